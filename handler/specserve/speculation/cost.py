"""What a forward pass costs on this machine: a staircase over its rows, measured once, that rises with the context."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

# One pass moves the speed factor by at most this share of itself: a pass that the machine held up says little.
_STEP = 0.02
_FURTHEST = 0.25
# Costs are remembered by this many cells of context.
_GRAIN = 64


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
    """

    def __init__(self, table: CostTable, *, most: int, speed: Speed | None = None) -> None:
        self._table = table
        self._most = most
        self._speed = speed or Speed()
        self._known: dict[int, tuple[list[float], list[int]]] = {}

    def seconds(self, rows: int, cells: int) -> float:
        """What a pass of at least `rows` rows takes, behind `cells` tokens in all slots; nothing for no rows."""
        if rows == 0:
            return 0.0
        prices, _ = self._prices(cells)
        if rows < len(prices):
            return self._speed.factor * prices[rows]
        return self._speed.factor * prices[-1] * rows / (len(prices) - 1)

    def padded(self, rows: int, cells: int) -> int:
        """The number of rows, `rows` or more, whose pass is the cheapest."""
        _, counts = self._prices(cells)
        return counts[rows] if 0 < rows < len(counts) else rows

    def observe(self, rows: int, cells: int, seconds: float) -> None:
        """Let the machine's speed follow what a live pass took."""
        self._speed.follow(math.log(seconds / self.seconds(rows, cells)))

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
