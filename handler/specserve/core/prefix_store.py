"""Prefixes in host memory: keys and values of finished texts, which come back by a copy when a prompt begins alike.

Texts are kept in blocks of 32 tokens that form a tree: the children of a block are the blocks that have followed it, so
texts that begin alike share what they share. A block is found by comparing its tokens, after those of all blocks before
it; no hash is trusted. Each owner has a tree of its own. Where room is short, the client with the most blocks loses the
one that it used longest ago (shares.py). It never has children: using a block uses all before it, too.

Others keep prefixes likewise: vLLM's prefix caching has blocks of a fixed size, keyed by a hash of all tokens so far;
SGLang's RadixAttention and HiCache a tree of token ranges, whose leaves are evicted to host memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from specserve.observability.records import StoreRecord
from specserve.sequence import Owner
from specserve.shares import Shares

# Tokens of a block. What is left of a text after its last whole block has to be prefilled again: 16 tokens in the mean,
# .1 s for 1.5B. vLLM's blocks have 16; with 32 the work of a block is a copy of 0.9 MB.
BLOCK_TOKENS = 32
_NOTHING = np.empty((0, 0), np.uint8)

# Copies the keys and values of the tokens from one position to another, shape (tokens, bytes of a token).
Save = Callable[[int, int], NDArray[np.uint8]]


@dataclass(eq=False, slots=True)
class Block:
    """Consecutive tokens of a text, after those of the blocks above it.

    Args:
        tokens: `BLOCK_TOKENS` of them, as integers of 32 bits; the root of a tree has none.
        parent: the block before; None for a root.
        saved: their keys and values, shape (`BLOCK_TOKENS`, bytes of a token); empty once the block is evicted.
    """

    tokens: bytes
    parent: Block | None
    saved: NDArray[np.uint8]
    children: dict[bytes, Block] = field(default_factory=dict)


class PrefixStore:
    """The blocks of all owners, within a limit of bytes.

    Any thread may call it; each call but `add` takes microseconds for a block.

    Args:
        token_bytes: of a token's keys and values.
        max_bytes: of all blocks, their keys, values and tokens. It holds at any time; beside them Python's objects take
            a kilobyte a block.
    """

    def __init__(self, token_bytes: int, max_bytes: int) -> None:
        self.token_bytes = token_bytes
        self._block_bytes = BLOCK_TOKENS * (token_bytes + 4)
        self._lock = Lock()
        # By owner, the block before all texts, which has no tokens.
        self._roots: dict[Owner, Block] = {}
        # With their owners. A client's block was used before the one that it follows in its text.
        self._blocks: Shares[Block, Owner] = Shares(max_bytes // self._block_bytes)
        self._hit_tokens = self._looked_up_tokens = self._evicted_blocks = 0

    @property
    def record(self) -> StoreRecord:
        """What it holds, and what it has done so far."""
        stored = self._blocks.total * self._block_bytes
        return StoreRecord(self._hit_tokens, self._looked_up_tokens, self._evicted_blocks, stored)

    def count(self, *, looked_up: int = 0, hits: int = 0) -> None:
        """Count tokens of a prompt that no slot held, and how many of them were taken from here."""
        self._looked_up_tokens += looked_up
        self._hit_tokens += hits

    def length(self, owner: Owner, tokens: list[int], max_length: int) -> int:
        """How many leading tokens of a text are stored, counted up to `max_length`; their blocks are used thereby."""
        with self._lock:
            path = list(self._path(owner, tokens))
            self._use(owner, path)
        return min(len(path) * BLOCK_TOKENS, max(0, max_length))

    def saved(self, owner: Owner, tokens: list[int], start: int, end: int) -> list[NDArray[np.uint8]]:
        """The keys and values of a text's tokens from `start` to `end`, in parts that follow each other.

        They end earlier where less is stored. Nothing is copied: the parts are those of the blocks, and not to be
        written to.
        """
        with self._lock:
            blocks = [block.saved for block in self._path(owner, tokens)]
        firsts = range(0, len(blocks) * BLOCK_TOKENS, BLOCK_TOKENS)
        parts = [
            saved[max(0, start - first) : max(0, end - first)] for first, saved in zip(firsts, blocks, strict=True)
        ]
        return [part for part in parts if part.size]

    def add(self, owner: Owner, tokens: list[int], save: Save, max_blocks: int) -> bool:
        """Store the blocks of a text that are not stored yet, the first ones first.

        A block of 0.9 MB (1.5B) takes about half a millisecond, most of it for the memory that the system clears; so a
        text of 8,000 tokens takes 0.13 s at once, and none once it is stored.

        Args:
            owner: of the text.
            tokens: the text; what follows its last whole block is not stored.
            save: copies keys and values from a slot.
            max_blocks: that are stored now.

        Returns:
            False if there are more. What would evict the beginning of the same text is not stored.

        Raises:
            EngineError: `save` has failed; the blocks before are stored.
        """
        with self._lock:
            path = list(self._path(owner, tokens))
            self._use(owner, path)
            try:
                while (first := len(path) * BLOCK_TOKENS) + BLOCK_TOKENS <= len(tokens):
                    if max_blocks <= 0:
                        return False
                    if not self._make_room(owner, path):
                        break
                    saved = save(first, first + BLOCK_TOKENS)
                    before = path[-1] if path else self._roots.setdefault(owner, Block(b"", None, _NOTHING))
                    path.append(self._insert(owner, before, _packed(tokens, first), saved))
                    max_blocks -= 1
            finally:
                self._use(owner, path)
        return True

    def _path(self, owner: Owner, tokens: list[int]) -> Iterator[Block]:
        """The stored blocks of a text, from its beginning."""
        block = self._roots.get(owner)
        if block is None:
            return
        for first in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            child = block.children.get(_packed(tokens, first))
            if child is None:
                return
            yield child
            block = child

    def _use(self, owner: Owner, path: list[Block]) -> None:
        """Make these blocks the last used, each before the one that it follows."""
        for block in reversed(path):
            self._blocks.use(owner[0], block)

    def _make_room(self, owner: Owner, path: list[Block]) -> bool:
        """Evict blocks until there is room for one; False if those of this path, just used, would have to go."""
        kept = set(path)
        while self._blocks.total >= self._blocks.limit:
            next_to_go = self._blocks.next_to_go(owner[0])
            if next_to_go is None or next_to_go[1].key in kept:
                return False
            self._evict(next_to_go[1].value, next_to_go[1].key)
        return True

    def _evict(self, owner: Owner, block: Block) -> None:
        """Remove a block without children."""
        self._blocks.remove(owner[0], block)
        if block.parent is not None:
            del block.parent.children[block.tokens]
            if not block.parent.children and block.parent.parent is None:
                del self._roots[owner]
        block.saved = _NOTHING
        self._evicted_blocks += 1

    def _insert(self, owner: Owner, parent: Block, tokens: bytes, saved: NDArray[np.uint8]) -> Block:
        # Several requests may read it.
        saved.setflags(write=False)
        block = parent.children[tokens] = Block(tokens, parent, saved)
        self._blocks.put(owner[0], block, owner)
        return block


def _packed(tokens: list[int], first: int) -> bytes:
    """The tokens of the block that begins at a position."""
    return array("i", tokens[first : first + BLOCK_TOKENS]).tobytes()
