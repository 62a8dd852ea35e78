"""Prefixes on disk: a file for each block of the store, so that a worker that starts again has the texts of before.

A thread of its own writes and reads them, and no round waits for it. A file is used only if it is as it was written, by
a worker with the same model, kernels and settings; others are removed, with one line in the log. A file that is lost
costs a prefill.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from threading import Thread, get_native_id
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specserve.serving.prefix_store import BLOCK_TOKENS, Block, PrefixStore, name_of

logger = logging.getLogger(__name__)

# A file has: this line, with the version of the format; the SHA-256 of the identity; the name of the block before; the
# tokens; their keys and values; the SHA-256 of all that. It is named as its block is.
_MAGIC = b"specserve prefix 1\n"
_DIGEST = hashlib.sha256().digest_size
_TOKENS = 4 * BLOCK_TOKENS
# Workers that may use a directory at the same time.
_MAX_WORKERS = 256
# The lowest priority that Linux has: forward passes come first.
_NICE = 19


class _Header(NamedTuple):
    """The name of the block before, and the tokens."""

    parent: bytes
    tokens: bytes


class PrefixFiles:
    """Writes the blocks of a store to files, and removes the files of those that are evicted.

    Args:
        directory: for all workers; each uses a directory in it of its own, the first that no other process has.
        identity: of everything that keys and values depend on.

    Raises:
        OSError: the directory cannot be used.
    """

    def __init__(self, directory: Path, identity: str) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory, self._lock = _own(directory)
        self._identity = hashlib.sha256(identity.encode()).digest()
        # None ends the thread.
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._writes = True
        self._thread = Thread(target=self._work, name="prefix files", daemon=True)
        self._thread.start()

    def read_into(self, store: PrefixStore) -> None:
        """Give the store the blocks of the last worker, the newest texts first, some time later."""
        self._jobs.put(lambda: self._read_into(store))

    def changed(self, block: Block) -> None:
        """Write a block that is stored, or remove one that was evicted, some time later."""
        self._jobs.put(lambda: self._write_or_remove(block))

    def close(self) -> None:
        """Finish what was asked for, and leave the directory to another worker."""
        self._jobs.put(None)
        self._thread.join()
        os.close(self._lock)

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, get_native_id(), _NICE)
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                logger.exception("specserve: the files of prefixes in %s cannot be used", self.directory)

    def _write_or_remove(self, block: Block) -> None:
        path = self._path(block.name)
        # One that is evicted while it is written is removed by the next job.
        saved = block.saved
        try:
            if not saved.size:
                path.unlink(missing_ok=True)
            elif self._writes and block.parent is not None:
                self._write(path, _Header(block.parent.name, block.tokens), saved)
        except OSError as error:
            if self._writes:
                logger.error("specserve: no more prefixes are written to %s: %s", self.directory, error)
            self._writes = False

    def _write(self, path: Path, header: _Header, saved: NDArray[np.uint8]) -> None:
        """Write a file as a whole or not at all; where the machine crashes meanwhile, its checksum is wrong."""
        part = path.with_suffix(".part")
        first = b"".join([_MAGIC, self._identity, *header])
        digest = hashlib.sha256(first)
        digest.update(saved.data)
        try:
            # Only its owner may read it, since it holds clients' texts.
            with open(part, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.writelines([first, saved.data, digest.digest()])
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def _read_into(self, store: PrefixStore) -> None:
        names = self._names()
        # What was read; None for what cannot be used.
        blocks: dict[bytes, Block | None] = {store.root.name: store.root}
        for newest in names:
            for name, header in self._unread(newest, blocks):
                blocks[name] = None
                if header and (parent := blocks[header.parent]) and store.has_room:
                    saved = self._saved(name, header, store.token_bytes)
                    blocks[name] = None if saved is None else store.restore(parent, header.tokens, saved)
        useless = [name for name in names if blocks[name] is None]
        for name in useless:
            self._path(name).unlink(missing_ok=True)
        if useless:
            logger.warning(
                "specserve: %d of %d files of prefixes in %s are removed: they are damaged, of another model, kernel, "
                "version or setting, or more than `prefix_cache_mib`",
                len(useless),
                len(names),
                self.directory,
            )

    def _names(self) -> list[bytes]:
        """The names of all files, the newest first."""
        files: list[tuple[int, bytes]] = []
        for path in self.directory.iterdir():
            if path.suffix == ".part":
                path.unlink()
            elif re.fullmatch(f"[0-9a-f]{{{2 * _DIGEST}}}", path.name):
                files.append((path.lstat().st_mtime_ns, bytes.fromhex(path.name)))
        return [name for _, name in sorted(files, reverse=True)]

    def _unread(self, name: bytes, read: Mapping[bytes, Block | None]) -> list[tuple[bytes, _Header | None]]:
        """The block of a file and those before it that were not read yet, in the order of the text.

        Those before one that cannot be used are not known.
        """
        unread: list[tuple[bytes, _Header | None]] = []
        while name not in read:
            header = self._header(name)
            unread.append((name, header))
            if header is None:
                break
            name = header.parent
        return unread[::-1]

    def _header(self, name: bytes) -> _Header | None:
        """What a file says of its block; None if that cannot be read, or is not the block of its name."""
        try:
            with self._path(name).open("rb") as file:
                file.seek(len(_MAGIC) + _DIGEST)
                header = _Header(file.read(_DIGEST), file.read(_TOKENS))
        except OSError:
            return None
        return header if name_of(*header) == name else None

    def _saved(self, name: bytes, header: _Header, token_bytes: int) -> NDArray[np.uint8] | None:
        """The keys and values in a file; None if any byte of it is not as this worker would have written it."""
        saved = np.empty((BLOCK_TOKENS, token_bytes), np.uint8)
        first = b"".join([_MAGIC, self._identity, *header])
        try:
            with self._path(name).open("rb") as file:
                if file.read(len(first)) != first or file.readinto(saved.data) != saved.nbytes:
                    return None
                # One byte more would be too many.
                written = file.read(_DIGEST + 1)
        except OSError:
            return None
        digest = hashlib.sha256(first)
        digest.update(saved.data)
        return saved if digest.digest() == written else None

    def _path(self, name: bytes) -> Path:
        return self.directory / name.hex()


def _own(directory: Path) -> tuple[Path, int]:
    """Return the first directory in this one that no other process uses, and the lock on it."""
    for number in range(_MAX_WORKERS):
        own = directory / str(number)
        own.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(own / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # It ends with the process.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            return own, lock
    raise OSError(errno.EBUSY, f"{_MAX_WORKERS} other workers use it")
