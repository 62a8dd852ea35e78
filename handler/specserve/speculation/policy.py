"""Who decides what is drafted: a policy for each mode of a request, `off` being `fixed` without drafts, and `auto`.

The drafters (drafters.py) execute. In every round they ask, for all sequences that may have drafts:

    max_drafts          the most that each may have: by its request, by the room in a pass, by what others can wait
    begin_round         which of them are worth asking further
    offer_length        how many of the tokens to draft that a lookup, the client's prediction or the grammar offers
    candidate           what is to be known before the draft model drafts one token more; `choose_for_model` (gain.py)
                        then decides for which sequences it does, and the question is asked again

Which tokens the target also reads, in case they are recovered in place of a draft, alternatives.py then chooses.

`Auto` compares what drafts gain with what their time is worth (gain.py), by measured costs (cost.py), by acceptance
probabilities (acceptance.py), and by what drafts have brought and cost each sequence (charges.py).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import abc
from typing import ClassVar

from specserve.sampling.distribution import FloatArray
from specserve.sampling.logits import TargetDistributions
from specserve.sequence import BySequence, Sequence
from specserve.speculation.acceptance import Acceptance
from specserve.speculation.alternatives import note_possible
from specserve.speculation.answer_length import AnswerLengths
from specserve.speculation.charges import Balance
from specserve.speculation.cost import Cost
from specserve.speculation.gain import Candidate, RoundCosts, choose_for_model, offer_length, rows_worth_adding
from specserve.speculation.step import Draft, Step

# benchmarks/simulate.py --sensitivity prints what half and twice of each of these change.

# With more tokens to read before it drafts, the draft model has a long catch-up: its prefill of the prompt, or what
# other drafters have drafted.
SHORT_CATCH_UP = 4
# The seconds of a long catch-up are spread over at most n + 48 of the tokens that are expected to follow n.
_HORIZON = 48
# Time counts so much more for every other sequence that shares it: what one drafts in vain, all wait for
# (benchmarks/decisions/tried.md).
_SHARED_MARGIN = 0.12
# An acceptance probability that few sequences have, and hardly several at once; and how many such drafts are tried:
# where so many do not pay, more do not either.
_LIKELY, _FEW = 0.95, 4


class Policy(ABC):
    """Decides what is drafted for the sequences of a mode.

    `is_certain` says whether as many tokens as possible are drafted, whatever they gain.

    Args:
        acceptance: estimates how likely each drafter is right.
    """

    is_certain: ClassVar[bool] = False

    def __init__(self, acceptance: Acceptance) -> None:
        self._acceptance = acceptance

    def max_drafts(self, sequence: Sequence) -> int:
        """The most draft tokens of a round that the request asks for: its gamma, none in mode off."""
        return 0 if sequence.speculation.mode == "off" else sequence.speculation.gamma

    @abstractmethod
    def worth_asking(self, steps: list[Step], certain: abc.Sequence[Candidate], rows: int, costs: RoundCosts) -> bool:
        """Whether any of these steps could get drafts; takes note in them of what they cannot get.

        Args:
            steps: all of this policy that may have drafts.
            certain: of steps of other policies, what the draft model drafts in any case.
            rows: number of rows of the target's pass without drafts.
            costs: what passes cost in this round.
        """

    @abstractmethod
    def offer_length(
        self, step: Step, probabilities: list[float], by_model: Candidate | None, rows: int, costs: RoundCosts
    ) -> int:
        """How many leading tokens of an offer to draft.

        Args:
            step: with the drafts before it.
            probabilities: acceptance probability of each token.
            by_model: the sequence as the draft model may go on with it instead; None where it may not.
            rows: of the target's pass by now.
            costs: of this round.
        """

    @abstractmethod
    def candidate(self, step: Step, pending: int, costs: RoundCosts) -> Candidate | None:
        """What is to be known before the draft model drafts one more token; None where it may not.

        Args:
            step: with the drafts before it.
            pending: tokens that the draft model has to read before that.
            costs: what passes cost in this round.
        """

    def note_alternatives(self, step: Step, logits: FloatArray, draft: Draft, probability: float) -> None:
        """Take note of what could be recovered in place of a draft of the draft model; by default of nothing.

        Args:
            step: without the draft.
            logits: that the draft was chosen by.
            draft: the model's draft.
            probability: the probability that it is accepted.
        """
        del step, logits, draft, probability

    def learn(self, step: Step, p: TargetDistributions, decided: list[int]) -> None:
        """Learn from a verification how likely each drafter is right, unless the request has no drafts."""
        if self.max_drafts(step.sequence):
            self._acceptance.learn_from(step, p, decided)


class Fixed(Policy):
    """Drafts up to `gamma` tokens a round, whatever they gain; the model those that it is likelier to get right."""

    is_certain = True

    def worth_asking(self, steps: list[Step], certain: abc.Sequence[Candidate], rows: int, costs: RoundCosts) -> bool:
        """They always are."""
        del steps, certain, rows, costs
        return True

    def offer_length(
        self, step: Step, probabilities: list[float], by_model: Candidate | None, rows: int, costs: RoundCosts
    ) -> int:
        """Drafts those before the first that is less likely than the model's next."""
        del step, rows, costs
        if by_model is None:
            return len(probabilities)
        unlikely = (index for index, p in enumerate(probabilities) if p < by_model.acceptance)
        return next(unlikely, len(probabilities))

    def candidate(self, step: Step, pending: int, costs: RoundCosts) -> Candidate | None:
        """The model drafts in any case, if it can."""
        del costs
        acceptance = self._acceptance.of(step.sequence).next_acceptance
        return Candidate(step.p_all_accepted, acceptance, pending, step.rows_left, is_certain=True)


