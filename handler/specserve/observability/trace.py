"""A record a round, as JSON lines in files that replace each other: off unless an operator wants it."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from zlib import crc32

from specserve.observability.records import End, Round

logger = logging.getLogger(__name__)

_FILES = 5


class _Files(RotatingFileHandler):
    """Where lines go; a full disk stops the trace, with one sentence in the log, and nothing else."""

    stopped = False

    def _open(self) -> TextIOWrapper:
        """Begin a file that nobody else may read, from its first moment on: it may hold clients' texts."""
        path = Path(self.baseFilename)
        path.touch(mode=0o600)
        path.chmod(0o600)
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """A line could not be written."""
        del record
        if not self.stopped:
            logger.error("specserve: the trace %s ends here: %s", self.baseFilename, sys.exc_info()[1])
        self.stopped = True


class Trace:
    """An observer that writes.

    Args:
        path: the file, which no other process may write; its directory is made where there is none.
        share: of the requests; all rounds of a request are written, or none.
        mebibytes: of all files together.
        text: spells tokens; None keeps what was written out of the trace.

    Raises:
        OSError: the directory cannot be written.
    """

    def __init__(
        self,
        path: Path,
        *,
        share: float,
        mebibytes: float,
        text: Callable[[int], bytes] | None,
    ) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        size = max(1, int(mebibytes * 2**20 / _FILES))
        self._files = _Files(path, maxBytes=size, backupCount=_FILES - 1, encoding="utf-8")
        self._share = share
        self._text = text

    def round(self, record: Round) -> None:
        """Write a round."""
        origin = record.origin
        if not self._traces(origin.request):
            return
        spelled = {} if self._text is None else {"text": [_readable(self._text(token)) for token in record.tokens]}
        self._write(
            {
                "event": "round",
                **asdict(origin),
                "place": record.place,
                "context": record.context,
                "drafts": record.drafts,
                "accepted": record.accepted,
                "tokens": len(record.tokens),
                "seconds": [round(seconds, 6) for seconds in (record.draft, record.target, record.other)],
                "live": record.live,
                **spelled,
            }
        )

    def end(self, record: End) -> None:
        """Write how a text ended."""
        origin = record.origin
        if self._traces(origin.request):
            rest = {key: value for key, value in record._asdict().items() if key != "origin"}
            self._write(
                {
                    "event": "end",
                    **asdict(origin),
                    **{key: round(value, 6) if isinstance(value, float) else value for key, value in rest.items()},
                }
            )

    def _traces(self, request: str) -> bool:
        return crc32(request.encode()) < self._share * 2**32

    def _write(self, entry: dict[str, object]) -> None:
        if self._files.stopped:
            return
        line = json.dumps({"time": round(time.time(), 3), **entry})
        self._files.emit(logging.LogRecord("", 0, "", 0, line, None, None))


def _readable(piece: bytes) -> str:
    # A character may be cut between tokens: what is no text is kept as Python spells it, and can be joined again.
    return piece.decode("utf-8", errors="surrogateescape")
