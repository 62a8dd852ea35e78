"""Incremental detokenization: whole characters only, and nothing that may become a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from functools import lru_cache

from specserve.engine.base import Vocabulary


def named_control_tokens(stops: Iterable[str], vocabulary: Vocabulary) -> dict[int, str]:
    """The control tokens that stop strings name, each with its stop string: they have no text that could be found."""
    by_token = {token: stop for stop in stops for token in vocabulary.encode(stop, special=True, begin=False)}
    return {token: stop for token, stop in by_token.items() if vocabulary.name(token) and not vocabulary.piece(token)}


class Detokenizer:
    """The text of one sequence; its end is held back while it may be the beginning of a stop string.

    Text is returned once, by `take`; it ends before the first stop string. `length` counts the characters that were
    pushed, `released` those that are no longer held back.

    Args:
        stops: the stop strings.
        includes_stop: whether the text ends after the stop string instead.
    """

    def __init__(self, stops: Iterable[str], *, includes_stop: bool = False) -> None:
        self._includes_stop = includes_stop
        # The stop strings with their tables, and how many of the first characters of each the text ends with.
        self._stops = [(stop, _table(stop)) for stop in stops]
        self._matched = [0] * len(self._stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._ready = ""
        # The stop string that ended the text; of several the longest.
        self.stop = ""
        self.length = 0
        self.released = 0

    def push(self, piece: bytes, *, may_stop: bool = True) -> None:
        """Add a token's bytes; the text does not end in them unless it may stop."""
        self._add(self._decoder.decode(piece), may_stop=may_stop)

    def finish(self) -> None:
        """End the text: an incomplete character becomes U+FFFD, and what was held back is released."""
        self._add(self._decoder.decode(b"", final=True), may_stop=True)
        self._release(len(self._held))

    @property
    def ready(self) -> bool:
        """Whether there is text to take."""
        return bool(self._ready)

    def take(self) -> str:
        """The text that was released since the last call."""
        ready, self._ready = self._ready, ""
        return ready

    def _add(self, text: str, *, may_stop: bool) -> None:
        if self.stop or not text:
            return
        before = len(self._held)
        self._held += text
        self.length += len(text)
        end = self._match(text, may_stop=may_stop)
        if end is not None:
            self._release(before + end - (0 if self._includes_stop else len(self.stop)))
            self._held = ""
        else:
            self._release(len(self._held) - (max(self._matched, default=0) if may_stop else 0))

    def _match(self, text: str, *, may_stop: bool) -> int | None:
        """Look for a stop string; returns how many characters of `text` it ends after, None if there is none."""
        for position, character in enumerate(text if self._stops else "", 1):
            for number, (stop, table) in enumerate(self._stops):
                matched = self._matched[number]
                while matched and stop[matched] != character:
                    matched = table[matched - 1]
                matched += stop[matched] == character
                if matched == len(stop):
                    matched = table[-1]
                    if may_stop and len(stop) > len(self.stop):
                        self.stop = stop
                self._matched[number] = matched
            if self.stop:
                return position
        return None

    def _release(self, count: int) -> None:
        count = max(0, count)  # a stop string may begin in what was released when it could not stop the text
        self._ready += self._held[:count]
        self._held = self._held[count:]
        self.released += count


# Tables for the stop strings of a few requests; one of 1,000 characters takes 0.2 ms and 8 kB.
@lru_cache(maxsize=64)
def _table(stop: str) -> tuple[int, ...]:
    """Knuth-Morris-Pratt: by prefix of `stop`, the length of its longest proper suffix that is a prefix too."""
    table = [0]
    for character in stop[1:]:
        matched = table[-1]
        while matched and stop[matched] != character:
            matched = table[matched - 1]
        table.append(matched + (stop[matched] == character))
    return tuple(table)
