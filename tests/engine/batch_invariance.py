"""Measures batch invariance: whether logits depend on how a text is split over passes, or on what else they compute."""

import numpy as np

from specserve.engine.base import Engine, FloatArray, Row

# Rows a pass. llama.cpp's kernels take rows in blocks of four and the rest one by one, have others for 8 rows and more
# where weights are not repacked, and others of attention for 64.
_CHUNKS = (65, 16, 8, 7, 5, 4, 3, 2)
# Rows that are compared: decoded one by one they are what all else is compared with.
_STEPS = 8
# Attention of llama.cpp changes for a single row above a KV length of 256.
_LENGTH = 264 + _STEPS

# Logits by position.
_Steps = dict[int, FloatArray]


def largest_difference(engine: Engine) -> float:
    """The largest difference that a logit shows on a sequence of random tokens; 0.0 means equal bits.

    Between ways to split the sequence over passes; and, if the engine has another slot, between a cache that holds
    nothing else and one whose other slot is used before, between and in its passes. The cache is empty before and
    after.
    """
    tokens = [int(token) for token in np.random.default_rng(0).integers(engine.width, size=_LENGTH)]
    end, half = _LENGTH - _STEPS, _LENGTH // 2
    _read(engine, tokens[:end], max(_CHUNKS))
    steps = _read(engine, tokens, 1)
    differences = []
    for chunk in _CHUNKS:
        # So that the last row is the last of a whole chunk.
        engine.truncate(0, _LENGTH - -(-_STEPS // chunk) * chunk)
        differences.append(_difference(_read(engine, tokens, chunk), steps))
    if engine.n_slots > 1:
        engine.truncate(0, 0)
        for slot in (0, 1):
            _read(engine, tokens[:half], max(_CHUNKS), slot=slot)
        _read(engine, tokens[:end], max(_CHUNKS))
        differences.append(_difference(_read(engine, tokens, 1), steps))
        pair = [Row(tokens[end], 0, end, wants_logits=True), Row(tokens[half], 1, half, wants_logits=False)]
        for rows in (pair, pair[::-1]):
            engine.truncate(0, end)
            engine.truncate(1, half)
            differences.append(_difference({end: engine.forward(rows)[0].copy()}, steps))
    for slot in range(engine.n_slots):
        engine.truncate(slot, 0)
    return float(np.max(differences))


def _read(engine: Engine, tokens: list[int], chunk: int, *, slot: int = 0) -> _Steps:
    """Read what a slot lacks of these tokens, in chunks; returns the logits of each pass's last rows."""
    found: _Steps = {}
    for first in range(engine.cached_len(slot), len(tokens), chunk):
        last = min(first + chunk, len(tokens))
        wanted = range(max(first, last - engine.max_logits, len(tokens) - _STEPS), last)
        rows = [Row(tokens[position], slot, position, position in wanted) for position in range(first, last)]
        found.update(zip(wanted, engine.forward(rows).copy(), strict=True))
    return found


def _difference(logits: _Steps, steps: _Steps) -> float:
    differences = [
        0.0 if np.array_equal(logits[position], steps[position]) else np.abs(logits[position] - steps[position]).max()
        for position in logits.keys() & steps.keys()
    ]
    return float(np.max(differences))
