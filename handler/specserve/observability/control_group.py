"""What speculation brings on live traffic: a share of the requests, and of rounds, goes without it, to compare with."""

from __future__ import annotations

import math
from collections import deque
from random import Random
from typing import NamedTuple

# Fewer texts than this on either side say nothing; the interval below is too narrow for them.
_LEAST = 30
# Student's t for 95 % and 29 degrees of freedom, the fewest that are shown; wider than need be for more.
_T = 2.045
# Rounds that follow each other are alike, so they are compared in blocks of so many plain ones, which are not: and as
# many blocks as these say something (t for 9 degrees of freedom).
_PLAIN_ROUNDS, _LEAST_BLOCKS, _T_BLOCKS = 8, 10, 2.262
# What is older than so many texts, or blocks, says nothing of now; 2 % of the texts are 400 of the control group.
_MOST_TEXTS, _MOST_BLOCKS = 20_000, 1_000


class Speedup(NamedTuple):
    """How many times as fast texts are with speculation, and where the true figure lies at 95 % confidence."""

    value: float
    low: float
    high: float

    @classmethod
    def around(cls, logarithm: float, away: float) -> Speedup:
        """From the figure's logarithm, and how far either way the true one may lie."""
        return cls(math.exp(logarithm), math.exp(logarithm - away), math.exp(logarithm + away))


class Lot:
    """Falls on a share of all, at random.

    Args:
        share: of them.
        seed: of the choice.
    """

    def __init__(self, share: float, seed: int | None = None) -> None:
        self._share = share
        self._random = Random(seed)  # noqa: S311 - whom it hits is no secret

    def chooses(self) -> bool:
        """Whether the next one goes without speculation."""
        return self._random.random() < self._share


class Logarithms:
    """The logarithms of what was added, seconds a token or ratios: their mean, and how sure that is."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0.0
        self._squares = 0.0

    def add(self, logarithm: float, times: int = 1) -> None:
        """One more, or, -1 times, one fewer."""
        self.count += times
        self._sum += times * logarithm
        self._squares += times * logarithm**2

    @property
    def mean(self) -> float:
        """Of all that count."""
        return self._sum / self.count if self.count else 0.0

    @property
    def error(self) -> float:
        """The mean's variance."""
        if self.count < 2:
            return math.inf
        # What rounding leaves of equal values may lie below 0.
        return max(0.0, self._squares - self.count * self.mean**2) / (self.count - 1) / self.count


class Recent:
    """Lets groups forget what is older than so many additions to any of them.

    Args:
        most: of them that count.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: deque[tuple[Logarithms, float]] = deque()

    def add(self, group: Logarithms, logarithm: float) -> None:
        """One more in a group; the oldest of all is none any more."""
        group.add(logarithm)
        self._kept.append((group, logarithm))
        if len(self._kept) > self._most:
            oldest, gone = self._kept.popleft()
            oldest.add(gone, -1)


class Holdback(Lot):
    """Chooses the control group among requests, and compares.

    Logarithms, since texts differ by factors: the figure is a ratio of geometric means. Both groups live in the same
    rounds, so a text without drafts is slowed by those with; the figure is what a client gets, not what a server could.
    """

    def __init__(self, share: float, seed: int | None = None) -> None:
        super().__init__(share, seed)
        self.forget()

    def forget(self) -> None:
        """Begin anew: what was seen is not what is to be compared any more."""
        self._speculating = Logarithms()
        self._plain = Logarithms()
        self._recent = Recent(_MOST_TEXTS)

    def learn(self, pace: float, *, plain: bool) -> None:
        """A text ended that took so many seconds a token."""
        self._recent.add(self._plain if plain else self._speculating, math.log(pace))

    def speedup(self) -> Speedup | None:
        """What speculation brings; None until there are enough texts on both sides."""
        if min(self._plain.count, self._speculating.count) < _LEAST:
            return None
        value = self._plain.mean - self._speculating.mean
        away = _T * math.sqrt(self._plain.error + self._speculating.error)
        return Speedup.around(value, away)


class PlainRounds(Lot):
    """Chooses rounds that go without drafts, and compares them with the others.

    A round is over for all of its texts at once and texts differ less from round to round than from each other, so
    this says far more than texts that are held back, and what one text does to its neighbours is in it. The figure is
    a ratio of tokens a second, in rounds that read no prompt.
    """

    def __init__(self, share: float, seed: int | None = None) -> None:
        super().__init__(share, seed)
        self.forget()

    def forget(self) -> None:
        """Begin anew: what was seen is not what is to be compared any more."""
        self._blocks = Logarithms()
        self._recent = Recent(_MOST_BLOCKS)
        self._begin_block()

    def _begin_block(self) -> None:
        self._plain_rounds = 0
        # By whether the rounds were plain: tokens and seconds.
        self._sums = {False: [0.0, 0.0], True: [0.0, 0.0]}

    def learn(self, tokens: int, seconds: float, *, plain: bool) -> None:
        """A round wrote so many tokens, of texts that all would have drafts if the controller wanted them."""
        self._plain_rounds += plain
        self._sums[plain][0] += tokens
        self._sums[plain][1] += seconds
        (drafted, drafting), (written, writing) = self._sums[False], self._sums[True]
        # Rounds that only end texts write nothing; a block is complete when both of its sides have written.
        if self._plain_rounds >= _PLAIN_ROUNDS and drafted and written:
            self._recent.add(self._blocks, math.log(drafted / drafting * writing / written))
            self._begin_block()

    def speedup(self) -> Speedup | None:
        """What speculation brings while texts are written; None until there are enough blocks."""
        if self._blocks.count < _LEAST_BLOCKS:
            return None
        value, away = self._blocks.mean, _T_BLOCKS * math.sqrt(self._blocks.error)
        return Speedup.around(value, away)
