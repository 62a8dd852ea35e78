"""A round's drafts: what the free proposers offer, then tokens of the draft model, as far as each pays.

After every token of the draft model the proposers (proposers.py) are asked again, so one draft may mix drafters.

An end token ends a proposal, and so does the end of a grammar: what follows would be thrown away with it.

A sequence with a grammar is drafted for as far as the round has time for its masks, position by position: a token is
drafted only after the mask at its position is computed, so verification lacks at most the mask after all drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from time import perf_counter

from specserve.errors import ConstraintError, DraftError, MaskDeferred
from specserve.sampling.distribution import FloatArray, argmax, confidence, is_greedy, one_hot, to_distribution
from specserve.sampling.logits import process_logits
from specserve.sequence import Sequence
from specserve.speculation.alternatives import choose_alternatives, note_possible
from specserve.speculation.controller import (
    SHORT_CATCH_UP,
    Candidate,
    Controller,
    RoundCosts,
    choose_for_model,
    offer_length,
    rows_worth_adding,
)
from specserve.speculation.draft_model import DraftedSequence, DraftModel
from specserve.speculation.proposal import Draft, Proposal, Refused
from specserve.speculation.proposers import Proposer
from specserve.speculation.rejection import RULES

logger = logging.getLogger(__name__)

# An acceptance probability that few sequences have, and hardly several at once; and how many such drafts are tried:
# where so many do not pay, more do not either.
_LIKELY, _FEW = 0.95, 4


class Drafters:
    """All drafters, and the controller that weighs them.

    The proposers are asked first, since they cost nothing; the model drafts where they have nothing to propose, or
    nothing as good. A drawn token is never taken back, and whether a further one is drawn is decided before it is, also
    by what was drawn for other sequences, with numbers that no two share: the length of a proposal is a stopping time,
    which every rule of rejection.py allows.

    Args:
        controller: decides for sequences in mode `auto`; the others take what they ask for.
        proposers: asked in this order, until one has something worth drafting.
        model: the draft model, where there is one.
        vocabulary: the width of the target's logits.
        end_tokens: those that end an answer.
        clock: seconds, for the cost of the draft model's passes.
    """

    def __init__(
        self,
        controller: Controller,
        *proposers: Proposer,
        model: DraftModel | None = None,
        vocabulary: int,
        end_tokens: Iterable[int],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.controller = controller
        self._proposers = proposers
        self._model = model
        self._vocabulary = vocabulary
        self._end_tokens = frozenset(end_tokens)
        self._clock = clock

    @property
    def has_model(self) -> bool:
        """Whether there is a draft model, and it works."""
        return self._model is not None

    def draft_kv_len(self, sequences: Iterable[Sequence]) -> int:
        """How many tokens of its KV cache a row of these attends to in the draft model; 0 without a model."""
        return self._model.kv_len(sequence.slot for sequence in sequences) if self._model else 0

    def propose(
        self,
        proposals: list[Proposal],
        rows: int,
        kv_len: int,
        awaiting_first_token: int = 0,
        *,
        max_alternatives: int = 0,
    ) -> None:
        """Add drafts and alternatives to the proposals, at most `max_drafts` each.

        Args:
            proposals: one for each sequence of the round, without drafts.
            rows: of the target's pass without drafts.
            kv_len: how many tokens a row of that pass attends to.
            awaiting_first_token: number of sequences in prefill or about to be.
            max_alternatives: of the target's pass.
        """
        drafting = [proposal for proposal in proposals if proposal.max_drafts > 0]
        if not drafting:
            return
        decoding = [proposal.sequence for proposal in proposals if proposal.sequence.decoding]
        costs = self.controller.costs(decoding, kv_len, self.draft_kv_len(decoding), awaiting_first_token)
        drafting = self._worth_weighing(drafting, rows, costs)
        for proposer in self._proposers:
            proposer.begin_round()
        for proposal in drafting:
            rows += self._propose_free(proposal, rows, costs)
        while self._model and (chosen := self._choose(drafting, rows, costs)):
            began = self._clock()
            try:
                logits, n_read = self._model.read([_drafted(proposal) for proposal in chosen])
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
        if max_alternatives:
            auto = [proposal for proposal in drafting if proposal.sequence.speculation.is_auto]
            choose_alternatives(auto, max_alternatives, rows, costs, self._end_tokens)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Only the first `length` tokens of a sequence are decided; the draft model's cache forgets the rest."""
        if self._model:
            self._model.truncate(sequence, length)

    def _worth_weighing(self, drafting: list[Proposal], rows: int, costs: RoundCosts) -> list[Proposal]:
        """The proposals that could get drafts, each with whether they could be the model's.

        Beside many sequences not even likely drafts pay, and weighing all takes up to 2 % of a round of eight.
        """
        auto = [proposal for proposal in drafting if proposal.sequence.speculation.is_auto]
        likely = [Candidate(1.0, _LIKELY, charged_rows=1, most=min(_FEW, one.max_drafts)) for one in auto]
        rows_pay, _ = rows_worth_adding([_LIKELY] * sum(one.most for one in likely), rows, costs)
        added = _added(costs, len(drafting) - len(auto))
        model_may_pay = self._model is not None and rows_pay > 0 and choose_for_model(likely, rows, added)[1] > 0
        for proposal in auto:
            proposal.model_may_pay = model_may_pay
        return drafting if rows_pay else [one for one in drafting if not one.sequence.speculation.is_auto]

    def _propose_free(self, proposal: Proposal, rows: int, costs: RoundCosts) -> int:
        """Draft what the first proposer offers that is worth verifying; returns how many tokens that is."""
        sequence = proposal.sequence
        if proposal.remaining <= 0 or not proposal.compute_mask() or proposal.is_over(self._end_tokens):
            return 0
        for proposer in self._proposers:
            if sequence.speculation.drafter not in {None, proposer.name}:
                continue
            offer = proposer.propose(sequence, proposal.tokens, proposal.remaining)
            tokens, confidences = offer.until(self._end_tokens)
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
            before = len(proposal.drafts)
            for token, stated, probability in zip(tokens[:length], confidences, probabilities, strict=False):
                if not proposal.allows(token):
                    break
                q = None if is_greedy(sequence.sampling) else one_hot(token, self._vocabulary)
                proposal.add(Draft(token, q, proposer.name, stated), probability)
            if len(proposal.drafts) > before:
                return len(proposal.drafts) - before
            if not proposal.drafts:
                proposal.refused.append(Refused(tokens[0], proposer.name, confidences[0]))
        return 0

    def _choose(self, drafting: list[Proposal], rows: int, costs: RoundCosts) -> list[Proposal]:
        """The sequences whose next token the model drafts in this step."""
        able = [(one, self._candidate(one, costs)) for one in drafting if not one.ended and one.remaining > 0]
        fixed = [(one, candidate) for one, candidate in able if candidate and not one.sequence.speculation.is_auto]
        auto = [(one, candidate) for one, candidate in able if candidate and one.sequence.speculation.is_auto]
        # A fixed number of drafts is made in any case, so the others are weighed by what they add to that pass.
        added = _added(costs, sum(candidate.charged_rows for _, candidate in fixed))
        chosen, _ = choose_for_model([candidate for _, candidate in auto], rows + len(fixed), added)
        return [*(one for one, _ in fixed), *(auto[index][0] for index in sorted(chosen))]

    def _candidate(self, proposal: Proposal, costs: RoundCosts) -> Candidate | None:
        """What is known of a sequence before the model drafts its next token; None where it cannot or may not."""
        sequence = proposal.sequence
        if self._model is None or sequence.speculation.drafter not in {None, "model"} or not proposal.model_may_pay:
            return None
        drafted = _drafted(proposal)
        if not self._model.can_read(drafted) or not proposal.compute_mask() or proposal.is_over(self._end_tokens):
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
            if is_greedy(sequence.sampling):
                q, token = None, argmax(shaped)
            else:
                q = to_distribution(shaped, sequence.sampling)
                token = RULES[sequence.speculation.verification].sample(q, len(proposal.drafts), proposal.noise)
        except (FloatingPointError, ConstraintError, MaskDeferred):
            # The grammar forbids all tokens that the draft's head computes, or cannot say now what it allows.
            return False
        stated = confidence(shaped)
        probability = self.controller.acceptance.of_token(sequence, "model", stated)
        draft = Draft(token, q, "model", stated)
        if sequence.speculation.is_auto:
            note_possible(proposal, shaped, draft, probability, self.controller.acceptance)
        proposal.add(draft, probability)
        return True


def _drafted(proposal: Proposal) -> DraftedSequence:
    """The sequence with the draft tokens after it."""
    return DraftedSequence(proposal.sequence, proposal.tokens)


def _added(costs: RoundCosts, rows: int) -> RoundCosts:
    """The costs where the draft model's passes have some rows anyway: what further ones add."""
    before = costs.draft_pass(rows)
    return costs._replace(draft_pass=lambda more: costs.draft_pass(rows + more) - before)
