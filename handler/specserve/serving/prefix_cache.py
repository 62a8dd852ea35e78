"""The slots of both models' KV caches: which sequence gets which, and which cached prompt prefix it reuses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specserve.kv_cache import KVCache, worth_waiting
from specserve.sequence import Sequence, common_prefix
from specserve.speculation.drafters import Drafters


@dataclass(eq=False)
class Slot:
    """One slot of both caches; `released` orders free slots by when their sequences finished."""

    index: int
    in_use: bool = False
    released: int = 0


class PrefixCache:
    """Assigns slots to sequences; a free slot keeps its tokens for later prompts that share a prefix.

    Args:
        target: the target's cache.
        drafters: have the draft model, whose cache has the same slots.
        idle_tokens: the most tokens that free slots keep in the target's cache, together.
    """

    def __init__(self, target: KVCache, drafters: Drafters, idle_tokens: int) -> None:
        self._target = target
        self._drafters = drafters
        self._idle_tokens = idle_tokens
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
        """Give a sequence a free slot, and the longest prefix of its prompt that any slot has cached.

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
        soon = max((common_prefix(other.tokens, sequence.tokens, max_length) for other in prefilling), default=0)
        if worth_waiting(sequence, shared, soon):
            return False
        slot = self._choose(sequence, source, shared)
        sequence.slot, sequence.cached_tokens = slot.index, shared
        if slot is not source and shared:
            self._target.copy(source.index, slot.index, shared)
        self._target.truncate(slot.index, shared)
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
        sequence.release()
        self._drafters.forget(sequence)
        # What followed the end of its answer is no part of its text.
        self._truncate(slot, len(sequence.tokens))
        self._evict()

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
            self._truncate(slot, 0)

    def _truncate(self, slot: Slot, end: int) -> None:
        self._target.truncate(slot.index, end)
        if self._drafters.model:
            self._drafters.model.cache.truncate(slot.index, end)
