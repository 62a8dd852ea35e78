"""Adds what rounds did to the statistics of sequences, and tells the observers: metrics and traces."""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Callable, Iterable
from typing import TypeVar

from specserve.core.generation import Generation
from specserve.observability.records import Observer
from specserve.speculation.step import Step

logger = logging.getLogger(__name__)
Record = TypeVar("Record")


class Recorder:
    """Records rounds and ends.

    Args:
        clock: seconds.
        observers: told of every step of a round and of every end.
    """

    def __init__(self, clock: Callable[[], float], observers: abc.Sequence[Observer]) -> None:
        self._clock = clock
        self._observers = observers
        self._has_failed = False

    def record_round(self, steps: list[Step], started: float) -> None:
        """Record a round, after its tokens have been read.

        Args:
            steps: of the round.
            started: when it began.
        """
        now = self._clock()
        other_seconds = now - started - sum(step.seconds.draft + step.seconds.target for step in steps)
        for step in steps:
            step.seconds.other = step.seconds.of_target * other_seconds
            step.count(now)
            for observer in self._observers:
                self._tell(observer.round, step)

    def record_ends(self, ended: Iterable[Generation]) -> None:
        """Record sequences that have finished, failed or left."""
        for generation in ended:
            record = generation.end_record(self._clock())
            for observer in self._observers:
                self._tell(observer.end, record)

    def _tell(self, observe: Callable[[Record], None], record: Record) -> None:
        """Tell an observer, whose failures cost no request its answer; the first of all is logged."""
        try:
            observe(record)
        except Exception:
            if not self._has_failed:
                logger.exception("specserve: metrics or traces are incomplete from now on")
            self._has_failed = True
