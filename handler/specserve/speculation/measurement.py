"""Measures what a model's forward passes cost on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

from specserve.engine.base import Engine, Row
from specserve.speculation.cost import CostTable, edges, faster_half, typical

_NEAR, _FAR = 64, 320
_MOST_ROWS = 32
_CHUNK = 64
# The far context is asked where the stairs' edges are: every row reads the same context, so what it adds is the rows'
# number times one price, and that price is what all of them together say.
_FAR_ROWS = (1, 4, 8, 16)
# All are asked twice, and the narrow ones and those that differ by more than this share of themselves again, so many
# times: three for all, and the far context for 32 rows, take half as long again and tell nothing more.
_ALL = 2
_SPREAD = 0.1
_AGAIN = 4


def measure(engine: Engine, clock: Callable[[], float] = perf_counter) -> CostTable:
    """Time passes of all numbers of rows behind a short and a longer context; the cache must be empty, and is again.

    Args:
        engine: whose passes are timed; its first slot is used.
        clock: seconds.

    Raises:
        EngineError: a pass failed.
    """
    far = max(2, min(_FAR, engine.slot_length - _MOST_ROWS))
    near = min(_NEAR, far // 2)
    rows = edges(min(_MOST_ROWS, engine.max_rows, engine.max_logits))
    filler = [_token(engine, place) for place in range(far)]
    read(engine, filler[:near])
    short = _times(engine, near, rows, clock)
    read(engine, filler, near)
    asked = tuple(count for count in _FAR_ROWS if count in rows)
    long = _times(engine, far, asked, clock)
    engine.truncate(0, 0)
    price = _price_of_context(asked, short, long)
    seconds = tuple(short[count] for count in rows)
    return CostTable(rows, (near, far), (seconds, tuple(short[count] + price * count for count in rows)))


def _price_of_context(rows: tuple[int, ...], short: dict[int, float], long: dict[int, float]) -> float:
    """Seconds a row that the longer context adds, by least squares of errors relative to the passes' time."""
    counts = np.array([count / short[count] for count in rows])
    dearer = np.array([long[count] / short[count] - 1 for count in rows])
    return max(0.0, float(counts @ dearer / (counts @ counts)))


def _times(engine: Engine, start: int, rows: tuple[int, ...], clock: Callable[[], float]) -> dict[int, float]:
    """Typical seconds by number of rows; the repetitions of all take turns, so that a slow moment meets each once."""
    seen: dict[int, list[float]] = {count: [] for count in rows}
    for _ in range(_ALL):
        for count in rows:
            seen[count].append(timed(engine, start, count, clock))
    for _ in range(_AGAIN):
        for count in rows:
            if count <= 4 or _spread(seen[count]) > _SPREAD:
                seen[count].append(timed(engine, start, count, clock))
    return {count: typical(seconds) for count, seconds in seen.items()}


def _spread(seconds: list[float]) -> float:
    faster = faster_half(seconds)
    return faster[-1] / faster[0] - 1


def timed(engine: Engine, start: int, count: int, clock: Callable[[], float] = perf_counter) -> float:
    """Seconds of one pass of `count` rows with logits behind the `start` tokens that the first slot holds."""
    rows = [Row(_token(engine, start + i), 0, start + i, wants_logits=True) for i in range(count)]
    began = clock()
    engine.forward(rows)
    seconds = clock() - began
    engine.truncate(0, start)
    return seconds


def read(engine: Engine, tokens: Sequence[int], start: int = 0) -> None:
    """Fill the first slot with a text from `start` on, where its cache ends; nothing is said about what follows."""
    step = min(engine.max_rows, _CHUNK)
    for first in range(start, len(tokens), step):
        places = range(first, min(len(tokens), first + step))
        engine.forward([Row(tokens[place], 0, place, wants_logits=False) for place in places])


def _token(engine: Engine, place: int) -> int:
    """Any tokens do, as long as they are not all one."""
    return (17 + 7919 * place) % engine.width
