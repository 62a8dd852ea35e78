"""The draft model: its KV cache of each sequence, and its logits of the next token."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from specserve.engine.base import FloatArray, Row
from specserve.engine.kv_cache import KVCache, worth_waiting
from specserve.errors import DraftError, EngineError
from specserve.sequence import common_prefix
from specserve.speculation.cost import Cost
from specserve.speculation.step import Step

# The most rows of a pass that other sequences wait for. With 16 instead of 32 two clients' 99th percentile of gaps is
# 1.30 and 1.34 times that of mode off instead of 1.40 and 1.68, their speed the same (Zen 4; benchmarks/load.py --ours
# --clients 2 --requests 2 --turns 2 --max-tokens 256).
_SHARED_ROWS = 16


class PassResult(NamedTuple):
    """The result of a pass, by index of the steps that were asked for.

    Args:
        logits: after the last token of a step, shape (vocabulary of the target,); none for a sequence that has not
            caught up yet. Overwritten by the next pass.
        n_read: how many tokens of each were read.
    """

    logits: dict[int, FloatArray]
    n_read: list[int]


class DraftModel:
    """A small model that drafts tokens.

    It need not read a whole sequence, since its drafts are verified: where it lags by more than `window` tokens, or its
    slot has no room for more, it begins anew near the end. At most `max_rows` tokens are read in a pass (16 where other
    sequences wait for it), the shortest catch-up first; a prefix that another slot holds is copied.

    Args:
        cache: the model's KV cache; its slots are those of the target.
        cost: of its passes.
        window: the longest catch-up, in tokens; it begins as far before the end of a sequence that is no longer.
        max_rows: the most tokens of a pass; at least two for every slot, so that a sequence that has caught up is
            never delayed.
        vocabulary: the width of the target's rows.
        context_length: the most tokens of a slot; a longer sequence begins anew near its end.
    """

    def __init__(
        self, cache: KVCache, cost: Cost, *, window: int, max_rows: int, vocabulary: int, context_length: int
    ) -> None:
        self.cache = cache
        self._cost = cost
        self._window = min(window, context_length // 2)
        least_rows = 2 * cache.n_slots
        self._max_rows = min(max(max_rows, least_rows), cache.engine.max_rows)
        self._shared_rows = min(max(_SHARED_ROWS, least_rows), self._max_rows)
        self._vocabulary = vocabulary
        self._context_length = context_length
        # Rows of the last pass, and the KV length that the average one attended to.
        self._last = 0, 0

    def catch_up(self, step: Step) -> int:
        """How many tokens it reads before it can draft the next one."""
        return self._first(step) if self._begins_anew(step) else step.length - self.cache.end(step.sequence.slot)

    def can_read(self, step: Step) -> bool:
        """Whether its vocabulary has every token that it would have to read."""
        # Where it begins anew, another slot's prefix may be copied, which ends as far before the end as the window.
        most = min(step.length, self._window) if self._begins_anew(step) else self.catch_up(step)
        return max(step.tokens_from(step.length - most), default=0) < self.cache.engine.width

    def read(self, steps: list[Step], *, is_shared: bool = False) -> PassResult:
        """Catch up with the sequences of these steps, drafts included, in one pass.

        Args:
            steps: of the sequences.
            is_shared: whether others wait for the pass.

        Raises:
            DraftError: the pass failed, or the cache of another slot could not be copied.
        """
        try:
            rows, complete = self._unread(steps, is_shared=is_shared)
            if not rows:
                self._last = 0, 0
                return PassResult({}, [0] * len(steps))
            by_slot = Counter(row.slot for row in rows)
            self._last = len(rows), sum(n * self.cache.kv_len([slot]) for slot, n in by_slot.items()) // len(rows)
            logits = self.cache.forward(rows)
        except EngineError as error:
            raise DraftError(f"The draft model failed: {error}") from error
        if not np.isfinite(logits.max(initial=0.0)):
            raise DraftError("The draft model failed: its logits are not finite.")
        return PassResult(
            {index: self._fitted(row) for index, row in zip(complete, logits, strict=True)},
            [by_slot[step.sequence.slot] for step in steps],
        )

    def observe_cost(self, seconds: float) -> None:
        """Tell the cost model what the last pass, and drafting from its logits, took."""
        rows, kv_len = self._last
        if rows:
            self._cost.observe(rows, kv_len, seconds)

    def _unread(self, steps: list[Step], *, is_shared: bool) -> tuple[list[Row], list[int]]:
        """The rows to read, and the indices of the steps that have caught up with them."""
        max_rows = self._shared_rows if is_shared else self._max_rows
        rows: list[Row] = []
        complete: list[int] = []
        reading: list[tuple[Step, int]] = []
        for index in sorted(range(len(steps)), key=lambda index: self.catch_up(steps[index])):
            step = steps[index]
            if not self._begin(step, reading):
                continue
            slot, first = step.sequence.slot, self.cache.end(step.sequence.slot)
            end = min(step.length, first + max_rows - len(rows))
            for position, token in zip(range(first, end), step.tokens_from(first), strict=False):
                rows.append(Row(token, slot, position, position == step.length - 1))
            reading.append((step, end))
            if end == step.length:
                complete.append(index)
        return rows, complete

    def _begin(self, step: Step, reading: list[tuple[Step, int]]) -> bool:
        """Set where a sequence is read from; False if it waits, since most of it is read for another in this pass.

        Args:
            step: to be read.
            reading: the steps that are read in this pass, and to which position.
        """
        cache, sequence, slot = self.cache, step.sequence, step.sequence.slot
        if step.length - cache.end(slot) > 2:
            # The last token is always read: its logits are those that are drafted from.
            prefixes = cache.prefixes(sequence.info.owner, sequence.tokens, len(sequence.tokens) - 1)
            prefixes[slot] = cache.end(slot)
            source = max(range(cache.n_slots), key=lambda other: (prefixes[other], other == slot))
            soon = max((self._shared(step, other, end) for other, end in reading), default=0)
            is_near = prefixes[source] >= step.length - self._window
            if worth_waiting(sequence, prefixes[source] if is_near else step.length - self._first(step), soon):
                return False
            if source != slot and is_near:
                cache.copy(source, slot, prefixes[source])
        if self._begins_anew(step):
            cache.restart(slot, step.length - self._first(step))
        return True

    def _begins_anew(self, step: Step) -> bool:
        """Whether its slot has too little of a sequence, or no room for it."""
        return step.length - self.cache.end(step.sequence.slot) > self._window or self._is_full(step)

    def _first(self, step: Step) -> int:
        """How far before the end it begins: nearer in a longer sequence, of which its last tokens tell less.

        Half of the window is the least (benchmarks/decisions/tried.md).
        """
        return min(step.length, max(self._window // 2, self._window**2 // step.length))

    def _is_full(self, step: Step) -> bool:
        """Whether a slot has no room for what its sequence has become."""
        return step.length - self.cache.start(step.sequence.slot) > self._context_length

    def _shared(self, step: Step, other: Step, end: int) -> int:
        """How many leading tokens of a step another one will share with it once it is read up to a position."""
        if step.sequence.info.owner != other.sequence.info.owner:
            return 0
        shared = common_prefix(step.sequence.tokens[:-1], other.sequence.tokens, end)
        return shared if shared > self.cache.start(other.sequence.slot) else 0

    def _fitted(self, logits: FloatArray) -> FloatArray:
        """A row as wide as the target's: models of one family pad their vocabularies differently."""
        missing = self._vocabulary - logits.size
        return np.pad(logits, (0, missing), constant_values=-np.inf) if missing > 0 else logits[: self._vocabulary]
