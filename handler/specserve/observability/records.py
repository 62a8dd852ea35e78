"""What the scheduler reports to metrics and traces: the step of each sequence and round, and how a sequence ends."""

import re
from collections import abc
from typing import NamedTuple, Protocol

from specserve.errors import LoggedOnce
from specserve.sequence import RequestInfo
from specserve.speculation.step import SequenceStep

_FAMILY = re.compile(r"[a-z0-9_-]{1,32}")


def family_label(name: str) -> str:
    """A client's `prompt_family`, fit for a label and a file: `other` where it is not a short plain word."""
    return name if not name or _FAMILY.fullmatch(name) else "other"


class EndRecord(NamedTuple):
    """A sequence that finished, failed, or was cancelled by its client; times in seconds."""

    info: RequestInfo
    choice: int  # the index of the sequence in its request
    reason: str  # `stop`, `length`, `error` or `cancelled`
    prompt_tokens: int
    cached_tokens: int  # of the prompt, that needed no prefill
    tokens: int  # of the output
    preemptions: int  # how often it had to wait again, since others needed its room
    waited: float  # before it first had a slot
    ttft: float | None  # from arrival to the first token
    tpot: float | None  # per output token after the first; None with fewer than two


class Observer(Protocol):
    """Is told of every step of a round, and of every end."""

    def round(self, step: SequenceStep) -> None:
        """A sequence took part in a round; its tokens have been read, and its time shares are known."""

    def end(self, record: EndRecord) -> None: ...


class Recorder:
    """Adds rounds to the statistics of their sequences, and tells the observers, whose failures cost no answer."""

    def __init__(self, observers: abc.Sequence[Observer]) -> None:
        self._observers = [(observer, LoggedOnce(f"{observer!r} is incomplete from now on")) for observer in observers]

    def record_round(self, steps: list[SequenceStep], started: float, now: float) -> None:
        """Record a round that began at `started`, after its tokens have been read."""
        other_seconds = now - started - sum(step.seconds.draft + step.seconds.target for step in steps)
        pass_seconds = sum(step.seconds.target_pass for step in steps)
        for step in steps:
            step.seconds.other = other_seconds * step.seconds.target_pass / pass_seconds
            step.count(now)
            for observer, contained in self._observers:
                with contained:
                    observer.round(step)

    def record_end(self, record: EndRecord) -> None:
        for observer, contained in self._observers:
            with contained:
                observer.end(record)
