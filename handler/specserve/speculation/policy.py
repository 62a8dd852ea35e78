"""Who decides how many tokens a round drafts: the controller, by what passes cost and what drafts bring.

A draft token is accepted only if all before it are. With acceptance probabilities alpha_j, T(rows) and D the seconds of
passes of the target and of the draft model, and v the tokens that a second yields now, n drafts gain

    gain(n) = sum_{i<=n} prod_{j<=i} alpha_j - v (T(1 + n) - T(1) + n D)

tokens (Leviathan et al. 2023, arXiv 2211.17192, section 3.3, with measured costs; block verification accepts more). The
largest gain over all n is sought, whatever shape the costs have; the draft model then drafts one token, and the
question is asked again. A draft model that reads mask tokens (draft_model.py) drafts all n for one D, of more rows, but
behind a mask a token is accepted with a lower probability, beta. The pass that gains more is chosen.

An example: alpha is .8 for every token, a pass of the target takes 40 ms and 3 ms more for each further row, one of the
draft model 12 ms. At first a second is worth what plain decoding yields, a token in 40 ms: a draft costs 15 ms, or .375
tokens, and the drafts bring .8, .64, .51, .41 and .33 tokens, so four are drafted. Rounds then give 3.36 tokens in
100 ms, a speed-up of 1.34, so a draft costs .50 tokens: three; and so on until two drafts give 34.9 tokens a second,
the most there is.
"""

import math
from collections import abc, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple
from weakref import WeakKeyDictionary

from specserve.sequence import Sequence
from specserve.speculation.acceptance import Acceptance
from specserve.speculation.costs import PassCosts
from specserve.speculation.step import SequenceStep

# `benchmarks/simulate.py --set policy._LOSS_PASSES=5` prints what another value changes.

# Optimistic probe: if four drafts at 95 % do not pay, nothing is drafted in this round.
_LIKELY, _FEW = 0.95, 4
# The loss budget: the draft model pauses once drafts have cost a sequence more than they gained by this many passes of
# plain decoding, plus this share of the answer's passes (tests/engine/test_simulation.py).
_LOSS_PASSES, _LOSS_SHARE = 10.0, 0.01
# The decay of a sequence's recent tokens and passes per round, and the cap on its recent speed-up: when a long copy
# ends, its speed ends with it (benchmarks/decode.py --modes adaptive).
_SPEEDUP_FADE, _MOST_SPEEDUP = 0.85, 2.0
# How much dearer a round's time becomes by each further sequence: four clients on a slow Zen 4 get 1.058 times plain
# decoding without it, 1.090 with it; on Zen 5 1.168 with .12, 1.180 with .18, 1.183 with .25
# (benchmarks/simulate.py --clients 2 4).
_SHARED_MARGIN = 0.18
# Answers whose lengths are remembered, and the share of them that may be shorter than expected; a new server assumes
# lengths of 2 to 2,048 tokens (benchmarks/decode.py --families short).
_ANSWERS, _SHORTER, _ASSUMED = 200, 0.1, tuple(2.0**power for power in range(1, 12))


@dataclass
class Prices:
    """What passes cost in this round by their number of rows, in tokens: seconds times what a second yields now."""

    target: Callable[[int], float]
    draft: Callable[[int], float]
    rows: int = 1  # of the target's pass by now
    block_length: int = 1  # the most tokens that a pass of the draft model drafts for a sequence


class Candidate(NamedTuple):
    """A sequence that the draft model may draft one more token for."""

    p_all_accepted: float  # the probability that all its drafts so far are accepted
    acceptance: float  # the probability that its next draft token is accepted
    limit: int  # draft tokens that it may still have
    draft_prefill: float = 0.0  # the part that this round pays of the price of what the draft model has not read
    pending: int = 1  # rows that the draft model reads in every round before it drafts
    masked_acceptance: float = 0.0  # the probability that a token behind a mask is accepted if all before it are

    def arrives(self, n: int, *, in_one_pass: bool) -> float:
        """The probability that the n-th token from now on is accepted."""
        following = self.masked_acceptance if in_one_pass else self.acceptance
        return self.p_all_accepted * self.acceptance * following ** (n - 1)


