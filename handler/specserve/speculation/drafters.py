"""Where guesses come from: a drafter proposes tokens for many sequences, and says what it sampled them from."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from specserve.engine.base import Engine, FloatArray, Row
from specserve.errors import DraftError, EngineError
from specserve.sequence import Sequence
from specserve.speculation.noise import Noise
from specserve.speculation.rejection import RULES
from specserve.speculation.shaping import distribution_behind


class Wish(NamedTuple):
    """A sequence that may be given up to `gamma` drafts, and the noise of its round."""

    sequence: Sequence
    gamma: int
    noise: Noise


class Proposal(NamedTuple):
    """Drafted tokens and, row for row, the distributions they were sampled from."""

    tokens: list[int]
    q: list[FloatArray]


class Drafter(Protocol):
    """A source of drafts."""

    def propose(self, wishes: list[Wish]) -> list[Proposal]:
        """At most `gamma` drafts for each wish, in order; none is an answer.

        Raises:
            DraftError: the source is broken and must not be asked again; no text has changed.
        """

    def keep(self, sequence: Sequence, length: int) -> None:
        """The first `length` tokens of `sequence` are decided; whatever the drafter holds beyond is void."""


class ModelDrafter:
    """Drafts from a small model, one forward pass a depth for all sequences together.

    What the small model has not read yet is fed first, the shortest arrears first and at most `max_rows` tokens a
    round over all sequences: a long prompt is read over several rounds, in which its sequence gets no drafts.

    Args:
        max_rows: at least two for every slot, so that whoever has read its prompt is never held up.
        vocabulary: the width of the target's rows.
        context_length: how long a text the small model was trained to read; behind it, it drafts no more.
    """

    def __init__(self, engine: Engine, *, max_rows: int, vocabulary: int, context_length: int) -> None:
        self._engine = engine
        self._max_rows = min(max(max_rows, 2 * engine.n_slots), engine.max_rows)
        self._vocabulary = vocabulary
        self._context_length = context_length

    def propose(self, wishes: list[Wish]) -> list[Proposal]:
        """At most `gamma` drafts for each wish; see `Drafter.propose`."""
        proposals = [Proposal([], []) for _ in wishes]
        rows, active = self._catch_up(wishes)
        while rows:
            try:
                logits = self._engine.forward(rows)
                for row, index in zip(logits, active, strict=True):
                    self._draft(row, wishes[index], proposals[index])
            except (EngineError, FloatingPointError) as error:
                raise DraftError(f"The draft model failed: {error}") from error
            active = [index for index in active if len(proposals[index].tokens) < wishes[index].gamma]
            rows = []
            for index in active:
                sequence = wishes[index].sequence
                rows.append(Row(proposals[index].tokens[-1], sequence.slot, sequence.draft_cached, wants_logits=True))
                sequence.draft_cached += 1
        return proposals

    def _draft(self, logits: FloatArray, wish: Wish, proposal: Proposal) -> None:
        """Sample one more draft from a row of the small model's logits."""
        tokens, q = proposal
        sample = RULES[wish.sequence.speculation.verification].sample
        q.append(distribution_behind(self._fitted(logits), wish.sequence, tokens))
        tokens.append(sample(q[-1], len(tokens), wish.noise))

    def _catch_up(self, wishes: list[Wish]) -> tuple[list[Row], list[int]]:
        """Rows of what the draft has not read, and which wishes have read all with them."""
        rows: list[Row] = []
        ready: list[int] = []
        for index in sorted(range(len(wishes)), key=lambda index: wishes[index].sequence.draft_pending):
            sequence, gamma, _ = wishes[index]
            if gamma == 0 or not self._can_read(sequence, gamma):
                continue
            end = min(len(sequence.tokens), sequence.draft_cached + self._max_rows - len(rows))
            complete = end == len(sequence.tokens)
            for position in range(sequence.draft_cached, end):
                wants = complete and position == end - 1
                rows.append(Row(sequence.tokens[position], sequence.slot, position, wants))
            sequence.draft_cached = end
            if complete:
                ready.append(index)
        return rows, ready

    def _can_read(self, sequence: Sequence, gamma: int) -> bool:
        """Whether the text fits the small model, and holds no token of the target's that it has never heard of."""
        fits = len(sequence.tokens) + gamma <= self._context_length
        return fits and max(sequence.tokens[sequence.draft_cached :]) < self._engine.width

    def _fitted(self, logits: FloatArray) -> FloatArray:
        """A row of the draft's logits as wide as the target's: models of one family pad differently."""
        missing = self._vocabulary - logits.size
        return np.pad(logits, (0, missing), constant_values=-np.inf) if missing > 0 else logits[: self._vocabulary]

    def keep(self, sequence: Sequence, length: int) -> None:
        """Cut the small model's cache back to what was decided."""
        sequence.draft_cached = min(sequence.draft_cached, length)
        self._engine.cut(sequence.slot, sequence.draft_cached)


class NoDrafter:
    """Proposes nothing: plain decoding."""

    def propose(self, wishes: list[Wish]) -> list[Proposal]:
        """No drafts for anyone."""
        return [Proposal([], []) for _ in wishes]

    def keep(self, sequence: Sequence, length: int) -> None:
        """Nothing is held."""
