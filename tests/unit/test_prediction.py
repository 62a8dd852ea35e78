"""The aligner keeps its position in a prediction while the output departs from it and returns to it."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.speculation.proposers import _AHEAD, _LONGEST, _NEAREST, _TRUSTED, Aligner
from specserve.speculation.token_index import TokenIndex

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts" / "edit.yaml"
VOCABULARY: dict[str, int] = {}


def tokens_of(text: str) -> list[int]:
    """Words, digits, punctuation and whitespace as tokens, roughly as a model's tokenizer splits them."""
    parts = re.findall(r" ?[^\W\d_]+|\d| ?[^\s\w]+|\s*\n+|\s|_", text)
    return [VOCABULARY.setdefault(part, len(VOCABULARY)) for part in parts]


TEXTS = {prompt["name"]: str(prompt["prediction"]) for prompt in yaml.safe_load(PROMPTS.read_text())}
PREDICTIONS = {name: tokens_of(text) for name, text in TEXTS.items()}


def aligner_of(prediction: Iterable[int]) -> Aligner:
    """An aligner of these tokens."""
    return Aligner(TokenIndex(list(prediction)))


def aligner_after(prediction: list[int], output: list[int]) -> Aligner:
    """An aligner to which this output was added."""
    aligner = aligner_of(prediction)
    aligner.extend(output)
    return aligner


def share_proposed(prediction: list[int], output: list[int]) -> float:
    """The share of the output's tokens that an aligner proposed, token by token."""
    aligner, hits = aligner_of(prediction), 0
    for token in output:
        hits += aligner.propose([], 1).tokens == [token]
        aligner.extend([token])
    return hits / len(output)


def share_by_position(prediction: list[int], output: list[int]) -> float:
    """The share of the output's tokens that equal the prediction's token at the same position."""
    return sum(predicted == token for predicted, token in zip(prediction, output, strict=False)) / len(output)


# Edits

INSERTED = tokens_of("\n        # A line that was not there before.\n        checked = validate(entry, strict=True)\n")


