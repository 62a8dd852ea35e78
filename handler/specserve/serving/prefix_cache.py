"""The slots of both models' KV caches: which sequence gets which, and which cached prompt prefix it reuses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specserve.engine.base import Engine
from specserve.sequence import Sequence, common_prefix, worth_waiting
from specserve.speculation.drafters import Drafters


@dataclass(eq=False)
class Slot:
    """One slot of both caches, and the sequence whose tokens they hold: a running one, or a finished one.

    `released` orders slots by when their sequences finished.
    """

    index: int
    sequence: Sequence | None = None
    in_use: bool = False
    released: int = 0

    @property
    def cached_len(self) -> int:
        """Number of tokens in the target's cache."""
        return self.sequence.target_cached if self.sequence else 0

    def common_prefix(self, sequence: Sequence) -> int:
        """The number of leading tokens of `sequence` that the target's cache holds and that need no prefill."""
        if self.sequence is None or sequence.scores_prompt:
            return 0
        # The last token of a prompt is always fed: the first token is sampled from its logits.
        return common_prefix(self.sequence.tokens, sequence.tokens, min(self.cached_len, len(sequence.tokens) - 1))


class PrefixCache:
    """Assigns slots to sequences; a free slot keeps its tokens for later prompts that share a prefix.

    Args:
        target: the engine that holds the target's cache.
        drafters: hold the draft model's.
        idle_tokens: the most tokens that free slots keep in the target's cache, together.
    """

    def __init__(self, target: Engine, drafters: Drafters, idle_tokens: int) -> None:
        self._target = target
        self._drafters = drafters
        self._idle_tokens = idle_tokens
        self._releases = 0
        self.slots = [Slot(index) for index in range(target.n_slots)]

    @property
    def free_slots(self) -> int:
        """Number of free slots."""
        return sum(not slot.in_use for slot in self.slots)

    def assign(self, sequence: Sequence, prefilling: Iterable[Sequence]) -> bool:
        """Give a sequence a free slot, and the longest prefix of its prompt that any slot has cached.

        Args:
            sequence: has no slot yet; there must be a free one.
            prefilling: the sequences whose prompts are being prefilled.

        Returns:
            False if it should wait, because enough of its prompt is being prefilled for another (`worth_waiting`).
        """
        source = max(self.slots, key=lambda slot: (slot.common_prefix(sequence), not slot.in_use))
        shared = source.common_prefix(sequence)
        most = 0 if sequence.scores_prompt else len(sequence.tokens) - 1
        soon = max((common_prefix(other.tokens, sequence.tokens, most) for other in prefilling), default=0)
        if worth_waiting(sequence, shared, soon):
            return False
        slot = self._choose(sequence, source, shared)
        sequence.slot = slot.index
        sequence.target_cached = sequence.cached_tokens = shared
        if slot is source:
            if source.sequence:
                sequence.inherit_draft(source.sequence, shared)
        elif shared:
            self._target.copy(source.index, slot.index, shared)
        self._truncate(sequence)
        slot.sequence, slot.in_use = sequence, True
        return True

    def release(self, sequence: Sequence) -> None:
        """Free a sequence's slot; the caches keep its tokens."""
        slot = self.slots[sequence.slot]
        self._releases += 1
        slot.in_use, slot.released = False, self._releases
        # The slot refers to the sequence for its tokens.
        sequence.release()
        self._truncate(sequence)
        self._evict()

    def _choose(self, sequence: Sequence, source: Slot, shared: int) -> Slot:
        """The free slot to write in: the source where most of it or of the prompt is shared, else an empty slot.

        A short common prefix is copied instead, so that the source stays cached as a whole.
        """
        free = [slot for slot in self.slots if not slot.in_use]
        if source in free and shared * 2 >= min(source.cached_len, len(sequence.tokens)) > 0:
            return source
        # An empty slot; else the one that was released longest ago, the source only if there is no other.
        return min(
            free,
            key=lambda slot: (
                slot.cached_len > 0,
                shared > 0 and slot is source,
                slot.released if slot.cached_len else 0,
            ),
        )

    def _evict(self) -> None:
        """Empty the free slots that were released first, until all together hold `idle_tokens` at most.

        llama.cpp's own attention runs over the whole cache: 7,000 idle tokens lengthen a step of the draft model by an
        eighth (0.5B, two cores).
        """
        idle = sorted((slot for slot in self.slots if not slot.in_use), key=lambda slot: slot.released)
        cached = sum(slot.cached_len for slot in idle)
        for slot in idle:
            if cached <= self._idle_tokens:
                return
            cached -= slot.cached_len
            if slot.sequence:
                slot.sequence.target_cached = 0
                slot.sequence.truncate_draft(0)
                self._truncate(slot.sequence)

    def _truncate(self, sequence: Sequence) -> None:
        """Make both caches hold what the sequence says they hold."""
        self._target.truncate(sequence.slot, sequence.target_cached)
        self._drafters.truncate(sequence, sequence.draft_end)
