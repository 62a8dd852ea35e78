"""The directory of model files, their checksums, which are remembered, and locks between processes."""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from specserve.config import cache_directory


def models_directory() -> Path:
    """Return the directory that model files are looked up in and written to: $SPECSERVE_MODELS, or the cache's."""
    directory = os.environ.get("SPECSERVE_MODELS")
    return (Path(directory).expanduser() if directory else cache_directory() / "models").resolve()


def sha256(path: Path) -> str:
    """Return a file's checksum, which is remembered by its path, size and modification time."""
    stat, memory = path.stat(), cache_directory() / "sha256.json"
    key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    known = read_json(memory)
    if key not in known:
        with path.open("rb") as file:
            known[key] = hashlib.file_digest(file, "sha256").hexdigest()
        partial = memory.with_name(f"{memory.name}.{os.getpid()}.partial")
        # The cache may be another user's; another process reads either the old or the new file.
        with contextlib.suppress(OSError):
            memory.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(known, indent=1), encoding="utf-8")
            partial.replace(memory)
    return str(known[key])


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, or an empty one if the file is missing or damaged."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def locked(path: Path, waiting_for: str) -> contextlib.AbstractContextManager[object]:
    """Lock a file against other processes, until the end of `with`; print `waiting_for` if another has locked it."""
    # A worker that finds its files needs no such library.
    from filelock import FileLock, Timeout  # noqa: PLC0415

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        print(f"waiting for another process: {waiting_for}", flush=True)
        return lock.acquire()
