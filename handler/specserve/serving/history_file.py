"""The pools of finished answers in a file, so that a worker that starts again drafts as the last one did.

What is read cannot change an answer: its tokens are only drafted, and each is verified.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from specserve.speculation.history import Pools

logger = logging.getLogger(__name__)

_FORMAT = "specserve history 1"


class HistoryFile:
    """Keeps pools in a file.

    Args:
        path: of the file.
        vocabulary: number of tokens of the target's vocabulary; a file of another one is not used.
    """

    def __init__(self, path: Path, vocabulary: int) -> None:
        self._path, self._vocabulary = path, vocabulary
        self._saved = 0

    def read_into(self, pools: Pools) -> None:
        """Give pools what an earlier worker has saved; a file that cannot be used is said and left."""
        try:
            self._read_into(pools)
        except FileNotFoundError:
            return
        except Exception as error:  # noqa: BLE001 - a damaged archive raises whatever it likes, and is not needed
            logger.warning("specserve: the history in %s is not used: %s", self._path, error)
        self._saved = pools.added

    def _read_into(self, pools: Pools) -> None:
        with np.load(self._path, allow_pickle=False) as file:
            header = json.loads(str(file["header"]))
            if header["format"] != _FORMAT or header["vocabulary"] != self._vocabulary:
                raise ValueError("it is of another version or vocabulary")
            for number, (owner, name) in enumerate(header["pools"]):
                tokens = file[f"pool_{number}"]
                if tokens.dtype != np.int32 or tokens.ndim != 1 or np.any(tokens >= self._vocabulary):
                    raise ValueError("it has no tokens of this vocabulary")
                pools.restore((owner, name), tokens)

    def save(self, pools: Pools) -> None:
        """Write what has been added since the last time, if anything; a failure is said and forgotten."""
        if self._saved == pools.added:
            return
        self._saved = pools.added
        names, texts = pools.contents()
        header = json.dumps({"format": _FORMAT, "vocabulary": self._vocabulary, "pools": names})
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                arrays: dict[str, Any] = {f"pool_{number}": tokens for number, tokens in enumerate(texts)}
                np.savez(file, header=np.array(header), **arrays)
            partial.replace(self._path)
        except OSError as error:
            logger.warning("specserve: the history cannot be saved in %s: %s", self._path, error.strerror)
            with suppress(OSError):
                partial.unlink()
