"""An optional trace: a JSON line per sequence and round, without text, in files that are rotated."""

import json
import logging
import time
from dataclasses import asdict
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from specserve.errors import ConfigError
from specserve.observability.metrics import Served
from specserve.observability.records import EndRecord
from specserve.private_file import open_private
from specserve.sequence import RequestInfo
from specserve.speculation.step import SequenceStep

# The number of files, and the bytes of each; the oldest is deleted first.
_FILES, _BYTES = 5, 20 * 2**20


class Trace(RotatingFileHandler):
    """An observer that writes JSON lines to a file, which no other process may write; its directory is created."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        super().__init__(path, maxBytes=_BYTES, backupCount=_FILES - 1, encoding="utf-8")

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, opener=open_private)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Raise what `emit` has caught, for the recorder to log."""
        del record
        raise  # noqa: PLE0704 - the error is being handled

    def round(self, step: SequenceStep) -> None:
        fields = {
            "position": step.position,
            "kv_len": step.num_computed_tokens,
            "drafts": step.drafted_by,
            "accepted": step.n_emitted_drafts,
            "tokens": len(step.emitted),
            "seconds": [round(part, 6) for part in (step.seconds.draft, step.seconds.target, step.seconds.other)],
            "live": step.running,
        }
        self._write("round", step.sequence.info, step.sequence.index, fields)

    def end(self, record: EndRecord) -> None:
        fields = record._asdict()
        del fields["info"], fields["choice"]
        self._write("end", record.info, record.choice, fields)

    def _write(self, event: str, info: RequestInfo, choice: int, fields: dict[str, object]) -> None:
        # A trace says nothing of who sent a request.
        labels = {key: value for key, value in asdict(info).items() if key not in {"client", "cache_salt"}}
        entry = {"time": round(time.time(), 3), "event": event, **labels, "choice": choice, **fields}
        self.emit(logging.LogRecord("", 0, "", 0, json.dumps(entry), None, None))


def open_traces(directory: Path | None, served: Served) -> list[Trace]:
    """Open the configured trace, a file for this model version; none without a directory."""
    if directory is None:
        return []
    path = directory / f"{served.model}-{served.version}.jsonl"
    try:
        return [Trace(path)]
    except OSError as error:
        raise ConfigError(f"`handler.trace`: {path} cannot be written ({error.strerror}).") from error
