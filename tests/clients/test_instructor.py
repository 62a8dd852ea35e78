"""instructor gets objects of a class, by tools and by schemas, from all three protocols."""

from typing import Any, Literal

import anthropic
import instructor
import openai
import pytest
from pydantic import BaseModel, Field

import store
from store import MODEL, QUESTION
from wire import Wire

MESSAGES: Any = [{"role": "user", "content": QUESTION}]


class Shelf(BaseModel):
    """A shelf with its items."""

    place: Literal["cellar", "attic"]
    weights: list[int] = Field(max_length=3)


class Stock(store.Stock):
    """What the store has, with a class inside."""

    shelf: Shelf | None = None


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_an_answer_of_openais_client_is_an_object_at_the_first_attempt(wire: Wire, mode: str) -> None:
    client = openai.OpenAI(base_url=f"{wire.url}/v1", api_key=wire.key, max_retries=0)
    create = instructor.from_openai(client, mode=instructor.Mode[mode]).chat.completions.create
    answer: Any = create(model=MODEL, messages=MESSAGES, response_model=Stock, max_retries=0, temperature=0)
    assert isinstance(answer, Stock)


def test_an_answer_of_anthropics_client_is_an_object_at_the_first_attempt(wire: Wire) -> None:
    client = anthropic.Anthropic(base_url=wire.url, auth_token=wire.key, api_key=None, max_retries=0)
    create = instructor.from_anthropic(client).messages.create
    answer: Any = create(model=MODEL, max_tokens=200, messages=MESSAGES, response_model=Stock, max_retries=0)
    assert isinstance(answer, Stock)


def test_an_object_grows_while_it_is_streamed(wire: Wire) -> None:
    client = openai.OpenAI(base_url=f"{wire.url}/v1", api_key=wire.key, max_retries=0)
    create = instructor.from_openai(client).chat.completions.create_partial
    states = list(create(model=MODEL, messages=MESSAGES, response_model=Stock, temperature=0))
    assert len(states) > 1
    assert Stock.model_validate(states[-1].model_dump())
