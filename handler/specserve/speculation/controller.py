"""How many tokens to draft: expected accepted tokens against what their time is worth, asked anew in every round.

A draft token is accepted only if all before it are. With acceptance probabilities alpha_j, T(rows) and D the seconds of
passes of the target and of the draft model, and v the tokens that a second yields now, n drafts gain

    gain(n) = sum_{i<=n} prod_{j<=i} alpha_j - v (T(1 + n) - T(1) + n D)

tokens (Leviathan et al. 2023, arXiv 2211.17192, section 3.3, with measured costs; block verification accepts more). The
largest gain over all n is sought, whatever shape the costs have; the draft model then drafts one token, and the
question is asked again.

An example: alpha is .8 for every token, a pass of the target takes 40 ms and 3 ms more for each further row, one of the
draft model 12 ms. At first a second is worth what plain decoding yields, a token in 40 ms: a draft costs 15 ms, or .375
tokens, and the drafts bring .8, .64, .51, .41 and .33 tokens, so four are drafted. Rounds then give 3.36 tokens in
100 ms (`Balance.speedup` is 1.34), so a draft costs .50 tokens: three; and so on until two drafts give 34.9 tokens a
second, the most there is.

drafters.py asks in every round, with the round's `costs`:

    for each sequence: a lookup, the client's prediction and the grammar offer tokens, which cost no pass;
        `offer_length` says how many of them to draft
    while `choose_for_model` chooses sequences, each seen as a `candidate`: the draft model reads these in one pass, one
        token is drafted for each, and the other drafters offer again

The acceptance probabilities come from acceptance.py.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from specserve.sequence import Sequence
from specserve.speculation.acceptance import Acceptance
from specserve.speculation.charges import Balance
from specserve.speculation.cost import Cost

# benchmarks/RESULTS.md has what half and twice of each of these change (sensitivity).

# With more tokens to read before it drafts, the draft model has a long catch-up: its prefill of the prompt, or what
# other drafters have drafted.
SHORT_CATCH_UP = 4
# The seconds of a long catch-up count 1.95 times (benchmarks/RESULTS.md, decisions). They are spread over the
# tokens that are expected to follow: after n tokens n + 48 more, but at most 16 n, since a short answer may end soon,
# and at most `remaining`. A grammar's answer is often a label of a few tokens: 2 n (an empty list was at .67 of plain
# decoding's speed, prefill included; benchmarks/decode.py --families schema, Zen 5).
_CATCH_UP_MARGIN = 1.95
_GROWTH, _GRAMMAR_GROWTH, _HORIZON = 16, 2, 48
# Time counts so much more for every other sequence that shares it: what one drafts in vain, all wait for.
_SHARED_MARGIN = 0.12


class RoundCosts(NamedTuple):
    """What passes cost in this round, and the value of its time.

    Args:
        target_pass: seconds of a pass of the target by its number of rows.
        draft_pass: the same of the draft model.
        tokens_per_second: the value of time, see `Controller.costs`.
        awaiting_first_token: number of sequences in prefill or about to be.
    """

    target_pass: Callable[[int], float]
    draft_pass: Callable[[int], float]
    tokens_per_second: float
    awaiting_first_token: int = 0


class Candidate(NamedTuple):
    """A sequence that the draft model may draft for.

    Args:
        reached: the probability that all its drafts so far are accepted.
        acceptance: the probability that its next draft token is accepted; before a long catch-up, the long run's.
        charged_rows: tokens that the draft model reads before that; 1 before a long catch-up, whose other rows are in
            `catch_up_seconds`.
        most: how many more draft tokens the sequence may have.
        catch_up_seconds: the part of a long catch-up that each further token of the answer pays.
    """

    reached: float
    acceptance: float
    charged_rows: int
    most: int
    catch_up_seconds: float = 0.0


class Controller:
    """Weighs drafts: by the costs of both models' passes, and by what sequences have shown.

    It has no clock and no randomness.

    Args:
        target_cost: of the target's passes.
        draft_cost: of the draft model's; None without one.
    """

    def __init__(self, target_cost: Cost, draft_cost: Cost | None) -> None:
        self.target_cost = target_cost
        self.draft_cost = draft_cost
        self.acceptance = Acceptance()

    def costs(
        self, decoding: abc.Sequence[Sequence], target_kv_len: int, draft_kv_len: int, awaiting_first_token: int = 0
    ) -> RoundCosts:
        """What passes cost in this round, and what its time is worth.

        `tokens_per_second`, v above: the sum of the sequences' speed-ups (`Balance.speedup`), and 1 for each that
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

    def candidate(
        self, sequence: Sequence, reached: float, pending: int, most: int, costs: RoundCosts
    ) -> Candidate | None:
        """What is to be known before the draft model drafts for a sequence; None where it may not.

        It may not while the sequence's drafts have lost too much for its length; other drafters go on. And no long
        catch-up starts while a sequence awaits its first token, since those that decode would wait for both.

        Args:
            sequence: in mode `auto`; the others draft what they ask for.
            reached: the probability that all its drafts so far are accepted.
            pending: tokens that the draft model has to read before it drafts.
            most: how many more draft tokens the sequence may have.
            costs: of this round.
        """
        if self.balance(sequence).is_over_budget:
            return None
        shown = self.acceptance.of(sequence)
        if pending <= SHORT_CATCH_UP:
            return Candidate(reached, shown.next_acceptance, pending, most)
        if costs.awaiting_first_token:
            return None
        growth = _GROWTH if sequence.constraint is None else _GRAMMAR_GROWTH
        following = min(sequence.remaining, growth * sequence.generated, _HORIZON + sequence.generated)
        catch_up = _CATCH_UP_MARGIN * (costs.draft_pass(pending) - costs.draft_pass(1)) / max(1, following)
        # It has to pay over all these tokens, so the long run's acceptance counts.
        return Candidate(reached, shown.long_run_acceptance, 1, most, catch_up)

    def balance(self, sequence: Sequence) -> Balance:
        """What drafts have brought and cost this sequence (charges.py).

        Made on first use, and kept in the sequence. `speedup`: its tokens of about the last seven rounds, over those
        that plain decoding would have given in the same time; at least 1, at most 2. `is_over_budget`: drafts have
        lost, net of their gains, more than 1 % of the time that plain decoding would have taken, plus that of 4 tokens.
        """
        return sequence.state(self, Balance)