class ModelPass(NamedTuple):
    """The draft model's next pass."""

    mask_tokens: dict[int, int]  # of the sequences that it drafts for, by their index
    gain: float = 0.0  # in tokens; 0.0 where nothing pays


def rows_worth_adding(tokens: abc.Iterable[float], prices: Prices) -> tuple[int, float]:
    """How many further rows the target's pass should have, and their gain in tokens: 0 and 0.0 where none pay.

    `tokens` is what each further row is expected to bring, in the order in which they are taken.
    """
    base = prices.target(prices.rows)
    best = 0, 0.0
    for n, expected in enumerate(accumulate(tokens), 1):
        gain = expected - (prices.target(prices.rows + n) - base)
        if gain > best[1]:
            best = n, gain
    return best


def choose_for_model(candidates: abc.Sequence[Candidate], prices: Prices) -> ModelPass:
    """For which sequences the draft model should draft, behind how many mask tokens, and the expected gain of going on.

    Several drafts can pay where one does not, and sequences share the passes of both models. So for every k and n the
    gain of n more tokens for the first k sequences is computed, one by one and in one pass.
    """
    able = [index for index, candidate in enumerate(candidates) if candidate.limit > 0]
    able.sort(key=lambda i: candidates[i].draft_prefill - candidates[i].p_all_accepted * candidates[i].acceptance)
    best = ModelPass({})
    for k in range(1, len(able) + 1):
        first_k = [candidates[index] for index in able[:k]]
        longest = max(candidate.limit for candidate in first_k)
        for in_one_pass in (False, True)[: 1 + (prices.block_length > 1)]:
            length = min(longest, prices.block_length) if in_one_pass else longest
            n, gain = _best_length(first_k, length, prices, in_one_pass=in_one_pass)
            if gain > best.gain:
                masks = {i: min(n, candidates[i].limit) - 1 if in_one_pass else 0 for i in able[:k]}
                best = ModelPass(masks, gain)
    return best


def _best_length(candidates: list[Candidate], longest: int, prices: Prices, *, in_one_pass: bool) -> tuple[int, float]:
    """How many tokens to draft for each of these sequences, and the gain: 0 and 0.0 where none pay."""
    base, pending = prices.target(prices.rows), sum(candidate.pending for candidate in candidates)
    expected, drafts, price = 0.0, 0, sum(candidate.draft_prefill for candidate in candidates)
    best = 0, 0.0
    for n in range(1, longest + 1):
        drafting = [candidate for candidate in candidates if candidate.limit >= n]
        expected += sum(candidate.arrives(n, in_one_pass=in_one_pass) for candidate in drafting)
        drafts += len(drafting)
        if n == 1:
            passes = prices.draft(pending)
        elif in_one_pass:
            passes = prices.draft(pending + drafts - len(candidates))
        else:
            passes += prices.draft(len(drafting))
        gain = expected - price - passes - (prices.target(prices.rows + drafts) - base)
        if gain > best[1]:
            best = n, gain
    return best


