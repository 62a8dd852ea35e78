"""The exact output distribution of a verification rule, from every outcome of a round (intervals.py)."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache

import numpy as np

from intervals import outcomes
from rules import Rule, noise
from specserve.sampling.distribution import FloatArray, draw
from specserve.sampling.noise import Purpose
from specserve.speculation.rejection import Verdict

Table = Mapping[tuple[int, ...], FloatArray]
# Probability of each output: the joint distribution of its tokens.
Joint = dict[tuple[int, ...], float]
Stop = Callable[[tuple[int, ...]], bool]

_DENOMINATOR = 12


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
        for (drafts, verdict), probability in outcomes(lambda: _round(rule, (p, q), prefix, gamma, stop)).items():
            committed = (*drafts[: verdict.n_accepted], verdict.next_token)[:missing]
            for rest, rest_probability in joint_after(prefix + committed).items():
                joint[committed + rest] += probability * rest_probability
        return joint

    return joint_after(())


def _round(
    rule: Rule, tables: tuple[Table, Table], prefix: tuple[int, ...], gamma: int, stop: Stop = lambda _drafts: False
) -> tuple[tuple[int, ...], Verdict]:
    """The drafts of a round after `prefix`, and the verdict on them."""
    (p, q), numbers, drafts = tables, noise(), tuple[int, ...]()
    while len(drafts) < gamma and not stop(drafts):
        drafts += (draw(q[prefix + drafts], numbers.uniform(Purpose.DRAFT, len(drafts))),)
    rows_p = [p[prefix + drafts[:i]] for i in range(len(drafts) + 1)]
    rows_q = [q[prefix + drafts[:i]] for i in range(len(drafts))]
    return drafts, rule(rows_p, rows_q, drafts, numbers)


def expected_acceptance(rule: Rule, p: Table, q: Table, gamma: int) -> float:
    """The exact expected number of accepted drafts in the first round."""
    found = outcomes(lambda: _round(rule, (p, q), (), gamma)[1].n_accepted)
    return sum(n_accepted * probability for n_accepted, probability in found.items())
