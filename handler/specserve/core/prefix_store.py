"""Prefixes in host memory: keys and values of earlier texts, which come back by a copy when a prompt begins alike.

Texts are kept in blocks of 32 tokens. A block is found by its tokens and by the block before it, which are compared, so
no hash is trusted; texts that begin alike share blocks. vLLM's prefix caching and SGLang's HiCache work likewise.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from specserve.sequence import Owner
from specserve.shares import Shares

# Tokens of a block. What is left of a text after its last whole block has to be prefilled again: 16 tokens in the mean,
# .1 s for 1.5B. vLLM's blocks have 16; with 32 the work of a block is a copy of 0.9 MB.
BLOCK_TOKENS = 32

# Copies the keys and values of the tokens from one position to another, shape (tokens, bytes of a token).
Save = Callable[[int, int], NDArray[np.uint8]]


@dataclass(frozen=True, eq=False, slots=True)
class Block:
    # What is before it, or its text's owner; and its tokens, as integers of 32 bits.
    key: tuple[Block | Owner, bytes]
    saved: NDArray[np.uint8]  # keys and values, shape (`BLOCK_TOKENS`, bytes of a token)


class PrefixStore:
    """The blocks of all owners, within a limit of bytes.

    Where room is short, the client with the most blocks loses the one that it used longest ago (shares.py). No other
    block follows that one, since using a block uses all before it, too. A store of 0 bytes keeps nothing; beside its
    limit Python's objects take half a kilobyte a block.
    """

    def __init__(self, token_bytes: int = 0, max_bytes: int = 0) -> None:
        self._block_bytes = BLOCK_TOKENS * (token_bytes + 4)
        self._blocks: Shares[tuple[Block | Owner, bytes], Block] = Shares(max_bytes // self._block_bytes)

    @property
    def max_bytes(self) -> int:
        return self._blocks.limit * self._block_bytes

    @property
    def stored_bytes(self) -> int:
        return self._blocks.total * self._block_bytes

    def length(self, owner: Owner, tokens: list[int], max_length: int) -> int:
        """How many leading tokens of a text are stored, counted up to `max_length`."""
        return min(len(self._path(owner, tokens)) * BLOCK_TOKENS, max(0, max_length))

    def saved(self, owner: Owner, tokens: list[int], start: int, end: int) -> list[NDArray[np.uint8]]:
        """The keys and values of a text's tokens from `start` to `end`, in parts that follow each other.

        They end earlier where less is stored. The parts are views, and not to be written to.
        """
        path = self._path(owner, tokens[: end + BLOCK_TOKENS - 1])
        parts = [
            block.saved[max(0, start - first) : max(0, end - first)]
            for first, block in zip(count(0, BLOCK_TOKENS), path, strict=False)
        ]
        return [part for part in parts if part.size]

    def add(self, owner: Owner, tokens: list[int], save: Save, max_blocks: int) -> bool:
        """Store at most `max_blocks` blocks of a text that are not stored yet, the first ones first; False if more are.

        What follows the last whole block is not stored, nor what would evict the beginning of the same text. A block of
        0.9 MB (1.5B) takes about half a millisecond, most of it for the memory that the system clears.

        Raises:
            EngineError: `save` has failed; the blocks before are stored.
        """
        path = self._path(owner, tokens)
        try:
            for first in range(len(path) * BLOCK_TOKENS, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
                if max_blocks <= 0:
                    return False
                if not self._make_room(owner, path):
                    break
                block = Block(_key(owner, path, tokens), save(first, first + BLOCK_TOKENS))
                # Several requests may read it.
                block.saved.setflags(write=False)
                self._blocks.put(owner[0], block.key, block)
                path.append(block)
                max_blocks -= 1
        finally:
            self._use(owner, path)
        return True

    def _path(self, owner: Owner, tokens: list[int]) -> list[Block]:
        """The stored blocks of a text, from its beginning; they are used thereby."""
        path: list[Block] = []
        while len(tokens) >= (len(path) + 1) * BLOCK_TOKENS:
            block = self._blocks.use(owner[0], _key(owner, path, tokens))
            if block is None:
                break
            path.append(block)
        self._use(owner, path)
        return path

    def _use(self, owner: Owner, path: list[Block]) -> None:
        """Make these blocks the last used, each before the one that it follows."""
        for block in reversed(path):
            self._blocks.use(owner[0], block.key)

    def _make_room(self, owner: Owner, kept: list[Block]) -> bool:
        """Evict blocks until there is room for one; False if one of the text that is being stored would have to go."""
        while self._blocks.total >= self._blocks.limit:
            next_to_go = self._blocks.next_to_go(owner[0])
            if next_to_go is None or next_to_go[2] in kept:
                return False
            self._blocks.remove(*next_to_go[:2])
        return True


def _key(owner: Owner, path: list[Block], tokens: list[int]) -> tuple[Block | Owner, bytes]:
    """The key of the block that follows these of a text."""
    first = len(path) * BLOCK_TOKENS
    return path[-1] if path else owner, array("i", tokens[first : first + BLOCK_TOKENS]).tobytes()
