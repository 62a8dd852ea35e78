"""Measures batch invariance: whether logits depend, bit for bit, on how a sequence is split over forward passes.

Only if they do not, greedy and seeded answers repeat exactly with and without speculation. With specserve's kernels
they never do (tests/engine/test_invariance.py), so a server measures only what llama.cpp's kernels compute.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specserve.engine.base import Engine, FloatArray, Row

# Rows a pass. llama.cpp's kernels take rows in blocks of four and the rest one by one, have others for 8 rows and more
# where weights are not repacked, and others of attention for 64.
_CHUNKS = (65, 16, 8, 7, 5, 4, 3, 2)
# Rows that are compared: decoded one by one they are what all else is compared with.
_STEPS = 8
# Attention of llama.cpp changes for a single row above a KV length of 256.
_LENGTH = 264 + _STEPS

# Of a model that specserve's kernels compute as a whole.
REPEATS = "specserve's kernels compute a row alike in any pass: greedy and seeded outputs repeat exactly"

# Logits by position.
_Steps = dict[int, FloatArray]


class Invariance(NamedTuple):
    """The largest absolute difference that a logit shows in a short trial; 0.0 means equal bits.

    Args:
        alone: between ways to split one sequence over passes.
        beside: between a cache that holds nothing else and one that other sequences use before, between and in its
            passes; None if the engine has one slot.
    """

    alone: float
    beside: float | None

    @property
    def largest(self) -> float:
        """The larger difference."""
        return max(self.alone, self.beside or 0.0)

    @property
    def sentence(self) -> str:
        """Whether greedy and seeded texts repeat, in one sentence for the operator."""
        if not self.largest:
            return (
                "the target gave the same logits in passes of any size and beside other sequences: greedy and seeded "
                "outputs repeat exactly, as far as a short trial can tell"
            )
        alone = "" if self.alone else "repeat exactly alone in an empty cache; beside or after other requests they "
        return (
            f"in a short trial the target's logits differed by {self.largest:.2g} between passes with other rows, and "
            f"may differ by more: greedy and seeded outputs {alone}may differ between runs where two tokens are nearly "
            "equal"
        )


def probe(engine: Engine) -> Invariance:
    """Measure the differences on one sequence of random tokens, in the time of some 900 tokens of prefill.

    The cache must be empty, and is empty afterwards.
    """
    length = min(engine.slot_length, engine.n_cells // min(2, engine.n_slots), _LENGTH)
    tokens = [int(token) for token in np.random.default_rng(0).integers(engine.width, size=length)]
    try:
        _read(engine, tokens[:-_STEPS], max(_CHUNKS))
        steps = _read(engine, tokens, 1)
        alone = []
        for chunk in _CHUNKS:
            # So that the last row is the last of a whole chunk.
            engine.truncate(0, max(0, length - -(-_STEPS // chunk) * chunk))
            alone.append(_difference(_read(engine, tokens, chunk), steps))
        beside = _beside(engine, tokens, steps) if engine.n_slots > 1 else None
        return Invariance(float(np.max(alone)), beside)
    finally:
        for slot in range(engine.n_slots):
            engine.truncate(slot, 0)


def _beside(engine: Engine, tokens: list[int], steps: _Steps) -> float:
    """Compare in a cache where cells of another slot lie between those of the sequence, and with rows of that slot."""
    end, half = len(tokens) - _STEPS, len(tokens) // 2
    engine.truncate(0, 0)
    _read(engine, tokens[:half], max(_CHUNKS))
    _read(engine, tokens[:half], max(_CHUNKS), slot=1)
    _read(engine, tokens[:end], max(_CHUNKS))
    differences = [_difference(_read(engine, tokens, 1), steps)]
    pair = [Row(tokens[end], 0, end, wants_logits=True), Row(tokens[half], 1, half, wants_logits=False)]
    for rows in (pair, pair[::-1])[: engine.max_rows // 2 * 2]:
        engine.truncate(0, end)
        engine.truncate(1, half)
        differences.append(_difference({end: engine.forward(rows)[0].copy()}, steps))
    return float(np.max(differences))


def _read(engine: Engine, tokens: list[int], chunk: int, *, slot: int = 0) -> _Steps:
    """Read what a slot lacks of these tokens, in chunks; returns the logits of the last rows that a pass gives."""
    found: _Steps = {}
    chunk = min(chunk, engine.max_rows)
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
