"""Rules that look right and are not: every test of losslessness must reject the ones it is meant to catch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specserve.sampling.distribution import draw
from specserve.sampling.noise import Noise, Purpose
from specserve.speculation.rejection import Distributions, NoiseSource, Verdict, recover


def recovers_from_p(p: Distributions, q: Distributions, drafts: Sequence[int], noise: NoiseSource) -> Verdict:
    """WRONG: after a rejection the next token comes from p instead of the residual."""
    for i, x in enumerate(drafts):
        if noise.uniform(Purpose.ACCEPT, i) * q[i][x] >= p[i][x]:
            return Verdict(i, draw(p[i], noise.uniform(Purpose.RECOVER, i)))
    return Verdict(len(drafts), draw(p[len(drafts)], noise.uniform(Purpose.BONUS, len(drafts))))


def shares_one_number(p: Distributions, q: Distributions, drafts: Sequence[int], noise: NoiseSource) -> Verdict:
    """WRONG: the number that rejected a draft also recovers the next token."""
    for i, x in enumerate(drafts):
        uniform = noise.uniform(Purpose.ACCEPT, i)
        if uniform * q[i][x] >= p[i][x]:
            return Verdict(i, recover(p[i], q[i], uniform))
    return Verdict(len(drafts), draw(p[len(drafts)], noise.uniform(Purpose.BONUS, len(drafts))))


def shares_the_drafts_numbers(p: Distributions, q: Distributions, drafts: Sequence[int], noise: NoiseSource) -> Verdict:
    """WRONG: a draft is judged by the number it was sampled with."""
    for i, x in enumerate(drafts):
        if noise.uniform(Purpose.DRAFT, i) * q[i][x] >= p[i][x]:
            return Verdict(i, recover(p[i], q[i], noise.uniform(Purpose.RECOVER, i)))
    return Verdict(len(drafts), draw(p[len(drafts)], noise.uniform(Purpose.BONUS, len(drafts))))


def accepts_likely_drafts(p: Distributions, q: Distributions, drafts: Sequence[int], noise: NoiseSource) -> Verdict:
    """WRONG: any draft the target finds at all likely is kept ("typical acceptance")."""
    for i, x in enumerate(drafts):
        if p[i][x] < 0.1:
            return Verdict(i, recover(p[i], q[i], noise.uniform(Purpose.RECOVER, i)))
    return Verdict(len(drafts), draw(p[len(drafts)], noise.uniform(Purpose.BONUS, len(drafts))))


def _wrong_block(
    p: Distributions,
    q: Distributions,
    drafts: Sequence[int],
    noise: NoiseSource,
    *,
    last_rule_everywhere: bool = False,
    weighed: bool = True,
) -> Verdict:
    """Block verification, written anew with one of its parts wrong."""
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
    return Verdict(n_accepted, recover(p[n_accepted], q[n_accepted], uniform, weight_there if weighed else 1.0))


def ends_a_block_anywhere_by_its_weight(
    p: Distributions, q: Distributions, drafts: Sequence[int], noise: NoiseSource
) -> Verdict:
    """WRONG: what holds for a block's last draft, that it stays with probability w, is taken to hold for all."""
    return _wrong_block(p, q, drafts, noise, last_rule_everywhere=True)


def recovers_from_a_block_as_from_a_token(
    p: Distributions, q: Distributions, drafts: Sequence[int], noise: NoiseSource
) -> Verdict:
    """WRONG: behind a block the residual is of p and q, not of w p and q."""
    return _wrong_block(p, q, drafts, noise, weighed=False)


# One draft is no block: only longer rounds show these.
WRONG_BLOCK_RULES = [ends_a_block_anywhere_by_its_weight, recovers_from_a_block_as_from_a_token]
WRONG_RULES = [recovers_from_p, shares_one_number, shares_the_drafts_numbers, accepts_likely_drafts]


class KeyedByPosition(Noise):
    """WRONG for token and block verification: a number belongs to a position of the text instead of a round."""

    def uniform(self, purpose: Purpose, index: int) -> float:
        """The number of the position that lies `index` behind the round's start."""
        at = Noise(self._seed_number, 0, 0, 0)
        return at.uniform(purpose, self._position + index)

    def __init__(self, seed: int, choice: int, round_number: int, position: int) -> None:
        super().__init__(seed, choice, round_number, position)
        self._seed_number = seed


class UniformRace(Noise):
    """WRONG for coupled verification: the tokens race with uniform numbers instead of exponential ones."""

    def exponentials(self, index: int, part: int, count: int) -> NDArray[np.float64]:
        """Uniform numbers."""
        numbers: NDArray[np.float64] = -np.expm1(-super().exponentials(index, part, count))
        return numbers


class CoarseRace(Noise):
    """WRONG for coupled verification: numbers of low precision, some of them exactly 0."""

    def exponentials(self, index: int, part: int, count: int) -> NDArray[np.float64]:
        """Multiples of 1 / 1024."""
        return np.floor(super().exponentials(index, part, count) * 1024) / 1024


class AlikeEverywhere(Noise):
    """WRONG for coupled verification: every position has the same numbers."""

    def __init__(self, seed: int, choice: int, round_number: int, position: int) -> None:
        del position
        super().__init__(seed, choice, round_number, 0)
