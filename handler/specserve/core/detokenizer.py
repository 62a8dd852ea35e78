"""Incremental detokenization: whole characters only, and nothing that may become a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from functools import lru_cache, reduce
from itertools import accumulate
from types import MappingProxyType

from specserve.engine.base import Vocabulary

# Characters that stand for control tokens in patterns: halves of surrogate pairs, which no decoded text contains.
_FIRST_MARK, _LAST_MARK = "\ud800", "\udfff"


def named_control_tokens(stops: Iterable[str], vocabulary: Vocabulary) -> dict[int, str]:
    """The names of the control tokens that stop strings name, by token; these have no text that could be found."""
    tokens = {token for stop in stops for token in vocabulary.encode(stop, special=True, begin=False)}
    names = {token: vocabulary.name(token).decode(errors="replace") for token in sorted(tokens)}
    return {token: name for token, name in names.items() if name and not vocabulary.piece(token)}


class _Pattern:
    """What ends the text: a stop string, or one with marks in place of the control tokens that it names.

    `matched` is how many of its first characters the output ends with; control tokens that it does not name are no part
    of the output for it. `width` is by number of its first characters how many of them are text.
    """

    def __init__(self, stop: str, pattern: str) -> None:
        self.stop = stop
        self.pattern = pattern
        self.table = _table(pattern)
        self.width = list(accumulate((not _is_mark(character) for character in pattern), initial=0))
        self.matched = 0

    def add(self, character: str) -> bool:
        """Match a character of the output; returns whether the pattern ends with it."""
        if _is_mark(character) and character not in self.pattern:
            return False
        matched = self.matched
        while matched and self.pattern[matched] != character:
            matched = self.table[matched - 1]
        matched += self.pattern[matched] == character
        is_whole = matched == len(self.pattern)
        self.matched = self.table[-1] if is_whole else matched
        return is_whole


class Detokenizer:
    """The text of one sequence; its end is held back while it may be the beginning of a stop string.

    Text is returned once, by `take`; it ends before the first stop string. `length` counts the characters that were
    pushed, `released` those that are no longer held back.

    Args:
        stops: the stop strings.
        controls: the names of the control tokens that these name, by token.
        includes_stop: whether the text ends after the stop string instead.
    """

    def __init__(
        self, stops: Iterable[str], controls: Mapping[int, str] = MappingProxyType({}), *, includes_stop: bool = False
    ) -> None:
        self._includes_stop = includes_stop
        self._marks = {token: chr(ord(_FIRST_MARK) + number) for number, token in enumerate(controls)}
        self._patterns = []
        for stop in stops:
            marked = reduce(lambda text, token: text.replace(controls[token], self._marks[token]), controls, stop)
            # A name may also be written as text.
            self._patterns += [_Pattern(stop, pattern) for pattern in dict.fromkeys((stop, marked))]
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

    def push_control(self, token: int, *, may_stop: bool = True) -> None:
        """Add a control token, which has no text but may be part of a stop string."""
        if token in self._marks and not self.stop:
            self._advance(self._marks[token], len(self._held) - 1, may_stop=may_stop)

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
        self._advance(text, before, may_stop=may_stop)

    def _advance(self, output: str, before: int, *, may_stop: bool) -> None:
        """Look for stop strings in what follows the first `before` characters held back; release, or end the text."""
        for end, character in enumerate(output if self._patterns else "", before + 1):
            whole = [pattern for pattern in self._patterns if pattern.add(character)]
            if whole and may_stop:
                longest = max(whole, key=lambda pattern: pattern.width[-1])
                self.stop = longest.stop
                self._release(end - (0 if self._includes_stop else longest.width[-1]))
                self._held = ""
                return
        withheld = max((pattern.width[pattern.matched] for pattern in self._patterns), default=0)
        self._release(len(self._held) - (withheld if may_stop else 0))

    def _release(self, count: int) -> None:
        count = max(0, count)  # a stop string may begin in what was released when it could not stop the text
        self._ready += self._held[:count]
        self._held = self._held[count:]
        self.released += count


def _is_mark(character: str) -> bool:
    return _FIRST_MARK <= character <= _LAST_MARK


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
