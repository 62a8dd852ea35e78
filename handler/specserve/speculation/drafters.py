"""Where guesses come from: a drafter proposes tokens for many sequences, and says what it sampled them from."""

from __future__ import annotations

import logging
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from specserve.engine.base import Engine, FloatArray, Row
from specserve.errors import ConstraintError, DraftError, EngineError
from specserve.sequence import DrafterName, Sequence
from specserve.speculation.distribution import one_hot
from specserve.speculation.noise import Noise
from specserve.speculation.rejection import RULES
from specserve.speculation.shaping import distribution_behind

logger = logging.getLogger(__name__)

# A row of what the draft model must first read takes about half of what a draft saves.
_READ_PER_TOKEN = 2


class Wish(NamedTuple):
    """A sequence that may be given up to `gamma` drafts, and the noise of its round."""

    sequence: Sequence
    gamma: int
    noise: Noise


class Proposal(NamedTuple):
    """Drafted tokens, row for row the distributions they were sampled from, and whose they are."""

    tokens: list[int]
    q: list[FloatArray]
    drafter: str = "none"


class Drafter(Protocol):
    """A source of drafts.

    What it proposes for a sequence may depend on decided texts and on the drafts it sampled itself, never on what
    another drafter proposed: rules accept a token because of the distribution it was drawn from.
    """

    name: ClassVar[DrafterName]

    def propose(self, wishes: list[Wish]) -> list[Proposal]:
        """At most `gamma` drafts for each wish, in order; none is an answer.

        Raises:
            DraftError: the source is broken and must not be asked again; no text has changed.
        """

    def keep(self, sequence: Sequence, length: int) -> None:
        """The first `length` tokens of `sequence` are decided; whatever the drafter holds beyond is void."""


class Drafters:
    """Asks drafters in turn: each may serve the wishes that those before it left without drafts."""

    def __init__(self, *drafters: Drafter) -> None:
        self._drafters = list(drafters)

    def propose(self, wishes: list[Wish]) -> list[Proposal]:
        """At most `gamma` drafts for each wish, in order, from one drafter each.

        A drafter that fails is asked no more.
        """
        proposals = [Proposal([], []) for _ in wishes]
        for drafter in list(self._drafters):
            mine = [i for i, wish in enumerate(wishes) if not proposals[i].tokens and _may_ask(drafter, wish)]
            if not mine:
                continue
            try:
                given = drafter.propose([wishes[i] for i in mine])
            except DraftError as error:
                logger.error("specserve: %s Decoding goes on without it.", error)
                self._drafters.remove(drafter)
                continue
            for i, proposal in zip(mine, given, strict=True):
                proposals[i] = proposal
        return proposals

    def keep(self, sequence: Sequence, length: int) -> None:
        """Tell every drafter what is decided."""
        for drafter in self._drafters:
            drafter.keep(sequence, length)


def worth_waiting(sequence: Sequence, cached: int, soon: int) -> bool:
    """Whether a good part of what must be read of a text is being read for another one that begins alike."""
    return 4 * (soon - cached) > len(sequence.tokens) - cached


def _may_ask(drafter: Drafter, wish: Wish) -> bool:
    return wish.gamma > 0 and wish.sequence.speculation.drafter in {None, drafter.name}