class Balance:
    """Two accounts of one sequence's drafts, in passes of plain decoding: its recent speed-up, and its loss in all."""

    def __init__(self) -> None:
        self._tokens = 0
        self._loss = 0.0
        self._recent_tokens = self._recent_passes = 0.0

    @property
    def speedup(self) -> float:
        """The recent speed-up over plain decoding, at least 1 and at most 2."""
        recent = self._recent_tokens / self._recent_passes if self._recent_passes else 1.0
        return min(_MOST_SPEEDUP, max(1.0, recent))

    @property
    def is_over_budget(self) -> bool:
        """Whether its drafts have cost more, net of what they brought, than they may; that grows with the text."""
        return self._loss > _LOSS_PASSES + _LOSS_SHARE * self._tokens

    def count_round(self, step: SequenceStep) -> None:
        """Account for a decode round; plain decoding would have given one token in one pass."""
        extra = (step.seconds.target_drafts + step.seconds.draft_model) / step.seconds.plain
        self._tokens += step.n_committed
        self._loss += 1 + extra - step.n_committed
        self._recent_tokens = _SPEEDUP_FADE * self._recent_tokens + step.n_committed
        self._recent_passes = _SPEEDUP_FADE * self._recent_passes + 1 + extra


class Controller:
    """Decides what is drafted: nothing in mode `off`, `gamma` tokens a round in mode `fixed`, what gains in `auto`.

    The drafters (drafters.py) execute. It has no clock and no randomness.
    """

    def __init__(self, target_cost: PassCosts, draft_cost: PassCosts | None, *, block_length: int = 1) -> None:
        self.target_cost = target_cost
        self.draft_cost = draft_cost
        self.block_length = block_length  # see `Prices`
        self.acceptance = Acceptance()
        self._balances: WeakKeyDictionary[Sequence, Balance] = WeakKeyDictionary()
        self._lengths = deque(_ASSUMED, _ANSWERS)  # of the last answers

    def balance(self, sequence: Sequence) -> Balance:
        return self._balances.setdefault(sequence, Balance())

    def forget(self, sequence: Sequence) -> None:
        """Forget an ended sequence except its length, which counts as infinite if the token limit cut it off."""
        if sequence.generated:
            self._lengths.append(math.inf if sequence.remaining <= 0 else sequence.generated)
        self._balances.pop(sequence, None)

    def prices(self, decoding: abc.Sequence[Sequence], target_kv_len: int, draft_kv_len: int) -> Prices:
        """What passes cost in this round, in which at least one sequence decodes.

        A second is worth the sum of the sequences' speed-ups, divided by the seconds of a pass without drafts. Each
        further sequence adds a margin, because a rejected draft delays it too. The KV lengths are the numbers of tokens
        that a row attends to.
        """
        target, draft = self.target_cost, self.draft_cost
        speedups = sum(self.balance(sequence).speedup for sequence in decoding)
        value = speedups / target.seconds(len(decoding), target_kv_len)
        value *= 1 + _SHARED_MARGIN * (len(decoding) - 1)
        return Prices(
            target=lambda rows: value * target.seconds(rows, target_kv_len),
            draft=lambda rows: value * draft.seconds(rows, draft_kv_len) if draft else 0.0,
            block_length=self.block_length,
        )

    def draft_limits(
        self,
        decoding: abc.Sequence[Sequence],
        *,
        max_rows: int,  # of the target's pass that may be drafts
        max_wait_seconds: float,  # that drafts may add to the round; infinite where no other request waits for them
        kv_len: int,  # tokens of the target's cache that a row attends to
        draft_kv_len: int,  # the same of the draft model's
    ) -> list[int]:
        """The most draft tokens of each sequence: its gamma, as far as a pass has room and others can wait for them."""
        # The round may add one token of the target's own.
        asked = [
            0 if sequence.speculation.mode == "off" else min(sequence.speculation.gamma, sequence.remaining - 1)
            for sequence in decoding
        ]
        drafting = max(1, sum(drafts > 0 for drafts in asked))
        # Below zero where sequences have outgrown what they were promised.
        most = max(0, max_rows) // drafting
        if not math.isinf(max_wait_seconds):
            draft_pass = self.draft_cost.seconds(drafting, draft_kv_len) if self.draft_cost else 0.0
            added = self.target_cost.curve(len(decoding) + drafting * most, kv_len)[len(decoding) :: drafting]
            waits = [gamma * draft_pass + seconds - added[0] for gamma, seconds in enumerate(added)]
            most = max((gamma for gamma, wait in enumerate(waits) if wait <= max_wait_seconds), default=0)
        return [max(0, min(drafts, most)) for drafts in asked]

    def steps_to_draft(self, steps: abc.Sequence[SequenceStep], prices: Prices) -> list[SequenceStep]:
        """The steps that may get drafts, before any is drafted; asking for each of many steps takes 2 % of a round.

        Sets `model_ended` on the steps for which the draft model drafts nothing.
        """
        able = [step for step in steps if step.max_drafts > 0]
        fixed = [step for step in able if is_fixed(step)]
        likely = [
            Candidate(1.0, _LIKELY, min(_FEW, step.max_drafts), masked_acceptance=_LIKELY)
            for step in able
            if not is_fixed(step)
        ]
        rows_pay, _ = rows_worth_adding([_LIKELY] * sum(candidate.limit for candidate in likely), prices)
        model_may_pay = rows_pay > 0 and choose_for_model(likely, prices).gain > 0
        for step in able:
            step.model_ended = not (model_may_pay or is_fixed(step))
        return able if rows_pay else fixed

    def proposal_length(
        self, step: SequenceStep, probabilities: list[float], by_model: Candidate | None, prices: Prices
    ) -> int:
        """How many leading tokens of a proposal to draft; 0 where the draft model gains more.

        Both are compared over the part of the proposal that is worth drafting, since after it the model may draft in
        either case; the model as if it drafted for this sequence alone. In mode `fixed` those before the first that is
        less likely than the model's next.

        The probabilities are of acceptance of each proposed token; `by_model` is None where the model may not draft.
        """
        if is_fixed(step):
            least = by_model.acceptance if by_model else 0.0
            return next((index for index, p in enumerate(probabilities) if p < least), len(probabilities))
        length, gain = self.length_worth_drafting(step, probabilities, prices)
        if by_model is None:
            return length
        by_model = by_model._replace(limit=min(by_model.limit, length))
        return length if gain > choose_for_model([by_model], prices).gain else 0

    def length_worth_drafting(
        self, step: SequenceStep, probabilities: abc.Sequence[float], prices: Prices
    ) -> tuple[int, float]:
        """How many of the tokens that follow the drafts are worth a row of the target, and their gain.

        The probabilities are of acceptance of each; in mode `fixed` all are drafted.
        """
        accepted = list(accumulate(probabilities, mul, initial=step.p_all_accepted))[1:]
        length, gain = rows_worth_adding(accepted, prices)
        return (len(accepted) if is_fixed(step) else length), gain

    def candidate(self, step: SequenceStep, pending: int, prices: Prices) -> Candidate | None:
        """What is known of a step before the draft model reads `pending` tokens and drafts the next one.

        None while drafts have lost too much for the sequence's length; other drafters go on.
        """
        sequence = step.sequence
        acceptance = self.acceptance.of_next(sequence)
        if self.balance(sequence).is_over_budget and not is_fixed(step):
            return None
        # What drafts behind masks have not read is read in every round; the rest once, for all tokens that follow.
        each_round = min(pending, prices.block_length)
        draft_prefill = (prices.draft(pending) - prices.draft(each_round)) / self._following(sequence)
        masked = self.acceptance.of_next(sequence, behind_mask=True)
        return Candidate(
            step.p_all_accepted, acceptance, step.rows_left, draft_prefill, pending=each_round, masked_acceptance=masked
        )

    def _following(self, sequence: Sequence) -> float:
        """A cautious estimate of the tokens still to come: 90 % of answers that got this far had more; at least 1."""
        longer = sorted(length for length in self._lengths if length > sequence.generated)
        length = longer[int(_SHORTER * len(longer))] if longer else 2.0 * sequence.generated
        return max(1.0, min(sequence.remaining, length - sequence.generated))


def is_fixed(step: SequenceStep) -> bool:
    return step.sequence.speculation.mode == "fixed"
