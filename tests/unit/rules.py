"""Wrong verification rules and noise sources: each test of losslessness must reject those it is meant to detect."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specserve.sampling.distribution import draw
from specserve.sampling.noise import Noise, Purpose
from specserve.speculation.rejection import Distributions, Verdict, recover


def noise(kind: type[Noise] = Noise, **keys: int) -> Noise:
    """Noise with some of its keys, where the others do not matter."""
    return kind(**({"secret": 0, "round_number": 0, "seed": 0, "choice": 0, "position": 0} | keys))


def recovers_from_p(p: Distributions, q: Distributions, drafts: Sequence[int], noise: Noise) -> Verdict:
    """WRONG: after a rejection the next token comes from p instead of the residual."""
    for i, x in enumerate(drafts):
        if noise.uniform(Purpose.ACCEPT, i) * q[i][x] >= p[i][x]:
            return Verdict(i, draw(p[i], noise.uniform(Purpose.RECOVER, i)))
    return Verdict(len(drafts), draw(p[len(drafts)], noise.uniform(Purpose.BONUS, len(drafts))))


def recovers_with_the_accept_number(p: Distributions, q: Distributions, drafts: Sequence[int], noise: Noise) -> Verdict:
    """WRONG: the number that rejected a draft also samples the recovered token."""
    for i, x in enumerate(drafts):
        uniform = noise.uniform(Purpose.ACCEPT, i)
        if uniform * q[i][x] >= p[i][x]:
            return Verdict(i, recover(p[i], q[i], uniform))
    return Verdict(len(drafts), draw(p[len(drafts)], noise.uniform(Purpose.BONUS, len(drafts))))


def accepts_with_the_draft_number(p: Distributions, q: Distributions, drafts: Sequence[int], noise: Noise) -> Verdict:
    """WRONG: a draft is accepted or rejected by the number that sampled it."""
    for i, x in enumerate(drafts):
        if noise.uniform(Purpose.DRAFT, i) * q[i][x] >= p[i][x]:
            return Verdict(i, recover(p[i], q[i], noise.uniform(Purpose.RECOVER, i)))
    return Verdict(len(drafts), draw(p[len(drafts)], noise.uniform(Purpose.BONUS, len(drafts))))


def accepts_likely_drafts(p: Distributions, q: Distributions, drafts: Sequence[int], noise: Noise) -> Verdict:
    """WRONG: every draft with p(x) of at least 0.1 is accepted ("typical acceptance")."""
    for i, x in enumerate(drafts):
        if p[i][x] < 0.1:
            return Verdict(i, recover(p[i], q[i], noise.uniform(Purpose.RECOVER, i)))
    return Verdict(len(drafts), draw(p[len(drafts)], noise.uniform(Purpose.BONUS, len(drafts))))


def _wrong_block(
    p: Distributions,
    q: Distributions,
    drafts: Sequence[int],
    noise: Noise,
    *,
    last_rule_everywhere: bool = False,
    weighted: bool = True,
) -> Verdict:
    """Block verification, reimplemented with one part wrong."""
    gamma = len(drafts)
    n_accepted, weight_there, weight = 0, 1.0, 1.0
    for i, x in enumerate(drafts):
        weight = min(1.0, weight * float(p[i][x] / q[i][x]))
        if weight == 0:
            break
        ends = weight
        if i + 1 < gamma and not last_rule_everywhere:
            excess = float(np.maximum(weight * p[i + 1] - q[i + 1], 0).sum())
            ends = excess / (excess + 1 - weight) if excess + 1 > weight else 1.0
        if noise.uniform(Purpose.ACCEPT, i) < ends:
            n_accepted, weight_there = i + 1, weight
    if n_accepted == gamma:
        return Verdict(gamma, draw(p[gamma], noise.uniform(Purpose.BONUS, gamma)))
    uniform = noise.uniform(Purpose.RECOVER, n_accepted)
    return Verdict(n_accepted, recover(p[n_accepted], q[n_accepted], uniform, weight_there if weighted else 1.0))


def ends_block_by_weight_at_every_draft(
    p: Distributions, q: Distributions, drafts: Sequence[int], noise: Noise
) -> Verdict:
    """WRONG: a block may end after any draft with probability w, which is right for the last draft only."""
    return _wrong_block(p, q, drafts, noise, last_rule_everywhere=True)


def recovers_from_the_unweighted_residual(
    p: Distributions, q: Distributions, drafts: Sequence[int], noise: Noise
) -> Verdict:
    """WRONG: after a rejection the residual is that of p and q instead of w p and q."""
    return _wrong_block(p, q, drafts, noise, weighted=False)


# Wrong only in rounds of two or more drafts.
WRONG_BLOCK_RULES = [ends_block_by_weight_at_every_draft, recovers_from_the_unweighted_residual]
WRONG_RULES = [recovers_from_p, recovers_with_the_accept_number, accepts_with_the_draft_number, accepts_likely_drafts]


class KeyedByPosition(Noise):
    """WRONG for block verification: numbers are keyed by the position in the output instead of the round."""

    def __init__(self, *, secret: int, round_number: int, seed: int, choice: int, position: int) -> None:
        del round_number
        super().__init__(secret=secret, round_number=0, seed=seed, choice=choice, position=position)

    def uniform(self, purpose: Purpose, index: int) -> float:
        """The number of the position `index` tokens after the start of the round."""
        return super().uniform(purpose, self._position + index)


class UniformRace(Noise):
    """WRONG for coupled verification: the race uses uniform instead of exponential numbers."""

    def exponentials(self, index: int, part: int, count: int) -> NDArray[np.float64]:
        """Uniform numbers."""
        numbers: NDArray[np.float64] = -np.expm1(-super().exponentials(index, part, count))
        return numbers


class CoarseRace(Noise):
    """WRONG for coupled verification: numbers of low precision, some of which are exactly 0."""

    def exponentials(self, index: int, part: int, count: int) -> NDArray[np.float64]:
        """Multiples of 1 / 1024."""
        return np.floor(super().exponentials(index, part, count) * 1024) / 1024


class SameAtEveryPosition(Noise):
    """WRONG for coupled verification: every position has the same numbers."""

    def __init__(self, *, secret: int, round_number: int, seed: int, choice: int, position: int) -> None:
        del position
        super().__init__(secret=secret, round_number=round_number, seed=seed, choice=choice, position=0)
