"""Copies between the target's cache and host memory, a part of them in each round, so that no stream waits for long."""

from __future__ import annotations

import logging
from collections.abc import Callable
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from specserve.core.prefix_store import PrefixStore
from specserve.engine.kv_cache import KVCache
from specserve.errors import EngineError
from specserve.sequence import Sequence

logger = logging.getLogger(__name__)

# Blocks that are copied to host memory in a round at most, where slots are needed: 8,192 tokens, .13 s for 1.5B. What
# is beyond them is prefilled again. And tokens that come back in a round, in as long (worst_cases.py).
_BLOCKS_A_ROUND, _TOKENS_A_ROUND = 256, 2048


class PrefixCopies:
    """Copies prefixes to the store and back.

    Args:
        target: the target's cache.
        store: None without host memory; then there is nothing to copy.
    """

    def __init__(self, target: KVCache, store: PrefixStore | None) -> None:
        self._target = target
        self._store = store
        # Blocks that may still be copied to the store in this round.
        self._blocks_left = _BLOCKS_A_ROUND
        # By sequence whose prefix is coming back: up to where.
        self._up_to: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()

    def may_save(self, sequence: Sequence) -> bool:
        """Whether what a slot holds of a sequence may be stored."""
        # Tokens are decided by finite logits only, and these depend on all keys and values before them.
        return self._store is not None and sequence.round_number > 0

    def save(self, slot: int, max_blocks: int = _BLOCKS_A_ROUND) -> bool:
        """Store what a slot holds, as much as this round may; returns whether that is all, or the rest cannot be."""
        if self._store is None:
            return True

        def copy(start: int, end: int) -> NDArray[np.uint8]:
            self._blocks_left -= 1
            return self._target.save(slot, start, end)

        tokens, owner = self._target.tokens(slot), self._target.owner(slot)
        try:
            return self._store.add(owner, tokens, copy, min(max_blocks, self._blocks_left))
        except (EngineError, MemoryError) as error:
            logger.warning("specserve: a prefix cannot be kept in host memory: %s", error)
            return True

    def stored(self, sequence: Sequence, max_length: int) -> int:
        """How many leading tokens of a sequence the store has, counted up to `max_length`."""
        return self._store.length(sequence.info.owner, sequence.tokens, max_length) if self._store else 0

    def begin(self, sequence: Sequence, stored: int, max_length: int) -> None:
        """Let a sequence's prefix come back in the next rounds: what its slot lacks of the first `stored` tokens."""
        shared = self._target.end(sequence.slot)
        if self._store:
            self._store.count(looked_up=max(0, max_length - shared))
        if stored > shared:
            self._up_to[sequence] = stored

    def are_running(self, sequence: Sequence) -> bool:
        """Whether a sequence's prefix is still coming back."""
        return sequence in self._up_to

    def forget(self, sequence: Sequence) -> None:
        """End what is coming back."""
        self._up_to.pop(sequence, None)

    def run(self, make_room: Callable[[int], None]) -> dict[Sequence, Exception]:
        """Begin a round, and copy its part of what is coming back, as far as the store still has it.

        Args:
            make_room: frees so many cells.

        Returns:
            The sequences that failed, and why.
        """
        self._blocks_left = _BLOCKS_A_ROUND
        left, failed = _TOKENS_A_ROUND, {}
        coming = sorted(self._up_to.items(), key=lambda item: item[1] - self._target.end(item[0].slot))
        for place, (sequence, up_to) in enumerate(coming):
            # An equal part for each; what a short one leaves is the others'.
            part = left // (len(coming) - place)
            start = end = self._target.end(sequence.slot)
            try:
                make_room(min(up_to - start, part))
                end = self._load(sequence, min(up_to, start + part))
            except Exception as error:
                logger.exception("specserve: a prefix in host memory cannot be used")
                failed[sequence] = error
            left -= end - start
            if end in {start, up_to}:
                del self._up_to[sequence]
        return failed

    def _load(self, sequence: Sequence, end: int) -> int:
        """Append to a sequence's slot what the store has of its tokens up to a position; returns up to where it had."""
        loaded = start = self._target.end(sequence.slot)
        if self._store is None:
            return start
        try:
            for saved in self._store.saved(sequence.info.owner, sequence.tokens, start, end):
                self._target.load(sequence.slot, sequence.tokens[loaded : loaded + len(saved)], saved)
                loaded += len(saved)
        except EngineError as error:
            logger.warning("specserve: a prefix in host memory cannot be used, and is computed again: %s", error)
        self._store.count(hits=loaded - start)
        if not sequence.preemptions:
            sequence.cached_tokens += loaded - start
        return loaded
