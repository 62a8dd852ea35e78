"""The slots of both models' KV caches: which sequence gets which, which prefix it reuses, and who makes room.

What leaves a slot goes to host memory (prefix_store.py), and comes back from there if no slot has it. Both are copied a
part in each round, so that no stream waits for long.
"""

import logging
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specserve.core.prefix_store import PrefixStore
from specserve.engine.kv_cache import KVCache
from specserve.errors import Contained, EngineError
from specserve.sequence import Sequence
from specserve.speculation.drafters import Drafters

logger = logging.getLogger(__name__)

# Blocks that are copied to host memory after each round, which takes 1 ms for 1.5B.
_BLOCKS_AFTER_A_ROUND = 2
# The most blocks that a round copies to host memory because it needs their slots: 8,192 tokens, .13 s for 1.5B; tokens
# beyond them are prefilled again. And the most tokens that a round copies back, in the same time (worst_cases.py).
_BLOCKS_A_ROUND, _TOKENS_A_ROUND = 256, 2048
# Tokens that a slot loses at least when room is needed, so that this is not done in every round. No command prints it.
_LEAST_LOSS = 256


class Match(NamedTuple):
    """The beginning of a sequence that is cached."""

    slot: int  # that holds most of it
    shared: int  # tokens that the slot holds
    stored: int  # tokens that the host memory has
    max_length: int  # tokens that may be reused


