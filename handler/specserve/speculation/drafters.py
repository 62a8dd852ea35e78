"""A round's drafts: what the free proposers offer, then tokens of the draft model, as far as each pays.

After every token of the draft model the proposers (proposers.py) are asked again, so one draft may mix drafters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from specserve.errors import ConstraintError, DraftError, MaskDeferred
from specserve.sampling.distribution import FloatArray, confidence, is_greedy, one_hot, to_distribution
from specserve.sampling.logits import process_logits
from specserve.sampling.noise import Noise
from specserve.sequence import DrafterName, Sequence
from specserve.speculation.controller import (
    SHORT_CATCH_UP,
    Candidate,
    Controller,
    RoundCosts,
    choose_for_model,
    offer_length,
)
from specserve.speculation.draft_model import DraftedSequence, DraftModel
from specserve.speculation.proposers import Proposer
from specserve.speculation.rejection import RULES

logger = logging.getLogger(__name__)


class Draft(NamedTuple):
    """A draft token, the distribution q it was sampled from, its drafter, and the drafter's confidence there.

    Confidence is a model's largest probability at temperature 1; other drafters estimate how likely the token is right.
    """

    token: int
    q: FloatArray
    drafter: DrafterName
    confidence: float


class Refused(NamedTuple):
    """The first token of an offer for a round's first position, nothing of which was drafted.

    p_0 shows all the same if it was right, so its drafter learns.
    """

    token: int
    drafter: DrafterName
    confidence: float


@dataclass
class Proposal:
    """The drafts of one sequence in one round.

    Args:
        sequence: that they follow.
        max_drafts: the most that it may have.
        noise: the random numbers of this round.
        drafts: in order.
        refused: one for each drafter whose offer was refused.
        reached: the estimated probability that all drafts are accepted.
        model_may_pay: whether tokens of the draft model would be worth their time if all were accepted; always in mode
            fixed, which does not ask.
        ended: whether the draft model has nothing more to add.
        draft_model_seconds: the sequence's part of the draft model's passes, by the cost model.
        long_catch_up_seconds: the part of these in which the model read more than SHORT_CATCH_UP tokens.
        deferred: whether it comes from an earlier round that could not verify it to its end; nothing is added.
    """

    sequence: Sequence
    max_drafts: int
    noise: Noise
    drafts: list[Draft] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    reached: float = 1.0
    model_may_pay: bool = True
    ended: bool = False
    draft_model_seconds: float = 0.0
    long_catch_up_seconds: float = 0.0
    deferred: bool = False

    def add(self, draft: Draft, acceptance: float) -> None:
        """Draft one more token; it stays in the round whatever it is."""
        self.drafts.append(draft)
        self.reached *= acceptance

    @property
    def remaining(self) -> int:
        """How many more tokens may be drafted."""
        return self.max_drafts - len(self.drafts)

    @property
    def drafted(self) -> DraftedSequence:
        """The sequence with the draft tokens after it."""
        return DraftedSequence(self.sequence, self.tokens)

    @property
    def tokens(self) -> list[int]:
        """The draft tokens, in order."""
        return [draft.token for draft in self.drafts]

    @property
    def q(self) -> list[FloatArray]:
        """The distributions that the drafts were sampled from, in order."""
        return [draft.q for draft in self.drafts]

    @property
    def drafted_by(self) -> list[DrafterName]:
        """The drafters of the drafts, in order."""
        return [draft.drafter for draft in self.drafts]


class Drafters:
    """All drafters, and the controller that weighs them.

    The proposers are asked first, since they cost nothing; the model drafts where they have nothing to propose, or
    nothing as good. A drawn token is never taken back, and whether a further one is drawn is decided before it is: the
    length of a proposal is a stopping time, which every rule of rejection.py allows.

    Args:
        controller: decides for sequences in mode `auto`; the others take what they ask for.
        proposers: asked in this order, until one has something worth drafting.
        model: the draft model, where there is one.
        vocabulary: the width of the target's logits.
        clock: seconds, for the cost of the draft model's passes.
    """

    def __init__(
        self,
        controller: Controller,
        *proposers: Proposer,
        model: DraftModel | None = None,
        vocabulary: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.controller = controller
        self._proposers = proposers
        self._model = model
        self._vocabulary = vocabulary
        self._clock = clock

    @property
    def has_model(self) -> bool:
        """Whether there is a draft model, and it works."""
        return self._model is not None

    def draft_kv_len(self, sequences: Iterable[Sequence]) -> int:
        """How many tokens of its KV cache a row of these attends to in the draft model; 0 without a model."""
        return self._model.kv_len(sequence.slot for sequence in sequences) if self._model else 0

    def defer(self, proposal: Proposal) -> None:
        """Keep a proposal that a round could not verify to its end for the sequence's next round (see round.py)."""
        proposal.deferred = True
        proposal.sequence.states[self] = proposal

    def deferred_tokens(self, sequence: Sequence) -> int | None:
        """The number of draft tokens that a sequence has to verify in its next round; None where it is free."""
        proposal: Proposal | None = sequence.states.get(self)
        return None if proposal is None else len(proposal.drafts)

    def begin(self, sequence: Sequence, max_drafts: int, noise: Noise) -> Proposal:
        """The proposal of a sequence for this round: the deferred one, or an empty one."""
        deferred: Proposal | None = sequence.states.pop(self, None)
        return deferred or Proposal(sequence, max_drafts, noise)

    def propose(self, proposals: list[Proposal], rows: int, kv_len: int, awaiting_first_token: int = 0) -> None:
        """Add drafts to the proposals, at most `max_drafts` each.

        Args:
            proposals: empty or deferred, one for each sequence of the round.
            rows: of the target's pass without drafts.
            kv_len: how many tokens a row of that pass attends to.
            awaiting_first_token: number of sequences in prefill or about to be.
        """
        drafting = [proposal for proposal in proposals if proposal.max_drafts > 0 and not proposal.deferred]
        if not drafting:
            return
        decoding = [proposal.sequence for proposal in proposals if proposal.sequence.decoding]
        costs = self.controller.costs(decoding, kv_len, self.draft_kv_len(decoding), awaiting_first_token)
        # Deferred proposals have drafts already.
        rows += sum(len(proposal.drafts) for proposal in proposals)
        # Beside many sequences not even certain drafts pay; what only the model needs is then not computed: 1 % of a
        # round of eight.
        auto = [proposal for proposal in drafting if proposal.sequence.speculation.is_auto]
        certain = [Candidate(reached=1.0, acceptance=1.0, first_rows=1, most=one.max_drafts) for one in auto]
        model_may_pay = self._model is not None and choose_for_model(certain, rows, costs)[1] > 0
        for proposal in auto:
            proposal.model_may_pay = model_may_pay
        for proposal in drafting:
            rows += self._propose_free(proposal, rows, costs)
        while self._model and (chosen := self._choose(drafting, rows, costs)):
            began = self._clock()
            try:
                logits, n_read = self._model.read([proposal.drafted for proposal in chosen])
            except DraftError as error:
                logger.error("specserve: %s Decoding goes on without it.", error)
                self._model = None
                return
            read = self._clock()
            seconds_per_row = costs.draft_pass(sum(n_read)) / max(1, sum(n_read))
            for index, proposal in enumerate(chosen):
                proposal.draft_model_seconds += seconds_per_row * n_read[index]
                if n_read[index] > SHORT_CATCH_UP:
                    # All but the row that it would have read anyway.
                    proposal.long_catch_up_seconds += seconds_per_row * (n_read[index] - 1)
                if index not in logits or not self._draw(logits[index], proposal):
                    proposal.ended = True
                    continue
                rows += 1
                rows += self._propose_free(proposal, rows, costs)
            # Drawing belongs to the cost of a pass, grammar masks do not.
            has_masks = any(proposal.sequence.constraint is not None for proposal in chosen)
            self._model.observe_cost((read if has_masks else self._clock()) - began)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Only the first `length` tokens of a sequence are decided; the draft model's cache forgets the rest."""
        if self._model:
            self._model.truncate(sequence, length)

    def _propose_free(self, proposal: Proposal, rows: int, costs: RoundCosts) -> int:
        """Draft what the first proposer offers that is worth verifying; returns how many tokens that is."""
        sequence = proposal.sequence
        if proposal.remaining <= 0:
            return 0
        for proposer in self._proposers:
            if sequence.speculation.drafter not in {None, proposer.name}:
                continue
            tokens, confidences = proposer.propose(sequence, proposal.tokens, proposal.remaining)
            if not tokens:
                continue
            by_model = self._candidate(proposal, costs)
            acceptance = self.controller.acceptance
            probabilities = [acceptance.of_token(sequence, proposer.name, stated) for stated in confidences]
            if sequence.speculation.is_auto:
                length = offer_length(proposal.reached, probabilities, by_model, rows, costs)
            else:
                # A fixed number of drafts is made in any case; the model makes those that it is likelier to get right.
                unlikely = (n for n, p in enumerate(probabilities) if by_model and p < by_model.acceptance)
                length = next(unlikely, len(tokens))
            for token, stated, probability in zip(tokens[:length], confidences, probabilities, strict=False):
                proposal.add(Draft(token, one_hot(token, self._vocabulary), proposer.name, stated), probability)
            if length:
                return length
            if not proposal.drafts:
                proposal.refused.append(Refused(tokens[0], proposer.name, confidences[0]))
        return 0

    def _choose(self, drafting: list[Proposal], rows: int, costs: RoundCosts) -> list[Proposal]:
        """The sequences whose next token the model drafts in this step."""
        able = [(one, self._candidate(one, costs)) for one in drafting if not one.ended and one.remaining > 0]
        fixed = [one for one, candidate in able if candidate and not one.sequence.speculation.is_auto]
        auto = [(one, candidate) for one, candidate in able if candidate and one.sequence.speculation.is_auto]
        chosen, _ = choose_for_model([candidate for _, candidate in auto], rows + len(fixed), costs)
        return [*fixed, *(auto[index][0] for index in sorted(chosen))]

    def _candidate(self, proposal: Proposal, costs: RoundCosts) -> Candidate | None:
        """What is known of a sequence before the model drafts its next token; None where it cannot or may not."""
        sequence = proposal.sequence
        if self._model is None or sequence.speculation.drafter not in {None, "model"} or not proposal.model_may_pay:
            return None
        drafted = proposal.drafted
        if not self._model.can_read(drafted):
            return None
        pending = self._model.pending(drafted)
        if sequence.speculation.is_auto:
            return self.controller.candidate(sequence, proposal.reached, pending, proposal.remaining, costs)
        acceptance = self.controller.acceptance.of(sequence).next_acceptance
        return Candidate(proposal.reached, acceptance, pending, proposal.remaining)

    def _draw(self, logits: FloatArray, proposal: Proposal) -> bool:
        """Draw a draft token from the model's logits; False where the grammar leaves none."""
        sequence = proposal.sequence
        try:
            shaped = process_logits(logits, sequence, proposal.tokens)
            q = to_distribution(shaped, sequence.sampling)
        except (FloatingPointError, ConstraintError, MaskDeferred):
            # The grammar forbids all tokens that the draft's head computes, or cannot say now what it allows.
            return False
        if is_greedy(sequence.sampling):
            token = int(q.argmax())
        else:
            token = RULES[sequence.speculation.verification].sample(q, len(proposal.drafts), proposal.noise)
        stated = confidence(shaped)
        probability = self.controller.acceptance.of_token(sequence, "model", stated)
        proposal.add(Draft(token, q, "model", stated), probability)
        return True
