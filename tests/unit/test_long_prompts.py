"""benchmarks/long_prompts.py: prompts ask for what is in them, and rows say what each server took."""

import re

import pytest

from common import Row
from fake_engine import FakeVocabulary
from long_prompts import AUTO, Library, conversation_rows


def test_prompts_have_their_length_ask_for_what_they_contain_and_begin_differently() -> None:
    library = Library(FakeVocabulary(256))
    prompts = [library.edit(8000) for _ in range(10)]
    assert len({prompt.text[:500] for prompt in prompts}) == 10, "a prefix would be cached"
    for prompt in prompts:
        assert prompt.tokens == pytest.approx(8000, abs=300)
        [asked] = re.findall(r"Rename `(\w+)`", prompt.text)
        assert f"def {asked}(" in prompt.text


def test_rows_have_medians_and_a_third_turn_is_compared_with_the_first_of_its_own_conversation() -> None:
    new = [[1000, 99.0], [1000, 5.0], [1000, 5.0]]
    measured = {"new": new, "speed": [29.0, 30.0, 99.0], "second": [0.2, 0.3, 9.0]}
    found: dict[int, Row] = {1024: {AUTO: measured, "specserve off": {"new": [], "speed": [25.0], "second": []}}}
    auto, off = conversation_rows(found, {"1024": 0.25})
    assert (auto["prefill_ms"], auto["tokens_per_second"], auto["second_turn_s"]) == (5.0, 30.0, 0.3)
    assert auto["third_turn_share"] == 0.05
    assert off == {"tokens": 1024, "server": "specserve off", "tokens_per_second": 25.0}
