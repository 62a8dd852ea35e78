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
    """Seconds of one model's forward passes now: the table times a factor that live passes set.

    Args:
        table: the measurement.
        target: for a draft model, the target's cost: the machine becomes slower and faster for both, and the passes of
            the target show it also while no drafts are made.
    """

    def __init__(self, table: CostTable, *, target: Cost | None = None) -> None:
        self.table = table
        self._target = target
        self._factor = 1.0
        self._curves: dict[int, list[float]] = {}

    @property
    def factor(self) -> float:
        """How long passes take now, in units of the measurement."""
        return self._factor * (self._target.factor if self._target else 1.0)

    def seconds(self, rows: int, kv_len: int) -> float:
        """What a pass of `rows` rows takes with `kv_len` tokens in the KV cache; nothing for no rows."""
        entry = kv_len // _GRAIN
        if entry not in self._curves:
            counts = [0, *self.table.rows]
            self._curves[entry] = np.interp(range(counts[-1] + 1), counts, [0, *self.table.at(entry * _GRAIN)]).tolist()
        curve = self._curves[entry]
        last = len(curve) - 1
        return self.factor * (curve[rows] if rows <= last else curve[last] * rows / last)

    def observe(self, rows: int, kv_len: int, seconds: float) -> None:
        """Let the factor follow what a live pass took; one wider than any measured is ignored."""
        if 0 < rows <= self.table.rows[-1]:
            surprise = math.log(seconds / self.seconds(rows, kv_len))
            self._factor *= math.exp(_STEP * min(1.0, max(-1.0, surprise / _FULL_STEP_AT)))
