"""How much a round may take on: draft tokens and prefill, as far as other sequences can wait for them.

All are functions of what passes cost; the scheduler asks them before each round.
"""

from __future__ import annotations

import math

from specserve.speculation.cost import Cost

# The least budget of a round for prefill, in tokens: a smaller chunk takes nearly as long (benchmarks/cost_curve.py).
_MIN_CHUNK = 4
# The default of `max_wait_ms`, in seconds; or, on a slow machine, in forward passes of one token, since the chunks that
# fit into 0.25 s would be so small that every prompt takes much longer (benchmarks/RESULTS.md, decisions).
_WAIT_SECONDS, _WAIT_PASSES = 0.25, 10
# Chunks whose wait per token is within this factor of the least are equal, since timings vary by a few per cent.
_EQUAL = 1.03


def max_wait(milliseconds: float | None, cost: Cost) -> float:
    """The seconds that prefill may add to a round of sequences that decode.

    Args:
        milliseconds: as configured; None derives it from the machine's speed.
        cost: of the target's forward passes.
    """
    if milliseconds is not None:
        return milliseconds / 1000
    return max(_WAIT_SECONDS, _WAIT_PASSES * cost.seconds(1, 0))


def prefill_chunk(cost: Cost, kv_len: int, *, rows: int, decoding: int, others: int, most: int, max_wait: float) -> int:
    """The prefill chunk, in tokens, that minimises the total wait of all sequences per prefilled token.

    Sequences that decode wait for what the chunk adds to the round: at most `max_wait` seconds, unless even the least
    chunk takes longer. The others wait for the whole round. Of equal chunks the largest is taken.

    Args:
        cost: of the target's passes.
        kv_len: tokens of its cache that a row attends to.
        rows: of the round without the chunk.
        decoding: how many sequences decode.
        others: how many wait or prefill.
        most: the largest chunk.
        max_wait: in seconds.
    """
    longest = max_wait if decoding else math.inf
    before = cost.seconds(rows, kv_len)
    chunks = range(min(_MIN_CHUNK, most), most + 1)
    # By estimate a forward pass may be cheaper with a chunk; no wait is below zero.
    added = {chunk: max(0.0, cost.seconds(rows + chunk, kv_len) - before) for chunk in chunks}
    fitting = [chunk for chunk in chunks if added[chunk] <= longest] or [chunks[0]]
    waits = {chunk: (others * (before + added[chunk]) + decoding * added[chunk]) / chunk for chunk in fitting}
    return max(chunk for chunk in fitting if waits[chunk] <= _EQUAL * min(waits.values()))


def drafts_in_time(
    target: Cost, kv_len: int, draft_step: float, *, rows: int, drafting: int, most: int, max_wait: float
) -> int:
    """How many drafts each sequence may have, up to `most`: they may delay other requests as long as prefill may.

    Sequences in mode `auto` stop earlier anyway; this bounds requests that fix a large gamma.

    Args:
        target: the cost of its passes.
        kv_len: tokens of its cache that a row attends to.
        draft_step: seconds of the draft model's pass over one token of each sequence.
        rows: of the pass without these drafts.
        drafting: how many sequences may have drafts.
        most: the limit without regard to time.
        max_wait: in seconds.
    """
    longest = target.seconds(rows, kv_len) + max_wait
    seconds = {n: n * draft_step + target.seconds(rows + drafting * n, kv_len) for n in range(1, most + 1)}
    return max((n for n in seconds if seconds[n] <= longest), default=0)
