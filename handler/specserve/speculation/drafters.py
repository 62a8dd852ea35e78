"""A round's drafts: what the free proposers offer, then tokens of the draft model, as the policy decides (policy.py).

After every token of the draft model the proposers (proposers.py) are asked again, so one draft may mix drafters.

An end token ends the drafts of a step, and so does the end of a grammar: what follows would be thrown away with it.

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
from specserve.speculation.alternatives import choose_alternatives
from specserve.speculation.draft_model import DraftModel
from specserve.speculation.gain import Candidate, RoundCosts, choose_for_model
from specserve.speculation.policy import SHORT_CATCH_UP, Controller
from specserve.speculation.proposers import Proposer
from specserve.speculation.rejection import RULES
from specserve.speculation.step import Draft, Refused, Step

logger = logging.getLogger(__name__)


class Drafters:
    """All drafters, which draft what the controller's policies decide.

    The proposers are asked first, since they cost nothing; the model drafts where they have nothing to propose, or
    nothing as good. A drawn token is never taken back, and whether a further one is drawn is decided before it is, also
    by what was drawn for other sequences, with numbers that no two share: the length of a draft is a stopping time,
    which every rule of rejection.py allows.

    Args:
        controller: has the policies.
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
        self.model = model
        self._proposers = proposers
        self._vocabulary = vocabulary
        self._end_tokens = frozenset(end_tokens)
        self._clock = clock

    def draft_kv_len(self, sequences: Iterable[Sequence]) -> int | None:
        """How many cached tokens a row of these attends to in the draft model; None without a model."""
        return self.model.cache.kv_len(sequence.slot for sequence in sequences) if self.model else None

    def forget(self, sequence: Sequence) -> None:
        """Drop what is known of a sequence that has ended."""
        self.controller.forget(sequence)
        for proposer in self._proposers:
            proposer.forget(sequence)

    def draft(
        self, steps: list[Step], kv_len: int, awaiting_first_token: int = 0, *, max_alternatives: int = 0
    ) -> None:
        """Add drafts and alternatives to the steps of a round, together at most `max_drafts` for each.

        Args:
            steps: all of the round, without drafts.
            kv_len: how many tokens a row of the target's pass attends to.
            awaiting_first_token: number of sequences in prefill or about to be.
            max_alternatives: of the target's pass.
        """
        if not any(step.max_drafts > 0 for step in steps):
            return
        rows = sum(step.rows for step in steps)
        decoding = [step.sequence for step in steps if not step.in_prefill]
        costs = self.controller.costs(decoding, kv_len, self.draft_kv_len(decoding) or 0, awaiting_first_token)
        drafting = self.controller.begin_round(steps, rows, costs)
        for step in drafting:
            with step.contained():
                rows += self._draft_offer(step, rows, costs)
        while self.model and (chosen := self._choose(drafting, rows, costs)):
            began = self._clock()
            try:
                logits, n_read = self.model.read(chosen, is_shared=len(decoding) > 1)
            except DraftError as error:
                logger.error("specserve: %s Decoding goes on without it.", error)
                self.model = None
                return
            read = self._clock()
            seconds_per_row = costs.draft_pass(sum(n_read)) / max(1, sum(n_read))
            for index, step in enumerate(chosen):
                step.draft_model_seconds += seconds_per_row * n_read[index]
                if n_read[index] > SHORT_CATCH_UP:
                    # All but the row that it would have read anyway.
                    step.long_catch_up_seconds += seconds_per_row * (n_read[index] - 1)
                with step.contained():
                    if index not in logits or not self._draw(logits[index], step):
                        step.model_ended = True
                    else:
                        rows += 1
                        rows += self._draft_offer(step, rows, costs)
            # Drawing belongs to the cost of a pass, grammar masks do not.
            has_masks = any(step.sequence.constraint is not None for step in chosen)
            self.model.observe_cost((read if has_masks else self._clock()) - began)
        choose_alternatives(drafting, max_alternatives, rows, costs, self._end_tokens)

    def _draft_offer(self, step: Step, rows: int, costs: RoundCosts) -> int:
        """Draft what the first proposer offers that is worth verifying; returns how many tokens that is."""
        sequence = step.sequence
        if step.rows_left <= 0 or not step.compute_mask() or step.is_over(self._end_tokens):
            return 0
        policy, acceptance = self.controller.policy(sequence), self.controller.acceptance
        for proposer in self._proposers:
            if sequence.speculation.drafter not in {None, proposer.name}:
                continue
            offer = proposer.propose(sequence, step.draft_tokens, step.rows_left)
            tokens, confidences = offer.until(self._end_tokens)
            if not tokens:
                continue
            probabilities = [acceptance.of_token(sequence, proposer.name, stated) for stated in confidences]
            length = policy.offer_length(step, probabilities, self._candidate(step, costs), rows, costs)
            before = len(step.drafts)
            for token, stated, probability in zip(tokens[:length], confidences, probabilities, strict=False):
                if not step.allows(token):
                    break
                q = None if is_greedy(sequence.sampling) else one_hot(token, self._vocabulary)
                step.add(Draft(token, q, proposer.name, stated), probability)
            if len(step.drafts) > before:
                return len(step.drafts) - before
            if not step.drafts:
                step.refused.append(Refused(tokens[0], proposer.name, confidences[0]))
        return 0

    def _choose(self, drafting: list[Step], rows: int, costs: RoundCosts) -> list[Step]:
        """The steps whose next token the model drafts now."""
        able = [(step, self._candidate(step, costs)) for step in drafting if step.rows_left > 0 and not step.error]
        candidates = [(step, candidate) for step, candidate in able if candidate]
        chosen, _ = choose_for_model([candidate for _, candidate in candidates], rows, costs)
        return [candidates[index][0] for index in chosen]

    def _candidate(self, step: Step, costs: RoundCosts) -> Candidate | None:
        """What is known of a step before the model drafts its next token; None where it cannot or may not."""
        if self.model is None or step.sequence.speculation.drafter not in {None, "model"} or step.model_ended:
            return None
        if not self.model.can_read(step) or not step.compute_mask() or step.is_over(self._end_tokens):
            return None
        return self.controller.policy(step.sequence).candidate(step, self.model.catch_up(step), costs)

    def _draw(self, logits: FloatArray, step: Step) -> bool:
        """Draw a draft token from the model's logits; False where the grammar leaves none."""
        sequence = step.sequence
        try:
            shaped = process_logits(logits, sequence, step.draft_tokens)
            if is_greedy(sequence.sampling):
                q, token = None, argmax(shaped)
            else:
                q = to_distribution(shaped, sequence.sampling)
                token = RULES[sequence.speculation.verification].sample(q, len(step.drafts), step.noise)
        except (FloatingPointError, ConstraintError, MaskDeferred):
            # The grammar forbids all tokens that the draft's head computes, or cannot say now what it allows.
            return False
        stated = confidence(shaped)
        probability = self.controller.acceptance.of_token(sequence, "model", stated)
        draft = Draft(token, q, "model", stated)
        self.controller.policy(sequence).note_alternatives(step, shaped, draft, probability)
        step.add(draft, probability)
        return True
