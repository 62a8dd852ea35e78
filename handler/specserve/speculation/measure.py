"""Times the forward passes of a model on this machine, by rows and by tokens in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import add
from time import perf_counter

import numpy as np

from specserve.engine.base import Engine, Row
from specserve.errors import EngineError
from specserve.speculation.cost import CostTable

# KV cache lengths, in tokens, that passes are timed after: always after the first, then after the others as far as a
# slot is long, or, where the engine cannot load what fills the cache, after a length that is quickly prefilled.
_NEAR, _FAR, _LOADED = 64, (4096, 16_384), 320
# The most rows of a timed pass all of which have logits, as of one that verifies drafts; and the rows of wider ones,
# which have them for the last only, as of one that prefills.
_MOST_ROWS, _WIDE_ROWS = 32, (64, 128, 256)
# Free cells that are needed to time passes after the first length.
MEASURED_CELLS = _NEAR + _WIDE_ROWS[-1]
# Rows that are timed after the other lengths.
_FAR_ROWS = (1, 4, 8, 16, 64)
# Up to this length, in tokens, what the context adds is less than timings vary: it is taken to be proportional to the
# rows, and fitted to all of them.
_FITTED = 1024
# Timings of each number of rows; and more of the few rows, and of those that vary by more than this share.
_TIMINGS, _MORE_TIMINGS, _SPREAD = 2, 4, 0.1
# Tokens of a pass that fills the cache before passes are timed.
_CHUNK = 64
# Increase it when forward passes are built or timed in another way.
METHOD = 5


class Interrupted(Exception):
    """A measurement was ended by a request."""


def never() -> bool:
    """Let a measurement end by itself."""
    return False


def measure(
    engine: Engine,
    clock: Callable[[], float] = perf_counter,
    interrupted: Callable[[], bool] = never,
    *,
    only_near: bool = False,
) -> CostTable:
    """Time passes of few to many rows after a short and after longer contexts.

    Args:
        engine: whose passes are timed, in an empty slot, which is empty again afterwards.
        clock: seconds.
        interrupted: asked before each pass.
        only_near: leave out the longer contexts.

    Raises:
        EngineError: a pass failed, or there is no empty slot.
        Interrupted: it was.
    """
    slot = next((slot for slot in range(engine.n_slots) if not engine.cached_len(slot)), None)
    if slot is None:
        raise EngineError("The passes cannot be timed: no slot is empty.")
    near, *far = kv_lengths(engine.slot_length, can_load=engine.token_bytes is not None)
    rows = row_counts(min(_MOST_ROWS, engine.max_rows, engine.max_logits))
    rows += tuple(count for count in _WIDE_ROWS if count <= min(engine.max_rows, engine.slot_length - near))
    asked = tuple(count for count in _FAR_ROWS if count in rows and count <= engine.slot_length - max(far))
    times = partial(_times, engine, slot, clock=clock, interrupted=interrupted)
    try:
        prefill(engine, [_token(engine, position) for position in range(near)], slot=slot)
        short = times(near, rows)
        seconds = [tuple(short.values())]
        for length in () if only_near else far:
            _fill(engine, slot, near, length, interrupted)
            added = _added(rows, short, times(length, asked), is_fitted=length <= _FITTED)
            seconds.append(tuple(map(add, short.values(), added)))
    finally:
        engine.truncate(slot, 0)
    return CostTable(rows, (near, *far)[: len(seconds)], tuple(seconds))


def kv_lengths(slot_length: int, *, can_load: bool) -> tuple[int, ...]:
    """The KV cache lengths worth measuring, ascending.

    Args:
        slot_length: in tokens.
        can_load: whether the engine can load what fills the cache.
    """
    longest = slot_length - _FAR_ROWS[-1]
    if not can_load or longest <= _LOADED:
        far = max(2, min(_LOADED, slot_length - _MOST_ROWS))
        return min(_NEAR, far // 2), far
    # One that is hardly longer than the one before would show nothing new.
    return _NEAR, *([min(length, longest) for length in _FAR if longest > length // 2] or [longest])


def _fill(engine: Engine, slot: int, near: int, length: int, interrupted: Callable[[], bool]) -> None:
    """Append tokens to a slot that holds at least `near` until it holds `length`."""
    if engine.token_bytes is None:
        prefill(engine, [_token(engine, position) for position in range(length)], engine.cached_len(slot), slot=slot)
        return
    # The time of a pass does not depend on what the cache contains.
    saved = engine.save(slot, 0, near)
    while (missing := length - engine.cached_len(slot)) > 0:
        if interrupted():
            raise Interrupted
        engine.load(slot, saved[:missing])


def _added(rows: tuple[int, ...], short: dict[int, float], long: dict[int, float], *, is_fitted: bool) -> list[float]:
    """Seconds that a longer context adds to passes of so many rows.

    Args:
        rows: numbers of rows.
        short: seconds after the short context, by each of these.
        long: seconds after the longer one, by some of these.
        is_fitted: whether they are taken to be proportional to the rows, by least squares of errors relative to the
            passes' time; otherwise they lie on lines between those that were timed.
    """
    slower = np.array([long[count] - short[count] for count in long])
    if is_fitted:
        weights = 1 / np.array([short[count] for count in long])
        counts = np.array(list(long)) * weights
        per_row = max(0.0, float(counts @ (slower * weights) / (counts @ counts)))
        return [per_row * count for count in rows]
    # Nor do more rows ever attend in less time.
    slower = np.maximum.accumulate(np.maximum(slower, 0.0))
    widest = max(long)
    return [float(np.interp(count, [0, *long], [0.0, *slower])) * max(1.0, count / widest) for count in rows]


def _times(
    engine: Engine,
    slot: int,
    start: int,
    rows: tuple[int, ...],
    *,
    clock: Callable[[], float],
    interrupted: Callable[[], bool],
) -> dict[int, float]:
    """Typical seconds by number of rows; timings are interleaved, so that a slow moment of the machine meets all."""
    seen: dict[int, list[float]] = {count: [] for count in rows}
    for number in range(_TIMINGS + _MORE_TIMINGS):
        for count in rows:
            if _wants_timing(seen, count, number):
                if interrupted():
                    raise Interrupted
                seen[count].append(timed(engine, start, count, clock, slot=slot))
    return {count: typical(seconds) for count, seconds in seen.items()}


def _wants_timing(seen: dict[int, list[float]], count: int, number: int) -> bool:
    """Whether passes of `count` rows are timed once more, in the turn of this number."""
    if count <= _MOST_ROWS:
        return number < _TIMINGS or count <= 4 or np.ptp(faster := faster_half(seen[count])) > _SPREAD * faster[0]
    # One that takes more for a row than a narrower one was probably held up; else so many rows are timed once.
    narrower = max(other for other in seen if other < count)
    per_row = min(seen[narrower]) / narrower
    return number == 0 or (number < _TIMINGS and min(seen[count]) / count > (1 + _SPREAD) * per_row)


def timed(engine: Engine, start: int, count: int, clock: Callable[[], float] = perf_counter, *, slot: int = 0) -> float:
    """Seconds of one pass of `count` rows after the `start` tokens that the slot holds.

    All have logits, or, of more than those that verify drafts, the last.
    """
    with_logits = count if count <= _MOST_ROWS else 1
    rows = [Row(_token(engine, start + i), slot, start + i, i >= count - with_logits) for i in range(count)]
    began = clock()
    engine.forward(rows)
    seconds = clock() - began
    engine.truncate(slot, start)
    return seconds


def prefill(engine: Engine, tokens: Sequence[int], start: int = 0, *, slot: int = 0) -> None:
    """Prefill a slot with `tokens` from position `start` on, where its cache ends; no logits."""
    step = min(engine.max_rows, _CHUNK)
    for first in range(start, len(tokens), step):
        positions = range(first, min(len(tokens), first + step))
        engine.forward([Row(tokens[position], slot, position, wants_logits=False) for position in positions])


def _token(engine: Engine, position: int) -> int:
    """Any tokens do, as long as they differ."""
    return (17 + 7919 * position) % engine.width


def row_counts(max_rows: int) -> tuple[int, ...]:
    """The numbers of rows worth measuring up to `most`: the first few, then where kernels' tiles end or begin."""
    return tuple(rows for rows in (1, 2, 3, 4, 5, 6, 8, 12, 16, 17, 24, 32) if rows <= max_rows)


def typical(seconds: list[float]) -> float:
    """The typical one of repeated measurements: the median of the faster half, since nothing makes a pass too fast."""
    return float(np.median(faster_half(seconds)))


def faster_half(seconds: list[float]) -> list[float]:
    """The shorter half of repeated measurements, ascending, the middle one included."""
    return sorted(seconds)[: (len(seconds) + 1) // 2]
