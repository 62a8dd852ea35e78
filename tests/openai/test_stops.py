"""What ends an answer: stop strings, also those that name control tokens, stop tokens, and a time limit."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fake_engine import FakeVocabulary
from specserve.core.detokenizer import named_control_tokens
from specserve.core.generation import Generation, TextParams
from specserve.sequence import SamplingParams, SpeculationParams, TokenScore

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


def written(
    stops: list[str], tokens: list[int], *, rounds: int = 1, min_tokens: int = 0, **more: Any
) -> tuple[Generation, list[str]]:
    """A generation that has been given these tokens, some in each round, and the texts it released."""
    more["stop_tokens"] = named_control_tokens(stops, VOCABULARY) | more.get("stop_tokens", {})
    clock = {"clock": more.pop("clock")} if "clock" in more else {}
    sampling, text = SamplingParams(min_tokens=min_tokens), TextParams(stops, **more)
    generation = Generation(
        [0], sampling, SpeculationParams(), VOCABULARY, text, max_tokens=len(tokens), top_logprobs=0, **clock
    )
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
    ("stops", "output", "text", "tokens"),
    [
        (["<|a|>"], "one<|a|>two", "one", 3),
        (["<|a|>"], "<|a|>", "", 0),
        (["never", "<|bb|>", "<|a|>"], "one<|a|>two<|bb|>", "one", 3),
        # A control token that no stop string names.
        (["<|a|>"], "one<|bb|>two", "onetwo", None),
        # Text before and after the control token does not matter.
        (["\n<|a|>user"], "one\n<|a|>user two", "one\n", 4),
        (["<|a|><|bb|>"], "x<|bb|><|a|>", "x", 1),
        # Other stop strings are found across a control token, since the output shows no trace of it.
        (["END"], "oneEN<|a|>D", "one", 7),
        # Of several the first to end.
        (["two", "<|a|>"], "one<|a|>two", "one", 3),
    ],
)
@pytest.mark.parametrize("rounds", [1, 3, 100])
def test_text_ends_before_the_stop_string_or_at_a_control_token_that_it_names(
    stops: list[str], output: str, text: str, tokens: int | None, rounds: int
) -> None:
    generation, texts = written(stops, spelled(output), rounds=rounds)
    assert "".join(texts) == text
    assert generation.finish_reason == ("length" if tokens is None else "stop")
    assert generation.answer == spelled(output)[:tokens]


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
    _, texts = written(["ne", "<|bb|>"], spelled("on<|a|>d"))
    assert texts == ["o", "", "", "nd"]
    _, texts = written(["ne", "<|bb|>"], spelled("on<|bb|>"))
    assert texts == ["o", "", "n"]


def test_a_control_token_that_stops_has_no_log_probability_in_the_answer() -> None:
    """Like the token of a stop string of text; one that does not stop has."""
    generation, _ = written(["<|a|>"], spelled("o<|bb|>n<|a|>"), rounds=100)
    assert [score.token for score, _ in generation.take_tokens()] == spelled("o<|bb|>n")


@pytest.mark.parametrize("rounds", [1, 3, 100])
@pytest.mark.parametrize(
    ("stops", "output", "min_tokens", "text"),
    [
        (["b"], "abcab", 0, "a"),
        (["b"], "abcab", 2, "abca"),
        (["b"], "abcab", 4, "abca"),
        (["b"], "abcab", 5, "abcab"),
        # A stop string that ends after them ends the answer, and what they have said stays.
        (["bca"], "abcab", 3, "abc"),
        (["bca"], "abcab", 2, "ab"),
        (["é"], "aéé", 3, "aé"),
        (["<|a|>"], "x<|a|>y<|a|>z", 2, "xy"),
    ],
)
def test_no_stop_string_ends_an_answer_before_its_least_number_of_tokens(
    stops: list[str], output: str, min_tokens: int, text: str, rounds: int
) -> None:
    generation, texts = written(stops, spelled(output), rounds=rounds, min_tokens=min_tokens)
    assert "".join(texts) == text
    assert generation.generated >= min_tokens


@pytest.mark.parametrize("rounds", [1, 3, 100])
def test_a_stop_string_is_part_of_the_text_if_the_request_wants_it(rounds: int) -> None:
    for stops, output, text in ((["bc"], "abcd", "abc"), (["b", "bc"], "abcd", "ab"), (["<|a|>"], "ab<|a|>c", "ab")):
        generation, texts = written(stops, spelled(output), rounds=rounds, includes_stop=True)
        assert ("".join(texts), generation.finish_reason) == (text, "stop")


@pytest.mark.parametrize("rounds", [1, 3, 100])
def test_a_stop_token_ends_an_answer_as_eos_does(rounds: int) -> None:
    [token] = spelled("b")
    for included, text in ((False, "a"), (True, "ab")):
        generation, texts = written([], spelled("abc"), rounds=rounds, stop_tokens={token: ""}, includes_stop=included)
        assert ("".join(texts), generation.finish_reason) == (text, "stop")
        assert generation.ended_by_eos is not included


def test_control_tokens_are_spelled_if_the_request_wants_them() -> None:
    for spells_control, text in ((False, "onetwo"), (True, "one<|bb|>two")):
        _, texts = written([], spelled("one<|bb|>two"), spells_control=spells_control)
        assert "".join(texts) == text


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("a\nbcd\ne\nf", "a\nbcd\n"),
        ("a\n<|a|>\nf", "a\n\n"),
        ("abcdefgh", "abcdefgh"),
        ("a\nb", "a\nb"),
    ],
)
def test_after_its_time_an_answer_ends_with_its_line(output: str, text: str) -> None:
    """The time begins with the first token, and is read at each line break."""
    times = iter([10.0, 12.9, 13.1])
    generation, texts = written([], spelled(output), max_seconds=3.0, clock=lambda: next(times))
    assert ("".join(texts), generation.finish_reason) == (text, "length")
