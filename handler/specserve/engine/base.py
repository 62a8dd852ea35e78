"""What the rest of specserve asks of an inference engine: a batched forward pass over slots of a key-value cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating]


class Row(NamedTuple):
    """One token of one forward pass: it is written at `position` of `slot`'s cache."""

    token: int
    slot: int
    position: int
    wants_logits: bool


class Vocabulary(Protocol):
    """The tokens of one model."""

    @property
    def size(self) -> int:
        """Number of tokens, which is the width of a row of logits."""

    def encode(self, text: str, *, special: bool = False, begin: bool = True) -> list[int]:
        """Tokenise `text` as the model was trained to see a prompt.

        Args:
            text: valid Unicode.
            special: also read the names of control tokens.
            begin: put the token that begins a text in front, where the model wants one.
        """

    def piece(self, token: int) -> bytes:
        """The bytes a token adds to the text; empty for control tokens."""

    def name(self, token: int) -> bytes:
        """The bytes of a token; for a control token, its name."""

    def ends_text(self, token: int) -> bool:
        """Whether the model ends its answer with this token."""

    def end_tokens(self) -> list[int]:
        """All tokens that end a text."""

    def infill(self, prefix: list[int], suffix: list[int]) -> list[int] | None:
        """The prompt for what stands between two texts; None where the model has no tokens for that."""

    def start_token(self) -> int | None:
        """The token that stands for an empty prompt, None where the vocabulary has no such token."""


class Engine(Protocol):
    """One model with its cache of `n_slots` independent sequences.

    A cache is always a contiguous prefix of its sequence: rows of one slot must continue at its length,
    in order, and only `cut` shortens it.
    """

    @property
    def n_slots(self) -> int:
        """Number of sequences the cache holds."""

    @property
    def width(self) -> int:
        """Number of tokens of the vocabulary, the width of a row of logits."""

    @property
    def max_rows(self) -> int:
        """The most rows of one forward pass."""

    @property
    def max_logits(self) -> int:
        """The most rows of one forward pass that may want logits."""

    def cached_len(self, slot: int) -> int:
        """How many tokens a slot holds."""

    def kv_len(self, slots: Iterable[int]) -> int:
        """How many tokens of the cache a row of these slots attends to or has to pass over."""

    @property
    def slot_length(self) -> int:
        """The longest text of one slot."""

    def forward(self, rows: list[Row]) -> FloatArray:
        """Run the model over `rows`.

        Returns:
            Logits, shape (rows that want them, vocabulary), in the rows' order; overwritten by the next call.

        Raises:
            EngineError: the pass failed; the caches of the rows' slots are as before the call.
        """

    def truncate(self, slot: int, length: int) -> None:
        """Keep the first `length` tokens of a slot's cache."""

    def copy(self, source: int, destination: int, length: int) -> None:
        """Make a slot hold just the first `length` tokens of another one's cache, without reading them again."""

    def close(self) -> None:
        """Give the memory back; the engine cannot be used afterwards."""
