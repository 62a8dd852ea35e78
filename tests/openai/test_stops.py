"""A stop string that names a control token stops at that token, which has no text, and as text as before."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_engine import FakeVocabulary
from specserve.sequence import SamplingParams, SpeculationParams, TokenScore
from specserve.serving.detokenizer import with_control_tokens
from specserve.serving.generation import Generation

CONTROLS = {200: b"<|a|>", 201: b"<|bb|>", 202: b"<s>"}


class Controls(FakeVocabulary):
    """A vocabulary of bytes, with control tokens after the end token."""

    def encode(self, text: str, *, special: bool = False, begin: bool = True) -> list[int]:
        names = b"|".join(map(re.escape, CONTROLS.values()))
        tokens: list[int] = []
        for part in re.split(b"(%b)" % names, text.encode()) if special else [text.encode()]:
            control = [token for token, name in CONTROLS.items() if name == part and special]
            tokens += control or super().encode(part.decode(), begin=begin)
        return tokens

    def piece(self, token: int) -> bytes:
        return b"" if token in CONTROLS else super().piece(token)

    def name(self, token: int) -> bytes:
        return CONTROLS.get(token) or super().name(token)


VOCABULARY = Controls(200)


def spelled(text: str) -> list[int]:
    """The tokens of a text, control tokens by their names."""
    return VOCABULARY.encode(text, special=True)


def written(stops: list[str], tokens: list[int], *, rounds: int = 1) -> tuple[Generation, list[str]]:
    """A generation that has been given these tokens, some in each round, and the texts it released."""
    strings, marks = with_control_tokens(stops, VOCABULARY)
    options: Any = {"max_tokens": len(tokens), "marks": marks, "top_logprobs": 0}
    generation = Generation([0], SamplingParams(), SpeculationParams(), VOCABULARY, strings, **options)
    texts = []
    for begin in range(0, len(tokens), rounds):
        if generation.done:
            break
        new = tokens[begin : begin + rounds]
        generation.tokens += new
        generation.scores += [TokenScore(token, -1.0, []) for token in new]
        generation.sources += ["target"] * len(new)
        generation.read_new_tokens()
        texts.append(generation.take_text())
    return generation, texts


@pytest.mark.parametrize(
    ("stops", "output", "text", "stopped_after"),
    [
        (["<|a|>"], "one<|a|>two", "one", 4),
        (["<|a|>"], "<|a|>", "", 1),
        (["never", "<|bb|>", "<|a|>"], "one<|a|>two<|bb|>", "one", 4),
        # A control token that no stop string names.
        (["<|a|>"], "one<|bb|>two", "onetwo", None),
        # Text before and after the control token belongs to the stop string.
        (["\n<|a|>user"], "one\n<|a|>user two", "one", 9),
        (["\n<|a|>user"], "one\n<|a|>use", "one\nuse", None),
        (["\n<|a|>user"], "one\n<|a|>\n<|a|>user", "one\n", 11),
        (["ab<|a|>"], "abab<|a|>", "ab", 5),
        (["<|a|><|bb|>"], "x<|a|><|a|><|bb|>", "x", 4),
        (["<|a|><|bb|>"], "x<|bb|><|a|>", "x", None),
        # Other stop strings are found across a control token, since the output shows no trace of it.
        (["END", "<|a|>x"], "oneEN<|a|>D", "one", 7),
        # Of several the first to end.
        (["<|a|>two", "<|a|>"], "one<|a|>two", "one", 4),
        (["e<|a|>", "<|a|>"], "one<|a|>two", "on", 4),
    ],
)
@pytest.mark.parametrize("rounds", [1, 3, 100])
def test_text_ends_before_the_stop_string(
    stops: list[str], output: str, text: str, stopped_after: int | None, rounds: int
) -> None:
    tokens = spelled(output)
    generation, texts = written(stops, tokens, rounds=rounds)
    assert "".join(texts) == text
    assert generation.finish_reason == ("stop" if stopped_after else "length")
    assert generation.answer == tokens[:stopped_after]


def test_a_stop_string_that_names_a_control_token_stops_at_its_name_written_as_text() -> None:
    generation, texts = written(["<|a|>"], VOCABULARY.encode("one<|a|>two"))
    assert ("".join(texts), generation.finish_reason) == ("one", "stop")


@pytest.mark.parametrize(
    ("stops", "output", "stop"),
    [
        (["two", "never"], "one two three", "two"),
        (["wo", "two"], "one two three", "two"),
        (["\n<|a|>user", "<|bb|>"], "one\n<|a|>user", "\n<|a|>user"),
        (["<|a|>"], "one<|a|>", "<|a|>"),
        (["tw", "thr"], "one t", ""),
    ],
)
@pytest.mark.parametrize("rounds", [1, 3, 100])
def test_a_generation_knows_the_stop_string_that_ended_it(
    stops: list[str], output: str, stop: str, rounds: int
) -> None:
    generation, _ = written(stops, spelled(output), rounds=rounds)
    assert generation.stop == stop


def test_text_is_withheld_only_while_it_may_begin_a_stop_string() -> None:
    _, texts = written(["n<|a|>e"], spelled("on<|a|>d"))
    assert texts == ["o", "", "", "nd"]
    _, texts = written(["n<|a|>e", "<|bb|>"], spelled("on<|bb|>"))
    assert texts == ["o", "", "n"]


def test_a_control_token_that_stops_has_no_log_probability_in_the_answer() -> None:
    """Like the token of a stop string of text; one that does not stop has."""
    generation, _ = written(["<|a|>"], spelled("o<|bb|>n<|a|>"), rounds=100)
    assert [score.token for score, _ in generation.take_tokens()] == spelled("o<|bb|>n")


@given(
    st.lists(st.sampled_from(["a", "b", "é", "<|a|>", "<|bb|>", "<s>"]), max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
    st.integers(1, 5),
)
def test_stop_strings_of_text_alone_stop_where_they_did_before_others_named_control_tokens(
    output: list[str], stops: list[str], rounds: int
) -> None:
    tokens = [token for part in output for token in spelled(part)]
    alone, others = (written([*stops, *more], tokens, rounds=rounds) for more in ([], ["<|a|>zz", "q<s>"]))
    assert "".join(alone[1]) == "".join(others[1])
    assert alone[0].tokens == others[0].tokens
