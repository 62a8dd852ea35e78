"""The slots of both models' KV caches: which sequence gets which, which prefix it reuses, and who makes room.

What leaves a slot goes to host memory (prefix_store.py), and comes back from there if no slot has it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from operator import itemgetter
from weakref import WeakKeyDictionary

from specserve.core.prefix_copies import PrefixCopies
from specserve.core.prefix_store import PrefixStore
from specserve.engine.kv_cache import KVCache, worth_waiting, worth_waiting_for
from specserve.errors import Contained
from specserve.sequence import Sequence, common_prefix
from specserve.speculation.drafters import Drafters

logger = logging.getLogger(__name__)

# Blocks that are copied to host memory after each round, which takes 1 ms for 1.5B.
_BLOCKS_A_ROUND = 2
# Tokens that a slot loses at least when room is needed, so that this is not done in every round. No command prints it.
_LEAST_LOSS = 256


class Admission(Enum):
    """Whether a sequence got a slot, or what it waits for."""

    ADMITTED = auto()
    # Another sequence prefills, or restores, most of what it needs (`worth_waiting`).
    AWAITS_PREFIX = auto()
    # It has a long prefill, and so have as many others as may.
    AWAITS_PREFILL = auto()
    # Its tokens do not fit beside those of the running sequences.
    AWAITS_ROOM = auto()


@dataclass(eq=False)
class Slot:
    """One slot of both caches.

    `last_used` orders free slots by when their tokens were last of use to a sequence; `unstored` says that the text of
    a free slot may not be in the store as a whole yet.
    """

    index: int
    in_use: bool = False
    last_used: int = 0
    unstored: bool = False


class PrefixCache:
    """Assigns slots to sequences; a free slot keeps its tokens for later prompts of its owner that share a prefix.

    It keeps them until a sequence needs the room: then the slots that were not used for longest lose theirs, from the
    end on, so that the beginning stays of use.

    Args:
        target: the target's cache.
        drafters: have the draft model, whose cache has the same slots.
        keeps_prefixes: whether free slots keep tokens at all.
        store: where texts are kept that have left the target's cache; None for nowhere. The draft model's cache is not
            stored: it reads no more than its window anew.
    """

    def __init__(
        self, target: KVCache, drafters: Drafters, *, keeps_prefixes: bool = True, store: PrefixStore | None = None
    ) -> None:
        self._target = target
        self._drafters = drafters
        self._keeps_prefixes = keeps_prefixes
        self.copies = PrefixCopies(target, store)
        self._uses = 0
        # By waiting sequence, which ones prefill, which of them what it needs, and up to where: it is compared with all
        # when others prefill, not in each round.
        self._awaited: WeakKeyDictionary[Sequence, tuple[list[Sequence], Sequence, int]] = WeakKeyDictionary()
        self._slots = [Slot(index) for index in range(target.n_slots)]

    @property
    def free_slots(self) -> int:
        """Number of free slots."""
        return sum(not slot.in_use for slot in self._slots)

    @property
    def room(self) -> int:
        """Number of cells of the target's cache that are free, or would be if all free slots were emptied."""
        return self._target.n_cells - self._target.pinned_cells

    def pending(self, sequence: Sequence) -> int:
        """Number of tokens the target has not been fed: 1 while decoding; in prefill 1 or more, 0 once all is fed."""
        return len(sequence.tokens) - self._target.end(sequence.slot)

    def decodes(self, sequence: Sequence) -> bool:
        """Whether a running sequence is not in prefill: every round that has time for its mask decides tokens."""
        return sequence.generated > 0 and self.pending(sequence) == 1

    def assign(
        self,
        sequence: Sequence,
        prefilling: Collection[Sequence],
        *,
        cells: int,
        room: int,
        max_prefill: float = math.inf,
    ) -> Admission:
        """Give a sequence a free slot, and the longest prefix of its tokens that a slot of its owner or the store has.

        Args:
            sequence: has no slot; there must be a free one.
            prefilling: the sequences that are being prefilled.
            cells: that it needs, those of the prefix included.
            room: number of cells that it may have besides those of running sequences.
            max_prefill: how many of its tokens may be left to prefill.
        """
        owner = sequence.info.owner
        prefilling = [other for other in prefilling if other.info.owner == owner]
        if self._still_awaits_prefix(sequence, prefilling):
            return Admission.AWAITS_PREFIX
        max_length = self._most_reused(sequence)
        prefixes = self._target.prefixes(owner, sequence.tokens, max_length)
        source = max(self._slots, key=lambda slot: (prefixes[slot.index], not slot.in_use))
        shared = prefixes[source.index]
        stored = self.copies.stored(sequence, max_length)
        if self._awaits_prefix(sequence, prefilling, shared, max(shared, stored), max_length):
            return Admission.AWAITS_PREFIX
        if len(sequence.tokens) - max(shared, stored) > max_prefill:
            return Admission.AWAITS_PREFILL
        if cells - self._target.pinned_before(source.index, shared) > room:
            return Admission.AWAITS_ROOM
        self._awaited.pop(sequence, None)
        slot = self._choose(sequence, source, shared)
        self._fill(slot, source, sequence, shared)
        self.copies.begin(sequence, stored, max_length)
        # Last: a slot whose engine failed stays free.
        slot.in_use = True
        self._target.pin(slot.index)
        return Admission.ADMITTED

    def _fill(self, slot: Slot, source: Slot, sequence: Sequence, shared: int) -> None:
        """Have a free slot hold a sequence's tokens as far as the source has them, and nothing else."""
        sequence.slot = slot.index
        owner = sequence.info.owner
        if slot is not source or not shared:
            self._evict(slot)
            self._target.claim(slot.index, owner)
            if shared:
                self._target.copy(source.index, slot.index, shared)
                self._touch(source)
        elif shared < self._target.length(slot.index):
            self._save(slot)
        self._target.truncate(slot.index, shared)
        if sequence.timestamps.start is None:
            sequence.cached_tokens = shared
        if self._drafters.model:
            draft = self._drafters.model.cache
            draft.claim(slot.index, owner)
            most = len(sequence.tokens) - 1 if sequence.reuses_prefix else 0
            draft.truncate(slot.index, draft.prefix(slot.index, owner, sequence.tokens, most))

    def release(self, sequence: Sequence) -> None:
        """Free the slot of a sequence that has ended; the caches keep its tokens, unless it has failed."""
        self._free(sequence)
        # Whatever that raises costs no slot.
        with Contained(sequence.info.request, lambda _: None):
            self._drafters.forget(sequence)
        sequence.release()

    def preempt(self, sequence: Sequence) -> None:
        """Free the slot of a sequence that will go on later; the caches keep its tokens until the room is needed."""
        self._free(sequence)
        sequence.slot = -1

    def make_room(self, n_cells: int) -> None:
        """Take tokens from the free slots that were not used for longest, until so many cells are free.

        Args:
            n_cells: at most `room`.
        """
        for slot in sorted(self._slots, key=lambda slot: slot.last_used):
            while not slot.in_use and self._target.length(slot.index):
                missing = n_cells - self._target.free_cells
                if missing <= 0:
                    return
                self._evict(slot, max(0, self._target.end(slot.index) - max(missing, _LEAST_LOSS)))

    def empty_slot(self, n_cells: int) -> None:
        """Empty the free slot that was not used for longest unless one is empty, and free so many cells."""
        free = [slot for slot in self._slots if not slot.in_use]
        if free and all(self._target.length(slot.index) for slot in self._slots):
            self._evict(min(free, key=lambda slot: slot.last_used))
        self.make_room(min(n_cells, self.room))

    def store(self) -> bool:
        """Copy some of what free slots hold to the store, what would leave first; returns whether there is more."""
        unstored = [slot for slot in self._slots if slot.unstored and not slot.in_use]
        if unstored:
            self._save(min(unstored, key=lambda slot: slot.last_used), max_blocks=_BLOCKS_A_ROUND)
        return any(slot.unstored for slot in unstored)

    def store_running(self, sequence: Sequence) -> bool:
        """Copy a round's part of what a running sequence has to the store; returns whether that is all."""
        return not self.copies.may_save(sequence) or self.copies.save(sequence.slot)

    def clear(self, sequence: Sequence) -> None:
        """Empty the slot of a sequence that has failed."""
        self._truncate(self._slots[sequence.slot], 0)

    def check(self) -> None:
        """Compare the record of both caches with what the engines hold; what differs is logged and emptied."""
        self._target.check()
        if self._drafters.model:
            self._drafters.model.cache.check()

    def _awaits_prefix(
        self, sequence: Sequence, prefilling: Collection[Sequence], shared: int, cached: int, max_length: int
    ) -> bool:
        """Whether it is worth waiting until another sequence has prefilled or restored more of what this one needs.

        Args:
            sequence: that would wait.
            prefilling: the others.
            shared: how many of its tokens a slot holds.
            cached: the same, or how many the store has if these are more; two that restore them share no cells.
            max_length: how many may be reused.
        """
        soon = [(common_prefix(other.tokens, sequence.tokens, max_length), other) for other in prefilling]
        length, other = max(soon, key=itemgetter(0), default=(0, sequence))
        if self.copies.are_running(other):
            cached = shared
        if not worth_waiting(sequence, cached, length):
            return False
        self._awaited[sequence] = [*prefilling], other, worth_waiting_for(sequence, length)
        return True

    def _still_awaits_prefix(self, sequence: Sequence, prefilling: Collection[Sequence]) -> bool:
        """Whether what it waited for last time is still being prefilled."""
        before, other, length = self._awaited.get(sequence, ([], sequence, 0))
        return length > 0 and before == [*prefilling] and self._target.end(other.slot) < length

    @staticmethod
    def _most_reused(sequence: Sequence) -> int:
        """How many of a sequence's tokens need no pass if they are cached."""
        if not sequence.reuses_prefix:
            return 0
        # The last token is always fed: the next one is sampled from its logits. A scored prompt is fed from the first
        # token without a score on.
        most = len(sequence.tokens) - 1
        return most if not sequence.scores_prompt or sequence.generated else min(most, len(sequence.prompt_scores))

    def _choose(self, sequence: Sequence, source: Slot, shared: int) -> Slot:
        """The free slot to write in: the source where most of it or of the prompt is shared, else an empty slot.

        A short common prefix is copied instead, so that the source stays cached as a whole.
        """
        free = [slot for slot in self._slots if not slot.in_use]
        if source in free and shared * 2 >= min(self._target.length(source.index), len(sequence.tokens)) > 0:
            return source
        # An empty slot; else the one that was not used for longest, the source only if there is no other.
        return min(
            free,
            key=lambda slot: (
                self._target.length(slot.index) > 0,
                shared > 0 and slot is source,
                slot.last_used if self._target.length(slot.index) else 0,
            ),
        )

    def _free(self, sequence: Sequence) -> None:
        """Free a sequence's slot, which keeps its tokens if it may."""
        slot = self._slots[sequence.slot]
        slot.in_use = False
        self.copies.forget(sequence)
        slot.unstored = self.copies.may_save(sequence)
        self._target.unpin(slot.index)
        self._touch(slot)
        # What followed the end of an answer is no part of its text.
        self._truncate(slot, len(sequence.tokens))
        if not self._keeps_prefixes:
            self._evict(slot)

    def _touch(self, slot: Slot) -> None:
        self._uses += 1
        slot.last_used = self._uses

    def _evict(self, slot: Slot, end: int = 0) -> None:
        """Take the tokens from position `end` on from a free slot; the store keeps them."""
        self._save(slot)
        self._truncate(slot, end)

    def _save(self, slot: Slot, **limit: int) -> None:
        """Store what a slot holds and the store does not; called before any of it is dropped."""
        if slot.unstored:
            slot.unstored = not self.copies.save(slot.index, **limit)

    def _truncate(self, slot: Slot, end: int) -> None:
        self._target.truncate(slot.index, end)
        if self._drafters.model:
            self._drafters.model.cache.truncate(slot.index, end)
