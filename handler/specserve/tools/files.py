"""Model files on disk: remembered checksums, a lock between processes, a full disk as one sentence."""

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

from specserve.errors import EnvironmentFailure
from specserve.tools.cli import say

_CHUNK = 1 << 20


@dataclass(frozen=True)
class ModelFile:
    """A complete file and the sha256 of its bytes."""

    path: Path
    sha256: str


def checked(path: Path, notes: Path) -> ModelFile:
    """Return the file with its sha256, read from the file only when its size or time has changed.

    Args:
        path: the file, anywhere.
        notes: the models directory, where the sha256 is remembered.

    Raises:
        EnvironmentFailure: the file cannot be read.
    """
    try:
        stat = path.stat()
        facts = {"path": str(path.resolve()), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        note = _note(path, notes)
        known = read_json(note)
        digest = known.pop("sha256", None)
        if known == facts and isinstance(digest, str):
            return ModelFile(path, digest)
        digest = _sha256(path)
    except OSError as error:
        raise EnvironmentFailure(f"{path}: cannot be read ({error.strerror}).") from error
    try:
        write_json(note, {**facts, "sha256": digest})
    except OSError as error:
        raise EnvironmentFailure(
            f"{note}: cannot be written ({error.strerror}); mend that, or point SPECSERVE_CACHE at another directory."
        ) from error
    return ModelFile(path, digest)


def delete(path: Path, notes: Path) -> None:
    """Remove a file and what is remembered about it."""
    path.unlink(missing_ok=True)
    _note(path, notes).unlink(missing_ok=True)


def _note(path: Path, notes: Path) -> Path:
    where = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
    return notes / ".checked" / f"{path.name}.{where}.json"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, or an empty one when the file is missing or damaged."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON object; another process sees the old one or the new one, never a half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(document, indent=1), encoding="utf-8")
    partial.replace(path)


@contextlib.contextmanager
def locked(path: Path, waiting_for: str) -> Iterator[None]:
    """Let one process at a time through; the others say what they wait for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
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
    """Turn "no space left on device" into a sentence.

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
    """Write a number of bytes as megabytes."""
    return f"{count / 1e6:,.0f} MB"
