"""Wrong verification rules and noise sources: each test of losslessness must reject those it is meant to detect."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from specserve.sampling.distribution import draw
from specserve.sampling.noise import Noise, Purpose
from specserve.speculation.rejection import Distributions, Verdict, recover

Rule = Callable[[Distributions, Distributions, Sequence[int], Noise], Verdict]


def noise(kind: type[Noise] = Noise, **keys: int) -> Noise:
    """Noise with some of its keys, where the others do not matter."""
    return kind(**({"secret": 0, "round_number": 0, "seed": 0, "choice": 0, "position": 0} | keys))


def _by_token(
    *,
    accepts: Purpose = Purpose.ACCEPT,
    recovers: Purpose = Purpose.RECOVER,
    from_p: bool = False,
    typical: bool = False,
) -> Rule:
    """Token verification, reimplemented with one part wrong."""

    def rule(p: Distributions, q: Distributions, drafts: Sequence[int], noise: Noise) -> Verdict:
        for i, x in enumerate(drafts):
            is_accepted = p[i][x] >= 0.1 if typical else noise.uniform(accepts, i) * q[i][x] < p[i][x]
            if not is_accepted:
                number = noise.uniform(recovers, i)
                return Verdict(i, draw(p[i], number) if from_p else recover(p[i], q[i], number))
        return Verdict(len(drafts), draw(p[len(drafts)], noise.uniform(Purpose.BONUS, len(drafts))))

    return rule


def _by_block(*, last_rule_everywhere: bool = False, weighted: bool = True) -> Rule:
    """Block verification, reimplemented with one part wrong."""

    def rule(p: Distributions, q: Distributions, drafts: Sequence[int], noise: Noise) -> Verdict:
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

    return rule


WRONG_RULES: dict[str, Rule] = {
    "recovers from p": _by_token(from_p=True),
    "recovers with the number that rejected": _by_token(recovers=Purpose.ACCEPT),
    "accepts with the number that drew the draft": _by_token(accepts=Purpose.DRAFT),
    "accepts every draft of .1 or more, as typical acceptance": _by_token(typical=True),
    # Wrong only in rounds of two or more drafts.
    "ends a block by w at every draft, which is right for the last": _by_block(last_rule_everywhere=True),
    "recovers from the residual of p and q instead of w p and q": _by_block(weighted=False),
}


class KeyedByPosition(Noise):
    """WRONG for block verification: numbers are keyed by the position in the output instead of the round."""

    def __init__(self, **keys: int) -> None:
        super().__init__(**keys | {"round_number": 0})

    def uniform(self, purpose: Purpose, index: int) -> float:
        return super().uniform(purpose, self._position + index)


class UniformRace(Noise):
    """WRONG for coupled verification: the race uses uniform instead of exponential numbers."""

    def exponentials(self, index: int, part: int, count: int) -> NDArray[np.float64]:
        numbers: NDArray[np.float64] = -np.expm1(-super().exponentials(index, part, count))
        return numbers


class CoarseRace(Noise):
    """WRONG for coupled verification: numbers are multiples of 1 / 1024, some exactly 0."""

    def exponentials(self, index: int, part: int, count: int) -> NDArray[np.float64]:
        return np.floor(super().exponentials(index, part, count) * 1024) / 1024


class SameAtEveryPosition(Noise):
    """WRONG for coupled verification: every position has the same numbers."""

    def __init__(self, **keys: int) -> None:
        super().__init__(**keys | {"position": 0})
