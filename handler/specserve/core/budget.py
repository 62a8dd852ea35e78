"""How much prefill a round may take on, as far as other sequences can wait for it; a function of what passes cost."""

from __future__ import annotations

import numpy as np

from specserve.speculation.costs import PassCosts

# The smallest chunk of a prefill, in tokens: a smaller one takes nearly as long (benchmarks/cost_curve.py).
_MIN_CHUNK = 4
# The default of `max_wait_ms`, in seconds; or, on a slow machine, in forward passes of one token, since the chunks that
# fit into 0.25 s would be so small that every prompt takes much longer (benchmarks/decisions/tried.md).
_WAIT_SECONDS, _WAIT_PASSES = 0.25, 7


def max_wait(milliseconds: float | None, cost: PassCosts) -> float:
    """The seconds that prefill may add to a round of sequences that decode.

    Args:
        milliseconds: as configured; None derives it from the machine's speed.
        cost: of the target's forward passes.
    """
    if milliseconds is not None:
        return milliseconds / 1000
    return max(_WAIT_SECONDS, _WAIT_PASSES * cost.seconds(1, 0))


def prefill_chunk(cost: PassCosts, kv_len: int, *, rows: int, max_rows: int, max_wait_seconds: float) -> int:
    """The longest prefill chunk, in tokens, that adds at most `max_wait_seconds` to a round; at least 4 tokens.

    Args:
        cost: of the target's passes.
        kv_len: tokens of its cache that a row of the chunk attends to.
        rows: of the round without the chunk.
        max_rows: the largest chunk.
        max_wait_seconds: infinite where no sequence decodes.
    """
    max_rows = max(0, max_rows)
    seconds = cost.curve(rows + max_rows, kv_len)
    # By estimate a wider pass may be faster than a narrower one.
    fitting = np.flatnonzero(seconds[rows + 1 :] - seconds[rows] <= max_wait_seconds)
    return max(min(_MIN_CHUNK, max_rows), int(fitting[-1]) + 1 if fitting.size else 0)
