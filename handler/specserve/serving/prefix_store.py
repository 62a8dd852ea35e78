"""Prefixes in host memory: keys and values of finished texts, which come back by a copy when a prompt begins alike.

Texts are kept in blocks of 32 tokens that form a tree: the children of a block are the blocks that have followed it, so
texts that begin alike share what they share. A block is found by comparing its tokens, after those of all blocks before
it; no hash is trusted. The block that was used longest ago is evicted first, and it never has children, since whoever
uses a block uses all before it as well.

Others keep prefixes likewise: vLLM's prefix caching has blocks of a fixed size, keyed by a hash of all tokens so far;
SGLang's RadixAttention and HiCache a tree of token ranges, whose leaves are evicted to host memory.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from specserve.observability.records import StoreRecord

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
        tokens: `BLOCK_TOKENS` of them, as integers of 32 bits; the root of the tree has none.
        parent: the block before; None for the root.
        saved: their keys and values, shape (`BLOCK_TOKENS`, bytes of a token); empty once the block is evicted.
    """

    tokens: bytes
    parent: Block | None
    saved: NDArray[np.uint8]
    children: dict[bytes, Block] = field(default_factory=dict)


class PrefixStore:
    """The blocks, within a limit of bytes; their order is that of their last use.

    Any thread may call it; each call but `add` takes microseconds for a block.

    Args:
        token_bytes: of a token's keys and values.
        max_bytes: of all blocks, their keys, values and tokens. It holds at any time; beside them Python's objects take
            a kilobyte a block.
    """

    def __init__(self, token_bytes: int, max_bytes: int) -> None:
        self.token_bytes = token_bytes
        self._block_bytes = BLOCK_TOKENS * (token_bytes + 4)
        self._max_bytes = max_bytes
        self._lock = Lock()
        self.root = Block(b"", None, _NOTHING)
        """The block before all texts; it has no tokens."""
        # Least recently used first; a block comes before the block that it follows in its text.
        self._blocks: OrderedDict[Block, None] = OrderedDict()
        self._hit_tokens = self._looked_up_tokens = self._evicted_blocks = 0

    @property
    def record(self) -> StoreRecord:
        """What it holds, and what it has done so far."""
        stored = len(self._blocks) * self._block_bytes
        return StoreRecord(self._hit_tokens, self._looked_up_tokens, self._evicted_blocks, stored)

    def count(self, *, looked_up: int, hits: int) -> None:
        """Count tokens of a prompt that no slot held, and how many of them were taken from here."""
        self._looked_up_tokens += looked_up
        self._hit_tokens += hits

    def length(self, tokens: list[int], max_length: int) -> int:
        """How many leading tokens of a text are stored, counted up to `max_length`; their blocks are used thereby."""
        with self._lock:
            path = list(self._path(tokens))
            self._use(path)
        return min(len(path) * BLOCK_TOKENS, max(0, max_length))

    def saved(self, tokens: list[int], start: int, end: int) -> list[NDArray[np.uint8]]:
        """The keys and values of a text's tokens from `start` to `end`, in parts that follow each other.

        They end earlier where less is stored. Nothing is copied: the parts are those of the blocks, and not to be
        written to.
        """
        with self._lock:
            blocks = [block.saved for block in self._path(tokens)]
        firsts = range(0, len(blocks) * BLOCK_TOKENS, BLOCK_TOKENS)
        parts = [
            saved[max(0, start - first) : max(0, end - first)] for first, saved in zip(firsts, blocks, strict=True)
        ]
        return [part for part in parts if part.size]

    def add(self, tokens: list[int], save: Save, max_blocks: int) -> bool:
        """Store the blocks of a text that are not stored yet, the first ones first.

        A block of 0.9 MB (1.5B) takes about half a millisecond, most of it for the memory that the system clears; so a
        text of 8,000 tokens takes 0.13 s at once, and none once it is stored.

        Args:
            tokens: the text; what follows its last whole block is not stored.
            save: copies keys and values from a slot.
            max_blocks: that are stored now.

        Returns:
            False if there are more. What would evict the beginning of the same text is not stored.

        Raises:
            EngineError: `save` has failed; the blocks before are stored.
        """
        with self._lock:
            path = list(self._path(tokens))
            self._use(path)
            try:
                while (first := len(path) * BLOCK_TOKENS) + BLOCK_TOKENS <= len(tokens):
                    if max_blocks <= 0:
                        return False
                    if not self._make_room(path):
                        break
                    saved = save(first, first + BLOCK_TOKENS)
                    path.append(self._insert(path[-1] if path else self.root, _packed(tokens, first), saved))
                    max_blocks -= 1
            finally:
                self._use(path)
        return True

    @property
    def has_room(self) -> bool:
        """Whether another block fits in."""
        return (len(self._blocks) + 1) * self._block_bytes <= self._max_bytes

    def _path(self, tokens: list[int]) -> Iterator[Block]:
        """The stored blocks of a text, from its beginning."""
        block = self.root
        for first in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            child = block.children.get(_packed(tokens, first))
            if child is None:
                return
            yield child
            block = child

    def _use(self, path: list[Block]) -> None:
        """Make these blocks the last used, each before the one that it follows."""
        for block in reversed(path):
            self._blocks.move_to_end(block)

    def _make_room(self, path: list[Block]) -> bool:
        """Evict blocks until there is room for one; False if those of this path, just used, would have to go."""
        kept = set(path)
        while not self.has_room:
            oldest = next(iter(self._blocks), None)
            if oldest is None or oldest in kept:
                return False
            self._evict(oldest)
        return True

    def _evict(self, block: Block) -> None:
        """Remove a block without children."""
        del self._blocks[block]
        del (block.parent or self.root).children[block.tokens]
        block.saved = _NOTHING
        self._evicted_blocks += 1

    def _insert(self, parent: Block, tokens: bytes, saved: NDArray[np.uint8]) -> Block:
        # Several requests may read it.
        saved.setflags(write=False)
        block = parent.children[tokens] = Block(tokens, parent, saved)
        self._blocks[block] = None
        return block


def _packed(tokens: list[int], first: int) -> bytes:
    """The tokens of the block that begins at a position."""
    return array("i", tokens[first : first + BLOCK_TOKENS]).tobytes()
