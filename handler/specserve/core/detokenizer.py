"""Incremental detokenization: whole characters only, and nothing that may become a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from functools import lru_cache


class _Match:
    """How many characters at the beginning of a stop string the output ends with, by Knuth, Morris and Pratt."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self._table = _table(stop)
        self.length = 0

    def add(self, character: str) -> bool:
        """Read a character of the output; returns whether the stop string ends with it."""
        length = _extended(self.stop, self._table, self.length, character)
        is_whole = length == len(self.stop)
        self.length = self._table[-1] if is_whole else length
        return is_whole


class Detokenizer:
    """The text of one sequence; its end is held back while it may be the beginning of a stop string.

    Text is returned once, by `take`; it ends before the first stop string, or after it with `includes_stop`.
    """

    def __init__(self, stops: Iterable[str], *, includes_stop: bool = False) -> None:
        self._includes_stop = includes_stop
        self._matches = [_Match(stop) for stop in stops]
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._ready = ""
        self.stop = ""  # the stop string that ended the text; of several the longest
        self.length = 0  # characters that were pushed
        self.released = 0  # those of them that are no longer held back

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
        if self.stop:
            return
        before = len(self._held)
        self._held += text
        self.length += len(text)
        for end, character in enumerate(text if self._matches else "", before + 1):
            whole = [match.stop for match in self._matches if match.add(character)]
            if whole and may_stop:
                self.stop = max(whole, key=len)
                self._release(end - (0 if self._includes_stop else len(self.stop)))
                self._held = ""
                return
        withheld = max((match.length for match in self._matches), default=0)
        self._release(len(self._held) - (withheld if may_stop else 0))

    def _release(self, count: int) -> None:
        count = max(0, count)  # a stop string may begin in what was released when it could not stop the text
        self._ready += self._held[:count]
        self._held = self._held[count:]
        self.released += count


# Tables for the stop strings of a few requests; one of 1,000 characters takes 0.2 ms and 8 kB.
@lru_cache(maxsize=64)
def _table(stop: str) -> list[int]:
    """By prefix of `stop`, the length of its longest proper suffix that is a prefix, too."""
    table = [0]
    for character in stop[1:]:
        table.append(_extended(stop, table, table[-1], character))
    return table


def _extended(stop: str, table: list[int], length: int, character: str) -> int:
    """How many characters of `stop` match, if `length` have matched and one more comes."""
    while length and stop[length] != character:
        length = table[length - 1]
    return length + (stop[length] == character)
