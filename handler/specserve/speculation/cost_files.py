"""The cost table of a model on this machine: measured at the first start (measure.py), and kept on disk."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from operator import mul
from pathlib import Path
from time import perf_counter

from specserve.config import cache_directory, processor
from specserve.engine.base import Engine
from specserve.private_file import open_private
from specserve.speculation.cost import CostTable
from specserve.speculation.measure import METHOD, measure

logger = logging.getLogger(__name__)

_MIB = 2**20
# Seconds after which a file that was to become a table is one of a process that has been killed.
_MAX_WRITE_SECONDS = 60


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
    with _exclusive(path.with_name("lock")):
        if (known := _stored(path)) is None:
            logger.info("specserve: measuring passes of %s (threads: %d), once on this machine", model.name, threads)
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
    now = measure(engine, clock, interrupted, only_near=True)
    # What was busy has added as much after the other lengths; to load these could take what others have cached.
    faster = [min(1.0, again / before) for before, again in zip(known.seconds[0], now.seconds[0], strict=True)]
    table = replace(known, seconds=tuple(tuple(map(mul, seconds, faster)) for seconds in known.seconds))
    _store(_path(engine, model, threads, kernels), table, model)
    return table


def _path(engine: Engine, model: Path, threads: int, kernels: str) -> Path:
    return cache_directory() / "costs" / f"{_key(model, threads, kernels, engine)}.json"


def _measured(engine: Engine, model: Path, path: Path, clock: Callable[[], float]) -> CostTable:
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
        file = open_private(lock, os.O_RDWR | os.O_CREAT)
    except OSError:
        # The table cannot be written here either, which `_store` logs, or the lock is another user's.
        yield
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _key(model: Path, threads: int, kernels: str, engine: Engine) -> str:
    """A hash of everything that the costs depend on."""
    parts = [
        _fingerprint(model),
        processor(),
        str(threads),
        kernels,
        str(engine.n_slots),
        str(engine.slot_length),
        str(engine.max_rows),
    ]
    return hashlib.sha256("\0".join([*parts, version("llama-cpp-python")]).encode()).hexdigest()[:32]


def _fingerprint(model: Path) -> str:
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
        with open(path, encoding="utf-8", opener=open_private) as file:
            table = json.load(file)
        if table["method"] != METHOD:
            logger.info("specserve: %s was measured by an earlier version; measuring again", path)
            return None
        seconds = tuple(tuple(map(float, after)) for after in table["seconds"])
        return CostTable(tuple(map(int, table["rows"])), tuple(map(int, table["kv_len"])), seconds)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        logger.warning("specserve: %s cannot be used (%s); measuring again", path, error)
        return None


def _store(path: Path, table: CostTable, model: Path) -> None:
    """Write a table; a server that may not write here measures at every start, and logs that."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob("*.part"):
            with suppress(OSError):
                if time.time() - left.lstat().st_mtime > _MAX_WRITE_SECONDS:
                    left.unlink()
        # A name that nobody knows before, and a file that only its owner may open.
        descriptor, part = tempfile.mkstemp(".part", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({"model": model.name, "method": METHOD, **asdict(table)}, file, indent=1)
            Path(part).replace(path)
        finally:
            Path(part).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("specserve: %s cannot be written (%s); the next start measures again", path, error.strerror)
