"""What speculation brings on live traffic: a share of the requests goes without it, to be compared with."""

from __future__ import annotations

import math
from random import Random
from typing import NamedTuple

# Fewer texts than this on either side say nothing; the interval below is too narrow for them.
_LEAST = 30
# Student's t for 95 % and 29 degrees of freedom, the fewest that are shown; wider than need be for more.
_T = 2.045


class Speedup(NamedTuple):
    """How many times as fast texts are with speculation, and where the true figure lies at 95 % confidence."""

    value: float
    low: float
    high: float


class Paces:
    """Running mean and spread of the logarithm of seconds a token (Welford's recurrence)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    def add(self, pace: float) -> None:
        """One text took so many seconds a token."""
        self.count += 1
        away = math.log(pace) - self.mean
        self.mean += away / self.count
        self._squares += away * (math.log(pace) - self.mean)

    @property
    def error(self) -> float:
        """The mean's variance."""
        return self._squares / (self.count - 1) / self.count if self.count > 1 else math.inf


class Holdback:
    """Chooses the control group, and compares.

    Logarithms, since texts differ by factors: the figure is a ratio of geometric means. Both groups live in the same
    rounds, so a text without drafts is slowed by those with; the figure is what a client gets, not what a server could.

    Args:
        share: of the requests.
        seed: of the choice.
    """

    def __init__(self, share: float, seed: int | None = None) -> None:
        self._share = share
        self._random = Random(seed)  # noqa: S311 - whom it hits is no secret
        self._speculating = Paces()
        self._plain = Paces()

    def chooses(self) -> bool:
        """Whether the next request goes without speculation."""
        return self._random.random() < self._share

    def learn(self, pace: float, *, plain: bool) -> None:
        """A text ended that took so many seconds a token."""
        (self._plain if plain else self._speculating).add(pace)

    def speedup(self) -> Speedup | None:
        """What speculation brings; None until there are enough texts on both sides."""
        if min(self._plain.count, self._speculating.count) < _LEAST:
            return None
        value = self._plain.mean - self._speculating.mean
        away = _T * math.sqrt(self._plain.error + self._speculating.error)
        return Speedup(math.exp(value), math.exp(value - away), math.exp(value + away))
