"""Where a JSON text stands, and how its writer lays it out: what a schema leaves free, but habit does not."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

WHITESPACE = frozenset(b" \n\r\t")
_OPENING = frozenset(b"{[")
_CLOSING = frozenset(b"}]")
_QUOTE, _BACKSLASH = b'"\\'
_OPEN, _COMMA, _COLON, _CLOSE, _VALUE, _START = "open", "comma", "colon", "close", "value", "start"
_KINDS = {**dict.fromkeys(_CLOSING, _CLOSE), ord(","): _COMMA, ord(":"): _COLON}
# Between two kinds of characters, and so many brackets deep.
Place = tuple[str, str, int]
# Brackets; deeper ones are laid out alike. Every depth is an entry of what is kept for a text.
_DEEPEST = 32


class Layout(NamedTuple):
    """A JSON text read so far, as far as its whitespace is concerned.

    Args:
        depth: how many brackets are open.
        last: the kind of the last character that was not whitespace.
        gap: the whitespace behind that.
        inside: whether the text stands inside a string.
        escaped: whether the last character escapes the next.
        gaps: the whitespace last seen at each place.
    """

    depth: int = 0
    last: str = _START
    gap: bytes = b""
    inside: bool = False
    escaped: bool = False
    gaps: Mapping[Place, bytes] = MappingProxyType({})

    def read(self, text: bytes) -> Layout:
        """The layout behind `text`; anything may follow here, JSON or not."""
        layout = self
        for character in text:
            layout = layout._step(character)
        return layout

    def before(self, character: int) -> bytes | None:
        """What whitespace is still to come before this character; None if nothing tells, or there is too much."""
        kind = _kind(character)
        usual = self._usual(kind)
        if usual is None or not usual.startswith(self.gap):
            return None
        return usual[len(self.gap) :]

    def _step(self, character: int) -> Layout:
        if self.inside:
            if self.escaped or character == _BACKSLASH:
                return self._replace(escaped=not self.escaped)
            return self._replace(inside=character != _QUOTE)
        if character in WHITESPACE:
            return self._replace(gap=self.gap + bytes([character]))
        kind = _kind(character)
        gaps = self.gaps
        if (self.last, kind) != (_VALUE, _VALUE) and gaps.get(self._place(kind)) != self.gap:
            gaps = {**gaps, self._place(kind): self.gap}
        depth = self.depth + (character in _OPENING) - (kind == _CLOSE)
        last = _OPEN if character in _OPENING else _VALUE if kind == _CLOSE else kind
        return Layout(depth, last, b"", character == _QUOTE, escaped=False, gaps=gaps)

    def _place(self, kind: str) -> Place:
        return self.last, kind, 0 if self.last == _COLON else min(self.depth, _DEEPEST)

    def _usual(self, kind: str) -> bytes | None:
        """The whitespace between what stands last and such a character: as last time, or as elsewhere in the text."""
        seen = self.gaps.get(self._place(kind))
        if seen is not None or self.last == _COLON:
            return seen
        if kind in {_COMMA, _COLON}:
            return b""
        opened = self.gaps.get((_OPEN, _VALUE, min(self.depth, _DEEPEST)))
        if opened is not None and not opened.startswith(b"\n"):
            return self.gaps.get((_COLON, _VALUE, 0), b"") if self.last == _COMMA else opened
        return self._indent(self.depth - (kind == _CLOSE))

    def _indent(self, depth: int) -> bytes | None:
        """What stands before an entry of this depth, by the first entry of the whole."""
        first = self.gaps.get((_OPEN, _VALUE, 1))
        if first is None:
            return None
        return b"\n" + first[1:] * depth if first.startswith(b"\n") else first


def _kind(character: int) -> str:
    """What a character is to the one before it: a bracket that opens begins a value."""
    return _KINDS.get(character, _VALUE)