def rows_worth_adding(tokens: abc.Iterable[float], rows: int, costs: RoundCosts) -> tuple[int, float]:
    """How many further rows the target's pass should have, taken in this order, and their gain in tokens.

    Args:
        tokens: what each further row is expected to bring.
        rows: of the target's pass by now.
        costs: of this round.

    Returns:
        0 and 0.0 where no number of them pays.
    """
    base = costs.target_pass(rows)
    expected, length, best = 0.0, 0, 0.0
    for n, brought in enumerate(tokens, 1):
        expected += brought
        gain = expected - costs.tokens_per_second * (costs.target_pass(rows + n) - base)
        if gain > best:
            length, best = n, gain
    return length, best


def choose_for_model(candidates: abc.Sequence[Candidate], rows: int, costs: RoundCosts) -> tuple[list[int], float]:
    """Which sequences the draft model should draft one more token for, and the expected gain of going on.

    Several drafts can pay where one does not, and sequences share the passes of both models. So for every k and n the
    gain of n more tokens for the first k sequences is computed, every token as likely as the first. These k draft one
    token each; then the question is asked again.

    Args:
        candidates: all that may go on.
        rows: of the target's pass by now.
        costs: of this round.

    Returns:
        Indices into `candidates`, and the gain in tokens; none and 0.0 where nothing pays.
    """
    # Cheapest long catch-up first (0: none), then the likeliest.
    able = [index for index, one in enumerate(candidates) if one.most > 0]
    able.sort(key=lambda i: (candidates[i].catch_up_seconds, -candidates[i].reached * candidates[i].acceptance))
    base = costs.target_pass(rows)
    best: tuple[list[int], float] = [], 0.0
    for k in range(1, len(able) + 1):
        first_k = [candidates[index] for index in able[:k]]
        expected, drafts = 0.0, 0
        # Every token of the round pays its part of a catch-up: the target's own, and the accepted drafts.
        seconds = sum(one.catch_up_seconds for one in first_k)
        for n in range(1, max(one.most for one in first_k) + 1):
            drafting = [one for one in first_k if one.most >= n]
            accepted = [one.reached * one.acceptance**n for one in drafting]
            expected += sum(accepted)
            seconds += sum(tokens * one.catch_up_seconds for tokens, one in zip(accepted, drafting, strict=True))
            drafts += len(drafting)
            # The first pass also reads what is pending.
            rows_read = sum(one.charged_rows for one in drafting) if n == 1 else len(drafting)
            seconds += costs.draft_pass(rows_read)
            gain = expected - costs.tokens_per_second * (seconds + costs.target_pass(rows + drafts) - base)
            if gain > best[1]:
                best = able[:k], gain
    return best


def offer_length(
    reached: float, probabilities: abc.Sequence[float], by_model: Candidate | None, rows: int, costs: RoundCosts
) -> int:
    """How many leading tokens of an offer to draft; 0 where the draft model gains more.

    Both are compared over the part of the offer that is worth drafting, since after it the model may draft in either
    case; the model as if it drafted for this sequence alone.

    Args:
        reached: the probability that all drafts before them are accepted.
        probabilities: acceptance probability of each offered token.
        by_model: the sequence as the draft model may go on with it instead; None where it may not.
        rows: of the target's pass by now.
        costs: of this round.
    """
    accepted = list(accumulate(probabilities, mul, initial=reached))[1:]
    length, best = rows_worth_adding(accepted, rows, costs)
    if by_model is None:
        return length
    _, model_gain = choose_for_model([by_model._replace(most=min(by_model.most, length))], rows, costs)
    return length if best > model_gain else 0
