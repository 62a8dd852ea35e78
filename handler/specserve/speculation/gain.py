"""What drafts gain: expected accepted tokens, less what their time is worth.

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
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from itertools import accumulate
from operator import mul
from typing import NamedTuple


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
        p_all_accepted: the probability that all its drafts so far are accepted.
        acceptance: the probability that its next draft token is accepted; before a long catch-up, the long run's.
        charged_rows: tokens that the draft model reads before that; 1 before a long catch-up, whose other rows are in
            `catch_up_seconds`.
        max_drafts: how many more draft tokens the sequence may have.
        catch_up_seconds: the part of a long catch-up that each further token of the answer pays.
        is_certain: whether the next token is drafted whatever it gains.
    """

    p_all_accepted: float
    acceptance: float
    charged_rows: int
    max_drafts: int
    catch_up_seconds: float = 0.0
    is_certain: bool = False


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
    token each; then the question is asked again. What is certain is drafted in any case, and the others are weighed by
    what they add to that pass.

    Args:
        candidates: all that may go on.
        rows: of the target's pass by now.
        costs: of this round.

    Returns:
        Indices into `candidates`, and the gain in tokens of those that are not certain; 0.0 where nothing pays.
    """
    able = [index for index, candidate in enumerate(candidates) if candidate.max_drafts > 0]
    certain = [index for index in able if candidates[index].is_certain]
    weighed = [index for index in able if not candidates[index].is_certain]
    # Cheapest long catch-up first (0: none), then the likeliest.
    weighed.sort(
        key=lambda i: (candidates[i].catch_up_seconds, -candidates[i].p_all_accepted * candidates[i].acceptance)
    )
    certain_rows = sum(candidates[index].charged_rows for index in certain)
    certain_seconds = costs.draft_pass(certain_rows) if certain else 0.0
    rows += len(certain)
    base = costs.target_pass(rows)
    best: tuple[list[int], float] = [], 0.0
    for k in range(1, len(weighed) + 1):
        first_k = [candidates[index] for index in weighed[:k]]
        expected, drafts = 0.0, 0
        # Every token of the round pays its part of a catch-up: the target's own, and the accepted drafts.
        seconds = sum(candidate.catch_up_seconds for candidate in first_k)
        for n in range(1, max(candidate.max_drafts for candidate in first_k) + 1):
            drafting = [candidate for candidate in first_k if candidate.max_drafts >= n]
            accepted = [candidate.p_all_accepted * candidate.acceptance**n for candidate in drafting]
            expected += sum(accepted)
            seconds += sum(tokens * c.catch_up_seconds for tokens, c in zip(accepted, drafting, strict=True))
            drafts += len(drafting)
            # The first pass also reads what is pending.
            rows_read = sum(candidate.charged_rows for candidate in drafting) if n == 1 else len(drafting)
            seconds += costs.draft_pass(certain_rows + rows_read) - certain_seconds
            gain = expected - costs.tokens_per_second * (seconds + costs.target_pass(rows + drafts) - base)
            if gain > best[1]:
                best = weighed[:k], gain
    return [*certain, *sorted(best[0])], best[1]


def offer_length(
    p_all_accepted: float, probabilities: abc.Sequence[float], by_model: Candidate | None, rows: int, costs: RoundCosts
) -> int:
    """How many leading tokens of an offer to draft; 0 where the draft model gains more.

    Both are compared over the part of the offer that is worth drafting, since after it the model may draft in either
    case; the model as if it drafted for this sequence alone.

    Args:
        p_all_accepted: the probability that all drafts before them are accepted.
        probabilities: acceptance probability of each offered token.
        by_model: the sequence as the draft model may go on with it instead; None where it may not.
        rows: of the target's pass by now.
        costs: of this round.
    """
    accepted = list(accumulate(probabilities, mul, initial=p_all_accepted))[1:]
    length, best = rows_worth_adding(accepted, rows, costs)
    if by_model is None:
        return length
    _, model_gain = choose_for_model(
        [by_model._replace(max_drafts=min(by_model.max_drafts, length), is_certain=False)], rows, costs
    )
    return length if best > model_gain else 0
