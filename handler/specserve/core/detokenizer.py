"""Incremental detokenization: whole characters only, and nothing that may become a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate

from specserve.engine.base import Vocabulary

# Characters that stand for control tokens in stop strings: halves of surrogate pairs, which no decoded text contains.
_FIRST_MARK, _LAST_MARK = "\ud800", "\udfff"


def with_control_tokens(stops: Iterable[str], vocabulary: Vocabulary) -> tuple[list[str], dict[int, str]]:
    """Stop strings that also stop at control tokens whose names they contain, and the mark of each such token.

    A control token has no text, so where a stop string contains its name, another one has the token's mark there.
    """
    stops = list(stops)
    names: dict[int, str] = {}
    for token in (token for stop in stops for token in vocabulary.encode(stop, special=True, begin=False)):
        name = vocabulary.name(token).decode(errors="replace")
        if name and not vocabulary.piece(token):
            names[token] = name
    marks = {token: chr(ord(_FIRST_MARK) + number) for number, token in enumerate(names)}
    for stop in list(stops):
        marked = stop
        for token, mark in marks.items():
            marked = marked.replace(names[token], mark)
        if marked != stop:
            stops.append(marked)
    return stops, marks


class _Stop:
    """A stop string, and how many of its first characters the text ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.table, self.shown = _tables(text)
        self.matched = 0


class Detokenizer:
    """The text of one sequence; its end is held back while it may be the beginning of a stop string.

    Text is returned once, by `take`; it ends before the first stop string. `length` counts the characters that were
    pushed, `released` those that are no longer held back.

    Args:
        stops: the stop strings, maybe with marks of control tokens.
        includes_stop: whether the text ends after the stop string instead.
    """

    def __init__(self, stops: Iterable[str], *, includes_stop: bool = False) -> None:
        self._includes_stop = includes_stop
        self._stops = [_Stop(stop) for stop in stops]
        self._marked = [stop for stop in self._stops if stop.shown[-1] < len(stop.text)]
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._ready = ""
        self.stopped = False
        # The stop string that ended the text.
        self.stop = ""
        self.length = 0
        self.released = 0

    def push(self, piece: bytes, *, may_stop: bool = True) -> None:
        """Add a token's bytes; the text does not end in them unless it may stop."""
        self._add(self._decoder.decode(piece), may_stop=may_stop)

    def push_mark(self, mark: str, *, may_stop: bool = True) -> None:
        """Add a control token by its mark: it has no text, but may end a stop string."""
        if not self.stopped:
            self._advance(mark, self._marked, len(self._held) - len(mark), may_stop=may_stop)

    def finish(self) -> None:
        """End the text: an incomplete character becomes U+FFFD, and what was held back is released."""
        if not self.stopped:
            self._add(self._decoder.decode(b"", final=True))
        self._release(len(self._held))

    @property
    def ready(self) -> bool:
        """Whether there is text to take."""
        return bool(self._ready)

    def take(self) -> str:
        """The text that was released since the last call."""
        ready, self._ready = self._ready, ""
        return ready

    def _add(self, text: str, *, may_stop: bool = True) -> None:
        if self.stopped or not text:
            return
        before = len(self._held)
        self._held += text
        self.length += len(text)
        self._advance(text, self._stops, before, may_stop=may_stop)

    def _advance(self, text: str, stops: list[_Stop], before: int, *, may_stop: bool) -> None:
        """Match what was added after the first `before` characters held back; release, or stop at a stop string."""
        found = self._match(text, stops, may_stop=may_stop)
        if not may_stop:
            self._release(len(self._held))
        elif found is None:
            self._release(len(self._held) - max((stop.shown[stop.matched] for stop in self._stops), default=0))
        else:
            end, length = found
            self._release(before + end - (0 if self._includes_stop else length))
            self._held = ""
            self.stopped = True

    def _match(self, text: str, stops: list[_Stop], *, may_stop: bool) -> tuple[int, int] | None:
        """The first end of a stop string in `text`, and the length of the longest that ends there, without marks."""
        for position, character in enumerate(text if stops else ""):
            found = None
            for stop in stops:
                matched = stop.matched
                while matched and stop.text[matched] != character:
                    matched = stop.table[matched - 1]
                matched += stop.text[matched] == character
                stop.matched = matched
                if matched == len(stop.text):
                    if may_stop and (found is None or stop.shown[-1] > found):
                        found, self.stop = stop.shown[-1], stop.text
                    stop.matched = stop.table[-1]
            if found is not None:
                return position + 1, found
        return None

    def _release(self, count: int) -> None:
        count = max(0, count)  # a stop string may begin in what was released when it could not stop the text
        self._ready += self._held[:count]
        self._held = self._held[count:]
        self.released += count


# Tables for the stop strings of a few requests; one of 1,000 characters takes 0.2 ms and 16 kB.
@lru_cache(maxsize=64)
def _tables(stop: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Knuth-Morris-Pratt: by prefix of `stop`, the length of its longest proper suffix that is a prefix too.

    And by number of its first characters, how many of them are no marks.
    """
    table = [0]
    for character in stop[1:]:
        matched = table[-1]
        while matched and stop[matched] != character:
            matched = table[matched - 1]
        table.append(matched + (stop[matched] == character))
    shown = accumulate((not _FIRST_MARK <= character <= _LAST_MARK for character in stop), initial=0)
    return tuple(table), tuple(shown)
