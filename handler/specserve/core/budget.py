"""How much prefill a round may take on, as far as other sequences can wait for it; a function of what passes cost."""

from __future__ import annotations

import math

import numpy as np

from specserve.speculation.costs import PassCosts

# The least budget of a round for prefill, in tokens: a smaller chunk takes nearly as long (benchmarks/cost_curve.py).
_MIN_CHUNK = 4
# The default of `max_wait_ms`, in seconds; or, on a slow machine, in forward passes of one token, since the chunks that
# fit into 0.25 s would be so small that every prompt takes much longer (benchmarks/decisions/tried.md).
_WAIT_SECONDS, _WAIT_PASSES = 0.25, 7
# Chunks whose wait per token is within this factor of the least are equal, since timings vary by a few per cent.
_EQUAL = 1.03


def max_wait(milliseconds: float | None, cost: PassCosts) -> float:
    """The seconds that prefill may add to a round of sequences that decode.

    Args:
        milliseconds: as configured; None derives it from the machine's speed.
        cost: of the target's forward passes.
    """
    if milliseconds is not None:
        return milliseconds / 1000
    return max(_WAIT_SECONDS, _WAIT_PASSES * cost.seconds(1, 0))


def prefill_chunk(
    cost: PassCosts, kv_len: int, *, rows: int, decoding: int, others: int, max_rows: int, max_wait_seconds: float
) -> int:
    """The prefill chunk, in tokens, that minimises the total wait of all sequences per prefilled token.

    Sequences that decode wait for what the chunk adds to the round: at most `max_wait_seconds`, unless even the least
    chunk takes longer. The others wait for the whole round. Of equal chunks the largest is taken.

    Args:
        cost: of the target's passes.
        kv_len: tokens of its cache that a row of the chunk attends to.
        rows: of the round without the chunk.
        decoding: how many sequences decode.
        others: how many wait or prefill.
        max_rows: the largest chunk.
        max_wait_seconds: that those that decode wait.
    """
    max_seconds = max_wait_seconds if decoding else math.inf
    seconds = cost.curve(rows + max_rows, kv_len)
    before = seconds[rows]
    chunks = np.arange(min(_MIN_CHUNK, max_rows), max_rows + 1)
    # By estimate a forward pass may be cheaper with a chunk; no wait is below zero.
    added = np.maximum(0.0, seconds[rows + chunks] - before)
    is_possible = added <= max_seconds
    is_possible[0] = True
    waits = (others * (before + added) + decoding * added) / chunks
    is_possible &= waits <= _EQUAL * waits[is_possible].min()
    return int(chunks[is_possible][-1])
