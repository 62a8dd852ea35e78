"""The draft model: its KV cache of each sequence, and its logits of the next tokens.

A model that was trained for it drafts a whole block in one pass (PARD, arXiv 2504.18583): after the tokens that it has
not read yet, it reads mask tokens, which stand for the drafts. The logits at each are of the token after it. They leave
the cache after the pass.
"""

from collections import Counter, abc
from itertools import islice

import numpy as np

from specserve.engine.base import FloatArray, Row
from specserve.engine.kv_cache import KVCache
from specserve.errors import EngineError
from specserve.speculation.costs import PassCosts
from specserve.speculation.step import SequenceStep

# The most rows of a pass that other sequences wait for: with 32 instead of 16 the 99th percentile of two clients' gaps
# is a tenth longer (Zen 4; benchmarks/load.py --clients 2 --requests 2 --turns 2 --max-tokens 256).
_SHARED_ROWS = 16


class DraftModel:
    """A small model that drafts tokens.

    It need not read a whole sequence, since its drafts are verified. If it lags by more than `window` tokens, or its
    slot is full, it restarts `window` tokens before the end. A prefix that another slot holds is copied, not read.
    The slots of its cache are those of the target, whose rows are `vocabulary` wide.
    """

    def __init__(
        self,
        cache: KVCache,
        cost: PassCosts,
        *,
        window: int,
        max_rows: int,
        vocabulary: int,
        context_length: int,
        mask_token: int = -1,  # none
    ) -> None:
        self.cache = cache
        self.cost = cost
        self._mask_token = mask_token
        self._window = min(window, context_length // 2)
        # Of a pass: two a slot, so that no sequence is delayed whose draft prefill is over.
        least_rows = 2 * cache.n_slots
        self._max_rows = min(max(max_rows, least_rows), cache.engine.max_rows)
        self._shared_rows = min(max(_SHARED_ROWS, least_rows), self._max_rows)
        self._vocabulary = vocabulary
        self._context_length = context_length  # of a slot
        # Rows of the last pass, and the KV length that the average one attended to.
        self._last = 0, 0

    def draft_prefill(self, step: SequenceStep) -> int:
        """How many tokens it reads before it can draft the next one."""
        return min(step.length, self._window) if self._begins_anew(step) else self._lag(step)

    def can_read(self, step: SequenceStep) -> bool:
        """Whether its vocabulary has every token that it may have to read."""
        return max(step.tokens_from(max(0, step.length - self._window)), default=0) < self.cache.engine.width

    def read(
        self, steps: abc.Sequence[SequenceStep], mask_tokens: abc.Sequence[int], *, is_shared: bool = False
    ) -> dict[int, list[FloatArray]]:
        """Read what is missing of the sequences of these steps, drafts included, in one pass: the shortest first.

        At most its number of mask tokens follows each sequence, as far as its step, its slot and the pass have room.
        Each step gets its share of the seconds that the cost table gives for the pass. One that others wait for
        (`is_shared`) reads at most 16 tokens beside them.

        Returns:
            The logits after the last token and after each mask, shape (vocabulary of the target,), by index of the
            step; none for a sequence of which more is left to read. Overwritten by the next pass.

        Raises:
            EngineError: the pass failed, or the cache of another slot could not be copied.
        """
        max_rows = self._shared_rows if is_shared else self._max_rows
        rows: list[Row] = []
        # By index of the step, its rows with logits.
        complete: dict[int, int] = {}
        most_masks = self.cache.engine.max_logits // len(steps) - 1
        for index in sorted(range(len(steps)), key=lambda index: self.draft_prefill(steps[index])):
            if max_rows <= 0:
                break
            step, slot = steps[index], steps[index].sequence.slot
            self._begin(step)
            first = self.cache.num_computed_tokens(slot)
            unread = step.tokens_from(first)[:max_rows]
            max_rows -= len(unread)
            rows += [
                Row(token, slot, position, wants_logits=position == step.length - 1)
                for position, token in enumerate(unread, first)
            ]
            if unread and first + len(unread) == step.length:
                room = self._context_length - (step.length - self.cache.start(slot))
                masks = max(0, min(mask_tokens[index], most_masks, step.rows_left - 1, room))
                rows += [Row(self._mask_token, slot, step.length + n, wants_logits=True) for n in range(masks)]
                complete[index] = 1 + masks
        by_slot = Counter(row.slot for row in rows)
        kv_tokens = sum(n * self.cache.kv_len([slot]) for slot, n in by_slot.items())
        self._last = len(rows), kv_tokens // max(1, len(rows))
        logits = self.cache.forward(rows) if rows else np.empty((0, 0), np.float32)
        for index, count in complete.items():
            if count > 1:
                self.cache.truncate(steps[index].sequence.slot, steps[index].length)
        if not np.isfinite(np.max(logits, initial=0.0)):
            raise EngineError("Its logits are not finite.")
        row_seconds = self.cost.seconds(*self._last) / max(1, len(rows))
        for step in steps:
            step.seconds.draft_model += row_seconds * by_slot[step.sequence.slot]
        following = iter(logits)
        return {index: [self._fitted(row) for row in islice(following, count)] for index, count in complete.items()}

    def observe_cost(self, seconds: float) -> None:
        """Tell the cost table what the last pass, and sampling from its logits, took."""
        rows, kv_len = self._last
        if rows:
            self.cost.observe(rows, kv_len, seconds)

    def _begin(self, step: SequenceStep) -> None:
        """Set where a sequence is read from: after what its slot, or a copy of another one, holds of it."""
        cache, sequence, slot = self.cache, step.sequence, step.sequence.slot
        if self._lag(step) > 2:
            # The last token is always read: its logits are those that are drafted from.
            prefixes = cache.prefixes(sequence.info.owner, sequence.tokens, len(sequence.tokens) - 1)
            source = max(range(cache.n_slots), key=lambda other: prefixes[other])
            if prefixes[source] > cache.num_computed_tokens(slot):
                cache.copy(source, slot, prefixes[source])
        if self._begins_anew(step):
            cache.restart(slot, step.length - min(step.length, self._window))

    def _lag(self, step: SequenceStep) -> int:
        return step.length - self.cache.num_computed_tokens(step.sequence.slot)

    def _begins_anew(self, step: SequenceStep) -> bool:
        """Whether its slot has too little of a sequence, or no room for it."""
        is_full = step.length - self.cache.start(step.sequence.slot) > self._context_length
        return is_full or self._lag(step) > self._window

    def _fitted(self, logits: FloatArray) -> FloatArray:
        """A row as wide as the target's: models of one family pad their vocabularies differently.

        A mask is no token that could follow.
        """
        if self._mask_token >= 0:
            logits[self._mask_token] = -np.inf
        missing = self._vocabulary - logits.size
        return np.pad(logits, (0, missing), constant_values=-np.inf) if missing > 0 else logits[: self._vocabulary]
