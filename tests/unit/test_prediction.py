"""A aligner keeps its place in a predicted text while the answer departs from it and comes back."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.speculation.prediction import _AHEAD, _LONGEST, _NEAREST, _TRUSTED, Aligner

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts" / "edit.yaml"
VOCABULARY: dict[str, int] = {}


def tokens_of(text: str) -> list[int]:
    """Words, digits, punctuation and blanks as tokens, about as a model's tokenizer parts them."""
    parts = re.findall(r" ?[^\W\d_]+|\d| ?[^\s\w]+|\s*\n+|\s|_", text)
    return [VOCABULARY.setdefault(part, len(VOCABULARY)) for part in parts]


TEXTS = {prompt["name"]: str(prompt["prediction"]) for prompt in yaml.safe_load(PROMPTS.read_text())}
PREDICTIONS = {name: tokens_of(text) for name, text in TEXTS.items()}


def aligner_after(prediction: list[int], answer: list[int]) -> Aligner:
    """A aligner that has taken up the beginning of an answer."""
    aligner = Aligner(prediction)
    aligner.extend(answer)
    return aligner


def share_followed(prediction: list[int], answer: list[int]) -> float:
    """The share of an answer's tokens that a aligner guessed, token by token."""
    aligner, right = Aligner(prediction), 0
    for token in answer:
        right += aligner.propose([], 1).tokens == [token]
        aligner.extend([token])
    return right / len(answer)


def share_by_position(prediction: list[int], answer: list[int]) -> float:
    """The share that one guesses who takes the prediction's token at the answer's own position."""
    return sum(guess == token for guess, token in zip(prediction, answer, strict=False)) / len(answer)


# Edits

INSERTED = tokens_of("\n        # A line that was not there before.\n        checked = validate(entry, strict=True)\n")


