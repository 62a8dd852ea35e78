"""The control group: requests without drafts, to measure what speculation brings on live traffic."""

from __future__ import annotations

import math
from collections import deque
from random import Random
from typing import NamedTuple

# The fewest sequences in either group for an estimate; with fewer the interval is too narrow.
_MIN_SEQUENCES = 30
# Student's t for 95 % and 29 degrees of freedom, those of the smallest groups; wider than necessary for larger ones.
_T = 2.045
# Sequences of both groups that the estimate looks back on; at a holdback of 2 %, 400 of them are of the control group.
_WINDOW = 20_000


class Speedup(NamedTuple):
    """Plain seconds per token over those with speculation, and the bounds of the 95 % confidence interval."""

    value: float
    low: float
    high: float


class _Moments:
    """Mean of a sample to which values are added and from which they are removed."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0.0
        self._squares = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Add a value, or with `times` -1 remove it."""
        self.count += times
        self._sum += times * value
        self._squares += times * value**2

    @property
    def mean(self) -> float:
        """The sample's mean."""
        return self._sum / self.count

    @property
    def variance_of_mean(self) -> float:
        """The square of the mean's standard error; needs two values."""
        # Rounding may leave less than 0 for equal values.
        return max(0.0, self._squares - self.count * self.mean**2) / (self.count - 1) / self.count


class Holdback:
    """Draws the control group and compares it with the other requests.

    The speed-up is a ratio of geometric means, since TPOTs of sequences differ by factors. Both groups run in the same
    rounds, so a sequence without drafts is slowed by those with: the figure is what a client gets, not what a server
    without speculation could do.

    Args:
        share: the probability that a request is in the control group.
        seed: of the draw.
    """

    def __init__(self, share: float, seed: int | None = None) -> None:
        self._share = share
        self._random = Random(seed)  # noqa: S311 - not a secret
        self.reset()

    def reset(self) -> None:
        """Forget all sequences, because the server has changed."""
        self._plain, self._speculating = _Moments(), _Moments()
        self._recent: deque[tuple[_Moments, float]] = deque()

    def draw(self) -> bool:
        """Whether the next request is in the control group; in any thread, since nothing else uses the generator."""
        return self._random.random() < self._share

    def observe(self, tpot: float, *, plain: bool) -> None:
        """Add a sequence of `tpot` seconds per token; the oldest one beyond the window is removed."""
        group, logarithm = self._plain if plain else self._speculating, math.log(tpot)
        group.add(logarithm)
        self._recent.append((group, logarithm))
        if len(self._recent) > _WINDOW:
            oldest, logarithm = self._recent.popleft()
            oldest.add(logarithm, -1)

    def speedup(self) -> Speedup | None:
        """The estimate; None while a group is too small."""
        plain, speculating = self._plain, self._speculating
        if min(plain.count, speculating.count) < _MIN_SEQUENCES:
            return None
        value = plain.mean - speculating.mean
        margin = _T * math.sqrt(plain.variance_of_mean + speculating.variance_of_mean)
        return Speedup(math.exp(value), math.exp(value - margin), math.exp(value + margin))
