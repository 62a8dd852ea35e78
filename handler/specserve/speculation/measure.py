"""Measures what forward passes cost on this machine, once: the tables are kept on disk."""

import fcntl
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
from pydantic import TypeAdapter

from specserve.config import cache_directory
from specserve.engine.base import Engine, Row
from specserve.machine import processor, thread_times
from specserve.private_file import open_private
from specserve.speculation.costs import CostTable

logger = logging.getLogger(__name__)

# Increase it when forward passes are built or timed in another way.
_METHOD = 7
# Rows of timed passes: the first few, then where kernels' tiles end or begin, all with logits as in verification; and
# wide ones with logits of the last row only, as in prefill.
_ROWS, _WIDE_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 17, 24, 32), (64, 128, 256)
# KV cache lengths, in tokens, that passes are timed after, as far as a slot is long. After the longer one only these
# numbers of rows are timed.
_NEAR, _FAR, _FAR_ROWS = 64, 16_384, (1, 4, 8, 16, 64)
# The share of the time in which threads waited for their cores above which a table is not kept.
_DISTURBED = 0.1
# Timings of up to eight rows; of more, fewer in proportion (benchmarks/decisions/tried.md).
_TIMINGS = 8


def measured_costs(engine: Engine, model: Path, *, threads: int, kernels: str) -> CostTable:
    """The cost table of a model's file, from an earlier start if nothing it depends on has changed.

    The engine's slots are empty; `kernels` identifies the code that computes.
    """
    path = cache_directory() / "costs" / f"{_key(model, threads, kernels, engine)}.json"
    lock = -1
    # Two workers that start together would slow each other down. Where there can be no lock, because the directory
    # cannot be written, `_store` says so; one that other users may open, and so hold, is not used.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open_private(path.with_name("lock"), os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        if (known := _stored(path)) is not None:
            logger.info("specserve: the cost table of %s was measured before (%s)", model.name, path)
            return known
        logger.info("specserve: measuring passes of %s (threads: %d), once on this machine", model.name, threads)
        started, before = perf_counter(), [*thread_times().values()]
        table = measure(engine)
        after = [*thread_times().values()]
        ran, waited = (sum(time[i] for time in after) - sum(time[i] for time in before) for i in (0, 1))
        costs = ", ".join(f"{rows}: {1000 * cost:.1f}" for rows, cost in zip(table.rows, table.seconds[0], strict=True))
        logger.info("specserve: measured in %.0f s; milliseconds by rows: %s", perf_counter() - started, costs)
        if waited > _DISTURBED * (ran + waited):
            share = 100 * waited / (ran + waited)
            logger.warning(
                "specserve: others took the cores for %.0f %% of the time while passes of %s were measured: the "
                "next start measures them again",
                share,
                model.name,
            )
        else:
            _store(path, table, model)
        return table
    finally:
        if lock >= 0:
            os.close(lock)


