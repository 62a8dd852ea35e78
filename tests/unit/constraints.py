"""Fake grammar constraints, simple enough to enumerate: the mask depends only on the number of generated tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fake_engine import FakeVocabulary
from specserve.errors import ConstraintError, MaskDeferred
from specserve.grammar.tool_calls import CallSyntax

BYTES = [bytes([byte]) for byte in range(256)]


class Pieces(FakeVocabulary):
    """Tokens with these texts, then control tokens with these names, then the end token."""

    def __init__(self, pieces: Sequence[bytes], names: Sequence[str] = ()) -> None:
        super().__init__(len(pieces) + len(names) + 1)
        self._pieces = pieces
        self._names = [name.encode() for name in names]

    def piece(self, token: int) -> bytes:
        return self._pieces[token] if token < len(self._pieces) else b""

    def name(self, token: int) -> bytes:
        return [*self._pieces, *self._names, b"<end>"][token]

    def encode(self, text: str, *, special: bool = False, begin: bool = True) -> list[int]:
        """Return the longest token at every place, control tokens only if `special`."""
        del begin
        rest, tokens = text.encode(), list[int]()
        texts = [*self._pieces, *(self._names if special else [])]
        while rest:
            tokens.append(max(range(len(texts)), key=lambda token: len(texts[token]) * rest.startswith(texts[token])))
            rest = rest[len(texts[tokens[-1]]) :]
        return tokens


def tags_in(syntax: CallSyntax) -> list[str]:
    """The names of control tokens in the forms of calls."""
    return sorted({*re.findall(r"<[^<>=\s]+>|\[[A-Z_]+\]", " ".join(form.text for form in syntax.forms))})


# Bytes and a few words, then the end token.
WORDS = Pieces([*BYTES, b'{"', b'":', b' "', b"name", b'", "', "世".encode(), b"\n  ", b"+x"])
(END,) = WORDS.end_tokens()


class Alternating:
    """Allows even and odd token ids in turn, none below `least`.

    The output is complete after `length` tokens; from `fails_at` tokens on there is no mask but a `ConstraintError`.
    """

    relaxed = ()

    def __init__(self, size: int, *, length: int = 10**6, fails_at: int | None = None, least: int = 0) -> None:
        tokens = np.arange(size)
        self._by_parity: list[NDArray[np.bool_]] = [(tokens % 2 == parity) & (tokens >= least) for parity in (0, 1)]
        self._length = length
        self._fails_at = fails_at

    def allowed(self, written: Sequence[int]) -> NDArray[np.bool_]:
        if self._fails_at is not None and len(written) >= self._fails_at:
            raise ConstraintError("The grammar has become too costly to follow.")
        return self._by_parity[len(written) % 2]

    def complete(self, written: Sequence[int]) -> bool:
        return len(written) >= self._length

    def forced(self, written: Sequence[int], max_tokens: int) -> list[int]:
        """Return no tokens: half of all are allowed everywhere."""
        self.allowed(written)
        return [0] * min(0, max_tokens)

    def fork(self) -> Alternating:
        return self


class Shared:
    """A round's budget for masks, counted in masks and shared by all sequences."""

    def __init__(self, masks: int) -> None:
        self._masks = masks
        self.left = masks
        self.deferred = 0

    def limit_masks(self, _seconds: float) -> None:
        self.left = self._masks

    def spend(self) -> None:
        if self.left <= 0:
            self.deferred += 1
            raise MaskDeferred("The round has no time left.")
        self.left -= 1


class Slow(Alternating):
    """An alternating grammar whose masks use up the shared budget; a mask is computed once and then free."""

    def __init__(self, size: int, shared: Shared) -> None:
        super().__init__(size)
        self._shared = shared
        self._computed: set[tuple[int, ...]] = set()

    def allowed(self, written: Sequence[int]) -> NDArray[np.bool_]:
        if tuple(written) not in self._computed:
            self._shared.spend()
            self._computed.add(tuple(written))
        return super().allowed(written)


class AlternatingGrammars:
    """A compiler that turns everything into an alternating grammar over a vocabulary of `size`."""

    def __init__(self, size: int) -> None:
        self._size = size

    def limit_masks(self, seconds: float) -> None:
        """Ignore the budget: these masks take no time."""

    def json_schema(self, source: dict[str, Any] | str) -> Alternating:
        return Alternating(self._size, length=len(source))

    gbnf = regex = json_schema

    def calls(self, *_form: Any, **_options: Any) -> None:
        """Leave the model free: these tests need no calls of its own."""
