"""A round's drafts: token by token from the cheapest source that has something to say, as far as it pays."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from specserve.engine.base import FloatArray
from specserve.errors import ConstraintError, DraftError
from specserve.sampling.distribution import argmax, confidence, is_greedy, one_hot, to_distribution
from specserve.sampling.logits import shaped_behind
from specserve.sampling.noise import Noise
from specserve.sequence import Sequence
from specserve.speculation.controller import Controller
from specserve.speculation.draft_model import DraftModel, DraftText
from specserve.speculation.gamma import Prices, Prospect, guess_length, model_steps, worth_keeping
from specserve.speculation.proposers import Guesser
from specserve.speculation.rejection import RULES

logger = logging.getLogger(__name__)


class Wish(NamedTuple):
    """A sequence that may be given up to `gamma` drafts, and the noise of its round."""

    sequence: Sequence
    gamma: int
    noise: Noise


class Draft(NamedTuple):
    """A drafted token, the distribution it was sampled from, its source, and how sure that was.

    The rule will keep it with probability `chance` if it keeps those before it; that is an estimate.
    """

    token: int
    q: FloatArray
    source: str
    confidence: float
    chance: float


class Thought(NamedTuple):
    """What a guesser would have begun the round with, and how sure it was: it shows how good it is, drafted or not."""

    token: int
    source: str
    confidence: float


@dataclass
class Proposal:
    """A sequence's drafts of one round, in the making: as they were drawn, and what is to become of them.

    Args:
        place: which of the round's texts it is.
        seconds: what the model's passes for it should have taken, its share of those that it had with others.
        reading_up: the part of them that is read for all rounds to come.
    """

    place: int
    seconds: float = 0.0
    reading_up: float = 0.0
    drafts: list[Draft] = field(default_factory=list)
    thoughts: list[Thought] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    reach: float = 1.0
    ended: bool = False

    def add(self, draft: Draft) -> None:
        """Draft one more token; it stays in the round whatever it is."""
        self.drafts.append(draft)
        self.tokens.append(draft.token)
        self.reach *= draft.chance

    @property
    def q(self) -> list[FloatArray]:
        """Draft for draft, the distributions that they were sampled from."""
        return [draft.q for draft in self.drafts]

    @property
    def sources(self) -> list[str]:
        """Draft for draft, where they come from."""
        return [draft.source for draft in self.drafts]


class Drafters:
    """All sources of drafts, and the controller that weighs them.

    Behind every draft the guessers are asked first, since they cost nothing; the model drafts where they have nothing
    to say, or nothing as good. A drawn token is never taken back, and whether a further one is drawn is decided
    before it is: the length of a proposal is a stopping time, which every rule of rejection.py allows.

    Args:
        controller: decides for sequences that adapt; the others take what they wish for.
        guessers: asked in this order, until one has something worth drafting.
        model: the draft model, where there is one.
        vocabulary: the width of the target's rows.
        clock: seconds, for what a draft of the model costs.
    """

    def __init__(
        self,
        controller: Controller,
        *guessers: Guesser,
        model: DraftModel | None = None,
        vocabulary: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.controller = controller
        self._guessers = guessers
        self._model = model
        self._vocabulary = vocabulary
        self._clock = clock

    @property
    def has_model(self) -> bool:
        """Whether there is a draft model, and it works."""
        return self._model is not None

    def propose(self, wishes: list[Wish], fed: list[int], kv_len: int, waiting: int = 0) -> list[Proposal]:
        """At most `gamma` drafts for each wish, in order.

        Args:
            wishes: the sequences of the round.
            fed: the rows of the target's pass without drafts, by wish.
            kv_len: how many tokens a row of that pass walks over.
            waiting: how many texts have not begun to be written.
        """
        proposals = [Proposal(place) for place in range(len(wishes))]
        drafting = [index for index, wish in enumerate(wishes) if wish.gamma > 0]
        if not drafting:
            return proposals
        held = self._model.kv_len if self._model else 0
        decoding = [index for index, wish in enumerate(wishes) if wish.sequence.generated]
        sequences, plain = [wishes[index].sequence for index in decoding], [fed[index] for index in decoding]
        prices = self.controller.prices(sequences, plain, (kv_len, held), waiting)
        rows = fed.copy()
        for index in drafting:
            self._guess(wishes[index], proposals[index], rows, prices)
        while self._model and (chosen := self._choose(wishes, proposals, rows, prices)):
            texts = [DraftText(wishes[index].sequence, proposals[index].tokens) for index in chosen]
            pending = [self._model.pending(text) for text in texts]
            begun = self._clock()
            try:
                reading = self._model.read(texts)
            except DraftError as error:
                logger.error("specserve: %s Decoding goes on without it.", error)
                self._model = None
                break
            read = sum(reading.rows)
            a_row = prices.draft(read) / read if read else 0.0
            for place, index in enumerate(chosen):
                if reading.rows[place]:
                    spent = a_row * reading.rows[place]
                    invested = self.controller.invest(wishes[index].sequence, pending[place], prices)
                    proposals[index].seconds += spent
                    proposals[index].reading_up += min(spent, invested)
                row = reading.logits.get(place)
                if row is None or not self._draw(row, wishes[index], proposals[index], rows, prices):
                    proposals[index].ended = True
                    continue
                rows[index] += 1
                self._guess(wishes[index], proposals[index], rows, prices)
            self._model.took(self._clock() - begun)
        return proposals

    def keep(self, sequence: Sequence, length: int) -> None:
        """The first `length` tokens of `sequence` are decided; whatever is held beyond is void."""
        if self._model:
            self._model.keep(sequence, length)

    def _guess(self, wish: Wish, proposal: Proposal, rows: list[int], prices: Prices) -> None:
        """Draft what the first guesser says that has anything worth a row, and count the rows."""
        room = wish.gamma - len(proposal.tokens)
        sequence = wish.sequence
        for guesser in self._guessers:
            if room <= 0 or sequence.speculation.drafter not in {None, guesser.name}:
                continue
            tokens, sure = guesser.guess(sequence, proposal.tokens, room)
            if not tokens:
                continue
            chances = [self.controller.chance(sequence, guesser.name, one) for one in sure]
            prospect, model = self._prospect(wish, proposal, prices)
            if sequence.speculation.adaptive:
                length = guess_length(prospect, chances, rows, prices, room=room, model=model)
            else:
                # So many drafts are wanted in any case; the model gives those that it is likelier to be right about.
                least = self.controller.hope(sequence) if model else 0.0
                length = next((i for i, chance in enumerate(chances) if chance < least), len(chances))
            for token, one, chance in zip(tokens[:length], sure, chances, strict=False):
                proposal.add(Draft(token, one_hot(token, self._vocabulary), guesser.name, one, chance))
            if length:
                rows[proposal.place] += length
                return
            if not proposal.tokens:
                proposal.thoughts.append(Thought(tokens[0], guesser.name, sure[0]))

    def _choose(self, wishes: list[Wish], proposals: list[Proposal], rows: list[int], prices: Prices) -> list[int]:
        """Whose next token the model drafts in this step."""
        fixed: list[int] = []
        adaptive: list[tuple[int, Prospect]] = []
        for index, (wish, proposal) in enumerate(zip(wishes, proposals, strict=True)):
            if proposal.ended or len(proposal.tokens) >= wish.gamma:
                continue
            prospect, may = self._prospect(wish, proposal, prices)
            if not may:
                continue
            if wish.sequence.speculation.adaptive:
                adaptive.append((index, prospect))
            else:
                fixed.append(index)
        longer = [count + (index in fixed) for index, count in enumerate(rows)]
        steps = model_steps([prospect for _, prospect in adaptive], longer, prices)
        return sorted([*fixed, *(adaptive[place][0] for place in steps.chosen)])

    def _prospect(self, wish: Wish, proposal: Proposal, prices: Prices) -> tuple[Prospect, bool]:
        """What is known of a sequence at this point, and whether the model may draft for it."""
        sequence = wish.sequence
        room = wish.gamma - len(proposal.tokens)
        if self._model is None or sequence.speculation.drafter not in {None, "model"}:
            return Prospect(proposal.place, proposal.reach, 0.0, 0, room), False
        text = DraftText(sequence, proposal.tokens)
        pending = self._model.pending(text)
        may = self._model.knows(text)
        if not sequence.speculation.adaptive:
            prospect = Prospect(proposal.place, proposal.reach, 1.0, pending, room)
            return prospect, may
        rows, arrears = self.controller.arrears(sequence, pending, prices)
        hope = self.controller.hope(sequence, pending)
        drafted = sum(source == "model" for source in proposal.sources)
        room = max(0, min(room, self.controller.room(sequence, wish.gamma) - drafted))
        prospect = Prospect(proposal.place, proposal.reach, hope, rows, room, arrears)
        return prospect, may and self.controller.may_draft(sequence, pending, prices)

    def _draw(self, logits: FloatArray, wish: Wish, proposal: Proposal, rows: list[int], prices: Prices) -> bool:
        """Draw a draft from a row of the model's logits; False where the request leaves it none, or it does not pay."""
        sequence = wish.sequence
        try:
            shaped = shaped_behind(logits, sequence, proposal.tokens)
            best = argmax(shaped)
        except (FloatingPointError, ConstraintError):
            # This text's grammar, not the model: the target's row of the place will say what is to be done.
            return False
        sure = confidence(shaped)
        chance = self.controller.chance(sequence, "model", sure)
        if sequence.speculation.adaptive:
            prospect, _ = self._prospect(wish, proposal, prices)
            if not worth_keeping(prospect, chance, rows, prices):
                return False
        if is_greedy(sequence.sampling):
            token, q = best, one_hot(best, self._vocabulary)
        else:
            q = to_distribution(shaped, sequence.sampling)
            token = RULES[sequence.speculation.verification].sample(q, len(proposal.tokens), wish.noise)
        proposal.add(Draft(token, q, "model", sure, chance))
        return True
