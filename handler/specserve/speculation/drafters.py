"""Where guesses come from: a drafter proposes tokens for many sequences, and says what it sampled them from."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from specserve.engine.base import Engine, FloatArray, Row
from specserve.errors import DraftError, EngineError
from specserve.sequence import Sequence
from specserve.speculation.distribution import to_distribution
from specserve.speculation.noise import Noise
from specserve.speculation.rejection import RULES


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

    What the small model has not read yet is fed first, at most `max_rows` tokens a round over all sequences,
    so a long prompt is read over several rounds, in which its sequence gets no drafts.
    """

    def __init__(self, engine: Engine, *, max_rows: int, vocabulary: int) -> None:
        self._engine = engine
        self._max_rows = min(max_rows, engine.max_rows)
        self._vocabulary = vocabulary

    def propose(self, wishes: list[Wish]) -> list[Proposal]:
        """At most `gamma` drafts for each wish; see `Drafter.propose`."""
        proposals = [Proposal([], []) for _ in wishes]
        rows, active = self._catch_up(wishes)
        while rows:
            try:
                logits = self._engine.forward(rows)
            except EngineError as error:
                raise DraftError(f"The draft model failed: {error}") from error
            rows = []
            still_active = []
            for row, index in zip(logits, active, strict=True):
                sequence, gamma, noise = wishes[index]
                tokens, q = proposals[index]
                q.append(to_distribution(self._fitted(row), sequence.sampling))
                sample = RULES[sequence.speculation.verification].sample
                tokens.append(sample(q[-1], len(tokens), noise))
                if len(tokens) < gamma:
                    rows.append(Row(tokens[-1], sequence.slot, sequence.draft_cached, wants_logits=True))
                    sequence.draft_cached += 1
                    still_active.append(index)
            active = still_active
        return proposals

    def _catch_up(self, wishes: list[Wish]) -> tuple[list[Row], list[int]]:
        """Rows of what the draft has not read, and which wishes have read all with them."""
        rows: list[Row] = []
        ready: list[int] = []
        for index, (sequence, gamma, _) in enumerate(wishes):
            if gamma == 0:
                continue
            if max(sequence.tokens[sequence.draft_cached :]) >= self._engine.width:
                continue  # a token of the target's that the small model has never heard of
            end = min(len(sequence.tokens), sequence.draft_cached + self._max_rows - len(rows))
            complete = end == len(sequence.tokens)
            for position in range(sequence.draft_cached, end):
                wants = complete and position == end - 1
                rows.append(Row(sequence.tokens[position], sequence.slot, position, wants))
            sequence.draft_cached = end
            if complete:
                ready.append(index)
        return rows, ready

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
