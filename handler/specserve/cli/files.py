"""Handles files in the models directory: caches checksums, locks out other processes, checks disk space."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specserve.cli import paths
from specserve.cli.cli import say
from specserve.errors import EnvironmentFailure


@dataclass(frozen=True)
class ModelFile:
    """A file that is complete, and its sha256."""

    path: Path
    sha256: str


def hashed(path: Path) -> ModelFile:
    """Return a file with its sha256, which is cached in the models directory by path, size and modification time.

    Raises:
        EnvironmentFailure: the file cannot be read, or the cache cannot be written.
    """
    try:
        stat = path.stat()
        key = {"path": str(path.resolve()), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        cache = _checksum_cache(path)
        cached = read_json(cache)
        digest = cached.pop("sha256", None)
        if cached == key and isinstance(digest, str):
            return ModelFile(path, digest)
        digest = _sha256(path)
    except OSError as error:
        raise EnvironmentFailure(f"{path}: cannot be read ({error.strerror}).") from error
    try:
        write_json(cache, {**key, "sha256": digest})
    except OSError as error:
        raise _not_written(cache, error) from error
    return ModelFile(path, digest)


def _not_written(path: Path, error: OSError) -> EnvironmentFailure:
    return EnvironmentFailure(
        f"{path}: cannot be written ({error.strerror}); mend that, or point SPECSERVE_CACHE at another directory."
    )


def delete(path: Path) -> None:
    """Delete a file and its cached checksum."""
    path.unlink(missing_ok=True)
    _checksum_cache(path).unlink(missing_ok=True)


def _checksum_cache(path: Path) -> Path:
    location = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
    return paths.models_directory() / ".checked" / f"{path.name}.{location}.json"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, or an empty one if the file is missing or damaged."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON object atomically: another process reads either the old or the new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(document, indent=1), encoding="utf-8")
    partial.replace(path)


@contextlib.contextmanager
def locked(path: Path, waiting_for: str) -> Iterator[None]:
    """Hold a lock between processes; print `waiting_for` if another process holds it.

    Raises:
        EnvironmentFailure: its file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("w")
    except OSError as error:
        raise _not_written(path.parent, error) from error
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process: {waiting_for}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def require_space(directory: Path, needed: int, purpose: str) -> None:
    """Check that `needed` bytes are free.

    Raises:
        EnvironmentFailure: they are not.
    """
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise EnvironmentFailure(
            f"{directory}: {purpose} needs {megabytes(needed)} and {megabytes(free)} are free; "
            "make room, or point SPECSERVE_CACHE at another disk."
        )


@contextlib.contextmanager
def full_disk_explained(directory: Path, purpose: str) -> Iterator[None]:
    """Turn "no space left on device" into a one-line error.

    Raises:
        EnvironmentFailure: the disk became full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        raise EnvironmentFailure(
            f"{directory}: the disk became full while {purpose}; make room, or point SPECSERVE_CACHE at another disk."
        ) from error


def megabytes(count: int) -> str:
    """Format a number of bytes as megabytes."""
    return f"{count / 1e6:,.0f} MB"
