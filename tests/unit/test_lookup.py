"""Lookup proposes what followed the longest suffix of the sequence before, with a calibrated confidence."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.speculation.lookup import _LENGTHS, _NEWEST, _PRIORS, Lookup
from specserve.speculation.offers import HitRates, Kind
from work import lines_run


def lookup_of(sequence: Sequence[int]) -> Lookup:
    """A lookup with the tokens of a sequence."""
    lookup = Lookup()
    lookup.extend(sequence)
    return lookup


def lookup_from_prompt(prompt: Sequence[int], answer: Sequence[int]) -> Lookup:
    """A lookup whose prompt was indexed at once."""
    lookup = Lookup(prompt).copy()
    lookup.extend(answer)
    return lookup


def matches(sequence: list[int], run: list[int]) -> tuple[list[int], int]:
    """By trying all positions: where the sequence has the longest suffix of `run` by these lengths, and the length.

    Only the newest occurrences of the last two tokens count.
    """
    found: tuple[list[int], int] = [], 0
    ends = [end for end in range(2, len(sequence) + 1) if sequence[end - 2 : end] == run[-2:]]
    newest = [end for end in ends[-_NEWEST:] if end < len(run)]
    for length in _LENGTHS:
        ends_of_length = [end for end in newest if end >= length and run[end - length : end] == run[-length:]]
        found = (ends_of_length, length) if ends_of_length else found
    return found


def expected(sequence: list[int], drafts: list[int], most: int) -> list[int]:
    """What followed the newest of the longest matches."""
    run = sequence + drafts
    ends, _length = matches(sequence, run)
    for i in range(most if ends else 0):
        run.append(run[ends[-1] + i])
    return run[len(sequence) + len(drafts) :]


def blocks(alphabet: int) -> st.SearchStrategy[list[int]]:
    """Sequences over a small alphabet with repeated blocks, some repeated often enough to be periodic."""
    block = st.tuples(st.lists(st.integers(1, alphabet), max_size=7), st.integers(1, 12))
    repeated = st.lists(block, max_size=5).map(lambda parts: [t for part, times in parts for t in part * times])
    return st.tuples(repeated, st.integers(0, 40)).map(lambda drawn: drawn[0] + drawn[0][: drawn[1]])


def fibonacci(length: int) -> list[int]:
    """The Fibonacci word, in which most runs recur although it is never periodic."""
    shorter, longer = [1], [1, 2]
    while len(longer) < length:
        shorter, longer = longer, longer + shorter
    return longer[:length]


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 4).flatmap(blocks), st.lists(st.integers(1, 4), max_size=5), st.integers(0, 50))
def test_proposal_continues_the_newest_occurrence_of_the_longest_suffix(
    sequence: list[int], drafts: list[int], most: int
) -> None:
    proposal = lookup_of(sequence).propose(drafts, most)
    assert proposal.tokens == expected(sequence, drafts, most)
    assert len(proposal.confidence) == len(proposal.tokens)
    assert all(0 < confidence < 1 for confidence in proposal.confidence)


def kind_of(sequence: list[int]) -> Kind | None:
    """The kind of the longest suffix that occurred before; None without one."""
    ends, length = matches(sequence, sequence)
    followed = {sequence[end] for end in ends}
    evidence = "split" if len(followed) > 1 else "repeated" if len(ends) > 1 else "once"
    return (evidence, length.bit_length()) if ends else None


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4).flatmap(blocks))
def test_confidence_is_the_hit_rate_of_proposals_of_the_same_kind(sequence: list[int]) -> None:
    sequence = sequence[:120]
    lookup, rates = Lookup(), HitRates(_PRIORS)
    for position, token in enumerate(sequence):
        proposal, kind = lookup.propose([], 1), kind_of(sequence[:position])
        assert proposal.confidence == ([] if kind is None else [rates.confidence(kind)])
        if kind is not None:
            rates.add(kind, right=proposal.tokens == [token])
        lookup.extend([token])


@settings(max_examples=400, deadline=None)
@given(
    st.integers(1, 6).flatmap(blocks),
    st.integers(0, 300),
    st.lists(st.lists(st.integers(1, 6), max_size=5), min_size=1, max_size=4),
)
def test_a_prompt_indexed_at_once_proposes_what_one_indexed_token_by_token_does(
    sequence: list[int], prompt_length: int, drafts: list[list[int]]
) -> None:
    """Tokens and confidences, bit for bit; every kind of proposal is seen, since the runs of a proposal grow."""
    at_once = lookup_from_prompt(sequence[:prompt_length], sequence[prompt_length:])
    by_token = lookup_of(sequence)
    for run in drafts:
        assert at_once.propose(run, 40) == by_token.propose(run, 40)


@pytest.mark.parametrize("name", ["fibonacci", "two tokens", "many tokens", "copied", "periodic, interrupted"])
def test_a_long_prompt_indexed_at_once_proposes_what_one_indexed_token_by_token_does(name: str) -> None:
    """By any of its ends, with tokens of more than 16 bits, and more of them than 16 bits can number."""
    for length, largest in ((3000, 150_000), (70_000, 2**31 - 1)):
        sequence = [largest - token for token in SEQUENCES[name](length)]
        at_once, by_token = lookup_from_prompt(sequence, []), lookup_of(sequence)
        for start in range(0, length, length // 50):
            drafts = sequence[start : start + 40]
            assert at_once.propose(drafts, 20) == by_token.propose(drafts, 20)


@settings(deadline=None)
@given(blocks(3), st.lists(st.integers(1, 3), max_size=5), st.integers(1, 9))
def test_proposal_does_not_depend_on_chunks_and_earlier_proposals(
    sequence: list[int], drafts: list[int], chunk: int
) -> None:
    lookup = Lookup()
    for start in range(0, len(sequence), chunk):
        lookup.extend(sequence[start : start + chunk])
        lookup.propose(drafts, chunk)
    assert lookup.propose(drafts, 20) == lookup_of(sequence).propose(drafts, 20)


@settings(deadline=None)
@given(blocks(3), st.lists(st.integers(1, 3), max_size=20), st.lists(st.integers(1, 3), max_size=20))
def test_a_copy_goes_on_separately(sequence: list[int], added: list[int], added_to_copy: list[int]) -> None:
    lookup = lookup_of(sequence)
    copy = lookup.copy()
    lookup.extend(added)
    copy.extend(added_to_copy)
    assert lookup.propose([], 20) == lookup_of(sequence + added).propose([], 20)
    assert copy.propose([], 20) == lookup_of(sequence + added_to_copy).propose([], 20)


def test_newest_of_equally_long_matches_is_continued() -> None:
    assert lookup_of([1, 2, 3, 8, 1, 2, 4, 9, 1, 2]).propose([], 2).tokens == [4, 9]


def test_longer_match_is_preferred_to_a_newer_one() -> None:
    assert lookup_of([6, 7, 1, 2, 3, 8, 1, 2, 4, 6, 7, 1, 2]).propose([], 2).tokens == [3, 8]


@pytest.mark.parametrize(("shared", "newer", "follower"), [(4, 3, 1), (5, 4, 2), (6, 4, 1), (31, 24, 2), (32, 24, 1)])
def test_suffixes_are_distinguished_by_some_lengths(shared: int, newer: int, follower: int) -> None:
    """`shared` tokens of the suffix occurred, then 1, and later the last `newer` of them, then 2."""
    context = list(range(100, 100 + shared))
    assert lookup_of([*context, 1, 8, *context[-newer:], 2, 7, *context]).propose([], 1).tokens == [follower]


def test_only_the_newest_occurrences_are_compared() -> None:
    others = [token for other in range(_NEWEST - 1) for token in (20 + other, 1, 2, 50 + other)]
    assert lookup_of([9, 8, 1, 2, 3, *others[4:], 9, 8, 1, 2]).propose([], 1).tokens == [3]
    assert lookup_of([9, 8, 1, 2, 3, *others, 9, 8, 1, 2]).propose([], 1).tokens == others[-1:]


def test_periodic_sequence_is_continued_without_end() -> None:
    assert lookup_of([1, 2] * 3).propose([], 100).tokens == [1, 2] * 50
    assert lookup_of([5, 1, 2, 3]).propose([1, 2, 3], 9).tokens == [1, 2, 3] * 3


@pytest.mark.parametrize("sequence", [[], [1], [1, 1], [1, 2, 1], [1, 2, 3, 4]])
def test_suffix_that_never_occurred_gives_no_proposal(sequence: list[int]) -> None:
    assert lookup_of(sequence).propose([], 8) == ([], [])


@pytest.mark.parametrize("most", [0, -1])
def test_proposal_of_at_most_0_tokens_is_empty(most: int) -> None:
    assert lookup_of([1, 2, 1, 2]).propose([], most) == ([], [])


# Confidence


def test_confidence_rises_with_the_length_of_the_match() -> None:
    sequence = list(range(50))
    by_length = [lookup_of([*sequence, *sequence[10 : 10 + n]]).propose([], 1).confidence[0] for n in (2, 4, 8, 16, 32)]
    assert by_length == sorted(by_length)
    assert by_length[0] < 0.5
    assert by_length[-1] > 0.9


def test_confidence_rises_along_a_proposal() -> None:
    confidence = lookup_of([*range(50), 10, 11]).propose([], 30).confidence
    assert confidence == sorted(confidence)


def test_confidence_is_higher_after_repeated_and_lower_after_split_suffixes() -> None:
    once = lookup_of([1, 2, 3, 7, 8, 9, 1, 2]).propose([], 1).confidence[0]
    repeated = lookup_of([1, 2, 3, 7, 1, 2, 3, 9, 1, 2]).propose([], 1).confidence[0]
    split = lookup_of([1, 2, 4, 7, 8, 1, 2, 3, 9, 1, 2]).propose([], 1).confidence[0]
    assert split < once < repeated


def test_confidence_adapts_to_the_hit_rate_in_the_sequence() -> None:
    page, pairs = list(range(100, 300)), list(itertools.product(range(10), range(10, 20)))
    copied, scrambled = lookup_of(page * 2), Lookup()
    for seed in range(6):
        scrambled.extend(token for pair in random.Random(seed).sample(pairs, len(pairs)) for token in pair)
    assert copied.propose([], 1).confidence[0] > 0.99
    assert scrambled.propose([3, 14], 1).confidence[0] < 0.15
    assert lookup_of([3, 14, 5, 3, 14]).propose([], 1).confidence[0] > 0.4


@pytest.mark.parametrize("always", [True, False])
def test_hit_rate_is_never_0_or_1(always: bool) -> None:
    rates = HitRates({("kind", 0): 0.5})
    for _ in range(10_000):
        rates.add(("kind", 0), right=always)
    assert 0 < rates.confidence(("kind", 0)) < 1
    assert abs(rates.confidence(("kind", 0)) - always) < 0.1


def test_hit_rates_follow_changes_and_are_separate_by_kind() -> None:
    rates = HitRates({("kind", 0): 0.5, ("other", 0): 0.5})
    for right in [True] * 200 + [False] * 50:
        rates.add(("kind", 0), right=right)
    assert rates.confidence(("kind", 0)) < 0.3
    assert rates.confidence(("other", 0)) == 0.5


# Cost


SEQUENCES: dict[str, Callable[[int], list[int]]] = {
    "one token": lambda n: [1] * n,
    "periodic": lambda n: [1, 2, 3] * (n // 3),
    "periodic, interrupted": lambda n: [0 if i % 100 == 0 else i % 2 + 1 for i in range(n)],
    "fibonacci": fibonacci,
    "two tokens": lambda n: random.Random(1).choices([1, 2], k=n),
    "many tokens": lambda n: random.Random(1).choices(range(1000), k=n),
    "all different": lambda n: list(range(n)),
    "copied": lambda n: list(range(n // 2)) * 2,
}


def frequent_and_rare_pairs(length: int) -> list[int]:
    """Long matches of a rare pair whose beginnings no longer are among the newest of the frequent pair before it."""
    block = [token for other in range(100, 116) for token in (1, 1, other)]
    return (block * (length // len(block) + 1))[:length]


@pytest.mark.parametrize("length", [300, 3000])
def test_work_per_token_does_not_grow_with_the_length_of_matches_that_go_on(length: int) -> None:
    for sequence in SEQUENCES.values():
        assert lines_run(partial(lookup_of, sequence(length))) <= 10 * _NEWEST * length
    assert lines_run(partial(lookup_of, frequent_and_rare_pairs(length))) <= 30 * _NEWEST * length


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_prompt_takes_a_line_a_token_and_answers_share_its_index(name: str) -> None:
    """What else is done for each token is done by NumPy; a copy has the tokens again, but not the index."""
    prompt = SEQUENCES[name](32_768)
    made: list[Lookup] = []
    assert lines_run(lambda: made.append(Lookup(prompt))) <= 3 * len(prompt)
    assert lines_run(lambda: made.append(made[0].copy())) <= 1000
    tracemalloc.start()
    copies = [made[0].copy() for _ in range(8)]
    memory, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert memory <= 12 * len(copies) * len(prompt)


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("length", [300, 3000])
def test_memory_per_token_is_bounded_for_any_sequence(name: str, length: int) -> None:
    sequence = SEQUENCES[name](length)
    tracemalloc.start()
    lookup = lookup_of(sequence)
    memory, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(lookup) == len(sequence)
    assert memory <= 1000 * length


@pytest.mark.parametrize("length", [300, 32_768])
def test_work_of_a_proposal_does_not_depend_on_the_length_of_the_sequence(length: int) -> None:
    """Neither in Python lines nor in what is copied."""
    lookup = Lookup([1, 2, 3] * (length // 3))
    assert lines_run(lambda: lookup.propose([1, 2, 3], 8)) < 2000
    tracemalloc.start()
    lookup.propose([1, 2, 3], 8)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50_000
