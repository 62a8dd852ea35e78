"""Drafts the tokens of a round: what a proposer has for nothing, or what the draft model gives (policy.py decides).

The proposers (proposers.py, ngram.py) are asked first and again after every token of the draft model, so one draft may
mix drafters.

A sampled draft token is never taken back. The decision to sample another one precedes the sampling; it may depend on
the tokens sampled for other sequences, because no two sequences share random numbers. So the length of a draft is a
stopping time, which every rule of rejection.py allows.

An end token ends the drafts of a step, and so does the end of a grammar. Under a grammar a token is drafted only after
the mask at its position is computed, so verification lacks at most the mask after all drafts.
"""

import logging
from collections.abc import Callable, Iterable
from time import perf_counter

from specserve.errors import ConstraintError, EngineError, MaskDeferred
from specserve.sampling.distribution import FloatArray, argmax, confidence, to_distribution
from specserve.sampling.logits import process_logits
from specserve.sequence import Sequence
from specserve.speculation.alternatives import alternatives_to, choose_alternatives
from specserve.speculation.draft_model import DraftModel
from specserve.speculation.policy import Candidate, Controller, Prices, choose_for_model, is_fixed
from specserve.speculation.proposers import Proposer
from specserve.speculation.rejection import RULES
from specserve.speculation.step import Draft, SequenceStep

logger = logging.getLogger(__name__)


