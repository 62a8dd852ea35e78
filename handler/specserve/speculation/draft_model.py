"""The draft model: its KV cache of each sequence, and its logits of the next token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from specserve.engine.base import Engine, FloatArray, Row
from specserve.errors import DraftError, EngineError
from specserve.sequence import Sequence, common_prefix, worth_waiting
from specserve.speculation.cost import Cost


class PassResult(NamedTuple):
    """The result of a pass, by index of the sequences that were asked for.

    Args:
        logits: after the last token of a sequence, shape (vocabulary of the target,); none for a sequence that has
            not caught up yet. Overwritten by the next pass.
        n_read: how many tokens of each sequence were read.
    """

    logits: dict[int, FloatArray]
    n_read: list[int]


class DraftedSequence(NamedTuple):
    """A sequence and the draft tokens after it."""

    sequence: Sequence
    drafts: list[int]

    def __len__(self) -> int:
        """Number of tokens, draft tokens included."""
        return len(self.sequence.tokens) + len(self.drafts)


class DraftModel:
    """A small model that drafts tokens.

    It need not read a whole sequence, since its drafts are verified: where it lags by more than `window` tokens it
    begins anew that far before the end, with positions of its own: with a window of 256 and 1,000 tokens `draft_start`
    is 744, and token 744 has position 0 in its cache. At most `max_rows` tokens are read in a pass, the
    shortest catch-up first; a prefix that another slot holds is copied.

    Args:
        engine: the model.
        cost: of its passes.
        window: the longest catch-up, in tokens.
        max_rows: the most tokens of a pass; at least two for every slot, so that a sequence that has caught up is
            never delayed.
        vocabulary: the width of the target's rows.
        context_length: that the small model was trained for, in tokens.
    """

    def __init__(
        self, engine: Engine, cost: Cost, *, window: int, max_rows: int, vocabulary: int, context_length: int
    ) -> None:
        self._engine = engine
        self._cost = cost
        self._window = min(window, context_length // 2)
        self._max_rows = min(max(max_rows, 2 * engine.n_slots), engine.max_rows)
        self._vocabulary = vocabulary
        self._context_length = context_length
        # By slot, the sequence whose tokens its cache holds: a running or a finished one.
        self._by_slot: dict[int, Sequence] = {}
        # Rows and KV length of the last pass.
        self._last = 0, 0

    def kv_len(self, slots: Iterable[int]) -> int:
        """How many tokens of its KV cache a row of one of these slots attends to."""
        return self._engine.kv_len(slots)

    def pending(self, drafted: DraftedSequence) -> int:
        """How many tokens it reads before it can draft the next one."""
        return min(len(drafted) - drafted.sequence.draft_end, self._window)

    def can_read(self, drafted: DraftedSequence) -> bool:
        """Whether its vocabulary has every token that it would have to read."""
        tokens = drafted.sequence.tokens
        begin = len(drafted) - self.pending(drafted)
        return max((*tokens[begin:], *drafted.drafts[max(0, begin - len(tokens)) :]), default=0) < self._engine.width

    def read(self, sequences: list[DraftedSequence]) -> PassResult:
        """Catch up with these sequences in one pass.

        Raises:
            DraftError: the pass failed, or the cache of another slot could not be copied.
        """
        try:
            rows, complete = self._unread(sequences)
            self._last = len(rows), self.kv_len({row.slot for row in rows})
            if not rows:
                return PassResult({}, [0] * len(sequences))
            logits = self._engine.forward(rows)
        except EngineError as error:
            raise DraftError(f"The draft model failed: {error}") from error
        if not np.isfinite(logits.max(initial=0.0)):
            raise DraftError("The draft model failed: its logits are not finite.")
        by_slot = Counter(row.slot for row in rows)
        return PassResult(
            {index: self._fitted(row) for index, row in zip(complete, logits, strict=True)},
            [by_slot[drafted.sequence.slot] for drafted in sequences],
        )

    def observe_cost(self, seconds: float) -> None:
        """Tell the cost model what the last pass, and drafting from its logits, took."""
        rows, kv_len = self._last
        if rows:
            self._cost.observe(rows, kv_len, seconds)

    def _unread(self, sequences: list[DraftedSequence]) -> tuple[list[Row], list[int]]:
        """The rows to read, and the indices of the sequences that have caught up with them."""
        rows: list[Row] = []
        complete: list[int] = []
        reading: dict[int, int] = {}
        for index in sorted(range(len(sequences)), key=lambda index: self.pending(sequences[index])):
            drafted = sequences[index]
            sequence = drafted.sequence
            if not self._begin(drafted, reading):
                continue
            reading[sequence.slot] = sequence.draft_end
            first = sequence.draft_end
            end = min(len(drafted), first + self._max_rows - len(rows))
            tokens = [*sequence.tokens[first:], *drafted.drafts[max(0, first - len(sequence.tokens)) :]]
            for token, position in zip(tokens, range(first, end), strict=False):
                rows.append(Row(token, sequence.slot, position - sequence.draft_start, position == len(drafted) - 1))
            sequence.draft_end = end
            if end == len(drafted):
                complete.append(index)
        return rows, complete

    def _begin(self, drafted: DraftedSequence, reading: dict[int, int]) -> bool:
        """Set where a sequence is read from; False if it waits, since most of it is read for another in this pass.

        Args:
            drafted: the sequence to be read.
            reading: by slot that is read in this pass, what was cached before.
        """
        sequence = drafted.sequence
        earliest = len(drafted) - self._window
        if len(drafted) - sequence.draft_end > 2:
            slot, cached, soon = self._best_source(sequence, reading)
            if worth_waiting(sequence, max(cached, earliest), soon):
                return False
            if slot != sequence.slot and cached >= earliest:
                start = self._by_slot[slot].draft_start
                self._engine.copy(slot, sequence.slot, cached - start)
                sequence.draft_start, sequence.draft_end = start, cached
        if sequence.draft_end < earliest or len(drafted) - sequence.draft_start > self._context_length:
            self._engine.truncate(sequence.slot, 0)
            sequence.draft_start = sequence.draft_end = max(0, earliest)
        return True

    def _best_source(self, sequence: Sequence, reading: dict[int, int]) -> tuple[int, int, int]:
        """The slot with the longest prefix of a sequence that is cached now, and its length now and after this pass."""
        slot, cached, soon = sequence.slot, sequence.draft_end, sequence.draft_end
        for other_slot, other in self._by_slot.items():
            if other_slot == sequence.slot:
                continue
            # The last token is always read: its logits are those that are drafted from.
            shared = common_prefix(other.tokens, sequence.tokens, min(other.draft_end, len(sequence.tokens) - 1))
            if shared <= other.draft_start:
                # Its cache begins after the common prefix.
                continue
            soon = max(soon, shared)
            now = min(shared, reading.get(other_slot, shared))
            if now > max(cached, other.draft_start):
                slot, cached = other_slot, now
        return slot, cached, soon

    def _fitted(self, logits: FloatArray) -> FloatArray:
        """A row as wide as the target's: models of one family pad their vocabularies differently."""
        missing = self._vocabulary - logits.size
        return np.pad(logits, (0, missing), constant_values=-np.inf) if missing > 0 else logits[: self._vocabulary]

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Only the first `length` tokens are decided: truncate the cache to them."""
        sequence.truncate_draft(length)
        self._engine.truncate(sequence.slot, sequence.draft_end - sequence.draft_start)
        self._by_slot[sequence.slot] = sequence
