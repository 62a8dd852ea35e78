"""Incremental detokenization: whole characters only, and nothing that may become a stop string."""

import codecs
from collections.abc import Iterable
from functools import lru_cache


class Detokenizer:
    """The text of one sequence; its end is held back while it may be the beginning of a stop string.

    Text is returned once, by `take`; it ends before the first stop string, or after it with `includes_stop`.
    """

    def __init__(self, stops: Iterable[str], *, includes_stop: bool = False) -> None:
        self._includes_stop = includes_stop
        # By stop string, how many characters at its beginning the output ends with (Knuth, Morris and Pratt).
        self._matched = dict.fromkeys(stops, 0)
        self._tables = {stop: _table(stop) for stop in self._matched}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.ready = ""  # what `take` returns
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

    def take(self) -> str:
        """The text that was released since the last call."""
        ready, self.ready = self.ready, ""
        return ready

    def _add(self, text: str, *, may_stop: bool) -> None:
        if self.stop:
            return
        before = len(self._held)
        self._held += text
        self.length += len(text)
        for end, character in enumerate(text if self._matched else "", before + 1):
            for stop, length in self._matched.items():
                self._matched[stop] = _extended(stop, self._tables[stop], length, character)
            whole = [stop for stop, length in self._matched.items() if length == len(stop)]
            if whole and may_stop:
                self.stop = max(whole, key=len)
                self._release(end - (0 if self._includes_stop else len(self.stop)))
                self._held = ""
                return
        withheld = max(self._matched.values(), default=0)
        self._release(len(self._held) - (withheld if may_stop else 0))

    def _release(self, count: int) -> None:
        count = max(0, count)  # a stop string may begin in what was released when it could not stop the text
        self.ready += self._held[:count]
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
    """How many characters of `stop` match, if `length`, perhaps all, have matched and one more comes."""
    while length and stop[length : length + 1] != character:
        length = table[length - 1]
    return length + (stop[length : length + 1] == character)