class Auto(Policy):
    """Drafts what gains more than its time is worth, at most `gamma` tokens.

    Args:
        controller: has measured what passes cost, and what sequences have shown.
    """

    def __init__(self, controller: Controller) -> None:
        super().__init__(controller.acceptance)
        self._controller = controller

    def worth_asking(self, steps: list[Step], certain: abc.Sequence[Candidate], rows: int, costs: RoundCosts) -> bool:
        """Whether likely drafts would pay: beside many sequences not even they do, and asking all takes 2 % of a round.

        Where those of the draft model would not, it is not asked in this round, and its next acceptance is not
        estimated.
        """
        likely = [Candidate(1.0, _LIKELY, charged_rows=1, max_drafts=min(_FEW, step.max_drafts)) for step in steps]
        rows_pay, _ = rows_worth_adding([_LIKELY] * sum(candidate.max_drafts for candidate in likely), rows, costs)
        model_may_pay = rows_pay > 0 and choose_for_model([*certain, *likely], rows, costs)[1] > 0
        for step in steps:
            step.learns_from_target = model_may_pay
            step.model_ended = not model_may_pay
        return rows_pay > 0

    def offer_length(
        self, step: Step, probabilities: list[float], by_model: Candidate | None, rows: int, costs: RoundCosts
    ) -> int:
        """Drafts those that gain; none where the draft model gains more."""
        return offer_length(step.p_all_accepted, probabilities, by_model, rows, costs)

    def candidate(self, step: Step, pending: int, costs: RoundCosts) -> Candidate | None:
        """The model may not draft while drafts have lost too much for the sequence's length; other drafters go on.

        And no long catch-up starts while a sequence awaits its first token: those that decode would wait for both.
        """
        sequence = step.sequence
        if self._controller.balance(sequence).is_over_budget:
            return None
        shown = self._acceptance.of(sequence)
        if pending <= SHORT_CATCH_UP:
            return Candidate(step.p_all_accepted, shown.next_acceptance, pending, step.rows_left)
        if costs.awaiting_first_token:
            return None
        likely = self._controller.lengths(sequence).following(sequence.generated)
        following = min(sequence.remaining, likely, _HORIZON + sequence.generated)
        catch_up = (costs.draft_pass(pending) - costs.draft_pass(1)) / max(1, following)
        # It has to pay over all these tokens, so the long run's acceptance counts.
        return Candidate(step.p_all_accepted, shown.long_run_acceptance, 1, step.rows_left, catch_up)

    def note_alternatives(self, step: Step, logits: FloatArray, draft: Draft, probability: float) -> None:
        """Take note of the draft model's next choices, as likely as such have been recovered so far."""
        note_possible(step, logits, draft, probability, self._acceptance)


