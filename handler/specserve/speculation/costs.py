"""What a forward pass costs on this machine: a measured table, times one factor that follows live passes."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Passes whose median the factor is, so up to 4 that the machine held up do not move it
# (tests/engine/test_busy_minutes.py).
_PASSES = 9
# The draft model's own factor is reset after this many target passes without a draft pass, or when the log of the
# target's factor has changed by this much since: only drafting can correct the draft's. Every 800 target passes, a
# retry of a draft model that has become 8 times as slow costs some 4 target passes (tests/engine/test_busy_minutes.py).
_FORGOTTEN_AFTER, _CHANGED = 800, 0.2
# Tokens of the KV cache that share one entry; with 256 the means of benchmarks/simulate.py change by .004 at most.
_GRAIN = 64


@dataclass(frozen=True)
class CostTable:
    """Seconds of forward passes, as measured.

    Raises:
        ValueError: these do not fit together, or are no times: with a damaged table every round would fail.
    """

    rows: tuple[int, ...]  # that were timed, ascending, 1 first
    kv_len: tuple[int, int]  # KV cache lengths that they were timed after, ascending
    seconds: tuple[tuple[float, ...], tuple[float, ...]]  # by KV cache length, then by number of rows

    def __post_init__(self) -> None:
        times = np.array(self.seconds)
        is_ascending = self.rows[:1] == (1,) and (np.diff(self.rows) > 0).all() and (np.diff(self.kv_len) > 0).all()
        is_complete = times.shape == (2, len(self.rows)) and (times > 0).all()
        if not (is_ascending and is_complete and np.isfinite(times).all()):
            raise ValueError("no seconds for each number of rows after each length, both ascending")


class PassCosts:
    """Seconds of one model's forward passes now: its table times a factor.

    A draft model's costs also follow the target's: the machine becomes slower and faster for both, and the target's
    passes show it also while no drafts are made.
    """

    def __init__(self, table: CostTable, *, target: PassCosts | None = None) -> None:
        self.table = table
        self.passes = 0
        self._target = target
        self._curves: dict[int, list[float]] = {}
        # Logarithms of passes' times in units of the table and, for a draft model, of the target's factor.
        self._shown = deque([0.0], _PASSES)
        self._log_factor = 0.0
        # Passes of the target, and its factor, when the draft model's last pass was observed.
        self._seen_at, self._factor_then = 0, 1.0

    @property
    def factor(self) -> float:
        """How long passes take now, in units of the table."""
        if self._target is None:
            return math.exp(self._log_factor)
        shared = self._target.factor
        is_old = self._target.passes - self._seen_at > _FORGOTTEN_AFTER
        if self._log_factor and (is_old or abs(math.log(shared / self._factor_then)) > _CHANGED):
            self._shown = deque([0.0], _PASSES)
            self._log_factor = 0.0
        return math.exp(self._log_factor) * shared

    def seconds(self, rows: int, kv_len: int) -> float:
        """What a pass of `rows` rows takes with `kv_len` tokens in the KV cache; nothing for no rows."""
        return self.factor * self._curve(rows, kv_len)[rows]

    def curve(self, max_rows: int, kv_len: int) -> NDArray[np.float64]:
        """What passes of 0 to `max_rows` rows take, shape (`max_rows` + 1,)."""
        return self.factor * np.array(self._curve(max_rows, kv_len)[: max_rows + 1])

    def rows_within(self, seconds: float, rows: int, most: int, kv_len: int) -> int:
        """How many rows, at most `most`, a pass of `rows` rows may have beside these if that adds so many seconds."""
        costs = self.curve(rows + most, kv_len)[rows:]
        # By estimate a wider pass may be faster than a narrower one.
        return int(np.flatnonzero(costs - costs[0] <= seconds)[-1])

    def observe(self, rows: int, kv_len: int, seconds: float) -> None:
        """Let the factor follow what a live pass took; one wider than any measured is ignored."""
        if not 0 < rows <= self.table.rows[-1]:
            return
        self.passes += 1
        usual = self.factor / math.exp(self._log_factor)
        if self._target is not None:
            self._seen_at, self._factor_then = self._target.passes, self._target.factor
        self._shown.append(math.log(seconds / (usual * self._curve(rows, kv_len)[rows])))
        self._log_factor = statistics.median(self._shown)

    def _curve(self, max_rows: int, kv_len: int) -> list[float]:
        """By number of rows, on lines between those that were timed and through both lengths; it may be longer."""
        entry, last = kv_len // _GRAIN, self.table.rows[-1]
        if entry not in self._curves:
            # Attention never gets cheaper with the context: a line that falls is noise.
            near, far = np.maximum.accumulate(np.array(self.table.seconds))
            start, end = self.table.kv_len
            seconds = near + max(0, entry * _GRAIN - start) / (end - start) * (far - near)
            self._curves[entry] = np.interp(range(last + 1), [0, *self.table.rows], [0, *seconds]).tolist()
        curve = self._curves[entry]
        if len(curve) <= max_rows:
            curve.extend(curve[last] * rows / last for rows in range(len(curve), max_rows + 1))
        return curve
