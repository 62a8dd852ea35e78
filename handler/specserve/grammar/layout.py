"""Predicts the whitespace that comes next in a JSON text from its layout so far."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

WHITESPACE = frozenset(b" \n\r\t")
_QUOTE, _BACKSLASH = b'"\\'
# The kind of a character is itself for `,` and `:`, `[` and `]` for brackets of both kinds, and `v` for the rest.
_KINDS = dict(zip(b"[]{},:", "[][],:", strict=True))
# Brackets; the layout of deeper ones is assumed to be the same.
_MAX_DEPTH = 32


class Layout(NamedTuple):
    """The whitespace of a JSON text so far, from which the whitespace before the next character is predicted.

    A gap is the whitespace between two adjacent characters. It is identified by the kinds of both, and by the depth.
    """

    depth: int = 0  # brackets that are open
    last: str = ""  # kind of the last character that is not whitespace; empty at the start
    gap: bytes = b""  # the whitespace since
    in_string: bool = False  # whether the text ends inside a string
    escaped: bool = False  # whether the text ends with a backslash that escapes the next character
    gaps: Mapping[tuple[str, str, int], bytes] = MappingProxyType({})  # the last of each identity (last, next, depth)

    def read(self, text: bytes) -> Layout:
        """Return the layout after `text`, which need not be JSON."""
        layout = self
        for character in text:
            layout = layout._read_character(character)
        return layout

    def _read_character(self, character: int) -> Layout:
        if self.in_string:
            if self.escaped or character == _BACKSLASH:
                return self._replace(escaped=not self.escaped)
            return self._replace(in_string=character != _QUOTE)
        if character in WHITESPACE:
            return self._replace(gap=self.gap + bytes([character]))
        kind, gaps = _KINDS.get(character, "v"), self.gaps
        identity = self._identity(kind)
        # Two adjacent characters of kind `v` belong to one number or literal.
        if identity[:2] != ("v", "v") and gaps.get(identity) != self.gap:
            gaps = {**gaps, identity: self.gap}
        depth = self.depth + (kind == "[") - (kind == "]")
        last = "v" if kind == "]" else kind
        return Layout(depth, last, b"", character == _QUOTE, escaped=False, gaps=gaps)

    def before(self, character: int) -> bytes | None:
        """Return the whitespace that is expected before `character`; None if nothing is known, or it is exceeded."""
        expected = self._expected(_KINDS.get(character, "v"))
        if expected is None or not expected.startswith(self.gap):
            return None
        return expected[len(self.gap) :]

    def _identity(self, kind: str) -> tuple[str, str, int]:
        return self.last, "v" if kind == "[" else kind, 0 if self.last == ":" else min(self.depth, _MAX_DEPTH)

    def _expected(self, kind: str) -> bytes | None:
        """Return the last gap of this identity, or else what the layout elsewhere suggests."""
        seen = self.gaps.get(self._identity(kind))
        if seen is not None or self.last == ":":
            return seen
        if kind in {",", ":"}:
            return b""
        opened = self.gaps.get(("[", "v", min(self.depth, _MAX_DEPTH)))
        if opened is not None and not opened.startswith(b"\n"):
            # A list or object on one line.
            return self.gaps.get((":", "v", 0), b"") if self.last == "," else opened
        first = self.gaps.get(("[", "v", 1))
        if first is None or not first.startswith(b"\n"):
            return first
        return b"\n" + first[1:] * (self.depth - (kind == "]"))
