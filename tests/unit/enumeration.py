"""The exact output distribution of a verification rule, by running the rule over every case of its random numbers."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from specserve.sampling.distribution import FloatArray
from specserve.sampling.noise import Noise, Purpose
from specserve.speculation.rejection import Distributions, Verdict

Rule = Callable[[Distributions, Distributions, Sequence[int], Noise], Verdict]
Table = Mapping[tuple[int, ...], FloatArray]
# Probability of each output: the joint distribution of its tokens.
Joint = dict[tuple[int, ...], float]
Key = tuple[Purpose, int]
Numbers = Mapping[Key, float]
Verdicts = Iterator[tuple[Verdict, float]]
Stop = Callable[[tuple[int, ...]], bool]

_DENOMINATOR = 12
_LARGEST = 1 - 2.0**-53


class _ScriptedNoise(Noise):
    """Noise that returns the given numbers, otherwise the largest in [0, 1), and records which were requested."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self.requested: list[Key] = []

    def uniform(self, purpose: Purpose, index: int) -> float:
        self.requested.append((purpose, index))
        return self._numbers.get((purpose, index), _LARGEST)

    def exponentials(self, index: int, part: int, count: int) -> NDArray[np.float64]:
        raise AssertionError(f"An enumerated rule does not race ({index}, {part}, {count}).")


def verdicts(rule: Rule, p: Distributions, q: Distributions, drafts: Sequence[int], given: Numbers) -> Verdicts:
    """Every verdict on these drafts with its probability over the numbers that are not `given`.

    The cases of a number, an interval each, are distinguished by the verdict when every later number is the largest:
    then all later drafts are rejected, so the verdict shows what this number decided.
    """

    def run(numbers: Numbers) -> tuple[Verdict, list[Key]]:
        noise = _ScriptedNoise(numbers)
        return rule(p, q, drafts, noise), noise.requested

    def explore(numbers: Numbers) -> Verdicts:
        verdict, requested = run(numbers)
        key = next((key for key in requested if key not in numbers), None)
        if key is None:
            yield verdict, 1.0
            return
        boundaries = _boundaries(lambda u: run({**numbers, key: u}), 0.0, _LARGEST)
        for low, high in itertools.pairwise([0.0, *boundaries, 1.0]):
            for final, probability in explore({**numbers, key: (low + high) / 2}):
                yield final, probability * (high - low)

    yield from explore(given)


def _boundaries(outcome: Callable[[float], object], low: float, high: float) -> Iterator[float]:
    """The numbers between `low` and `high` at which the outcome changes, by bisection."""
    if outcome(low) == outcome(high):
        return
    if high - low < 1e-14:
        yield high
        return
    middle = (low + high) / 2
    yield from _boundaries(outcome, low, middle)
    yield from _boundaries(outcome, middle, high)


def random_table(rng: np.random.Generator, vocabulary: int, depth: int) -> Table:
    """A distribution for every prefix shorter than `depth`, all of them multiples of 1 / 12, zeros included."""
    return {
        prefix: rng.multinomial(_DENOMINATOR, rng.dirichlet(np.ones(vocabulary))) / _DENOMINATOR
        for length in range(depth)
        for prefix in itertools.product(range(vocabulary), repeat=length)
    }


def joint_by_sampling(table: Table, vocabulary: int, length: int) -> Joint:
    """The joint distribution of outputs sampled token by token from `table`."""
    return {
        output: float(np.prod([table[output[:i]][token] for i, token in enumerate(output)]))
        for output in itertools.product(range(vocabulary), repeat=length)
    }


def joint_by_rounds(
    rule: Rule, p: Table, q: Table, *, length: int, gamma: int, stop: Stop = lambda _drafts: False
) -> Joint:
    """The joint distribution of `length` tokens decoded in rounds with drafts from q.

    `stop` decides from the drafts so far whether a round stops drafting: any such function is a stopping time.
    """

    @cache
    def joint_after(prefix: tuple[int, ...]) -> Joint:
        missing = length - len(prefix)
        if missing <= 0:
            return {(): 1.0}
        joint: Joint = defaultdict(float)
        for drafts, drafted in _draft_paths(q, prefix, gamma, stop):
            rows_p = [p[prefix + drafts[:i]] for i in range(len(drafts) + 1)]
            rows_q = [q[prefix + drafts[:i]] for i in range(len(drafts))]
            # The number that sampled a draft lies anywhere in that token's interval of q; a correct rule ignores it.
            given = {(Purpose.DRAFT, i): _middle(row, drafts[i]) for i, row in enumerate(rows_q)}
            for (n_accepted, token), probability in verdicts(rule, rows_p, rows_q, drafts, given):
                committed = (*drafts[:n_accepted], token)[:missing]
                for rest, rest_probability in joint_after(prefix + committed).items():
                    joint[committed + rest] += drafted * probability * rest_probability
        return joint

    return joint_after(())


def _draft_paths(
    q: Table, prefix: tuple[int, ...], gamma: int, stop: Stop, drafts: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every possible sequence of drafts after `prefix`, with its probability."""
    if len(drafts) == gamma or stop(drafts):
        yield drafts, 1.0
        return
    row = q[prefix + drafts]
    for token in np.flatnonzero(row).tolist():
        for path, probability in _draft_paths(q, prefix, gamma, stop, (*drafts, token)):
            yield path, float(row[token]) * probability


def expected_acceptance(rule: Rule, p: Table, q: Table, gamma: int) -> float:
    """The exact expected number of accepted drafts in the first round."""
    return sum(
        drafted * probability * verdict.n_accepted
        for drafts, drafted in _draft_paths(q, (), gamma, lambda _drafts: False)
        for verdict, probability in verdicts(
            rule, [p[drafts[:i]] for i in range(gamma + 1)], [q[drafts[:i]] for i in range(gamma)], drafts, {}
        )
    )


def distance(first: Joint, second: Joint) -> float:
    """The largest difference of two joint distributions over all outputs."""
    return max(abs(first.get(output, 0.0) - second.get(output, 0.0)) for output in first.keys() | second.keys())


def _middle(row: FloatArray, token: int) -> float:
    """The middle of the interval of numbers that sample `token`."""
    return float(row[:token].sum() + row[token] / 2)