def insertion(text: list[int]) -> list[int]:
    """Two lines more in the first half."""
    return [*text[: len(text) // 3], *INSERTED, *text[len(text) // 3 :]]


def deletion(text: list[int]) -> list[int]:
    """Forty tokens less."""
    return text[: len(text) // 3] + text[len(text) // 3 + 40 :]


def replacement(text: list[int]) -> list[int]:
    """Two other lines instead of forty tokens."""
    return [*text[: len(text) // 3], *INSERTED, *text[len(text) // 3 + 40 :]]


def another_beginning(text: list[int]) -> list[int]:
    """An introduction and a fence before the text."""
    return tokens_of("Here is the updated file:\n\n```python\n") + text


@pytest.mark.parametrize("edit", [insertion, deletion, replacement, another_beginning])
@pytest.mark.parametrize("name", PREDICTIONS)
def test_an_edit_costs_few_guesses_beyond_the_new_tokens(name: str, edit: Callable[[list[int]], list[int]]) -> None:
    prediction = PREDICTIONS[name]
    answer = edit(prediction)
    kept = len(prediction) - (40 if edit in {deletion, replacement} else 0)
    possible = kept / len(answer)
    assert share_followed(prediction, answer) > possible - 0.03
    assert share_by_position(prediction, answer) < possible - 0.3


@pytest.mark.parametrize("name", PREDICTIONS)
def test_a_name_changed_everywhere_costs_few_guesses(name: str) -> None:
    words = re.findall(r"[a-z]{4,}", TEXTS[name])
    frequent = max(sorted(set(words)), key=words.count)
    answer = tokens_of(re.sub(rf"\b{frequent}\b", "quite_another_name", TEXTS[name]))
    prediction = PREDICTIONS[name]
    assert share_followed(prediction, answer) > 0.7
    assert share_by_position(prediction, answer) < 0.6


# Places


def test_it_starts_at_the_beginning() -> None:
    assert Aligner([1, 2, 3]).propose([], 2).tokens == [1, 2]


def test_it_starts_at_the_beginning_though_the_first_tokens_differ() -> None:
    assert aligner_after([1, 2, 3, 4, 5], [9, 8, 7, 1, 2]).propose([], 8).tokens == [3, 4, 5]


def test_among_places_that_agree_as_far_the_nearest_is_taken() -> None:
    text = [1, 2, 50, *range(60, 70), 80, 81, 82, 83, *range(70, 76), 1, 2, 51, *range(90, 99), 1, 2, 52]
    assert aligner_after(text, [80, 81, 82, 83, 7, 1, 2]).propose([], 1).tokens == [51]


def test_among_the_nearest_the_one_ahead_is_taken() -> None:
    text = [1, 2, 50, *range(60, 68), 80, 81, 82, 83, *range(70, 81), 1, 2, 51]
    assert aligner_after(text, [80, 81, 82, 83, 7, 1, 2]).propose([], 1).tokens == [51]


def test_a_longer_agreement_goes_before_nearer_places() -> None:
    text = [*range(60, 70), *[4, 5, 0, 5, 1, 0, 1, 2, 50] * 5, *range(70, 90), 4, 5, 1, 2, 51]
    assert aligner_after(text, [*range(60, 70), 4, 5, 1, 2]).propose([], 1).tokens == [51]


def test_from_a_place_that_many_tokens_speak_for_the_next_one_is_looked_for() -> None:
    text = [1, 2, 3, 4, 5, *range(60, 70), 7, 8, 50, *range(70, 99), 1, 2, 3, 4, 6, *range(100, 110), 7, 8, 51]
    assert aligner_after(text, [1, 2, 3, 4, 6, 9, 7, 8]).propose([], 1).tokens == [51]


def test_a_single_common_token_does_not_lead_away_for_good() -> None:
    comma = 0
    text = [*range(60, 70), *(token for word in range(10, 30) for token in (word, comma))]
    answer = [*range(60, 70), 5, comma, 6, comma, 7, comma, 10, comma]
    assert aligner_after(text, answer).propose([], 3).tokens == [11, comma, 12]


def test_a_token_that_occurs_once_is_enough_however_far_away() -> None:
    text = [*range(60, 70), *[1, 2] * 200, 77, 78]
    assert aligner_after(text, [*range(60, 70), 77]).propose([], 1).tokens == [78]


def test_behind_its_end_a_prediction_says_nothing_until_the_answer_comes_back() -> None:
    assert aligner_after([1, 2, 3], [1, 2, 3]).propose([], 4) == ([], [])
    assert aligner_after([1, 2, 3], [1, 2, 3, 9, 9, 9, 1, 2]).propose([], 4).tokens == [3]
    assert Aligner([]).propose([1, 2], 4) == ([], [])


def reference(prediction: list[int], answer: list[int]) -> int:
    """By comparing every place at every token: where the answer stands."""
    place = run = trusted = 0
    for end in range(1, len(answer) + 1):

        def agreement(behind: int, written: list[int] = answer[:end]) -> int:
            pairs = zip(reversed(prediction[:behind]), reversed(written), strict=False)
            return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

        follows = place + 1 if agreement(place + 1) and place < len(prediction) else 0
        if follows and run + 1 >= _TRUSTED:
            place, run, trusted = follows, run + 1, follows
            continue
        found = {behind: agreement(behind) for behind in range(1, len(prediction) + 1) if agreement(behind)}
        if len(found) > 1 and max(found.values()) == 1:
            ahead = min((behind for behind in found if trusted < behind <= trusted + _AHEAD), default=0)
            found = {behind: 1 for behind in found if behind in {follows, ahead}}
        order = sorted(found, key=lambda b: (-found[b], b != follows, abs(b - trusted), b < trusted))
        place, run = (order[0], found[order[0]]) if order else (place + 1, 0)
        trusted = place if run >= _TRUSTED else trusted
    return place


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 6).flatmap(lambda n: st.tuples(*[st.lists(st.integers(1, n), max_size=_NEAREST)] * 4)))
def test_the_alignment_is_what_a_comparison_of_all_positions_gives(parts: tuple[list[int], ...]) -> None:
    one, two, three, four = parts
    prediction, answer = (one + two)[:_NEAREST], one + three + two + four
    assert aligner_after(prediction, answer).propose([], 99).tokens == prediction[reference(prediction, answer) :][:99]


@settings(max_examples=300, deadline=None)
@given(*[st.lists(st.integers(-2, 3), max_size=50)] * 3, st.integers(-1, 60))
def test_drafts_are_followed_as_decided_tokens_are_but_not_taken_up(
    prediction: list[int], answer: list[int], drafts: list[int], most: int
) -> None:
    aligner = aligner_after(prediction, answer)
    before = aligner.propose([], most)
    guess = aligner.propose(drafts, most)
    assert aligner.propose([], most) == before
    assert guess.tokens == aligner_after(prediction, answer + drafts).propose([], most).tokens
    assert len(guess.tokens) == len(guess.confidence) <= max(most, 0)
    assert all(0 < confidence < 1 for confidence in guess.confidence)


# Confidence


def test_a_longer_run_is_trusted_more() -> None:
    text = list(range(100))
    by_run = [aligner_after(text, [500, *text[50 : 50 + n]]).propose([], 1).confidence[0] for n in range(40)]
    assert by_run[1:] == sorted(by_run[1:])
    assert by_run[0] < 0.5
    assert by_run[-1] > 0.95


def test_a_guess_is_trusted_more_from_token_to_token() -> None:
    confidence = aligner_after(list(range(100)), [500, 50]).propose([], 40).confidence
    assert confidence == sorted(confidence)


def test_a_prediction_that_does_not_come_true_is_trusted_less_and_less() -> None:
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
    """How often each of these tokens is compared when the answer goes on with it."""
    counts = []
    for token in tokens:
        Compared.count = 0
        aligner.extend([Compared(token)])
        counts.append(Compared.count)
    return counts


def test_while_the_answer_follows_nothing_is_searched() -> None:
    text = random.Random(1).choices(range(5), k=2000)
    counts = comparisons(Aligner(text), text)
    assert max(counts[:_TRUSTED]) > 3, "the count sees a search"
    assert max(counts[_TRUSTED:]) <= 3


@pytest.mark.parametrize("length", [1000, 50_000])
@pytest.mark.parametrize("period", [1, 2, 50])
def test_the_work_for_a_token_is_bounded_however_long_the_prediction(length: int, period: int) -> None:
    tokens = random.Random(1).choices(range(min(period, 3) + 1), k=300)
    counts = comparisons(Aligner(i % period for i in range(length)), tokens)
    assert max(counts) <= (2 * _NEAREST + 1) * (_LONGEST + 1) + _AHEAD
