"""The exact law of a rule, found by running the rule itself over every case of its random numbers."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import numpy as np

from specserve.sampling.distribution import FloatArray
from specserve.sampling.noise import Purpose
from specserve.speculation.rejection import Distributions, NoiseSource, Verdict

Rule = Callable[[Distributions, Distributions, Sequence[int], NoiseSource], Verdict]
Table = Mapping[tuple[int, ...], FloatArray]
Law = dict[tuple[int, ...], float]
Key = tuple[Purpose, int]
Stop = Callable[[tuple[int, ...]], bool]

_DENOMINATOR = 12
_LARGEST = 1 - 2.0**-53


class _Script:
    """Noise that gives the numbers it was told, else the largest there is, and notes what was asked for."""

    def __init__(self, numbers: Mapping[Key, float]) -> None:
        self._numbers = numbers
        self.asked: list[Key] = []

    def uniform(self, purpose: Purpose, index: int) -> float:
        self.asked.append((purpose, index))
        return self._numbers.get((purpose, index), _LARGEST)

    def exponentials(self, index: int, part: int, count: int) -> FloatArray:
        raise AssertionError(f"An enumerated rule does not race ({index}, {part}, {count}).")


def verdicts(
    rule: Rule, p: Sequence[FloatArray], q: Sequence[FloatArray], drafts: Sequence[int], given: Mapping[Key, float]
) -> Iterator[tuple[Verdict, float]]:
    """Every verdict on these drafts with its probability over the numbers that are not `given`.

    A number's cases are told apart by the verdict that follows when every later number is the largest: that is
    where all later drafts are rejected, so what was decided before is seen.
    """

    def run(numbers: Mapping[Key, float]) -> tuple[Verdict, list[Key]]:
        script = _Script(numbers)
        return rule(p, q, drafts, script), script.asked

    def explore(numbers: Mapping[Key, float]) -> Iterator[tuple[Verdict, float]]:
        verdict, asked = run(numbers)
        key = next((key for key in asked if key not in numbers), None)
        if key is None:
            yield verdict, 1.0
            return
        for low, high in _cases(lambda u: run({**numbers, key: u})):
            for each, probability in explore({**numbers, key: (low + high) / 2}):
                yield each, probability * (high - low)

    yield from explore(given)


def _cases(outcome: Callable[[float], object]) -> Iterator[tuple[float, float]]:
    """The intervals of [0, 1) on which `outcome` is constant, each outcome's numbers being one interval."""
    yield from itertools.pairwise([0.0, *_borders(outcome, 0.0, _LARGEST), 1.0])


def _borders(outcome: Callable[[float], object], low: float, high: float) -> Iterator[float]:
    """Where between `low` and `high` the outcome changes, by bisection."""
    if outcome(low) == outcome(high):
        return
    if high - low < 1e-14:
        yield high
        return
    middle = (low + high) / 2
    yield from _borders(outcome, low, middle)
    yield from _borders(outcome, middle, high)


def random_table(rng: np.random.Generator, vocabulary: int, depth: int) -> Table:
    """A distribution for every prefix shorter than `depth`, all of them multiples of 1 / 12, zeros included."""
    return {
        prefix: rng.multinomial(_DENOMINATOR, rng.dirichlet(np.ones(vocabulary))) / _DENOMINATOR
        for length in range(depth)
        for prefix in itertools.product(range(vocabulary), repeat=length)
    }


def law_of_text(table: Table, vocabulary: int, length: int) -> Law:
    """The law of texts sampled token by token from `table`."""
    return {text: _probability(table, text) for text in itertools.product(range(vocabulary), repeat=length)}


def law_by_rounds(
    rule: Rule, p: Table, q: Table, *, length: int, gamma: int, rounds: int = 99, stop: Stop = lambda _drafts: False
) -> Law:
    """The law of `length` tokens written in rounds with drafts from q; behind the last round p is sampled plainly.

    `stop` says of what was drafted so far whether a round drafts no further: any such rule is a stopping time.
    """
    vocabulary = len(p[()])

    @cache
    def law_behind(prefix: tuple[int, ...], rounds_left: int) -> Law:
        wanted = length - len(prefix)
        if wanted <= 0:
            return {(): 1.0}
        if rounds_left == 0:
            return {rest: _probability(p, rest, prefix) for rest in itertools.product(range(vocabulary), repeat=wanted)}
        law: Law = defaultdict(float)
        for drafts, drafted in _draft_paths(q, prefix, gamma, stop):
            rows_p = [p[prefix + drafts[:i]] for i in range(len(drafts) + 1)]
            rows_q = [q[prefix + drafts[:i]] for i in range(len(drafts))]
            # The numbers the drafts were sampled with lie anywhere in their share of q; a right rule ignores them.
            given = {(Purpose.DRAFT, i): _middle(row, drafts[i]) for i, row in enumerate(rows_q)}
            for (n_accepted, token), probability in verdicts(rule, rows_p, rows_q, drafts, given):
                text = (*drafts[:n_accepted], token)[:wanted]
                for rest, behind in law_behind(prefix + text, rounds_left - 1).items():
                    law[text + rest] += drafted * probability * behind
        return law

    return law_behind((), rounds)


def _draft_paths(
    q: Table, prefix: tuple[int, ...], gamma: int, stop: Stop, drafts: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every sequence of drafts behind `prefix` that is not impossible, with its probability."""
    if len(drafts) == gamma or stop(drafts):
        yield drafts, 1.0
        return
    row = q[prefix + drafts]
    for token in np.flatnonzero(row).tolist():
        for path, probability in _draft_paths(q, prefix, gamma, stop, (*drafts, token)):
            yield path, float(row[token]) * probability


def expected_acceptance(rule: Rule, p: Table, q: Table, gamma: int) -> float:
    """The expected number of accepted drafts of a first round, exactly."""
    return sum(
        drafted * probability * verdict.n_accepted
        for drafts, drafted in _draft_paths(q, (), gamma, lambda _drafts: False)
        for verdict, probability in verdicts(
            rule, [p[drafts[:i]] for i in range(gamma + 1)], [q[drafts[:i]] for i in range(gamma)], drafts, {}
        )
    )


def distance(first: Law, second: Law) -> float:
    """The largest difference of two laws over all texts."""
    return max(abs(first.get(text, 0.0) - second.get(text, 0.0)) for text in first.keys() | second.keys())


def _middle(row: FloatArray, token: int) -> float:
    return float(row[:token].sum() + row[token] / 2)


def _probability(table: Table, text: tuple[int, ...], behind: tuple[int, ...] = ()) -> float:
    return float(np.prod([table[behind + text[:i]][token] for i, token in enumerate(text)]))
