"""What every client is asked: how many pears there are, which only a tool knows."""

from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Literal

from pydantic import BaseModel, Field

CONFIG = Path(__file__).parents[3] / "config" / "qwen2.5-coder-0.5b-1.5b.yaml"
MODEL = "qwen2.5-coder-1.5b-instruct"
# So clear that a model of 1.5 billion parameters calls the tool once, and then answers.
RULES = "Call count_items if you do not know a count. When you have its result, answer in a sentence and call nothing."
QUESTION = "How many pears are in the store?"
# A number that a model does not guess.
COUNT = "4711"


def slow_question(words: int = 600) -> str:
    """Random words of some 3.5 tokens each, always other ones, so that reading them takes seconds."""
    random = Random()
    return " ".join("".join(random.choices(ascii_lowercase, k=random.randint(3, 9))) for _ in range(words))


def count_items(item: Literal["pears", "plums"]) -> str:
    """Count the items of a kind in the store."""
    return f"{COUNT} {item}. Now tell the user."


class Stock(BaseModel):
    """What the store has."""

    item: Literal["pears", "plums"]
    number: int = Field(ge=0, le=9999)
