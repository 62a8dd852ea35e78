"""What a forward pass costs on this machine: a measured table over its rows, times a factor that live passes set."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

# The share by which a live pass moves the factor at most, and the log-ratio of times from which it does: a pass that
# the machine held up says little. Half and twice as much change the means of benchmarks/simulate.py, whose machine
# never slows down, by .007 at most.
_STEP, _FULL_STEP_AT = 0.02, 0.25
# Tokens of the KV cache that one entry of the cache of costs stands for; 16 and 256 change the means by .004 at most.
_GRAIN = 64


@dataclass(frozen=True)
class CostTable:
    """Seconds of forward passes, as measured.

    Args:
        rows: the numbers of rows that were timed, ascending, 1 first.
        kv_len: the two KV cache lengths that they were timed after, ascending.
        seconds: by KV cache length, then by number of rows.
    """

    rows: tuple[int, ...]
    kv_len: tuple[int, int]
    seconds: tuple[tuple[float, ...], tuple[float, ...]]

    def at(self, kv_len: int) -> list[float]:
        """Seconds for each number of rows in `rows` after `kv_len` tokens, on the line through both measurements."""
        (near, far), (short, long) = self.kv_len, self.seconds
        share = max(0.0, (kv_len - near) / (far - near))
        # Attention never gets cheaper with the context: a line that falls is noise.
        return [low + share * max(0.0, high - low) for low, high in zip(short, long, strict=True)]


class Cost:
    """Seconds of one model's forward pass, and how many rows it should have.

    A pass is padded to the number of rows, `rows` or more, that costs the least: with some of llama.cpp's kernels four
    rows cost less than three.

    Args:
        table: the measurement.
        most: the most rows of a pass that is padded.
        target: for a draft model, the target's cost: the machine becomes slower and faster for both, and the passes of
            the target show it also while no drafts are made.
    """

    def __init__(self, table: CostTable, *, most: int, target: Cost | None = None) -> None:
        self.table = table
        self._most = most
        self._target = target
        self._factor = 1.0
        self._envelopes: dict[int, tuple[list[float], list[int]]] = {}

    @property
    def factor(self) -> float:
        """How long passes take now, in units of the measurement."""
        return self._factor * (self._target.factor if self._target else 1.0)

    def seconds(self, rows: int, kv_len: int) -> float:
        """What a pass of at least `rows` rows takes with `kv_len` tokens in the KV cache; nothing for no rows."""
        seconds, _ = self._envelope(kv_len)
        last = len(seconds) - 1
        return self.factor * (seconds[rows] if rows <= last else seconds[last] * rows / last)

    def exactly(self, rows: int, kv_len: int) -> float:
        """What a pass of just `rows` rows takes, whether or not one of more rows is cheaper."""
        beyond = max(1.0, rows / self.table.rows[-1])
        return self.factor * beyond * float(np.interp(rows, self.table.rows, self.table.at(kv_len)))

    def padded(self, rows: int, kv_len: int) -> int:
        """The number of rows, `rows` or more, whose pass is the cheapest."""
        _, counts = self._envelope(kv_len)
        return counts[rows] if 0 < rows < len(counts) else rows

    def observe(self, rows: int, kv_len: int, seconds: float) -> None:
        """Let the factor follow what a live pass took; one wider than any measured is ignored."""
        if 0 < rows <= self.table.rows[-1]:
            surprise = math.log(seconds / self.seconds(rows, kv_len))
            self._factor *= math.exp(_STEP * min(1.0, max(-1.0, surprise / _FULL_STEP_AT)))

    def _envelope(self, kv_len: int) -> tuple[list[float], list[int]]:
        """By number of rows, from 0: seconds of the cheapest pass of at least so many, and its number of rows."""
        entry = kv_len // _GRAIN
        if entry not in self._envelopes:
            measured = list(zip(self.table.rows, self.table.at(entry * _GRAIN), strict=True))
            measured = [(count, cost) for count, cost in measured if count <= self._most]
            most = measured[-1][0]
            cheapest = [min((cost, count) for count, cost in measured if count >= rows) for rows in range(1, most + 1)]
            cheapest.insert(0, (0.0, 0))
            self._envelopes[entry] = [cost for cost, _ in cheapest], [count for _, count in cheapest]
        return self._envelopes[entry]


def row_counts(most: int) -> tuple[int, ...]:
    """The numbers of rows worth measuring up to `most`: all of the first few, then the ends of kernels' tiles."""
    return tuple(rows for rows in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32) if rows <= most)


def typical(seconds: list[float]) -> float:
    """The typical one of repeated measurements: the median of the faster half, since nothing makes a pass too fast."""
    return float(np.median(faster_half(seconds)))


def faster_half(seconds: list[float]) -> list[float]:
    """The shorter half of repeated measurements, ascending, the middle one included."""
    return sorted(seconds)[: (len(seconds) + 1) // 2]
