"""The cost table of a model on this machine, measured at the first start and kept on disk."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

from specserve.config import cache_directory, processor
from specserve.engine.base import Engine
from specserve.speculation.cost import CostTable
from specserve.speculation.passes import measure

logger = logging.getLogger(__name__)

_MIB = 2**20
# Increase it when forward passes are built or timed in another way.
_METHOD = 3


def measured_cost(engine: Engine, model: Path, *, threads: int, kernels: str) -> CostTable:
    """The cost table of a model, from an earlier start if nothing it depends on has changed.

    Args:
        engine: runs the forward passes.
        model: its file.
        threads: its compute threads.
        kernels: identifies the code that computes.

    Raises:
        EngineError: a forward pass failed.
    """
    path = cache_directory() / "costs" / f"{_key(model, threads, kernels, engine)}.json"
    if (known := _read(path)) is None:
        with _exclusive(cache_directory() / "costs.lock"):
            if (known := _read(path)) is None:
                return _measured(engine, model, path)
    logger.info("specserve: the cost table of %s was measured before (%s)", model.name, path)
    return known


def _measured(engine: Engine, model: Path, path: Path) -> CostTable:
    logger.info("specserve: measuring the forward passes of %s, once on this machine", model.name)
    started = perf_counter()
    table = measure(engine)
    costs = ", ".join(f"{rows}: {1000 * cost:.1f}" for rows, cost in zip(table.rows, table.seconds[0], strict=True))
    logger.info("specserve: measured in %.0f s; milliseconds by rows: %s", perf_counter() - started, costs)
    _write(path, table, model)
    return table


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    """One process at a time: two workers that start together would slow each other down."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError:
        # The table cannot be written here either, which `_write` logs.
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key(model: Path, threads: int, kernels: str, engine: Engine) -> str:
    """A hash of everything that the costs depend on."""
    parts = [
        _fingerprint(model),
        processor(),
        str(threads),
        kernels,
        str(engine.n_slots),
        str(engine.slot_length),
        str(_METHOD),
    ]
    return hashlib.sha256("\0".join([*parts, version("llama-cpp-python")]).encode()).hexdigest()[:32]


def _fingerprint(model: Path) -> str:
    """A hash of the file's size and of its first and last mebibyte; the header names every tensor and its format."""
    size = model.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with model.open("rb") as file:
        digest.update(file.read(_MIB))
        file.seek(max(0, size - _MIB))
        digest.update(file.read(_MIB))
    return digest.hexdigest()


def _read(path: Path) -> CostTable | None:
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


def _write(path: Path, table: CostTable, model: Path) -> None:
    """Write a table; a server that may not write here measures at every start, and logs that."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"model": model.name, **asdict(table)}, indent=1), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        logger.warning("specserve: %s cannot be written (%s); the next start measures again", path, error.strerror)
