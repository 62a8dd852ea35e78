"""What a forward pass costs on this machine: a measured table over its rows, times a factor that live passes set."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

# The share by which a live pass moves the factor at most, and the log-ratio of times from which it does: a pass that
# the machine held up says little. Half and twice as much change the means of benchmarks/simulate.py, whose machine
# never slows down, by .007 at most.
_STEP, _FULL_STEP_AT = 0.02, 0.25
# The share by which a live pass moves the tilt at most, and the most that it gets, both as logarithms for a pass of one
# row: of two states of the memory of a Zen 4 the differences are .22 for one row and -.12 for eight. Twice the share
# changes the mean of recorded texts in the state that a table was not measured in by .004 at most.
_TILT_STEP, _MOST_TILT = 0.02, 0.25
# Passes that are remembered, and the log-ratio from which they move the factor at once: more than passes of a quiet
# machine vary, less than a neighbour changes (benchmarks/neighbours.py).
_RECENT, _JUMP = 8, 0.25
# The log-ratio by which passes have to be shorter than a table says before it is doubted: the memory of a machine that
# is shared varies by as much (benchmarks/RESULTS.md).
_DOUBTFUL = 0.25
# The share that is left of what the draft model's own passes have shown, after each further pass of the target when
# `_RECENT` were without one: the target has become faster or slower since (a tenth after 10), or not: to try a draft
# model that has become 8 times as slow takes 120 ms, all 800 passes (tests/engine/test_busy_minutes.py).
_KEPT_OF_ANOTHER_TIME, _KEPT = 0.8, 0.999
# Tokens of the KV cache that one entry of the cache of costs stands for; 16 and 256 change the means by .004 at most.
_GRAIN = 64


@dataclass(frozen=True)
class CostTable:
    """Seconds of forward passes, as measured.

    Args:
        rows: the numbers of rows that were timed, ascending, 1 first.
        kv_len: the KV cache lengths that they were timed after, ascending.
        seconds: by KV cache length, then by number of rows.

    Raises:
        ValueError: these do not fit together, or are no times.
    """

    rows: tuple[int, ...]
    kv_len: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        """Refuse a table that is not complete."""
        shape = {len(seconds) for seconds in self.seconds}
        is_ascending = all(low < high for low, high in [*pairwise((0, *self.rows)), *pairwise((-1, *self.kv_len))])
        if not is_ascending or shape != {len(self.rows)} or len(self.seconds) != len(self.kv_len):
            raise ValueError("no seconds for each number of rows after each length, both ascending")
        if self.rows[:1] != (1,) or not all(0 < seconds < math.inf for after in self.seconds for seconds in after):
            raise ValueError("no seconds of one row, or none that a pass can take")

    def at(self, kv_len: int) -> list[float]:
        """Seconds for each number of rows in `rows` after `kv_len` tokens.

        On the line between the measurements before and after that length, beyond the last on the last line.
        """
        # Attention never gets cheaper with the context: a line that falls is noise.
        rising = list(accumulate(self.seconds, lambda before, now: tuple(map(max, before, now))))
        index = min(bisect_right(self.kv_len, kv_len), len(rising) - 1)
        if index == 0:
            return list(rising[0])
        (near, far), (short, long) = self.kv_len[index - 1 : index + 1], rising[index - 1 : index + 1]
        share = (kv_len - near) / (far - near)
        return [low + share * (high - low) for low, high in zip(short, long, strict=True)]


class _State:
    """A table, and how the machine differs from it now."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        # Log of the factor, and what each of the last passes has shown of it.
        self.log_factor = 0.0
        # How much that differs between passes that memory limits and those that arithmetic limits: see `_WIDTHS`.
        self.tilt = 0.0
        self.shown: deque[float] = deque(maxlen=_RECENT)
        # When the last pass was observed, in passes of the target, and the log of its factor then.
        self.observed_at, self.target_then = 0, 0.0
        # By length; once more as lists, since numbers of these are read faster.
        self._curves: dict[int, FloatArray] = {}
        self._lists: dict[int, list[float]] = {}

    def seconds(self, rows: int, kv_len: int) -> float:
        """What the table says, between its entries and beyond them."""
        entry = kv_len // _GRAIN
        if (curve := self._lists.get(entry)) is None:
            curve = self._lists[entry] = self._curve(entry).tolist()
        last = len(curve) - 1
        return curve[rows] if rows <= last else curve[last] * rows / last

    def curve(self, max_rows: int, kv_len: int) -> FloatArray:
        """The same for 0 to `max_rows` rows."""
        curve = self._curve(kv_len // _GRAIN)
        last = len(curve) - 1
        if max_rows <= last:
            return curve[: max_rows + 1]
        return np.append(curve, curve[last] * np.arange(last + 1, max_rows + 1) / last)

    def _curve(self, entry: int) -> FloatArray:
        if entry not in self._curves:
            counts = [0, *self.table.rows]
            self._curves[entry] = np.interp(range(counts[-1] + 1), counts, [0, *self.table.at(entry * _GRAIN)])
        return self._curves[entry]


# By number of rows, how far a pass is from one that memory limits (-1, one row) to one that arithmetic limits (1, eight
# or more).
_WIDTHS = (-1.0, *(2 / 3 * math.log2(rows) - 1 for rows in range(1, 9)))


def _width(rows: int) -> float:
    return _WIDTHS[min(rows, len(_WIDTHS) - 1)]


class Cost:
    """Seconds of one model's forward passes now: the table times a factor that live passes set.

    The factor follows them slowly, and jumps where the last passes agree that the machine has changed. It is tilted,
    since machines change in speed of memory and of arithmetic by themselves: exp(log_factor + tilt * _WIDTHS[rows]).

    Args:
        table: the measurement; or several, by number of compute threads.
        target: for a draft model, the target's cost: the machine becomes slower and faster for both, and the passes of
            the target show it also while no drafts are made. What the draft model's own passes have shown beside that
            is forgotten while it makes none: else what a busy minute has taught would keep it from drafting for ever.
    """

    def __init__(self, table: CostTable | Mapping[int, CostTable], *, target: Cost | None = None) -> None:
        tables = {1: table} if isinstance(table, CostTable) else table
        self._states = {threads: _State(table) for threads, table in tables.items()}
        self._state = self._states[max(self._states)]
        self._target = target
        self._passes = 0

    @property
    def table(self) -> CostTable:
        """The measurement for the present number of threads."""
        return self._state.table

    @property
    def factor(self) -> float:
        """How long passes take now, in units of the measurement."""
        return math.exp(self.log_factor)

    @property
    def log_factor(self) -> float:
        """Its logarithm."""
        return self._own_log_factor + (self._target.log_factor if self._target else 0.0)

    @property
    def _own_log_factor(self) -> float:
        state, target = self._state, self._target
        if target is None or (unobserved := target.passes - state.observed_at - _RECENT) <= 0:
            return state.log_factor
        is_another_time = abs(target.log_factor - state.target_then) > _JUMP
        return state.log_factor * (_KEPT_OF_ANOTHER_TIME if is_another_time else _KEPT) ** unobserved

    @property
    def passes(self) -> int:
        """Number of passes that were observed."""
        return self._passes

    def use_threads(self, threads: int) -> None:
        """Passes run with so many compute threads from now on: the table for the nearest number counts."""
        self._state = self._states[min(self._states, key=lambda known: abs(math.log(known / threads)))]

    @property
    def doubtful(self) -> bool:
        """Whether passes with all threads take less than the table says: it was measured on a busy machine."""
        return self._states[max(self._states)].log_factor < -_DOUBTFUL

    @property
    def tables(self) -> dict[int, CostTable]:
        """The measurements by number of compute threads."""
        return {threads: state.table for threads, state in self._states.items()}

    def replace_table(self, threads: int, table: CostTable) -> None:
        """Take a new measurement for a number of threads; what passes have shown of the old one is forgotten."""
        is_used = self._state is self._states[threads]
        self._states[threads] = _State(table)
        if is_used:
            self._state = self._states[threads]

    def seconds(self, rows: int, kv_len: int) -> float:
        """What a pass of `rows` rows takes with `kv_len` tokens in the KV cache; nothing for no rows."""
        return self._tilted(rows) * self._state.seconds(rows, kv_len)

    def curve(self, max_rows: int, kv_len: int) -> FloatArray:
        """What passes of 0 to `max_rows` rows take, shape (`max_rows` + 1,); see `seconds`."""
        seconds = self._tilted(max_rows) * self._state.curve(max_rows, kv_len)
        # All but the widest of few rows are tilted otherwise.
        narrower = np.array(_WIDTHS[: min(max_rows, len(_WIDTHS) - 1)])
        seconds[: narrower.size] *= np.exp(self._state.tilt * (narrower - _width(max_rows)))
        return seconds

    def _tilted(self, rows: int) -> float:
        """The factor of a pass of so many rows."""
        return math.exp(self.log_factor + self._state.tilt * _width(rows))

    def observe(self, rows: int, kv_len: int, seconds: float) -> None:
        """Let the factor follow what a live pass took; one wider than any measured is ignored."""
        state, target = self._state, self._target
        if not 0 < rows <= state.table.rows[-1]:
            return
        self._passes += 1
        state.log_factor = self._own_log_factor
        others = 0.0
        if target is not None:
            others = target.log_factor
            if target.passes - state.observed_at > _RECENT:
                # They belong to another time.
                state.shown.clear()
            state.observed_at, state.target_then = target.passes, others
        shown = state.shown
        width = _width(rows)
        shown.append(math.log(seconds / state.seconds(rows, kv_len)) - others - state.tilt * width)
        surprise = min(1.0, max(-1.0, (shown[-1] - state.log_factor) / _FULL_STEP_AT))
        state.log_factor += _STEP * surprise
        if abs(surprise) < 1:
            # More is of a neighbour, who slows down all passes.
            state.tilt = min(_MOST_TILT, max(-_MOST_TILT, state.tilt + _TILT_STEP * surprise * width))
        if len(shown) == _RECENT:
            agreed = statistics.median(shown)
        elif len(shown) > 1:
            agreed = min(max(state.log_factor, min(shown)), max(shown))
        else:
            return
        if abs(agreed - state.log_factor) > _JUMP:
            state.log_factor = agreed