class PrefixCache:
    """Assigns slots to sequences; a free slot keeps its tokens for later prompts of its owner that share a prefix.

    It keeps them until a sequence needs the room: then the least recently used slots lose their tokens, the last ones
    first, so that the beginning stays reusable.

    The draft model's cache has the same slots, but is not stored, because the model rereads no more than its window.
    """

    def __init__(self, target: KVCache, drafters: Drafters, store: PrefixStore | None = None) -> None:
        self._target = target
        self._drafters = drafters
        self._store = store or PrefixStore()
        # Slots, by when their tokens were last of use to a sequence, the last ones last.
        self._by_use = list(range(target.n_slots))
        # Slots whose text may not be in the store as a whole yet.
        self._unstored: set[int] = set()
        # Blocks that may still be copied to the store in this round.
        self._blocks_left = _BLOCKS_A_ROUND
        # By sequence whose prefix is coming back: up to where.
        self._restoring: dict[Sequence, int] = {}

    @property
    def free_slots(self) -> list[int]:
        """The slots without a sequence, those first that were not used for longest."""
        return [slot for slot in self._by_use if not self._target.is_pinned(slot)]

    @property
    def room(self) -> int:
        """Number of cells of the target's cache that are free, or would be if all free slots were emptied."""
        return self._target.n_cells - self._target.pinned_cells

    def pending(self, sequence: Sequence) -> int:
        """Number of tokens the target has not been fed: 1 while decoding; in prefill 1 or more, 0 once all is fed."""
        return len(sequence.tokens) - self._target.num_computed_tokens(sequence.slot)

    def decodes(self, sequence: Sequence) -> bool:
        """Whether a running sequence is not in prefill: every round that has time for its mask commits tokens."""
        return sequence.generated > 0 and self.pending(sequence) == 1

    def is_restoring(self, sequence: Sequence) -> bool:
        return sequence in self._restoring

    def find(self, sequence: Sequence) -> Match:
        """Find the longest prefix of a waiting sequence that a slot of its owner holds, and the one that is stored."""
        owner = sequence.info.owner
        # The last token is always fed: the next one is sampled from its logits. A scored prompt is fed from the first
        # token without a score on.
        most = len(sequence.tokens) - 1 if sequence.reuses_prefix else 0
        if sequence.scores_prompt and not sequence.generated:
            most = min(most, len(sequence.prompt_scores))
        prefixes = self._target.prefixes(owner, sequence.tokens, most)
        slot = max(range(self._target.n_slots), key=lambda slot: (prefixes[slot], not self._target.is_pinned(slot)))
        return Match(slot, prefixes[slot], self._store.length(owner, sequence.tokens, most), most)

    def assign(self, sequence: Sequence, match: Match) -> None:
        """Give a sequence a free slot, of which there must be one, and the prefix that was found for it."""
        owner, shared = sequence.info.owner, match.shared
        sequence.slot = slot = self._choose(sequence, match)
        is_source = slot == match.slot and shared > 0
        if not is_source or shared < self._target.length(slot):
            self._save(slot, self._blocks_left)
        self._truncate(slot, shared if is_source else 0)
        self._target.claim(slot, owner)
        if shared and not is_source:
            self._target.copy(match.slot, slot, shared)
            self._touch(match.slot)
        if sequence.timestamps.start is None:
            sequence.cached_tokens = self._target.num_computed_tokens(slot)
        if self._drafters.model:
            draft = self._drafters.model.cache
            draft.claim(slot, owner)
            draft.truncate(slot, draft.prefix(slot, owner, sequence.tokens, match.max_length))
        if match.stored > shared:
            self._restoring[sequence] = match.stored
        # Last: a slot whose engine failed stays free.
        self._target.pin(slot)

    def release(self, sequence: Sequence) -> None:
        """Free the slot of a sequence that has ended; the caches keep its tokens."""
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
        """Take tokens from the free slots that were not used for longest, until so many of the `room` are free."""
        for slot in self.free_slots:
            while self._target.length(slot):
                missing = n_cells - self._target.free_cells
                if missing <= 0:
                    return
                self._save(slot, self._blocks_left)
                self._truncate(slot, max(0, self._target.num_computed_tokens(slot) - max(missing, _LEAST_LOSS)))

    def store(self) -> bool:
        """Copy some of what free slots hold to the store, what would leave first; returns whether there is more."""
        unstored = [slot for slot in self.free_slots if slot in self._unstored]
        if unstored:
            self._save(unstored[0], _BLOCKS_AFTER_A_ROUND)
        return any(slot in self._unstored for slot in unstored)

    def restore(self) -> None:
        """Begin a round: copy its part of the prefixes that come back, half for the oldest, then the shortest first.

        What cannot be used, or the store has lost, is computed again.
        """
        self._blocks_left = _BLOCKS_A_ROUND
        left, held = _TOKENS_A_ROUND, self._target.num_computed_tokens
        oldest, reserved = next(iter(self._restoring), None), left // 2
        for sequence, end in sorted(self._restoring.items(), key=lambda item: item[1] - held(item[0].slot)):
            if sequence is oldest:
                reserved = 0
            slot = sequence.slot
            begin = held(slot)
            part = min(end, begin + left - reserved)
            try:
                self.make_room(part - begin)
                for saved in self._store.saved(sequence.info.owner, sequence.tokens, begin, part):
                    self._target.load(slot, sequence.tokens[held(slot) : held(slot) + len(saved)], saved)
            except Exception:
                logger.exception("specserve: a prefix in host memory cannot be used, and is computed again")
                # The engine may hold more than was recorded.
                self._target.truncate(slot, held(slot))
            loaded = held(slot) - begin
            sequence.cached_tokens += 0 if sequence.preemptions else loaded
            if begin + loaded == end or (part > begin and not loaded):
                del self._restoring[sequence]
            left -= loaded

    def clear(self, sequence: Sequence) -> None:
        self._truncate(sequence.slot, 0)

    def _choose(self, sequence: Sequence, match: Match) -> int:
        """The free slot to write in: the source where most of it or of the prompt is shared, else an empty slot.

        A short common prefix is copied instead, so that the source stays cached as a whole.
        """
        free, length = self.free_slots, self._target.length
        if match.slot in free and match.shared * 2 >= min(length(match.slot), len(sequence.tokens)) > 0:
            return match.slot
        # An empty slot; else the one that was not used for longest, the source only if there is no other.
        return min(free, key=lambda slot: (length(slot) > 0, match.shared > 0 and slot == match.slot))

    def _free(self, sequence: Sequence) -> None:
        slot = sequence.slot
        self._restoring.pop(sequence, None)
        self._unstored.discard(slot)
        # Tokens are committed by finite logits only, and these depend on all keys and values before them.
        if sequence.round_number:
            self._unstored.add(slot)
        self._target.unpin(slot)
        self._touch(slot)
        # What followed the end of an answer is no part of its text.
        self._truncate(slot, len(sequence.tokens))

    def _touch(self, slot: int) -> None:
        self._by_use.remove(slot)
        self._by_use.append(slot)

    def _save(self, slot: int, max_blocks: int) -> None:
        """Store what a slot holds and the store does not, as far as so many blocks hold it."""
        if slot not in self._unstored:
            return

        def copy(start: int, end: int) -> NDArray[np.uint8]:
            self._blocks_left -= 1
            return self._target.engine.save(slot, start, end)

        try:
            if self._store.add(self._target.owner(slot), self._target.tokens(slot), copy, max_blocks):
                self._unstored.discard(slot)
        except (EngineError, MemoryError) as error:
            logger.warning("specserve: a prefix cannot be kept in host memory: %s", error)
            self._unstored.discard(slot)

    def _truncate(self, slot: int, end: int) -> None:
        self._target.truncate(slot, end)
        if self._drafters.model:
            self._drafters.model.cache.truncate(slot, end)
