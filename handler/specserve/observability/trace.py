"""An optional trace: a JSON line per sequence and round, in files that are rotated."""

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

from specserve.config import TraceConfig
from specserve.errors import ConfigError
from specserve.observability.metrics import Served
from specserve.observability.records import EndRecord
from specserve.private_file import open_private
from specserve.sequence import RequestInfo
from specserve.speculation.step import Step

logger = logging.getLogger(__name__)

_FILES = 5


class _Files(RotatingFileHandler):
    """The files; when one cannot be written the trace stops, and serving goes on."""

    stopped = False

    def _open(self) -> TextIOWrapper:
        """Open a file that only its owner may read, since it may hold clients' texts."""
        return open(self.baseFilename, "a", encoding=self.encoding, opener=open_private)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Stop the trace."""
        del record
        if not self.stopped:
            logger.error("specserve: the trace %s stops: %s", self.baseFilename, sys.exc_info()[1])
        self.stopped = True


class Trace:
    """An observer that writes JSON lines.

    Args:
        path: the file, which no other process may write; its directory is created if it does not exist.
        share: the share of requests that are traced, each as a whole.
        mebibytes: the size of all files together.
        text: spells tokens; None leaves the output text out of the trace.

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

    def round(self, step: Step) -> None:
        """Write a round."""
        tokens = step.emitted
        seconds = step.seconds.draft, step.seconds.target, step.seconds.other
        fields: dict[str, object] = {
            "position": step.position,
            "kv_len": step.cached,
            "drafts": step.drafted_by,
            "accepted": step.accepted,
            "alternatives": len(step.alternatives),
            "adopted": step.adopted,
            "tokens": len(tokens),
            "seconds": [round(part, 6) for part in seconds],
            "live": step.running,
        }
        if self._text is not None:
            # A character may be spread over tokens: bytes that are not UTF-8 are escaped, so that they can be joined.
            fields["text"] = [self._text(token).decode("utf-8", errors="surrogateescape") for token in tokens]
        self._write("round", step.sequence.info, step.sequence.index, fields)

    def end(self, record: EndRecord) -> None:
        """Write the end of a sequence."""
        fields = {
            key: round(value, 6) if isinstance(value, float) else value for key, value in record._asdict().items()
        }
        del fields["info"], fields["choice"]
        self._write("end", record.info, record.choice, fields)

    def _write(self, event: str, info: RequestInfo, choice: int, fields: dict[str, object]) -> None:
        if self._files.stopped or crc32(info.request.encode()) >= self._share * 2**32:
            return
        # A trace says nothing of who sent a request.
        labels = {key: value for key, value in asdict(info).items() if key not in {"client", "cache_salt"}}
        entry = {"time": round(time.time(), 3), "event": event, **labels, "choice": choice, **fields}
        self._files.emit(logging.LogRecord("", 0, "", 0, json.dumps(entry), None, None))


def open_traces(config: TraceConfig | None, served: Served, spell: Callable[[int], bytes]) -> list[Trace]:
    """The configured trace, in a file of this model version; none without a configuration.

    Raises:
        ConfigError: it cannot be written.
    """
    if config is None:
        return []
    path = config.directory / f"{served.model}-{served.version}.jsonl"
    try:
        return [Trace(path, share=config.share, mebibytes=config.mebibytes, text=spell if config.text else None)]
    except OSError as error:
        raise ConfigError(f"`handler.trace.directory`: {path} cannot be written ({error.strerror}).") from error