def insertion(prediction: list[int]) -> list[int]:
    """Insert two lines in the first half."""
    return [*prediction[: len(prediction) // 3], *INSERTED, *prediction[len(prediction) // 3 :]]


def deletion(prediction: list[int]) -> list[int]:
    """Delete forty tokens."""
    return prediction[: len(prediction) // 3] + prediction[len(prediction) // 3 + 40 :]


def replacement(prediction: list[int]) -> list[int]:
    """Replace forty tokens by two other lines."""
    return [*prediction[: len(prediction) // 3], *INSERTED, *prediction[len(prediction) // 3 + 40 :]]


def introduction(prediction: list[int]) -> list[int]:
    """Add an introduction and a code fence at the beginning."""
    return tokens_of("Here is the updated file:\n\n```python\n") + prediction


@pytest.mark.parametrize("edit", [insertion, deletion, replacement, introduction])
@pytest.mark.parametrize("name", PREDICTIONS)
def test_edit_costs_few_proposals_beyond_the_new_tokens(name: str, edit: Callable[[list[int]], list[int]]) -> None:
    prediction = PREDICTIONS[name]
    output = edit(prediction)
    kept = len(prediction) - (40 if edit in {deletion, replacement} else 0)
    possible = kept / len(output)
    assert share_proposed(prediction, output) > possible - 0.03
    assert share_by_position(prediction, output) < possible - 0.3


@pytest.mark.parametrize("name", PREDICTIONS)
def test_renaming_an_identifier_costs_few_proposals(name: str) -> None:
    words = re.findall(r"[a-z]{4,}", TEXTS[name])
    frequent = max(sorted(set(words)), key=words.count)
    output = tokens_of(re.sub(rf"\b{frequent}\b", "quite_another_name", TEXTS[name]))
    prediction = PREDICTIONS[name]
    assert share_proposed(prediction, output) > 0.7
    assert share_by_position(prediction, output) < 0.6


# Alignment


def test_alignment_starts_at_the_beginning() -> None:
    assert aligner_of([1, 2, 3]).propose([], 2).tokens == [1, 2]


def test_beginning_is_found_after_different_first_tokens() -> None:
    assert aligner_after([1, 2, 3, 4, 5], [9, 8, 7, 1, 2]).propose([], 8).tokens == [3, 4, 5]


def test_nearest_of_equally_long_matches_is_taken() -> None:
    prediction = [1, 2, 50, *range(60, 70), 80, 81, 82, 83, *range(70, 76), 1, 2, 51, *range(90, 99), 1, 2, 52]
    assert aligner_after(prediction, [80, 81, 82, 83, 7, 1, 2]).propose([], 1).tokens == [51]


def test_match_ahead_is_preferred_to_one_as_near_before() -> None:
    prediction = [1, 2, 50, *range(60, 68), 80, 81, 82, 83, *range(70, 81), 1, 2, 51]
    assert aligner_after(prediction, [80, 81, 82, 83, 7, 1, 2]).propose([], 1).tokens == [51]


def test_longer_match_is_preferred_to_nearer_ones() -> None:
    prediction = [*range(60, 70), *[4, 5, 0, 5, 1, 0, 1, 2, 50] * 5, *range(70, 90), 4, 5, 1, 2, 51]
    assert aligner_after(prediction, [*range(60, 70), 4, 5, 1, 2]).propose([], 1).tokens == [51]


def test_nearest_match_is_measured_from_the_last_trusted_position() -> None:
    prediction = [1, 2, 3, 4, 5, *range(60, 70), 7, 8, 50, *range(70, 99), 1, 2, 3, 4, 6, *range(100, 110), 7, 8, 51]
    assert aligner_after(prediction, [1, 2, 3, 4, 6, 9, 7, 8]).propose([], 1).tokens == [51]


def test_matches_of_a_common_token_do_not_lose_the_alignment() -> None:
    comma = 0
    prediction = [*range(60, 70), *(token for word in range(10, 30) for token in (word, comma))]
    output = [*range(60, 70), 5, comma, 6, comma, 7, comma, 10, comma]
    assert aligner_after(prediction, output).propose([], 3).tokens == [11, comma, 12]


def test_token_that_occurs_once_is_a_match_at_any_distance() -> None:
    prediction = [*range(60, 70), *[1, 2] * 200, 77, 78]
    assert aligner_after(prediction, [*range(60, 70), 77]).propose([], 1).tokens == [78]


def test_no_proposal_after_the_prediction_ends_until_the_output_returns() -> None:
    assert aligner_after([1, 2, 3], [1, 2, 3]).propose([], 4) == ([], [])
    assert aligner_after([1, 2, 3], [1, 2, 3, 9, 9, 9, 1, 2]).propose([], 4).tokens == [3]
    assert aligner_of([]).propose([1, 2], 4) == ([], [])


def reference(prediction: list[int], output: list[int]) -> int:
    """The position that the output is aligned with, by comparing all positions after every token."""
    position = run = trusted = 0
    for length in range(1, len(output) + 1):

        def agreement(end: int, decided: list[int] = output[:length]) -> int:
            pairs = zip(reversed(prediction[:end]), reversed(decided), strict=False)
            return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

        follows = position + 1 if agreement(position + 1) and position < len(prediction) else 0
        if follows and run + 1 >= _TRUSTED:
            position, run, trusted = follows, run + 1, follows
            continue
        runs = {end: agreement(end) for end in range(1, len(prediction) + 1) if agreement(end)}
        if len(runs) > 1 and max(runs.values()) == 1:
            ahead = min((end for end in runs if trusted < end <= trusted + _AHEAD), default=0)
            runs = {end: 1 for end in runs if end in {follows, ahead}}
        order = sorted(runs, key=lambda end: (-runs[end], end != follows, abs(end - trusted), end < trusted))
        position, run = (order[0], runs[order[0]]) if order else (position + 1, 0)
        trusted = position if run >= _TRUSTED else trusted
    return position


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 6).flatmap(lambda n: st.tuples(*[st.lists(st.integers(1, n), max_size=_NEAREST)] * 4)))
def test_alignment_equals_a_comparison_of_all_positions(parts: tuple[list[int], ...]) -> None:
    one, two, three, four = parts
    prediction, output = (one + two)[:_NEAREST], one + three + two + four
    assert aligner_after(prediction, output).propose([], 99).tokens == prediction[reference(prediction, output) :][:99]


@settings(max_examples=300, deadline=None)
@given(*[st.lists(st.integers(-2, 3), max_size=50)] * 3, st.integers(-1, 60))
def test_drafts_are_aligned_like_output_but_not_added(
    prediction: list[int], output: list[int], drafts: list[int], most: int
) -> None:
    aligner = aligner_after(prediction, output)
    before = aligner.propose([], most)
    proposal = aligner.propose(drafts, most)
    assert aligner.propose([], most) == before
    assert proposal.tokens == aligner_after(prediction, output + drafts).propose([], most).tokens
    assert len(proposal.tokens) == len(proposal.confidence) <= max(most, 0)
    assert all(0 < confidence < 1 for confidence in proposal.confidence)


# Confidence


def test_confidence_rises_with_the_length_of_the_run() -> None:
    prediction = list(range(100))
    by_run = [
        aligner_after(prediction, [500, *prediction[50 : 50 + n]]).propose([], 1).confidence[0] for n in range(40)
    ]
    assert by_run[1:] == sorted(by_run[1:])
    assert by_run[0] < 0.5
    assert by_run[-1] > 0.95


def test_confidence_rises_along_a_proposal() -> None:
    confidence = aligner_after(list(range(100)), [500, 50]).propose([], 40).confidence
    assert confidence == sorted(confidence)


def test_confidence_falls_while_the_prediction_is_wrong() -> None:
    prediction = PREDICTIONS["edit-py-rename-arg"]
    other = random.Random(1).sample(prediction, len(prediction))
    fresh = aligner_after(prediction, prediction[100:102]).propose([], 1).confidence[0]
    assert aligner_after(prediction, [*other, *prediction[100:102]]).propose([], 1).confidence[0] < fresh - 0.2
    assert aligner_after(prediction, [-1] * 50).propose([], 1).tokens == [prediction[50]]
    assert aligner_after(prediction, [-1] * 50).propose([], 1).confidence[0] < 0.05


# Cost


class Compared(int):
    """A token that counts the comparisons with it."""

    count = 0

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


def comparisons(aligner: Aligner, tokens: list[int]) -> list[int]:
    """How often each of these tokens is compared when it is added to the output."""
    counts = []
    for token in tokens:
        Compared.count = 0
        aligner.extend([Compared(token)])
        counts.append(Compared.count)
    return counts


def test_no_search_while_the_output_follows_the_prediction() -> None:
    prediction = random.Random(1).choices(range(5), k=2000)
    counts = comparisons(aligner_of(prediction), prediction)
    assert max(counts[:_TRUSTED]) > 3, "the count sees a search"
    assert max(counts[_TRUSTED:]) <= 3


@pytest.mark.parametrize("length", [1000, 50_000])
@pytest.mark.parametrize("period", [1, 2, 50])
def test_work_per_token_is_bounded_for_any_length_of_the_prediction(length: int, period: int) -> None:
    tokens = random.Random(1).choices(range(min(period, 3) + 1), k=300)
    counts = comparisons(aligner_of(i % period for i in range(length)), tokens)
    assert max(counts) <= (2 * _NEAREST + 1) * (_LONGEST + 1) + _AHEAD
