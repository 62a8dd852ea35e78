"""Forward passes: padded to the cheapest number of rows, and timed to find out what that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

from specserve.engine.base import Engine, FloatArray, Row
from specserve.speculation.cost import Cost, CostTable, faster_half, row_counts, typical

# KV cache lengths, in tokens, that passes are timed after, and the most rows of a timed pass.
_NEAR, _FAR = 64, 320
_MOST_ROWS = 32
# Tokens of a pass that fills the cache before passes are timed.
_CHUNK = 64
# Rows that are timed after the long context: every row attends to the same cache, so what the context adds is
# proportional to the number of rows, and one factor is fitted to these.
_FAR_ROWS = (1, 4, 8, 16)
# Timings of each number of rows; and more of the few rows, and of those that vary by more than this share.
_TIMINGS, _MORE_TIMINGS, _SPREAD = 2, 4, 0.1


def run_pass(engine: Engine, rows: list[Row], cost: Cost) -> FloatArray:
    """Run `rows` through the engine, padded with rows that nobody reads where that is cheaper.

    The padding follows the last row's sequence and is truncated from its cache at once. It asks for logits only if all
    rows do: a prompt's chunk wants those of its last row alone.

    Args:
        engine: runs the pass.
        rows: those of each slot contiguous.
        cost: of the engine's passes.

    Returns:
        The logits of the rows that want them, as `Engine.forward` gives them.

    Raises:
        EngineError: the pass failed; the caches are as before.
    """
    wants = all(row.wants_logits for row in rows)
    most = min(engine.max_rows, engine.max_logits) if wants else engine.max_rows
    last = rows[-1]
    end = last.position + 1
    padded = min(cost.padded(len(rows), engine.kv_len({row.slot for row in rows})), most)
    extra = min(padded - len(rows), engine.slot_length - end)
    if extra <= 0:
        return engine.forward(rows)
    logits = engine.forward(rows + [Row(last.token, last.slot, end + n, wants) for n in range(extra)])
    engine.truncate(last.slot, end)
    return logits[: len(rows)] if wants else logits


def measure(engine: Engine, clock: Callable[[], float] = perf_counter) -> CostTable:
    """Time passes of few to many rows after a short and a longer context; the cache must be empty, and is again.

    Args:
        engine: whose passes are timed; its first slot is used.
        clock: seconds.

    Raises:
        EngineError: a pass failed.
    """
    far = max(2, min(_FAR, engine.slot_length - _MOST_ROWS))
    near = min(_NEAR, far // 2)
    rows = row_counts(min(_MOST_ROWS, engine.max_rows, engine.max_logits))
    filler = [_token(engine, position) for position in range(far)]
    read(engine, filler[:near])
    short = _times(engine, near, rows, clock)
    read(engine, filler, near)
    asked = tuple(count for count in _FAR_ROWS if count in rows)
    long = _times(engine, far, asked, clock)
    engine.truncate(0, 0)
    per_row = _seconds_per_row(asked, short, long)
    seconds = tuple(short[count] for count in rows)
    return CostTable(rows, (near, far), (seconds, tuple(short[count] + per_row * count for count in rows)))


def _seconds_per_row(rows: tuple[int, ...], short: dict[int, float], long: dict[int, float]) -> float:
    """Seconds a row that the longer context adds, by least squares of errors relative to the passes' time."""
    counts = np.array([count / short[count] for count in rows])
    slower = np.array([long[count] / short[count] - 1 for count in rows])
    return max(0.0, float(counts @ slower / (counts @ counts)))


def _times(engine: Engine, start: int, rows: tuple[int, ...], clock: Callable[[], float]) -> dict[int, float]:
    """Typical seconds by number of rows; timings are interleaved, so that a slow moment of the machine meets all."""
    seen: dict[int, list[float]] = {count: [] for count in rows}
    for _ in range(_TIMINGS):
        for count in rows:
            seen[count].append(timed(engine, start, count, clock))
    for _ in range(_MORE_TIMINGS):
        for count in rows:
            if count <= 4 or _spread(seen[count]) > _SPREAD:
                seen[count].append(timed(engine, start, count, clock))
    return {count: typical(seconds) for count, seconds in seen.items()}


def _spread(seconds: list[float]) -> float:
    faster = faster_half(seconds)
    return faster[-1] / faster[0] - 1


def timed(engine: Engine, start: int, count: int, clock: Callable[[], float] = perf_counter) -> float:
    """Seconds of one pass of `count` rows with logits, after the `start` tokens that the first slot holds."""
    rows = [Row(_token(engine, start + i), 0, start + i, wants_logits=True) for i in range(count)]
    began = clock()
    engine.forward(rows)
    seconds = clock() - began
    engine.truncate(0, start)
    return seconds


def read(engine: Engine, tokens: Sequence[int], start: int = 0) -> None:
    """Prefill the first slot with `tokens` from position `start` on, where its cache ends; no logits."""
    step = min(engine.max_rows, _CHUNK)
    for first in range(start, len(tokens), step):
        positions = range(first, min(len(tokens), first + step))
        engine.forward([Row(tokens[position], 0, position, wants_logits=False) for position in positions])


def _token(engine: Engine, position: int) -> int:
    """Any tokens do, as long as they differ."""
    return (17 + 7919 * position) % engine.width
