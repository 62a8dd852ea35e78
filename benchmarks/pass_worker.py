"""The side of a peer in peers.py: a process that runs one pass when it is asked to, and waits otherwise.

Only the standard library is used, since a peer's virtual environment has nothing of ours. A request is a line of JSON
with the fields of `Pass`, an answer a line that begins with MARK: whatever else a peer prints is none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

MARK = "pass: "


class Pass(NamedTuple):
    """A pass over `rows` tokens of the text that come after the first `context` ones, giving logits of the last few."""

    context: int
    rows: int
    logits: int


class Outcome(NamedTuple):
    """What passes took, in seconds, and the likeliest token after the last one; None where it was not asked for."""

    seconds: list[float]
    token: int | None


class Setting(NamedTuple):
    """The first line that a worker reads."""

    file: str
    threads: int
    tokens: list[int]


def serve(load: Callable[[Setting], Callable[[Pass], Outcome]]) -> None:
    """Load what the first line says, then answer every line until there are no more.

    A pass that cannot be asked for is answered with the exception's text.
    """
    fields: dict[str, Any] = json.loads(sys.stdin.readline())
    run = load(Setting(**fields))
    _say({"ready": True})
    for line in sys.stdin:
        try:
            outcome = run(Pass(*json.loads(line)))
        except NotImplementedError as reason:
            _say({"error": str(reason)})
        else:
            _say(outcome._asdict())


def _say(fields: dict[str, Any]) -> None:
    print(f"{MARK}{json.dumps(fields)}", flush=True)


def benchmarks_directory() -> Path:
    """Where this file is."""
    return Path(__file__).resolve().parent
