"""The cost table of a model on this machine: its forward passes are timed at the first start, and kept on disk."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

import numpy as np

from specserve.config import cache_directory, processor
from specserve.engine.base import Engine, Row
from specserve.errors import EngineError
from specserve.speculation.cost import CostTable

logger = logging.getLogger(__name__)

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
_MIB = 2**20
# Increase it when forward passes are built or timed in another way.
_METHOD = 4


class Interrupted(Exception):
    """A measurement was ended by a request."""


def never() -> bool:
    """Let a measurement end by itself."""
    return False


def measured_cost(
    engine: Engine, model: Path, *, threads: int, kernels: str, clock: Callable[[], float] = perf_counter
) -> CostTable:
    """The cost table of a model, from an earlier start if nothing it depends on has changed.

    Args:
        engine: runs the forward passes.
        model: its file.
        threads: its compute threads.
        kernels: identifies the code that computes.
        clock: seconds.

    Raises:
        EngineError: a forward pass failed.
    """
    path = _path(engine, model, threads, kernels)
    if (known := _stored(path)) is None:
        with _exclusive(cache_directory() / "costs.lock"):
            if (known := _stored(path)) is None:
                return _measured(engine, model, path, clock)
    logger.info("specserve: the cost table of %s was measured before (%s)", model.name, path)
    return known


def measured_again(
    engine: Engine,
    model: Path,
    known: CostTable,
    *,
    threads: int,
    kernels: str,
    interrupted: Callable[[], bool],
    clock: Callable[[], float] = perf_counter,
) -> CostTable:
    """The cost table of a model whose passes have become faster than it says, for this server and the next start.

    It was measured while something else was busy. So may the machine be now: of both measurements the shorter times
    count, since nothing makes a pass too fast.

    Raises:
        EngineError: a forward pass failed.
        Interrupted: the server is wanted for something else.
    """
    logger.info("specserve: the forward passes of %s are faster than measured; measuring them again", model.name)
    table = measure(engine, clock, interrupted)
    if (table.rows, table.kv_len) == (known.rows, known.kv_len):
        short, long = (tuple(map(min, before, now)) for before, now in zip(known.seconds, table.seconds, strict=True))
        table = replace(table, seconds=(short, long))
    _store(_path(engine, model, threads, kernels), table, model)
    return table


def _path(engine: Engine, model: Path, threads: int, kernels: str) -> Path:
    return cache_directory() / "costs" / f"{_key(model, threads, kernels, engine)}.json"


def _measured(engine: Engine, model: Path, path: Path, clock: Callable[[], float]) -> CostTable:
    logger.info("specserve: measuring the forward passes of %s, once on this machine", model.name)
    started = perf_counter()
    table = measure(engine, clock)
    costs = ", ".join(f"{rows}: {1000 * cost:.1f}" for rows, cost in zip(table.rows, table.seconds[0], strict=True))
    logger.info("specserve: measured in %.0f s; milliseconds by rows: %s", perf_counter() - started, costs)
    _store(path, table, model)
    return table


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    """One process at a time: two workers that start together would slow each other down."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError:
        # The table cannot be written here either, which `_store` logs.
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key(model: Path, threads: int, kernels: str, engine: Engine) -> str:
    """A hash of everything that the costs depend on."""
    parts = [
        fingerprint(model),
        processor(),
        str(threads),
        kernels,
        str(engine.n_slots),
        str(engine.slot_length),
        str(_METHOD),
    ]
    return hashlib.sha256("\0".join([*parts, version("llama-cpp-python")]).encode()).hexdigest()[:32]


def fingerprint(model: Path) -> str:
    """Return a hash of a file's size and of its first and last mebibyte.

    The header names every tensor and its format.
    """
    size = model.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with model.open("rb") as file:
        digest.update(file.read(_MIB))
        file.seek(max(0, size - _MIB))
        digest.update(file.read(_MIB))
    return digest.hexdigest()


def _stored(path: Path) -> CostTable | None:
    """The table of an earlier start; None if there is none that can be read."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        near, far = table["kv_len"]
        short, long = (tuple(map(float, seconds)) for seconds in table["seconds"])
        return CostTable(tuple(map(int, table["rows"])), (int(near), int(far)), (short, long))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("specserve: %s cannot be used (%s); measuring again", path, error)
        return None


def _store(path: Path, table: CostTable, model: Path) -> None:
    """Write a table; a server that may not write here measures at every start, and logs that."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"model": model.name, **asdict(table)}, indent=1), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        logger.warning("specserve: %s cannot be written (%s); the next start measures again", path, error.strerror)


def measure(
    engine: Engine, clock: Callable[[], float] = perf_counter, interrupted: Callable[[], bool] = never
) -> CostTable:
    """Time passes of few to many rows after a short and a longer context.

    Args:
        engine: whose passes are timed, in an empty slot, which is empty again afterwards.
        clock: seconds.
        interrupted: asked before each pass.

    Raises:
        EngineError: a pass failed, or there is no empty slot.
        Interrupted: it was.
    """
    slot = next((slot for slot in range(engine.n_slots) if not engine.cached_len(slot)), None)
    if slot is None:
        raise EngineError("The passes cannot be timed: no slot is empty.")
    far = max(2, min(_FAR, engine.slot_length - _MOST_ROWS))
    near = min(_NEAR, far // 2)
    rows = row_counts(min(_MOST_ROWS, engine.max_rows, engine.max_logits))
    filler = [_token(engine, position) for position in range(far)]
    times = partial(_times, engine, slot, clock=clock, interrupted=interrupted)
    try:
        prefill(engine, filler[:near], slot=slot)
        short = times(near, rows)
        prefill(engine, filler, near, slot=slot)
        asked = tuple(count for count in _FAR_ROWS if count in rows)
        long = times(far, asked)
    finally:
        engine.truncate(slot, 0)
    per_row = _seconds_per_row(asked, short, long)
    seconds = tuple(short[count] for count in rows)
    return CostTable(rows, (near, far), (seconds, tuple(short[count] + per_row * count for count in rows)))


def _seconds_per_row(rows: tuple[int, ...], short: dict[int, float], long: dict[int, float]) -> float:
    """Seconds a row that the longer context adds, by least squares of errors relative to the passes' time."""
    counts = np.array([count / short[count] for count in rows])
    slower = np.array([long[count] / short[count] - 1 for count in rows])
    return max(0.0, float(counts @ slower / (counts @ counts)))


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
            if number < _TIMINGS or count <= 4 or _spread(seen[count]) > _SPREAD:
                if interrupted():
                    raise Interrupted
                seen[count].append(timed(engine, start, count, clock, slot=slot))
    return {count: typical(seconds) for count, seconds in seen.items()}


def _spread(seconds: list[float]) -> float:
    faster = faster_half(seconds)
    return faster[-1] / faster[0] - 1


def timed(engine: Engine, start: int, count: int, clock: Callable[[], float] = perf_counter, *, slot: int = 0) -> float:
    """Seconds of one pass of `count` rows with logits, after the `start` tokens that the slot holds."""
    rows = [Row(_token(engine, start + i), slot, start + i, wants_logits=True) for i in range(count)]
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
