"""Texts of whole blocks for tests of the prefix store, and the keys that are right for them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from specserve.core.prefix_store import BLOCK_TOKENS, PrefixStore

TOKEN_BYTES = 16
NOBODY = ("", "")
BLOCK_BYTES = BLOCK_TOKENS * (TOKEN_BYTES + 4)


class Text:
    """A text whose "keys and values" of a token are a hash of all tokens up to it, and its position."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.saved: list[tuple[int, int]] = []

    def save(self, start: int, end: int) -> NDArray[np.uint8]:
        self.saved.append((start, end))
        return self.keys(start, end)

    def keys(self, start: int, end: int) -> NDArray[np.uint8]:
        rows = [(hash(tuple(self.tokens[: n + 1])), n) for n in range(start, end)]
        return np.array(rows, np.int64).reshape(-1, 2).view(np.uint8)


def store_of(blocks: int, *, spare_bytes: int = 0) -> PrefixStore:
    """A store with room for so many blocks."""
    return PrefixStore(TOKEN_BYTES, blocks * BLOCK_BYTES + spare_bytes)


def added(store: PrefixStore, *parts: int, max_blocks: int = 99) -> Text:
    """A text of one block for each of these numbers, which the store has been given."""
    text = Text(tokens_of(*parts))
    store.add(NOBODY, text.tokens, text.save, max_blocks)
    return text


def tokens_of(*parts: int) -> list[int]:
    return [1000 * part + n for part in parts for n in range(BLOCK_TOKENS)]


def stored(store: PrefixStore, *parts: int) -> int:
    """How many blocks of such a text are stored; they are used thereby."""
    return store.length(NOBODY, tokens_of(*parts), 10**6) // BLOCK_TOKENS


def joined(parts: Iterable[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    return np.concatenate([np.empty((0, TOKEN_BYTES), np.uint8), *parts])