class Controller:
    """The policies, and what they share: costs of both models' passes, and what sequences have shown.

    It has no clock and no randomness.

    Args:
        target_cost: of the target's passes.
        draft_cost: of the draft model's; None without one.
    """

    def __init__(self, target_cost: Cost, draft_cost: Cost | None) -> None:
        self.target_cost = target_cost
        self.draft_cost = draft_cost
        self.acceptance = Acceptance()
        # Of answers that follow a grammar, which are labels more often, and of others.
        self._lengths = {True: AnswerLengths(), False: AnswerLengths()}
        self._balances = BySequence(lambda _: Balance())
        fixed = Fixed(self.acceptance)
        self.policies: dict[str, Policy] = {"off": fixed, "fixed": fixed, "auto": Auto(self)}

    def policy(self, sequence: Sequence) -> Policy:
        """The policy of a sequence."""
        return self.policies[sequence.speculation.mode]

    def balance(self, sequence: Sequence) -> Balance:
        """What drafts have brought and cost a sequence."""
        return self._balances.of(sequence)

    def lengths(self, sequence: Sequence) -> AnswerLengths:
        """The lengths of answers that follow a grammar, or do not, as a sequence's; calls of tools do not count."""
        constraint = sequence.constraint
        return self._lengths[constraint is not None and not constraint.allows_text]

    def forget(self, sequence: Sequence) -> None:
        """Drop what a sequence has shown that has ended, but for its length."""
        if sequence.generated:
            self.lengths(sequence).learn(sequence.generated, is_cut_off=sequence.remaining <= 0)
        self._balances.forget(sequence)
        self.acceptance.forget(sequence)

    def costs(
        self, decoding: abc.Sequence[Sequence], target_kv_len: int, draft_kv_len: int, awaiting_first_token: int = 0
    ) -> RoundCosts:
        """What passes cost in this round, and what its time is worth.

        `tokens_per_second`, v in gain.py: the sum of the sequences' speed-ups (`Balance.speedup`), and 1 for each that
        awaits its first token, divided by the seconds of a pass without drafts; 12 % more for every other sequence.

        Args:
            decoding: the sequences that decode in this round, at least one.
            target_kv_len: tokens of the target's cache that a row attends to.
            draft_kv_len: the same of the draft model's.
            awaiting_first_token: number of sequences in prefill or about to be.
        """
        plain_seconds = self.target_cost.seconds(len(decoding), target_kv_len)
        draft_cost = self.draft_cost
        speedups = [self.balance(sequence).speedup for sequence in decoding]
        margin = 1 + _SHARED_MARGIN * (len(decoding) - 1)
        return RoundCosts(
            target_pass=lambda rows: self.target_cost.seconds(rows, target_kv_len),
            draft_pass=(lambda rows: draft_cost.seconds(rows, draft_kv_len)) if draft_cost else (lambda _rows: 0.0),
            tokens_per_second=margin * (sum(speedups) + awaiting_first_token) / plain_seconds,
            awaiting_first_token=awaiting_first_token,
        )

    def max_drafts(
        self,
        decoding: abc.Sequence[Sequence],
        *,
        max_rows: int,
        max_wait_seconds: float,
        kv_len: int,
        draft_kv_len: int | None,
    ) -> list[int]:
        """The most draft tokens of each sequence: its policy's, as far as a pass has room and others can wait for them.

        Args:
            decoding: the sequences that decode in this round.
            max_rows: rows of the target's pass that may be drafts.
            max_wait_seconds: that drafts may add to the round; infinite where no other request waits for them.
            kv_len: tokens of the target's cache that a row attends to.
            draft_kv_len: the same of the draft model's; None without one.
        """
        # The round may add one token of the target's own.
        asked = [min(self.policy(sequence).max_drafts(sequence), sequence.remaining - 1) for sequence in decoding]
        drafting = max(1, sum(drafts > 0 for drafts in asked))
        max_each = max_rows // drafting
        if not math.isinf(max_wait_seconds):
            draft_pass = 0.0
            if self.draft_cost and draft_kv_len is not None:
                draft_pass = self.draft_cost.seconds(drafting, draft_kv_len)
            max_seconds = self.target_cost.seconds(len(decoding), kv_len) + max_wait_seconds
            seconds = {
                gamma: gamma * draft_pass + self.target_cost.seconds(len(decoding) + drafting * gamma, kv_len)
                for gamma in range(1, max_each + 1)
            }
            max_each = max((gamma for gamma in seconds if seconds[gamma] <= max_seconds), default=0)
        return [max(0, min(drafts, max_each)) for drafts in asked]

    def begin_round(self, steps: abc.Sequence[Step], rows: int, costs: RoundCosts) -> list[Step]:
        """The steps that could get drafts.

        Args:
            steps: all of the round.
            rows: of the target's pass without drafts.
            costs: of this round.
        """
        drafting = [(step, self.policy(step.sequence)) for step in steps if step.max_drafts > 0]
        certain = [Candidate(1.0, 1.0, 1, step.max_drafts, is_certain=True) for step, own in drafting if own.is_certain]
        worth_asking = {
            policy: policy.worth_asking([step for step, own in drafting if own is policy], certain, rows, costs)
            for policy in dict.fromkeys(own for _, own in drafting)
        }
        return [step for step, own in drafting if worth_asking[own]]
