"""The exact law of a rule, found by running the rule itself over every case of its random numbers."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from specserve.speculation.distribution import FloatArray
from specserve.speculation.noise import Purpose
from specserve.speculation.rejection import Distributions, UniformSource, Verdict

Rule = Callable[[Distributions, Distributions, Sequence[int], UniformSource], Verdict]
Table = Mapping[tuple[int, ...], FloatArray]
Law = dict[tuple[int, ...], float]

# Probabilities in these tests are multiples of 1 / 12, so no case of a uniform number is narrower than that.
DENOMINATOR = 12
_GRID = 40


class _NeedsNumberError(Exception):
    def __init__(self, key: tuple[Purpose, int]) -> None:
        self.key = key


class _Scripted:
    """Noise that gives the numbers it was told, and stops the rule where it wants one more."""

    def __init__(self, numbers: Mapping[tuple[Purpose, int], float]) -> None:
        self._numbers = numbers

    def uniform(self, purpose: Purpose, index: int) -> float:
        if (purpose, index) not in self._numbers:
            raise _NeedsNumberError((purpose, index))
        return self._numbers[purpose, index]


def verdicts(
    rule: Rule,
    p: Sequence[FloatArray],
    q: Sequence[FloatArray],
    drafts: Sequence[int],
    given: dict[tuple[Purpose, int], float],
) -> Iterator[tuple[Verdict, float]]:
    """Every verdict on these drafts with its probability over the numbers that are not `given`."""

    def outcome(numbers: Mapping[tuple[Purpose, int], float]) -> Verdict | tuple[Purpose, int]:
        try:
            return rule(p, q, drafts, _Scripted(numbers))
        except _NeedsNumberError as needed:
            return needed.key

    def explore(numbers: dict[tuple[Purpose, int], float]) -> Iterator[tuple[Verdict, float]]:
        result = outcome(numbers)
        if isinstance(result, Verdict):
            yield result, 1.0
            return
        for low, high in _cases(lambda u: outcome({**numbers, result: u})):
            for verdict, probability in explore({**numbers, result: (low + high) / 2}):
                yield verdict, probability * (high - low)

    yield from explore(given)


def _cases(outcome: Callable[[float], object]) -> Iterator[tuple[float, float]]:
    """The intervals of [0, 1) on which `outcome` is constant; their borders are found by bisection."""
    grid = [(i + 0.5) / _GRID for i in range(_GRID)]
    borders = [_border(outcome, *ends) for ends in itertools.pairwise(grid) if outcome(ends[0]) != outcome(ends[1])]
    yield from itertools.pairwise([0.0, *borders, 1.0])


def _border(outcome: Callable[[float], object], low: float, high: float) -> float:
    """Where between `low` and `high` the outcome changes."""
    before = outcome(low)
    while high - low > 1e-14:
        middle = (low + high) / 2
        low, high = (middle, high) if outcome(middle) == before else (low, middle)
    return high


def random_table(rng: np.random.Generator, vocabulary: int, depth: int) -> Table:
    """A distribution for every prefix shorter than `depth`, all of them multiples of 1 / 12, zeros included."""
    return {
        prefix: rng.multinomial(DENOMINATOR, rng.dirichlet(np.ones(vocabulary))) / DENOMINATOR
        for length in range(depth)
        for prefix in itertools.product(range(vocabulary), repeat=length)
    }


def law_of_text(table: Table, vocabulary: int, length: int) -> Law:
    """The law of texts sampled token by token from `table`."""
    return {text: _probability(table, text) for text in itertools.product(range(vocabulary), repeat=length)}


def law_of_round(rule: Rule, p: Table, q: Table, vocabulary: int, gamma: int) -> Law:
    """The law of gamma + 1 tokens: one round with drafts from q, and after it plain sampling from p."""
    law: Law = defaultdict(float)
    for drafts in itertools.product(range(vocabulary), repeat=gamma):
        drafted = _probability(q, drafts)
        if drafted == 0:
            continue
        rows_p = [p[drafts[:i]] for i in range(gamma + 1)]
        rows_q = [q[drafts[:i]] for i in range(gamma)]
        # The numbers the drafts were sampled with lie anywhere in their share of q; a right rule ignores them.
        given = {(Purpose.DRAFT, i): _middle(rows_q[i], drafts[i]) for i in range(gamma)}
        for (n_accepted, token), probability in verdicts(rule, rows_p, rows_q, drafts, given):
            text = (*drafts[:n_accepted], token)
            for rest in itertools.product(range(vocabulary), repeat=gamma - n_accepted):
                law[text + rest] += drafted * probability * _probability(p, rest, text)
    return law


def distance(first: Law, second: Law) -> float:
    """The largest difference of two laws over all texts."""
    return max(abs(first.get(text, 0.0) - second.get(text, 0.0)) for text in first.keys() | second.keys())


def _middle(row: FloatArray, token: int) -> float:
    return float(row[:token].sum() + row[token] / 2)


def _probability(table: Table, text: tuple[int, ...], behind: tuple[int, ...] = ()) -> float:
    return float(np.prod([table[behind + text[:i]][token] for i, token in enumerate(text)]))
