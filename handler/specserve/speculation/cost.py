"""What a forward pass costs on this machine: a staircase over its rows, measured once, that rises with the context."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

# One pass moves the speed factor by at most this share of itself: a pass that the machine held up says little.
_STEP = 0.02
_FURTHEST = 0.25
# Costs are remembered by this many cells of context.
_GRAIN = 64
_SHAPES_KEPT = 4096


@dataclass(frozen=True)
class CostTable:
    """Seconds of forward passes, as measured.

    Args:
        rows: the numbers of rows that were tried, ascending, 1 first.
        cells: two lengths of the context that the rows stood behind, ascending.
        seconds: by length of context, then by number of rows.
    """

    rows: tuple[int, ...]
    cells: tuple[int, int]
    seconds: tuple[tuple[float, ...], tuple[float, ...]]

    def at(self, cells: int) -> list[float]:
        """Seconds for each measured number of rows behind `cells` tokens, on the line through both measurements."""
        (near, far), (short, long) = self.cells, self.seconds
        share = max(0.0, (cells - near) / (far - near))
        # Attention never gets cheaper with the context; a line that falls is noise.
        return [low + share * max(0.0, high - low) for low, high in zip(short, long, strict=True)]


@dataclass
class Speed:
    """How long passes take of late, in units of what was measured: one for all models of a machine.

    A model that is not run would otherwise seem dear for ever where the machine was slow when it was measured.
    """

    factor: float = 1.0

    def follow(self, surprise: float) -> None:
        """A pass took exp(`surprise`) times what was expected; one that was held up moves it no more than others."""
        self.factor *= math.exp(_STEP * min(_FURTHEST, max(-_FURTHEST, surprise)) / _FURTHEST)


class Cost:
    """Seconds of one model's forward pass, and how many rows it should have.

    Only numbers of rows that were measured are ever run: a pass between two stairs is padded up to the cheapest one
    above it, which may cost less than what was asked for (four rows are cheaper than three where the weights are
    repacked for four).

    Args:
        table: the measurement.
        most: the most rows of a pass that is padded.
        speed: of the machine, shared by its models.
        separate: whether texts with different numbers of rows take several passes; see `passes`.
    """

    def __init__(self, table: CostTable, *, most: int, speed: Speed | None = None, separate: bool = False) -> None:
        self._table = table
        self._most = most
        self._speed = speed or Speed()
        self._separate = separate
        self._known: dict[int, tuple[list[float], list[int]]] = {}
        self._shapes: dict[tuple[int, Many[int]], float] = {}

    def seconds(self, rows: int, cells: int) -> float:
        """What a pass of at least `rows` rows takes, behind `cells` tokens in all slots; nothing for no rows."""
        if rows == 0:
            return 0.0
        prices, _ = self._prices(cells)
        if rows < len(prices):
            return self._speed.factor * prices[rows]
        return self._speed.factor * prices[-1] * rows / (len(prices) - 1)

    def together(self, counts: Many[int], cells: int) -> float:
        """What the rows of several texts take at best, so many of each; `cells` as in `seconds`.

        Where texts take passes of equal rows, it may pay to give all of them as many rows as the one with the most.
        """
        rows = sum(counts)
        if not self._separate or len(counts) == 1 or rows == 0:
            return self.seconds(rows, cells)
        shape = tuple(sorted(count for count in counts if count))
        key = (cells // _GRAIN, shape)
        if key not in self._shapes:
            if len(self._shapes) >= _SHAPES_KEPT:
                self._shapes.clear()
            apart = sum(self.seconds(size, cells) for size in passes(shape))
            even = self.seconds(len(shape) * shape[-1], cells)
            self._shapes[key] = min(apart, even) / self._speed.factor
        return self._speed.factor * self._shapes[key]

    def exactly(self, rows: int, cells: int) -> float:
        """What a pass of just so many rows takes, cheaper or dearer than one of more."""
        measured = self._table.at(cells)
        if rows > self._table.rows[-1]:
            return self._speed.factor * measured[-1] * rows / self._table.rows[-1]
        return self._speed.factor * float(np.interp(rows, self._table.rows, measured))

    def padded(self, rows: int, cells: int) -> int:
        """The number of rows, `rows` or more, whose pass is the cheapest."""
        _, counts = self._prices(cells)
        return counts[rows] if 0 < rows < len(counts) else rows

    def observe(self, expected: float, seconds: float) -> None:
        """Let the machine's speed follow what a live pass took, which was expected to take so long."""
        self._speed.follow(math.log(seconds / expected))

    def _prices(self, cells: int) -> tuple[list[float], list[int]]:
        """By number of rows, from 0: seconds without the factor, and the number that is run."""
        bucket = cells // _GRAIN
        if bucket not in self._known:
            self._known[bucket] = self._envelope(bucket * _GRAIN)
        return self._known[bucket]

    def _envelope(self, cells: int) -> tuple[list[float], list[int]]:
        measured = [pair for pair in zip(self._table.rows, self._table.at(cells), strict=True) if pair[0] <= self._most]
        prices, counts = [0.0], [0]
        for rows in range(1, measured[-1][0] + 1):
            price, count = min((seconds, count) for count, seconds in measured if count >= rows)
            prices.append(price)
            counts.append(count)
        return prices, counts


def passes(counts: Many[int]) -> list[int]:
    """The passes that slots with caches of their own take for so many rows each: neighbours alike, as far as they go.

    Args:
        counts: by slot; a slot without rows parts those on its sides.

    Returns:
        Numbers of rows, in the order of the passes.
    """
    left = list(counts)
    sizes = []
    while any(left):
        first = next(slot for slot, count in enumerate(left) if count)
        behind = next((slot for slot in range(first, len(left)) if not left[slot]), len(left))
        rows = min(left[first:behind])
        left[first:behind] = [count - rows for count in left[first:behind]]
        sizes.append(rows * (behind - first))
    return sizes


def edges(most: int) -> tuple[int, ...]:
    """The numbers of rows worth measuring up to `most`: every one of the first block, then a stair's edges."""
    tried = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
    return tuple(rows for rows in tried if rows <= most)


def typical(seconds: list[float]) -> float:
    """The typical one of repeated measurements: the median of the faster half, since nothing makes a pass too fast."""
    return float(np.median(faster_half(seconds)))


def faster_half(seconds: list[float]) -> list[float]:
    """The shorter half of repeated measurements, ascending, the middle one included."""
    return sorted(seconds)[: (len(seconds) + 1) // 2]
