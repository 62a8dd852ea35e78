"""Keeps what was measured of a model on this machine, so that it is measured once and not at every start."""

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
# Goes up when passes are built or timed in another way.
_METHOD = 3


def measured_cost(engine: Engine, model: Path, *, threads: int, kernels: str) -> CostTable:
    """The costs of a model's passes, from an earlier start if nothing they depend on has changed.

    Args:
        engine: runs the passes.
        model: the file it has loaded.
        threads: how many it uses.
        kernels: whatever else decides which code computes.

    Raises:
        EngineError: a pass failed.
    """
    place = cache_directory() / "costs" / f"{_key(model, threads, kernels, engine)}.json"
    if (known := _read(place)) is None:
        with _alone(cache_directory() / "costs.lock"):
            if (known := _read(place)) is None:
                return _measured(engine, model, place)
    logger.info("specserve: what passes of %s cost was measured before (%s)", model.name, place)
    return known


def _measured(engine: Engine, model: Path, place: Path) -> CostTable:
    logger.info("specserve: measuring what passes of %s cost on this machine, once", model.name)
    started = perf_counter()
    table = measure(engine)
    stairs = ", ".join(f"{rows}: {1000 * cost:.1f}" for rows, cost in zip(table.rows, table.seconds[0], strict=True))
    logger.info("specserve: measured in %.0f s; milliseconds by rows: %s", perf_counter() - started, stairs)
    _write(place, table, model)
    return table


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time: two workers that start together would measure each other."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError:
        # Nothing can be kept here either, which `_write` says.
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key(model: Path, threads: int, kernels: str, engine: Engine) -> str:
    """Everything that the costs depend on."""
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
    """The file's size and its first and last mebibyte: the header names every tensor and its format."""
    size = model.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with model.open("rb") as file:
        digest.update(file.read(_MIB))
        file.seek(max(0, size - _MIB))
        digest.update(file.read(_MIB))
    return digest.hexdigest()


def _read(place: Path) -> CostTable | None:
    """A table that was kept; None where there is none, or none that can be read."""
    try:
        kept = json.loads(place.read_text(encoding="utf-8"))
        near, far = kept["kv_len"]
        short, long = (tuple(map(float, seconds)) for seconds in kept["seconds"])
        return CostTable(tuple(map(int, kept["rows"])), (int(near), int(far)), (short, long))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("specserve: %s cannot be used (%s); measuring again", place, error)
        return None


def _write(place: Path, table: CostTable, model: Path) -> None:
    """Keep a table; a server that may not write here measures at every start, and says so."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = place.with_suffix(".part")
        draft.write_text(json.dumps({"model": model.name, **asdict(table)}, indent=1), encoding="utf-8")
        draft.replace(place)
    except OSError as error:
        logger.warning("specserve: %s cannot be written (%s); the next start measures again", place, error.strerror)
