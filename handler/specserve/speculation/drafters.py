"""A round's drafts: what the free proposers offer, then tokens of the draft model, as far as each pays.

After every token of the draft model the proposers (proposers.py) are asked again, so one draft may mix drafters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter

from specserve.errors import ConstraintError, DraftError, MaskDeferred
from specserve.sampling.distribution import FloatArray, confidence, is_greedy, one_hot, to_distribution
from specserve.sampling.logits import process_logits
from specserve.sampling.noise import Noise
from specserve.sequence import Sequence
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
from specserve.speculation.round import Draft, Proposal, Undrafted

logger = logging.getLogger(__name__)


@dataclass
class GrowingProposal:
    """A proposal that may get more drafts.

    Args:
        proposal: the drafts so far.
        reached: the estimated probability that all of them are accepted.
        ended: whether the draft model has nothing more to add.
    """

    proposal: Proposal
    reached: float = 1.0
    ended: bool = False

    @property
    def sequence(self) -> Sequence:
        """The one that the drafts follow."""
        return self.proposal.sequence

    @property
    def remaining(self) -> int:
        """How many more tokens may be drafted."""
        return self.proposal.max_drafts - len(self.proposal.drafts)

    def add(self, draft: Draft, acceptance: float) -> None:
        """Draft one more token; it stays in the round whatever it is."""
        self.proposal.drafts.append(draft)
        self.reached *= acceptance


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
        """Keep a proposal that a round could not verify to its end, for the sequence's next round; see `Drafting`."""
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
        drafting = [
            GrowingProposal(proposal) for proposal in proposals if proposal.max_drafts > 0 and not proposal.deferred
        ]
        if not drafting:
            return
        decoding = [proposal.sequence for proposal in proposals if proposal.sequence.decoding]
        costs = self.controller.costs(decoding, kv_len, self.draft_kv_len(decoding), awaiting_first_token)
        # Deferred proposals have drafts already.
        rows += sum(len(proposal.drafts) for proposal in proposals)
        for growing in drafting:
            rows += self._propose_free(growing, rows, costs)
        while self._model and (chosen := self._choose(drafting, rows, costs)):
            began = self._clock()
            try:
                logits, n_read = self._model.read([DraftedSequence(g.sequence, g.proposal.tokens) for g in chosen])
            except DraftError as error:
                logger.error("specserve: %s Decoding goes on without it.", error)
                self._model = None
                return
            read = self._clock()
            seconds_per_row = costs.draft_pass(sum(n_read)) / max(1, sum(n_read))
            for index, growing in enumerate(chosen):
                growing.proposal.draft_model_seconds += seconds_per_row * n_read[index]
                if n_read[index] > SHORT_CATCH_UP:
                    growing.proposal.catch_up_seconds += seconds_per_row * (n_read[index] - 1)
                if index not in logits or not self._draw(logits[index], growing):
                    growing.ended = True
                    continue
                rows += 1
                rows += self._propose_free(growing, rows, costs)
            # Drawing belongs to the cost of a pass, grammar masks do not.
            has_masks = any(growing.sequence.constraint is not None for growing in chosen)
            self._model.observe_cost((read if has_masks else self._clock()) - began)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Only the first `length` tokens of a sequence are decided; the draft model's cache forgets the rest."""
        if self._model:
            self._model.truncate(sequence, length)

    def _propose_free(self, growing: GrowingProposal, rows: int, costs: RoundCosts) -> int:
        """Draft what the first proposer offers that is worth verifying; returns how many tokens that is."""
        sequence, proposal = growing.sequence, growing.proposal
        if growing.remaining <= 0:
            return 0
        for proposer in self._proposers:
            if sequence.speculation.drafter not in {None, proposer.name}:
                continue
            tokens, confidences = proposer.propose(sequence, proposal.tokens, growing.remaining)
            if not tokens:
                continue
            by_model = self._candidate(growing, costs)
            acceptance = self.controller.acceptance
            probabilities = [acceptance.of_token(sequence, proposer.name, stated) for stated in confidences]
            if sequence.speculation.is_auto:
                length = offer_length(growing.reached, probabilities, by_model, rows, costs)
            else:
                # A fixed number of drafts is made in any case; the model makes those that it is likelier to get right.
                unlikely = (n for n, p in enumerate(probabilities) if by_model and p < by_model.acceptance)
                length = next(unlikely, len(tokens))
            for token, stated, probability in zip(tokens[:length], confidences, probabilities, strict=False):
                growing.add(Draft(token, one_hot(token, self._vocabulary), proposer.name, stated), probability)
            if length:
                return length
            if not proposal.drafts:
                proposal.undrafted.append(Undrafted(tokens[0], proposer.name, confidences[0]))
        return 0

    def _choose(self, drafting: list[GrowingProposal], rows: int, costs: RoundCosts) -> list[GrowingProposal]:
        """The sequences whose next token the model drafts in this step."""
        able = [(g, self._candidate(g, costs)) for g in drafting if not g.ended and g.remaining > 0]
        fixed = [g for g, candidate in able if candidate and not g.sequence.speculation.is_auto]
        auto = [(g, candidate) for g, candidate in able if candidate and g.sequence.speculation.is_auto]
        chosen, _ = choose_for_model([candidate for _, candidate in auto], rows + len(fixed), costs)
        return [*fixed, *(auto[index][0] for index in sorted(chosen))]

    def _candidate(self, growing: GrowingProposal, costs: RoundCosts) -> Candidate | None:
        """What is known of a sequence before the model drafts its next token; None where it cannot or may not."""
        sequence = growing.sequence
        if self._model is None or sequence.speculation.drafter not in {None, "model"}:
            return None
        drafted = DraftedSequence(sequence, growing.proposal.tokens)
        if not self._model.can_read(drafted):
            return None
        pending = self._model.pending(drafted)
        if sequence.speculation.is_auto:
            return self.controller.candidate(sequence, growing.reached, pending, growing.remaining, costs)
        acceptance = self.controller.acceptance.of(sequence).next_acceptance
        return Candidate(growing.reached, acceptance, pending, growing.remaining)

    def _draw(self, logits: FloatArray, growing: GrowingProposal) -> bool:
        """Draw a draft token from the model's logits; False where the grammar leaves none."""
        sequence, proposal = growing.sequence, growing.proposal
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
        growing.add(Draft(token, q, "model", stated), probability)
        return True
