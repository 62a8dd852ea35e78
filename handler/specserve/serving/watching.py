"""Turns the scheduler's work into records for whoever observes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from specserve.observability.records import Observer, Round
from specserve.serving.generation import Generation
from specserve.speculation.round import Times


class Watch:
    """Notes when things happen to texts, and tells observers of every round and of every end, in this order.

    Args:
        observers: told.
        clock: seconds.
    """

    def __init__(self, observers: Sequence[Observer], clock: Callable[[], float]) -> None:
        self._observers = observers
        self._clock = clock
        self._in_round = False
        self._ended: list[Generation] = []

    def submitted(self, generation: Generation, waited: float) -> None:
        """A text waits for a slot, and has waited for so many seconds before."""
        generation.moments.submitted = self._clock() - waited

    def begun(self, generation: Generation) -> None:
        """A text has a slot."""
        generation.moments.begun = self._clock()

    def ended(self, generation: Generation) -> None:
        """A text is at its end, or was left."""
        self._ended.append(generation)
        if not self._in_round:
            self._tell_ends()

    @contextmanager
    def round(self, live: Sequence[Generation]) -> Iterator[dict[int, Times]]:
        """Watch a round over these texts; yields where the time of each is put, by the identity of its sequence."""
        before = [(text, text.sequence.generated, text.sequence.target_cached) for text in live]
        shares: dict[int, Times] = {}
        self._in_round = True
        try:
            yield shares
        finally:
            self._in_round = False
            now = self._clock()
            for text, place, context in before:
                times = shares.get(id(text.sequence))
                if text.sequence.generated > place:
                    self._note_time(text, now)
                if times is not None:
                    self._tell_round(text, place, context, times, len(before))
            self._tell_ends()

    def _note_time(self, text: Generation, now: float) -> None:
        if text.moments.first is None:
            text.moments.first = now
        text.moments.last = now

    def _tell_round(self, text: Generation, place: int, context: int, times: Times, live: int) -> None:
        if not self._observers:
            return
        account = text.sequence.account
        # The round that ends a prompt has no drafts.
        drafts, accepted = (account.last_sources, account.last_accepted) if place else ([], 0)
        tokens = text.sequence.answer[place:]
        record = Round(text.origin, place, context, drafts, accepted, tokens, *times, live)
        for observer in self._observers:
            observer.round(record)

    def _tell_ends(self) -> None:
        ended, self._ended = self._ended, []
        for text in ended:
            record = text.record(self._clock())
            for observer in self._observers:
                observer.end(record)
