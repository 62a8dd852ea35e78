"""The control group: requests without drafts, to measure what speculation brings on live traffic."""

import math
from collections import deque
from random import Random
from typing import NamedTuple

import numpy as np

# The fewest sequences in either group for an estimate; with fewer the interval is too narrow.
_MIN_SEQUENCES = 30
# Student's t for 95 % and 29 degrees of freedom, those of the smallest groups; wider than necessary for larger ones.
_T = 2.045
# Sequences of both groups that the estimate looks back on; at a holdback of 2 %, 400 of them are of the control group.
_WINDOW = 20_000


class Speedup(NamedTuple):
    value: float  # plain seconds per token over those with speculation
    low: float  # the bounds of the 95 % confidence interval
    high: float


class Holdback:
    """Draws the control group and compares it with the other requests.

    The speed-up is a ratio of geometric means, since seconds per token differ by factors between sequences. Both groups
    run in the same rounds, so a sequence without drafts is slowed by those with: the figure is what a client gets, not
    what a server without speculation could do.
    """

    def __init__(self, share: float, seed: int | None = None) -> None:
        self._share = share  # the probability that a request is in the control group
        self._random = Random(seed)  # noqa: S311 - not a secret
        # Whether a sequence was in the control group, and the logarithm of its seconds per token.
        self._recent: deque[tuple[bool, float]] = deque(maxlen=_WINDOW)

    def reset(self) -> None:
        self._recent.clear()

    def draw(self) -> bool:
        """Whether the next request is in the control group; safe in any thread."""
        return self._random.random() < self._share

    def observe(self, tpot: float, *, plain: bool) -> None:
        if self._share:
            self._recent.append((plain, math.log(tpot)))

    def speedup(self) -> Speedup | None:
        """The estimate; None while a group is too small."""
        groups = [np.array([log for plain, log in self._recent if plain is group]) for group in (True, False)]
        if min(map(len, groups)) < _MIN_SEQUENCES:
            return None
        value = groups[0].mean() - groups[1].mean()
        margin = _T * math.sqrt(sum(group.var(ddof=1) / len(group) for group in groups))
        return Speedup(math.exp(value), math.exp(value - margin), math.exp(value + margin))
