"""The interface that an inference engine has: batched forward passes over a KV cache of several slots."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from specserve.sampling.distribution import FloatArray

__all__ = ["Engine", "FloatArray", "Row", "Vocabulary"]


class Row(NamedTuple):
    """A token of a batch, which is written at `position` of `slot`'s KV cache.

    An `alternative` comes after the other rows of its slot, at a position that one of them has, and takes its place:
    it attends to the tokens before that, and no row attends to it. See `Engine.adopt`.
    """

    token: int
    slot: int
    position: int
    wants_logits: bool
    alternative: bool = False


class Vocabulary(Protocol):
    size: int

    def encode(self, text: str, *, special: bool = False, begin: bool = True) -> list[int]:
        """Tokenise valid Unicode; in it, names of control tokens stand for these tokens if it is `special`.

        A text that may `begin` a prompt gets the BOS token, if the model's prompts begin with it.
        """

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token; none for control tokens."""

    def name(self, token: int) -> bytes:
        """Return the bytes of a token; for a control token, its name."""

    def is_end_token(self, token: int) -> bool:
        """Whether the token ends an answer (llama.cpp: EOG)."""

    def end_tokens(self) -> list[int]: ...

    def infill(self, prefix: list[int], suffix: list[int]) -> list[int] | None:
        """Return a fill-in-the-middle prompt; None if the model has no tokens for it."""

    def file_separators(self) -> tuple[int | None, int | None]:
        """Return the tokens before a repository's and a file's name in a fill-in-the-middle prompt, if it has them."""

    def bos_token(self) -> int | None:
        """Return the BOS token, which also stands for an empty prompt; None if the vocabulary has none."""


class Engine(Protocol):
    """A model whose KV cache holds `n_slots` independent sequences, which share `n_cells` cells of one token each.

    A slot always caches a contiguous prefix of its sequence: rows of a slot must continue at its cached length, in
    order, and only `truncate` and `adopt` shorten it.
    """

    n_slots: int
    n_cells: int  # tokens that all slots hold at most, shared ones counted once, alternatives not
    slot_length: int  # tokens that a slot holds at most
    rollback: int | None  # the most tokens, of the last pass, that `truncate` removes without the others; None: any
    width: int  # the length of a row of logits: the size of the vocabulary
    max_rows: int  # the most rows of a forward pass
    max_logits: int  # the most rows of a pass that may want logits
    max_alternatives: int  # the most rows of a pass that may be alternatives
    token_bytes: int | None  # the size of a token's keys and values in all layers; None if they cannot be saved

    def cached_len(self, slot: int) -> int:
        """Return how many tokens of a slot are cached, alternatives not counted."""

    def kv_len(self, slots: Iterable[int]) -> int:
        """Return how many cached tokens attention reads for a row of one of these slots, its own or not."""

    def forward(self, rows: list[Row]) -> FloatArray:
        """Run one forward pass; returns logits, shape (rows with `wants_logits`, vocabulary), in the rows' order.

        The next call overwrites them.

        Raises:
            EngineError: the pass failed, or its tokens do not fit into the free cells; the cache is unchanged.
        """

    def truncate(self, slot: int, length: int) -> None:
        """Remove all but the first `length` tokens of a slot from the cache, or all of them, and its alternatives."""

    def adopt(self, slot: int, number: int) -> None:
        """Let a slot end with one of its alternatives of the last pass, in place of what is cached from there on.

        They are numbered in the order of the rows. The slot has not been truncated since that pass.
        """

    def copy(self, source: int, destination: int, length: int) -> None:
        """Replace a slot's cache by the first `length` tokens of another slot, whose cells both share.

        Where that is not possible, the slot is emptied (`rollback`).
        """

    def save(self, slot: int, start: int, end: int) -> NDArray[np.uint8]:
        """Return a copy of the keys and values of a slot's tokens, shape (end - start, `token_bytes`).

        Raises:
            EngineError: the slot holds fewer tokens.
        """

    def load(self, slot: int, saved: NDArray[np.uint8]) -> None:
        """Append tokens to a slot, whose keys and values were saved from the same positions of the same text.

        Nothing is computed, and whatever is computed from them has the same bits as where they were saved.

        Raises:
            EngineError: they do not fit; the cache is unchanged.
        """

    def close(self) -> None:
        """Free the memory; the engine cannot be used afterwards."""
