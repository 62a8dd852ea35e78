"""The slots of both models' KV caches: which sequence gets which, and which cached prompt prefix it reuses.

What leaves a slot goes to host memory (prefix_store.py), and comes back from there if no slot has it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from specserve.errors import EngineError
from specserve.kv_cache import KVCache, worth_waiting
from specserve.sequence import Sequence, common_prefix
from specserve.serving.prefix_store import PrefixStore
from specserve.speculation.drafters import Drafters

logger = logging.getLogger(__name__)

# Blocks that are copied to host memory after a round, which takes 1 ms for 1.5B (prefix_store.py): what prefill adds
# a round is two blocks, so a text is stored soon after its end, and a slot that is needed waits for no copy.
_BLOCKS_A_ROUND = 2


@dataclass(eq=False)
class Slot:
    """One slot of both caches.

    `released` orders free slots by when their sequences finished; `unstored` says that the text of a free slot may
    not be in the store as a whole yet.
    """

    index: int
    in_use: bool = False
    released: int = 0
    unstored: bool = False


class PrefixCache:
    """Assigns slots to sequences; a free slot keeps its tokens for later prompts that share a prefix.

    Args:
        target: the target's cache.
        drafters: have the draft model, whose cache has the same slots.
        idle_tokens: the most tokens that free slots keep in the target's cache, together.
        store: where texts are kept that have left the target's cache; None for nowhere. The draft model's cache is not
            stored: it reads no more than its window anew.
    """

    def __init__(self, target: KVCache, drafters: Drafters, idle_tokens: int, store: PrefixStore | None = None) -> None:
        self._target = target
        self._drafters = drafters
        self._idle_tokens = idle_tokens
        self._store = store
        self._releases = 0
        self._slots = [Slot(index) for index in range(target.n_slots)]

    @property
    def free_slots(self) -> int:
        """Number of free slots."""
        return sum(not slot.in_use for slot in self._slots)

    def pending(self, sequence: Sequence) -> int:
        """Number of tokens the target has not been fed: 1 while decoding; in prefill 1 or more, 0 once all is fed."""
        return len(sequence.tokens) - self._target.end(sequence.slot)

    def assign(self, sequence: Sequence, prefilling: Iterable[Sequence]) -> bool:
        """Give a sequence a free slot, and the longest prefix of its prompt that any slot or the store has.

        Args:
            sequence: has no slot yet; there must be a free one.
            prefilling: the sequences whose prompts are being prefilled.

        Returns:
            False if it should wait, because enough of its prompt is being prefilled for another (`worth_waiting`).
        """
        # The last token of a prompt is always fed: the first token is sampled from its logits.
        max_length = 0 if sequence.scores_prompt else len(sequence.tokens) - 1
        prefixes = self._target.prefixes(sequence.tokens, max_length)
        source = max(self._slots, key=lambda slot: (prefixes[slot.index], not slot.in_use))
        shared = prefixes[source.index]
        stored = self._store.length(sequence.tokens, max_length) if self._store else 0
        soon = max((common_prefix(other.tokens, sequence.tokens, max_length) for other in prefilling), default=0)
        if worth_waiting(sequence, max(shared, stored), soon):
            return False
        slot = self._choose(sequence, source, shared)
        sequence.slot = slot.index
        if slot is not source or shared < self._target.length(slot.index):
            self._save(slot)
        if slot is not source and shared:
            self._target.copy(source.index, slot.index, shared)
        self._target.truncate(slot.index, shared)
        if self._store:
            self._load(self._store, sequence, max_length)
        sequence.cached_tokens = self._target.end(slot.index)
        if self._drafters.model:
            draft = self._drafters.model.cache
            draft.truncate(slot.index, draft.prefix(slot.index, sequence.tokens, len(sequence.tokens) - 1))
        # Last: a slot whose engine failed stays free.
        slot.in_use = True
        return True

    def release(self, sequence: Sequence) -> None:
        """Free a sequence's slot; the caches keep its tokens, unless it has failed or another answer needs the room."""
        slot = self._slots[sequence.slot]
        self._releases += 1
        slot.in_use, slot.released = False, self._releases
        # Tokens are decided by finite logits only, and these depend on all keys and values before them.
        slot.unstored = self._store is not None and sequence.round_number > 0
        sequence.release()
        self._drafters.forget(sequence)
        # What followed the end of its answer is no part of its text.
        self._truncate(slot, len(sequence.tokens))
        self._evict()

    def store(self, max_blocks: int | None = _BLOCKS_A_ROUND) -> bool:
        """Copy what free slots hold to the store, what would leave its slot first; returns whether there is more.

        Args:
            max_blocks: that are copied; None for all of a slot.
        """
        unstored = [slot for slot in self._slots if slot.unstored and not slot.in_use]
        if unstored:
            self._save(min(unstored, key=lambda slot: slot.released), max_blocks)
        return any(slot.unstored for slot in unstored)

    def clear(self, sequence: Sequence) -> None:
        """Empty the slot of a sequence that has failed."""
        self._truncate(self._slots[sequence.slot], 0)

    def check(self) -> None:
        """Compare the record of both caches with what the engines hold; what differs is logged and emptied."""
        self._target.check()
        if self._drafters.model:
            self._drafters.model.cache.check()

    def _choose(self, sequence: Sequence, source: Slot, shared: int) -> Slot:
        """The free slot to write in: the source where most of it or of the prompt is shared, else an empty slot.

        A short common prefix is copied instead, so that the source stays cached as a whole.
        """
        free = [slot for slot in self._slots if not slot.in_use]
        if source in free and shared * 2 >= min(self._target.length(source.index), len(sequence.tokens)) > 0:
            return source
        # An empty slot; else the one that was released longest ago, the source only if there is no other.
        return min(
            free,
            key=lambda slot: (
                self._target.length(slot.index) > 0,
                shared > 0 and slot is source,
                slot.released if self._target.length(slot.index) else 0,
            ),
        )

    def _evict(self) -> None:
        """Empty the free slots that were released first, until all together hold `idle_tokens` at most.

        llama.cpp's own attention runs over the whole cache: 7,000 idle tokens lengthen a step of the draft model by an
        eighth (0.5B, two cores).
        """
        idle = sorted((slot for slot in self._slots if not slot.in_use), key=lambda slot: slot.released)
        cached = sum(self._target.length(slot.index) for slot in idle)
        for slot in idle:
            if cached <= self._idle_tokens:
                return
            cached -= self._target.length(slot.index)
            self._save(slot)
            self._truncate(slot, 0)

    def _save(self, slot: Slot, max_blocks: int | None = None) -> None:
        """Store what a free slot holds and the store does not; to be called before any of it is dropped."""
        if self._store is None or not slot.unstored:
            return
        tokens = self._target.tokens(slot.index)
        try:
            slot.unstored = not self._store.add(
                tokens, lambda start, end: self._target.save(slot.index, start, end), max_blocks
            )
        except (EngineError, MemoryError) as error:
            logger.warning("specserve: a prefix cannot be kept in host memory: %s", error)
            slot.unstored = False

    def _load(self, store: PrefixStore, sequence: Sequence, max_length: int) -> None:
        """Append to a sequence's slot what the store has of its prompt; what fails is prefilled."""
        start = end = self._target.end(sequence.slot)
        try:
            for saved in store.saved(sequence.tokens, start, max_length):
                self._target.load(sequence.slot, sequence.tokens[end : end + len(saved)], saved)
                end += len(saved)
        except EngineError as error:
            logger.warning("specserve: a prefix in host memory cannot be used, and is computed again: %s", error)
        store.count(looked_up=max(0, max_length - start), hits=end - start)

    def _truncate(self, slot: Slot, end: int) -> None:
        self._target.truncate(slot.index, end)
        if self._drafters.model:
            self._drafters.model.cache.truncate(slot.index, end)
