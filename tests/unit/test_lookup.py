"""A lookup finds what stood behind the longest end of a text before, and knows how far it may be trusted."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.speculation.lookup import _LONGEST, _PRIORS, _SHORTEST, HitRates, Kind, Lookup
from work import lines_run


def lookup_of(text: Sequence[int]) -> Lookup:
    """A lookup that has taken up a text."""
    lookup = Lookup()
    lookup.extend(text)
    return lookup


def expected(text: list[int], drafts: list[int], most: int) -> list[int]:
    """By trying all lengths and places: the longest end, its newest occurrence in the text, and what follows that."""
    whole = text + drafts
    for length in range(min(_LONGEST, len(whole)), _SHORTEST - 1, -1):
        for behind in range(min(len(text), len(whole) - 1), length - 1, -1):
            if whole[behind - length : behind] == whole[-length:]:
                for i in range(most):
                    whole.append(whole[behind + i])
                return whole[len(whole) - most :] if most else []
    return []


def blocks(alphabet: int) -> st.SearchStrategy[list[int]]:
    """Texts of few tokens in which whole parts come again, some often enough to be periodic."""
    block = st.tuples(st.lists(st.integers(1, alphabet), max_size=7), st.integers(1, 12))
    texts = st.lists(block, max_size=5).map(lambda parts: [t for part, times in parts for t in part * times])
    return st.tuples(texts, st.integers(0, 40)).map(lambda drawn: drawn[0] + drawn[0][: drawn[1]])


def fibonacci(length: int) -> list[int]:
    """The text in which most runs come again without its ever being periodic."""
    shorter, longer = [1], [1, 2]
    while len(longer) < length:
        shorter, longer = longer, longer + shorter
    return longer[:length]


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 4).flatmap(blocks), st.lists(st.integers(1, 4), max_size=5), st.integers(0, 50))
def test_it_guesses_what_followed_the_newest_occurrence_of_the_longest_end(
    text: list[int], drafts: list[int], most: int
) -> None:
    guess = lookup_of(text).propose(drafts, most)
    assert guess.tokens == expected(text, drafts, most)
    assert len(guess.confidence) == len(guess.tokens)
    assert all(0 < confidence < 1 for confidence in guess.confidence)


def kind_of(text: list[int]) -> Kind | None:
    """What is known of the longest end by trying all lengths: how it was followed, and its length; None without one."""
    for length in range(min(_LONGEST, len(text) - 1), _SHORTEST - 1, -1):
        followed = [text[end] for end in range(length, len(text)) if text[end - length : end] == text[-length:]]
        if followed:
            evidence = "split" if len(set(followed)) > 1 else "repeated" if len(followed) > 1 else "once"
            return evidence, length.bit_length()
    return None


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4).flatmap(blocks))
def test_confidence_is_the_hit_rate_of_ends_as_long_and_as_often_followed_alike(text: list[int]) -> None:
    text = text[:60]
    lookup, rates = Lookup(), HitRates(_PRIORS)
    for position, token in enumerate(text):
        guess, kind = lookup.propose([], 1), kind_of(text[:position])
        assert guess.confidence == ([] if kind is None else [rates.confidence(kind)])
        if kind is not None:
            rates.add(kind, right=guess.tokens == [token])
        lookup.extend([token])


@settings(deadline=None)
@given(blocks(3), st.lists(st.integers(1, 3), max_size=5), st.integers(1, 9))
def test_a_guess_depends_on_the_decided_text_alone(text: list[int], drafts: list[int], chunk: int) -> None:
    lookup = Lookup()
    for start in range(0, len(text), chunk):
        lookup.extend(text[start : start + chunk])
        lookup.propose(drafts, chunk)
    assert lookup.propose(drafts, 20) == lookup_of(text).propose(drafts, 20)


def test_among_occurrences_of_the_same_length_the_newest_is_continued() -> None:
    assert lookup_of([1, 2, 3, 8, 1, 2, 4, 9, 1, 2]).propose([], 2).tokens == [4, 9]


def test_a_longer_end_goes_before_a_newer_one() -> None:
    assert lookup_of([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]).propose([], 2).tokens == [3, 8]


def test_ends_are_told_apart_by_their_last_32_tokens() -> None:
    context = list(range(100, 100 + _LONGEST))
    assert lookup_of([7, *context, 1, 8, *context, 2, 7, *context]).propose([], 1).tokens == [2]
    assert lookup_of([7, *context[1:], 1, 8, *context[1:], 2, 7, *context[1:]]).propose([], 1).tokens == [1]


def test_periodic_text_is_continued_without_end() -> None:
    assert lookup_of([1, 2] * 3).propose([], 100).tokens == [1, 2] * 50
    assert lookup_of([5, 1, 2, 3]).propose([1, 2, 3], 9).tokens == [1, 2, 3] * 3


@pytest.mark.parametrize("text", [[], [1], [1, 1], [1, 2, 1], [1, 2, 3, 4]])
def test_an_end_that_never_occurred_gives_no_guess(text: list[int]) -> None:
    assert lookup_of(text).propose([], 8) == ([], [])


@pytest.mark.parametrize("most", [0, -1])
def test_no_guess_is_made_where_none_is_wanted(most: int) -> None:
    assert lookup_of([1, 2, 1, 2]).propose([], most) == ([], [])


# Confidence


def test_a_longer_match_is_trusted_more() -> None:
    text = list(range(50))
    by_length = [lookup_of([*text, *text[10 : 10 + n]]).propose([], 1).confidence[0] for n in (2, 4, 8, 16, 32)]
    assert by_length == sorted(by_length)
    assert by_length[0] < 0.5
    assert by_length[-1] > 0.9


def test_a_guess_is_trusted_more_from_token_to_token() -> None:
    confidence = lookup_of([*range(50), 10, 11]).propose([], 30).confidence
    assert confidence == sorted(confidence)


def test_a_context_that_was_always_followed_alike_is_trusted_more_and_one_that_was_not_less() -> None:
    once = lookup_of([1, 2, 3, 7, 8, 9, 1, 2]).propose([], 1).confidence[0]
    repeated = lookup_of([1, 2, 3, 7, 1, 2, 3, 9, 1, 2]).propose([], 1).confidence[0]
    split = lookup_of([1, 2, 4, 7, 8, 1, 2, 3, 9, 1, 2]).propose([], 1).confidence[0]
    assert split < once < repeated


def test_trust_adapts_to_what_came_true_in_this_text() -> None:
    page, pairs = list(range(100, 300)), list(itertools.product(range(10), range(10, 20)))
    copied, scrambled = lookup_of(page * 2), Lookup()
    for seed in range(6):
        scrambled.extend(token for pair in random.Random(seed).sample(pairs, len(pairs)) for token in pair)
    assert copied.propose([], 1).confidence[0] > 0.99
    assert scrambled.propose([3, 14], 1).confidence[0] < 0.15
    assert lookup_of([3, 14, 5, 3, 14]).propose([], 1).confidence[0] > 0.4


@pytest.mark.parametrize("always", [True, False])
def test_a_record_is_never_certain(always: bool) -> None:
    record = HitRates({("kind", 0): 0.5})
    for _ in range(10_000):
        record.add(("kind", 0), right=always)
    assert 0 < record.confidence(("kind", 0)) < 1
    assert abs(record.confidence(("kind", 0)) - always) < 0.1


def test_a_record_follows_a_change_and_keeps_kinds_apart() -> None:
    record = HitRates({("kind", 0): 0.5, ("other", 0): 0.5})
    for right in [True] * 200 + [False] * 50:
        record.add(("kind", 0), right=right)
    assert record.confidence(("kind", 0)) < 0.3
    assert record.confidence(("other", 0)) == 0.5


# Cost


TEXTS: dict[str, Callable[[int], list[int]]] = {
    "one token": lambda n: [1] * n,
    "periodic": lambda n: [1, 2, 3] * (n // 3),
    "periodic, interrupted": lambda n: [0 if i % 100 == 0 else i % 2 + 1 for i in range(n)],
    "fibonacci": fibonacci,
    "two tokens": lambda n: random.Random(1).choices([1, 2], k=n),
    "many tokens": lambda n: random.Random(1).choices(range(1000), k=n),
    "all different": lambda n: list(range(n)),
    "copied": lambda n: list(range(n // 2)) * 2,
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("length", [300, 3000])
def test_memory_and_work_for_a_token_are_bounded_whatever_the_text(name: str, length: int) -> None:
    text = TEXTS[name](length)
    assert lines_run(lambda: lookup_of(text)) <= 10 * _LONGEST * length
    tracemalloc.start()
    lookup = lookup_of(text)
    memory, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(lookup) == len(text)
    assert memory <= 1000 * length
