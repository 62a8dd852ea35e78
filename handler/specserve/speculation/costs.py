"""What a forward pass costs on this machine: a measured table, times one factor that follows live passes."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from specserve.speculation.step import Step

FloatArray = NDArray[np.float64]

# The factor is the median of the last 9 passes, so up to 4 that the machine held up do not move it
# (tests/engine/test_busy_minutes.py).
_PASSES = 9
# What the draft model's passes have shown is forgotten after so many passes of the target without one, or when the
# log of the target's factor has changed by so much since: only drafting can correct it. To try a draft model that has
# become 8 times as slow takes some 4 passes of the target, all 800 (tests/engine/test_busy_minutes.py).
_FORGOTTEN_AFTER, _CHANGED = 800, 0.2
# Tokens of the KV cache that share one entry; with 256 the means of benchmarks/simulate.py change by .004 at most.
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
        """Refuse a table that is damaged: with it every round would fail."""
        times = np.array(self.seconds)
        is_ascending = self.rows[:1] == (1,) and (np.diff(self.rows) > 0).all() and (np.diff(self.kv_len) > 0).all()
        if not is_ascending or times.shape != (len(self.kv_len), len(self.rows)) or not (times > 0).all():
            raise ValueError("no seconds for each number of rows after each length, both ascending")
        if not np.isfinite(times).all():
            raise ValueError("no seconds that a pass can take")

    def at(self, kv_len: int) -> FloatArray:
        """Seconds for each number of rows in `rows` after `kv_len` tokens.

        On the line between the measurements before and after that length, beyond the last on the last line.
        """
        # Attention never gets cheaper with the context: a line that falls is noise.
        rising: FloatArray = np.maximum.accumulate(np.array(self.seconds))
        index = min(bisect_right(self.kv_len, kv_len), len(rising) - 1)
        seconds: FloatArray = rising[index]
        if index:
            near, far = self.kv_len[index - 1 : index + 1]
            seconds = rising[index - 1] + (kv_len - near) / (far - near) * (seconds - rising[index - 1])
        return seconds


class PassCosts:
    """Seconds of one model's forward passes now: its table times a factor.

    Args:
        table: the measurement.
        target: for a draft model, the target's costs: the machine becomes slower and faster for both, and the target's
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
        if self._log_factor and self._is_outdated(self._target):
            self._shown = deque([0.0], _PASSES)
            self._log_factor = 0.0
        return math.exp(self._log_factor) * self._target.factor

    def _is_outdated(self, target: PassCosts) -> bool:
        change = abs(math.log(target.factor / self._factor_then))
        return target.passes - self._seen_at > _FORGOTTEN_AFTER or change > _CHANGED

    def seconds(self, rows: int, kv_len: int) -> float:
        """What a pass of `rows` rows takes with `kv_len` tokens in the KV cache; nothing for no rows."""
        return self.factor * self._measured(rows, kv_len)

    def curve(self, max_rows: int, kv_len: int) -> FloatArray:
        """What passes of 0 to `max_rows` rows take, shape (`max_rows` + 1,)."""
        curve = self._curve(kv_len)
        last = len(curve) - 1
        beyond = curve[last] * np.arange(last + 1, max_rows + 1) / last
        return self.factor * np.append(curve[: max_rows + 1], beyond)

    def observe(self, rows: int, kv_len: int, seconds: float) -> None:
        """Let the factor follow what a live pass took; one wider than any measured is ignored."""
        if not 0 < rows <= self.table.rows[-1]:
            return
        self.passes += 1
        usual = self.factor / math.exp(self._log_factor)
        if self._target is not None:
            self._seen_at, self._factor_then = self._target.passes, self._target.factor
        self._shown.append(math.log(seconds / (usual * self._measured(rows, kv_len))))
        self._log_factor = statistics.median(self._shown)

    def _measured(self, rows: int, kv_len: int) -> float:
        curve = self._curve(kv_len)
        last = len(curve) - 1
        return curve[rows] if rows <= last else curve[last] * rows / last

    def _curve(self, kv_len: int) -> list[float]:
        """By number of rows, on lines between those that were timed."""
        entry = kv_len // _GRAIN
        if entry not in self._curves:
            counts = [0, *self.table.rows]
            curve = np.interp(range(counts[-1] + 1), counts, [0, *self.table.at(entry * _GRAIN)])
            self._curves[entry] = curve.tolist()
        return self._curves[entry]


def share_time(
    steps: list[Step], costs: PassCosts, kv_len: int, *, draft_seconds: float, target_seconds: float
) -> None:
    """Give each step its part of a round's time: decoding equally, prefill and drafts by their rows.

    Args:
        steps: of the round, before their tokens are committed.
        costs: of the target's passes.
        kv_len: tokens of its cache that a row attends to.
        draft_seconds: that the round's drafting took.
        target_seconds: that the target's pass took.
    """
    decoding = sum(not step.in_prefill for step in steps)
    rows = sum(step.rows for step in steps)
    drafts = sum(step.draft_rows for step in steps)
    decode, plain = costs.seconds(decoding, kv_len), costs.seconds(rows, kv_len)
    # By the table a pass may be cheaper with more rows.
    draft_row = max(0.0, costs.seconds(rows + drafts, kv_len) - plain) / max(1, drafts)
    prompt_row = max(0.0, plain - decode) / max(1, rows - decoding)
    for step in steps:
        step.seconds.plain = step.rows * prompt_row if step.in_prefill else decode / decoding
        step.seconds.target_drafts = step.draft_rows * draft_row
    # Drafts that took no pass have taken time for grammar masks at most.
    passes = [step.seconds.draft_model for step in steps]
    draft_shares = _shares(passes if any(passes) else [float(step.draft_rows) for step in steps])
    target_shares = _shares([step.seconds.plain + step.seconds.target_drafts for step in steps])
    for step, draft_share, target_share in zip(steps, draft_shares, target_shares, strict=True):
        step.seconds.draft = draft_share * draft_seconds
        step.seconds.of_target = target_share
        step.seconds.target = target_share * target_seconds


def _shares(seconds: list[float]) -> list[float]:
    """Each one's share of the sum; equal shares of nothing."""
    total = sum(seconds)
    return [part / total if total else 1 / len(seconds) for part in seconds]