class PredictionDrafter:
    """Drafts what the client predicted: the part of its text that follows what the answer ends with.

    Args:
        vocabulary: the width of the target's rows.
    """

    name: ClassVar[DrafterName] = "prediction"

    # The longest end of the answer that is looked for, then shorter ones; a single token says too little.
    _ENDS = (16, 8, 4, 2)
    # How far from where the answer stands it is looked for, in tokens.
    _WINDOW = 1024

    def __init__(self, *, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def propose(self, wishes: list[Wish]) -> list[Proposal]:
        """The next tokens of each prediction, with certainty for q."""
        return [self._proposal(wish) for wish in wishes]

    def _proposal(self, wish: Wish) -> Proposal:
        tokens = self._continuation(wish.sequence, wish.gamma)
        return Proposal(tokens, [one_hot(token, self._vocabulary) for token in tokens], self.name)

    def _continuation(self, sequence: Sequence, gamma: int) -> list[int]:
        start = max(0, sequence.generated - self._WINDOW)
        near = sequence.prediction[start : sequence.generated + self._WINDOW]
        for length in self._ENDS if sequence.generated > 1 else (1,):
            if length > min(sequence.generated, near.size):
                continue
            end = np.array(sequence.tokens[-length:])
            places = np.flatnonzero((np.lib.stride_tricks.sliding_window_view(near, length) == end).all(axis=1))
            if places.size:
                # Among equals the one nearest to where the answer stands, since most of it is as predicted.
                behind = start + places + length
                closest = int(behind[np.argmin(np.abs(behind - sequence.generated))])
                return [int(token) for token in sequence.prediction[closest : closest + gamma]]
        return []

    def keep(self, sequence: Sequence, length: int) -> None:
        """Nothing is held."""


class ModelDrafter:
    """Drafts from a small model, one forward pass a depth for all sequences together.

    What the small model has not read yet is fed first, the shortest arrears first and at most `max_rows` tokens a
    round over all sequences: a long prompt is read over several rounds, in which its sequence gets no drafts. A text
    that begins as another slot's does is not read again.

    Args:
        max_rows: at least two for every slot, so that whoever has read its prompt is never held up.
        vocabulary: the width of the target's rows.
        context_length: how long a text the small model was trained to read; behind it, it drafts no more.
    """

    name: ClassVar[DrafterName] = "model"

    def __init__(self, engine: Engine, *, max_rows: int, vocabulary: int, context_length: int) -> None:
        self._engine = engine
        self._max_rows = min(max(max_rows, 2 * engine.n_slots), engine.max_rows)
        self._vocabulary = vocabulary
        self._context_length = context_length
        self._readers: dict[int, Sequence] = {}

    def propose(self, wishes: list[Wish]) -> list[Proposal]:
        """At most `gamma` drafts for each wish; see `Drafter.propose`."""
        proposals = [Proposal([], [], self.name) for _ in wishes]
        rows, active = self._catch_up(wishes)
        while rows:
            try:
                logits = self._engine.forward(rows)
                drafting = [
                    index
                    for row, index in zip(logits, active, strict=True)
                    if self._draft(row, wishes[index], proposals[index])
                ]
            except EngineError as error:
                raise DraftError(f"The draft model failed: {error}") from error
            active = [index for index in drafting if len(proposals[index].tokens) < wishes[index].gamma]
            rows = []
            for index in active:
                sequence = wishes[index].sequence
                rows.append(Row(proposals[index].tokens[-1], sequence.slot, sequence.draft_cached, wants_logits=True))
                sequence.draft_cached += 1
        return proposals

    def _draft(self, logits: FloatArray, wish: Wish, proposal: Proposal) -> bool:
        """Sample one more draft from a row of the small model's logits; False where the request leaves it none."""
        if not np.isfinite(logits.max()):
            raise EngineError("its logits are not finite.")
        tokens, q, _ = proposal
        sample = RULES[wish.sequence.speculation.verification].sample
        try:
            row = distribution_behind(self._fitted(logits), wish.sequence, tokens)
        except (FloatingPointError, ConstraintError):
            # This text's grammar, not the model: the target's row of the place will say what is to be done.
            return False
        q.append(row)
        tokens.append(sample(row, len(tokens), wish.noise))
        return True

    def _catch_up(self, wishes: list[Wish]) -> tuple[list[Row], list[int]]:
        """Rows of what the draft has not read, and which wishes have read all with them."""
        rows: list[Row] = []
        ready: list[int] = []
        reading: dict[int, int] = {}
        for index in sorted(range(len(wishes)), key=lambda index: wishes[index].sequence.draft_pending):
            sequence, gamma, _ = wishes[index]
            if not self._can_read(sequence, gamma) or not self._borrow(sequence, reading):
                continue
            reading[sequence.slot] = sequence.draft_cached
            end = min(len(sequence.tokens), sequence.draft_cached + self._max_rows - len(rows))
            complete = end == len(sequence.tokens)
            for position in range(sequence.draft_cached, end):
                wants = complete and position == end - 1
                rows.append(Row(sequence.tokens[position], sequence.slot, position, wants))
            sequence.draft_cached = end
            if complete:
                ready.append(index)
        return rows, ready

    def _borrow(self, sequence: Sequence, reading: dict[int, int]) -> bool:
        """Take over what another slot has read of this text; False if one reads more of it in this very pass.

        Args:
            sequence: the text to catch up with.
            reading: by slot, what was read before this pass.
        """
        if sequence.draft_pending <= _READ_PER_TOKEN:
            return True
        source, most, soon = -1, sequence.draft_cached, sequence.draft_cached
        for slot, other in self._readers.items():
            # The last token is always fed: its logits are the first that are drafted from.
            shared = other.common_prefix(sequence.tokens, min(other.draft_cached, len(sequence.tokens) - 1))
            if slot == sequence.slot:
                continue
            soon = max(soon, shared)
            if min(shared, reading.get(slot, shared)) > most:
                source, most = slot, min(shared, reading.get(slot, shared))
        if worth_waiting(sequence, most, soon):
            return False
        if source >= 0:
            self._engine.copy(source, sequence.slot, most)
            sequence.draft_cached = most
        return True

    def _can_read(self, sequence: Sequence, gamma: int) -> bool:
        """Whether the text fits the small model, is worth reading, and holds no token that the model never heard of."""
        fits = len(sequence.tokens) + gamma <= self._context_length
        pays = sequence.draft_pending <= _READ_PER_TOKEN * sequence.remaining
        return fits and pays and max(sequence.tokens[sequence.draft_cached :]) < self._engine.width

    def _fitted(self, logits: FloatArray) -> FloatArray:
        """A row of the draft's logits as wide as the target's: models of one family pad differently."""
        missing = self._vocabulary - logits.size
        return np.pad(logits, (0, missing), constant_values=-np.inf) if missing > 0 else logits[: self._vocabulary]

    def keep(self, sequence: Sequence, length: int) -> None:
        """Cut the small model's cache back to what was decided."""
        sequence.draft_cached = min(sequence.draft_cached, length)
        self._engine.cut(sequence.slot, sequence.draft_cached)
        self._readers[sequence.slot] = sequence