def measure(engine: Engine, clock: Callable[[], float] = perf_counter) -> CostTable:
    """Time passes of few to many rows after a short and after a long context, in slot 0, which is empty."""
    # Shorter ones if they have to be prefilled, much shorter if before each pass.
    part = 64 if engine.rollback is not None else 16 if engine.token_bytes is None else 1
    near, far = kv_lengths(engine.slot_length, _FAR // part)
    most = min(engine.max_rows, engine.slot_length - near)
    rows = tuple(count for count in _ROWS if count <= min(most, engine.max_logits))
    rows += tuple(count for count in _WIDE_ROWS if count <= most)
    far_rows = tuple(count for count in _FAR_ROWS if count in rows and count <= engine.slot_length - far)
    try:
        _fill(engine, near)
        short = _times(engine, near, rows, _TIMINGS, clock)
        _fill(engine, far)
        long = _times(engine, far, far_rows, _TIMINGS // 2, clock)
    finally:
        engine.truncate(0, 0)
    # What the context adds: never less for more rows, on lines between those timed, and proportional beyond them.
    added = np.maximum.accumulate([max(0.0, long[count] - short[count]) for count in far_rows])
    slower = [np.interp(count, (0, *far_rows), (0.0, *added)) * max(1.0, count / far_rows[-1]) for count in rows]
    seconds = tuple(short.values())
    return CostTable(rows, (near, far), (seconds, tuple(map(float, np.add(seconds, slower)))))


def kv_lengths(slot_length: int, longest: int = _FAR) -> tuple[int, int]:
    """The KV cache lengths that passes are timed after, ascending."""
    room = slot_length - min(_FAR_ROWS[-1], slot_length // 2)
    far = max(2, min(longest, room))
    return min(_NEAR, far // 2), far


def prefill(engine: Engine, tokens: Sequence[int], start: int = 0) -> None:
    """Prefill slot 0 with `tokens` from position `start` on, where its cache ends; no logits."""
    step = min(engine.max_rows, _WIDE_ROWS[0])
    for first in range(start, len(tokens), step):
        positions = range(first, min(len(tokens), first + step))
        engine.forward([Row(tokens[position], 0, position, wants_logits=False) for position in positions])


def _fill(engine: Engine, length: int) -> None:
    held = engine.cached_len(0)
    if not held or engine.token_bytes is None:
        prefill(engine, [_token(engine, position) for position in range(length)], held)
        return
    # The time of a pass does not depend on what the cache contains.
    saved = engine.save(0, 0, held)
    while (missing := length - engine.cached_len(0)) > 0:
        engine.load(0, saved[:missing])


def _times(
    engine: Engine, start: int, rows: Sequence[int], timings: int, clock: Callable[[], float]
) -> dict[int, float]:
    """Seconds of passes after the `start` tokens that slot 0 holds, by number of rows.

    Timings are interleaved, so that a slow moment of the machine affects all numbers of rows alike. The fastest of each
    number counts, since nothing makes a pass too fast.
    """
    seen = dict.fromkeys(rows, math.inf)
    for number in range(timings):
        for count in rows:
            if number >= max(2, 8 * timings // max(8, count)):
                continue
            without_logits = count - 1 if count > _ROWS[-1] else 0
            batch = [Row(_token(engine, start + i), 0, start + i, i >= without_logits) for i in range(count)]
            began = clock()
            engine.forward(batch)
            seen[count] = min(seen[count], clock() - began)
            engine.truncate(0, start)
            if engine.rollback is not None:
                _fill(engine, start)
    return seen


def _token(engine: Engine, position: int) -> int:
    """Any tokens do, as long as they differ: so do the experts that they use in a mixture."""
    return (17 + 7919 * position) % engine.width


def _key(model: Path, threads: int, kernels: str, engine: Engine) -> str:
    size = model.stat().st_size
    parts = (
        *(_METHOD, size, processor(), threads, kernels, version("llama-cpp-python")),
        *(engine.n_slots, engine.slot_length, engine.max_rows),
    )
    digest = hashlib.sha256("\0".join(map(str, parts)).encode())
    # Of the file its ends are enough: the header names every tensor and its format.
    with model.open("rb") as file:
        digest.update(file.read(2**20))
        file.seek(max(0, size - 2**20))
        digest.update(file.read(2**20))
    return digest.hexdigest()[:32]


def _stored(path: Path) -> CostTable | None:
    """The table of an earlier start; None if there is none that can be used."""
    try:
        with open(path, encoding="utf-8", opener=open_private) as file:
            return TypeAdapter(CostTable).validate_json(file.read())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("specserve: %s cannot be used (%s); measuring again", path, str(error).partition("\n")[0])
        return None


def _store(path: Path, table: CostTable, model: Path) -> None:
    """Write a table; a server that may not write here measures at every start, and logs that."""
    content = json.dumps({"model": model.name, **asdict(table)}, indent=1)
    try:
        with TemporaryDirectory(dir=path.parent) as directory:
            part = Path(directory) / path.name
            part.touch(0o600)
            part.write_text(content, encoding="utf-8")
            part.replace(path)
    except OSError as error:
        logger.warning("specserve: %s cannot be written (%s); the next start measures again", path, error.strerror)
