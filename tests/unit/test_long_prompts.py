"""benchmarks/long_prompts.py: prompts ask for what is in them, and ratios say how much faster a server is."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from common import Row
from fake_engine import FakeVocabulary
from library_prompts import Library, Prompt
from long_prompts import PLAIN, conversation_rows


def beginning(prompt: Prompt) -> str:
    return prompt.text[:500]


def test_prompts_have_the_length_that_is_asked_for_but_for_their_question() -> None:
    assert Library(FakeVocabulary(256)).edit(8000).tokens == pytest.approx(8000, abs=300)


def test_a_prompt_asks_for_a_function_that_it_contains() -> None:
    prompt = Library(FakeVocabulary(256)).edit(8000)
    asked = re.findall(r"Rename `(\w+)`", prompt.text)
    assert len(asked) == 1
    assert f"def {asked[0]}(" in prompt.text


def test_no_two_prompts_begin_alike() -> None:
    """A prefix would be cached."""
    library = Library(FakeVocabulary(256))
    assert len({beginning(library.edit(2000)) for _ in range(20)}) == 20


def servers() -> dict[int, Row]:
    """Prefill at 5 ms a token against 10, and 30 tokens a second against 20."""

    def server(seconds: float, speeds: Sequence[float]) -> Row:
        return {"new": [[1000, 99.0], [1000, seconds], [1000, seconds]], "speed": speeds, "second": [0.2, 0.3, 0.4]}

    without = {"new": [], "speed": [25.0], "second": []}
    return {1024: {"specserve auto": server(5, [29, 30, 31]), "specserve off": without, PLAIN: server(10, [20.0])}}


def test_ratios_are_above_one_where_the_server_is_faster_than_llama_server() -> None:
    rows = {row["server"]: row for row in conversation_rows(servers(), {"1024": 0.25})}
    assert (rows["specserve auto"]["prefill_ratio"], rows["specserve auto"]["ratio"]) == (2.0, 1.5)
    assert rows["specserve off"]["ratio"] == 1.25
    assert rows[PLAIN]["ratio"] == 1.0


def test_a_third_turn_is_compared_with_the_first_turn_of_its_own_conversation() -> None:
    rows = {row["server"]: row for row in conversation_rows(servers(), {"1024": 0.25})}
    assert rows["specserve auto"]["third_turn_share"] == 0.05


def test_without_llama_server_there_are_no_ratios() -> None:
    found = servers()
    del found[1024][PLAIN]
    assert {row["ratio"] for row in conversation_rows(found, {"1024": 0.25})} == {None}
