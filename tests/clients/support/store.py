"""What every client is asked: how many pears there are, which only a tool knows."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

CONFIG = Path(__file__).parents[3] / "config" / "qwen2.5-coder-0.5b-1.5b.yaml"
MODEL = "qwen2.5-coder-1.5b-instruct"
RULES = "You answer questions about a store. Its counts are known to the tool count_items only."
QUESTION = "How many pears are in the store?"
# A number that a model does not guess.
COUNT = "4711"


def count_items(item: Literal["pears", "plums"]) -> str:
    """Count the items of a kind in the store."""
    return f"There are {COUNT} {item} in the store."


class Stock(BaseModel):
    """What the store has."""

    item: Literal["pears", "plums"]
    number: int = Field(ge=0, le=9999)
