"""Alternatives: tokens that may be recovered in place of a rejected draft, read by the target beside the drafts.

Where a further row costs the target's pass next to nothing, the target also reads the draft model's next choices. If
the rule recovers one of them, its row of logits is there already, and the round commits one more token, as the next
round would without drafts (round.py). The rules know nothing of it, so the distribution is the target's.
"""

import math
from collections import abc
from collections.abc import Container

import numpy as np

from specserve.sampling.distribution import FloatArray
from specserve.speculation.acceptance import Acceptance
from specserve.speculation.policy import Prices, rows_worth_adding
from specserve.speculation.rejection import RULES, likeliest
from specserve.speculation.step import Alternative, Draft, SequenceStep

# Alternatives to a draft that are considered: 4 instead of 2 bring 1 to 5 % at temperature 0.8
# (benchmarks/decisions/tried.md).
_CHOICES = 4
# What an alternative has to gain beside its row, in tokens: it takes .1 ms of bookkeeping in the KV cache
# (`benchmarks/simulate.py --set alternatives._LEAST_GAIN=.02`).
_LEAST_GAIN = 0.005


def alternatives_to(
    draft: Draft, step: SequenceStep, logits: FloatArray, acceptance: Acceptance
) -> tuple[Alternative, ...]:
    """The draft model's next choices after a draft, the likeliest to be recovered first.

    The step has not got the draft yet; the logits, shape (vocabulary,), are those that a greedy draft is the argmax of.
    """
    is_greedy, index = draft.q is None, len(step.drafts)
    values, excluded = (logits, -np.inf) if draft.q is None else (draft.q, 0.0)
    guess = likeliest if is_greedy else RULES[step.sequence.speculation.verification].guess
    best = float(values[draft.token])
    # That the draft is the first to be rejected and none so far is recovered; and what their probabilities leave.
    rejected, left = step.p_all_accepted * (1 - draft.acceptance), 1 - (draft.confidence if is_greedy else best)
    # Choices are excluded one by one, and put back in the end: a copy of 150,000 numbers takes longer than all else.
    held = {draft.token: best}
    values[draft.token] = excluded
    found: list[Alternative] = []
    while len(found) < _CHOICES and rejected >= _LEAST_GAIN and left > 0:
        token = guess(values, index, step.noise)
        value = float(values[token])
        if value <= excluded:
            # No token is left.
            break
        mass = draft.confidence * math.exp(value - best) if is_greedy else value
        share = min(1.0, mass / left)
        gain = rejected * acceptance.of_token(step.sequence, "alternative", share)
        found.append(Alternative(index, token, share, gain))
        rejected, left = rejected - gain, left - mass
        held[token] = value
        values[token] = excluded
    for token, value in held.items():
        values[token] = value
    return tuple(found)


def choose_alternatives(
    steps: abc.Sequence[SequenceStep], max_alternatives: int, prices: Prices, end_tokens: Container[int]
) -> None:
    """Let the target read the alternatives that are likely to be recovered, as many as pay for their rows.

    The steps have all their drafts. No end token is an alternative, since no token follows it.
    """
    possible = [
        (alternative, step)
        for step in steps
        for draft in step.drafts
        for alternative in draft.alternatives
        if alternative.token not in end_tokens
    ]
    possible.sort(key=lambda pair: pair[0].gain, reverse=True)
    gains = [alternative.gain - _LEAST_GAIN for alternative, _ in possible[:max_alternatives]]
    length, _ = rows_worth_adding(gains, prices)
    for alternative, step in possible[:length]:
        if step.rows_left > 0:
            step.alternatives.append(alternative)