class Drafters:
    """All drafters, which draft what the controller decides.

    The proposers are asked in their order, until one has something worth drafting.
    """

    def __init__(
        self,
        controller: Controller,
        *proposers: Proposer,
        model: DraftModel | None = None,
        end_tokens: Iterable[int],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.controller = controller
        self.model = model
        self._proposers = proposers
        self._end_tokens = frozenset(end_tokens)
        self._clock = clock

    def draft_kv_len(self, sequences: Iterable[Sequence]) -> int:
        """How many cached tokens a row of these attends to in the draft model; 0 without one."""
        return self.model.cache.kv_len(sequence.slot for sequence in sequences) if self.model else 0

    def forget(self, sequence: Sequence) -> None:
        self.controller.forget(sequence)
        for proposer in self._proposers:
            proposer.forget(sequence)

    def draft(self, steps: list[SequenceStep], kv_len: int, *, max_alternatives: int = 0) -> None:
        """Add drafts and alternatives to the steps of a round, at most `max_drafts` a step; see `run_round`."""
        if not any(step.max_drafts > 0 for step in steps):
            return
        decoding = [step.sequence for step in steps if not step.in_prefill]
        prices = self.controller.prices(decoding, kv_len, self.draft_kv_len(decoding))
        prices.rows = sum(step.rows for step in steps)
        drafting = self.controller.steps_to_draft(steps, prices)
        for step in drafting:
            with step.contained():
                self._draft_proposal(step, prices)
        while self.model and (chosen := self._chosen_for_model(drafting, prices)):
            try:
                self._draft_by_model(self.model, chosen, prices, is_shared=len(decoding) > 1)
            except EngineError as error:
                logger.error("specserve: the draft model failed: %s Decoding goes on without it.", error)
                self.model = None
                return
        choose_alternatives(drafting, max_alternatives, prices, self._end_tokens)

    def _draft_proposal(self, step: SequenceStep, prices: Prices) -> None:
        """Draft what a proposer has that gains more than the draft model would."""
        sequence = step.sequence
        if not self._may_go_on(step):
            return
        for proposer in self._proposers:
            if sequence.speculation.drafter not in {None, proposer.name}:
                continue
            proposal = proposer.propose(sequence, step.draft_tokens, step.rows_left).until(self._end_tokens)
            if not proposal.tokens:
                continue
            acceptance = [
                self.controller.acceptance.of_token(sequence, proposer.name, stated) for stated in proposal.confidence
            ]
            length = self.controller.proposal_length(step, acceptance, self._candidate(step, prices), prices)
            proposed = [
                Draft(token, None, proposer.name, stated, probability)
                for token, stated, probability in zip(*proposal, acceptance, strict=True)
            ]
            for n_drafted, draft in enumerate(proposed[:length]):
                if not step.allows(draft.token):
                    length = n_drafted
                    break
                step.drafts.append(draft)
                prices.rows += 1
            if length:
                return
            if not step.drafts:
                step.refused.append(proposed[0])

    def _may_go_on(self, step: SequenceStep) -> bool:
        """Whether one more token can be drafted, the mask at its position known."""
        return step.rows_left > 0 and step.compute_mask() and not step.is_over(self._end_tokens)

    def _chosen_for_model(self, drafting: list[SequenceStep], prices: Prices) -> list[tuple[SequenceStep, int]]:
        """The steps that the model's next pass drafts for, each with its number of mask tokens."""
        able = [(step, self._candidate(step, prices)) for step in drafting if step.rows_left > 0 and not step.error]
        auto = [(step, candidate) for step, candidate in able if candidate and not is_fixed(step)]
        masks = choose_for_model([candidate for _, candidate in auto], prices).mask_tokens
        most = prices.block_length
        fixed = [(step, min(step.rows_left, most) - 1) for step, candidate in able if candidate and is_fixed(step)]
        return [*fixed, *((auto[index][0], count) for index, count in masks.items())]

    def _candidate(self, step: SequenceStep, prices: Prices) -> Candidate | None:
        """What is known of a step before the model drafts its next token; None where it cannot or may not."""
        if self.model is None or step.sequence.speculation.drafter not in {None, "model"} or step.model_ended:
            return None
        if not self.model.can_read(step) or not self._may_go_on(step):
            return None
        return self.controller.candidate(step, self.model.draft_prefill(step), prices)

    def _draft_by_model(
        self, model: DraftModel, chosen: list[tuple[SequenceStep, int]], prices: Prices, *, is_shared: bool
    ) -> None:
        """Draft for these steps in one pass of the model, and what proposers add; EngineError if it fails."""
        began = self._clock()
        steps, mask_tokens = zip(*chosen, strict=True)
        logits = model.read(steps, mask_tokens, is_shared=is_shared)
        read = self._clock()
        for index, step in enumerate(steps):
            with step.contained():
                self._draft_block(logits.get(index, []), step, prices)
        # Sampling belongs to the cost of a pass, grammar masks do not.
        has_masks = any(step.sequence.constraint is not None for step in steps)
        model.observe_cost((read if has_masks else self._clock()) - began)

    def _draft_block(self, logits: list[FloatArray], step: SequenceStep, prices: Prices) -> None:
        """Draft from the model's logits of the next tokens: the first, and those behind masks that are worth a row.

        Their confidences decide how many, before any is sampled.
        """
        if not logits or not self._sample(logits[0], step, prices):
            step.model_ended = True
            return
        of_token = self.controller.acceptance.of_token
        behind = [of_token(step.sequence, "masked", confidence(row)) for row in logits[1:]]
        length, _ = self.controller.length_worth_drafting(step, behind, prices)
        for row in logits[1 : 1 + length]:
            if not self._may_go_on(step) or not self._sample(row, step, prices, behind_mask=True):
                return
        self._draft_proposal(step, prices)

    def _sample(self, logits: FloatArray, step: SequenceStep, prices: Prices, *, behind_mask: bool = False) -> bool:
        """Sample a draft token from the model's logits; False where the grammar leaves none."""
        sequence = step.sequence
        try:
            shaped = process_logits(logits, sequence, step.draft_tokens)
            if sequence.sampling.is_greedy:
                q, token = None, argmax(shaped)
            else:
                q = to_distribution(shaped, sequence.sampling)
                token = RULES[sequence.speculation.verification].sample(q, len(step.drafts), step.noise)
        except (FloatingPointError, ConstraintError, MaskDeferred):
            # The grammar forbids all tokens that the draft's head computes, or cannot say now what it allows.
            return False
        stated = confidence(shaped)
        acceptance = self.controller.acceptance
        draft = Draft(token, q, "model", stated, behind_mask=behind_mask)
        draft = draft._replace(acceptance=acceptance.of_token(sequence, draft.calibration, stated))
        if sequence.speculation.mode == "auto":
            draft = draft._replace(alternatives=alternatives_to(draft, step, shaped, acceptance))
        step.drafts.append(draft)
        prices.rows += 1
        return True
