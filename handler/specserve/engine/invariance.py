"""Measures batch invariance: whether logits depend, bit for bit, on how a sequence is split over forward passes.

Only if they do not, greedy and seeded answers repeat exactly with and without speculation. This is a property of the
weights, the kernels and the cache together, so it is measured on the engine that will serve.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from specserve.engine.base import Engine, FloatArray, Row

# Rows a pass. Kernels process rows in blocks of four and the rest one by one: these leave rests of 2, 3, 0 and 1. Where
# weights are not repacked, llama.cpp has another kernel for 8 rows and more.
_COUNTS = (2, 3, 4, 5, 8)
# Decode steps, one row a pass, that all else is compared with.
_STEPS = 8
# Attention of llama.cpp changes for a single row above a KV length of 256, and for 64 rows and more.
_LENGTH = 264 + _STEPS
_WIDE_CHUNK = 65
_CHUNK = 16
# Leaves a rest of 3, and is too small for the kernel for 8 rows.
_ODD_CHUNK = 7
# Tokens of a short trial, for engines whose results do not depend on the length.
_SHORT_LENGTH = 96


class Invariance(NamedTuple):
    """The largest absolute difference that a logit shows when one condition changes; 0.0 means equal bits.

    Args:
        rows: number of rows of the sequence in a pass.
        chunks: split of the prompt over passes.
        layout: positions of the sequence's cells in the cache, and their earlier content. A different order of sums
            seldom shows with quantised weights, so 0.0 is no proof.
        neighbours: rows of other sequences in the pass; None if a pass has too few rows for any.
        alternatives: tokens read and adopted as alternatives to drafts; None if the engine takes none.
    """

    rows: float
    chunks: float
    layout: float
    neighbours: float | None
    alternatives: float | None

    @property
    def single_sequence(self) -> bool:
        """Whether a single sequence in an empty cache repeats exactly, with any drafts."""
        return self.rows == self.chunks == 0 and not self.alternatives

    @property
    def any_batch(self) -> bool:
        """Whether a sequence repeats exactly, with any drafts and beside any other sequences."""
        return self.single_sequence and self.layout == 0 and not self.neighbours

    @property
    def largest(self) -> float:
        """The largest difference that any condition makes."""
        return float(np.max([difference or 0.0 for difference in self]))

    @property
    def sentence(self) -> str:
        """Whether greedy and seeded texts repeat, in one sentence for the operator."""
        names = {
            "numbers of rows": self.rows,
            "prefill chunks": self.chunks,
            "cache positions": self.layout,
            "neighbours": self.neighbours,
            "alternatives": self.alternatives,
        }
        tried = {name: difference for name, difference in names.items() if difference is not None}
        if self.any_batch:
            return (
                f"the target gave the same logits for all {_listed(tried)} that were tried: greedy and seeded outputs "
                "repeat exactly, as far as a short trial can tell"
            )
        found = _listed(f"{name} (by {difference:.2g})" for name, difference in tried.items() if difference)
        exactly = (
            "repeat exactly alone in an empty cache; beside or after other requests they "
            if self.single_sequence
            else ""
        )
        return (
            f"in a short trial the target's logits differed between {found}, and may differ by more: greedy and seeded "
            f"outputs {exactly}may differ between runs where two tokens are nearly equal"
        )


def probe(engine: Engine, *, thorough: bool) -> Invariance:
    """Measure the differences on one sequence of random tokens.

    The cache must be empty, and is empty afterwards.

    Args:
        engine: the engine to measure.
        thorough: whether to look for effects of the KV length and of small chunks for longer, as llama.cpp's kernels
            have them; this takes as long as the prefill of 600 tokens, a short trial as that of 250.
    """
    try:
        return _Probe(engine, thorough=thorough).run()
    finally:
        for slot in range(engine.n_slots):
            engine.truncate(slot, 0)


class _Probe:
    """Compares the steps of a sequence in slot 0: its prompt is an opening chunk and what follows up to `end`."""

    def __init__(self, engine: Engine, *, thorough: bool) -> None:
        self._engine = engine
        self._thorough = thorough
        # A second slot may be filled as far.
        length = min(
            engine.slot_length, engine.n_cells // min(2, engine.n_slots), _LENGTH if thorough else _SHORT_LENGTH
        )
        self._tokens = [int(token) for token in np.random.default_rng(0).integers(engine.width, size=length)]
        self._end = length - _STEPS
        self._opening = min(_CHUNK, engine.max_rows, self._end)
        # Before it the prompt is computed once, after it for every comparison.
        self._tail = max(self._opening, self._end - (4 if thorough else 2) * _CHUNK)

    def run(self) -> Invariance:
        """Run all comparisons, in an order that computes only the prompt's end again."""
        opening = self._prefill_opening(0)
        wide_start = max(self._opening, self._end + _STEPS - _WIDE_CHUNK)
        self._prefill(self._opening, wide_start, _WIDE_CHUNK)
        wide = self._steps_in_chunk(wide_start, _WIDE_CHUNK)
        self._engine.truncate(0, self._tail)
        self._prefill(self._tail, self._end, _CHUNK)
        steps = self._steps(_STEPS)
        alternatives = self._alternatives(steps)
        layout, neighbours = [self._after_rejections(steps)], None
        rows = [self._rows(count, steps) for count in _COUNTS if count <= self._engine.max_rows]
        odd = self._steps_in_chunk(self._tail, _ODD_CHUNK)
        if self._engine.n_slots > 1:
            neighbours = self._neighbours()
            layout.append(self._interleaved(opening, steps))
            if self._thorough and len(self._tokens) < _LENGTH:
                layout.append(self._full(steps))
        chunks = [_difference(logits, steps[-len(logits) :]) for logits in (wide, odd)]
        return Invariance(_largest(rows), _largest(chunks), _largest(layout), neighbours, alternatives)

    def _rows(self, count: int, steps: FloatArray) -> float:
        """Compare steps in one pass, the first ones or all of them after the prompt's last tokens."""
        start = self._end - max(0, count - _STEPS)
        self._engine.truncate(0, start)
        wanted = min(count, _STEPS, self._engine.max_logits)
        logits = self._forward(_rows_of(self._tokens, start, count), wanted)
        last = min(count, _STEPS)
        return _difference(logits, steps[last - wanted : last])

    def _steps_in_chunk(self, start: int, chunk: int) -> FloatArray:
        """Return the logits that the last steps have as the last rows of a prefill in chunks from `start`."""
        self._engine.truncate(0, start)
        end = self._end + _STEPS
        last = end - min(chunk, self._engine.max_rows, end - start)
        self._prefill(start, last, chunk)
        return self._forward(_rows_of(self._tokens, last, end - last), min(_STEPS, end - last, self._engine.max_logits))

    def _alternatives(self, steps: FloatArray) -> float | None:
        """Compare the third step as an alternative to another draft, and the fourth after it was adopted."""
        if self._engine.max_alternatives == 0 or self._engine.max_rows < 4:
            return None
        self._engine.truncate(0, self._end)
        *rows, third = _rows_of(self._tokens, self._end, 3)
        other = third._replace(token=(third.token + 1) % self._engine.width)
        logits = self._forward([*rows, other, third._replace(alternative=True)])
        self._engine.adopt(0, 0)
        fourth = self._forward(_rows_of(self._tokens, self._end + 3, 1))
        return _difference(np.concatenate([logits, fourth]), steps[2:4])

    def _after_rejections(self, steps: FloatArray) -> float:
        """Compare the first steps after other tokens were cached and truncated at their positions."""
        self._engine.truncate(0, self._end)
        self._forward(_rows_of(self._tokens[::-1], self._end, min(3, self._engine.max_rows)))
        self._engine.truncate(0, self._end)
        return _difference(self._steps(2), steps[:2])

    def _interleaved(self, opening: FloatArray, steps: FloatArray) -> float:
        """Compare with cells before and after those of another slot, and in cells that it has freed."""
        self._engine.truncate(0, self._tail)
        self._engine.truncate(1, 0)
        other_slot = _difference(self._prefill_opening(1), opening)
        middle = min(self._tail + _CHUNK, self._end)
        self._prefill(self._tail, middle, _CHUNK)
        self._engine.truncate(1, 0)
        self._prefill(middle, self._end, _CHUNK)
        return _largest([other_slot, _difference(self._steps(4), steps[:4])])

    def _full(self, steps: FloatArray) -> float:
        """Compare beside so many tokens of other slots as make the cache long, where one slot cannot."""
        missing = min(_LENGTH, self._engine.n_cells) - len(self._tokens)
        for slot in range(1, self._engine.n_slots):
            self._engine.truncate(slot, 0)
            count = min(missing, len(self._tokens))
            self._prefill(0, count, _WIDE_CHUNK, slot=slot)
            missing -= count
        self._engine.truncate(0, self._end)
        return _difference(self._steps(2), steps[:2])

    def _neighbours(self) -> float | None:
        """Compare passes with as many rows of another sequence to one of the same size without."""
        half = min(2, self._engine.max_rows // 2)
        if half == 0:
            return None
        own = _rows_of(self._tokens, self._end, 2 * half)
        other = _rows_of(self._tokens, 0, half, slot=1)
        own[half - 1] = own[half - 1]._replace(wants_logits=True)
        logits = []
        for rows in (own, own[:half] + other, other + own[:half]):
            self._engine.truncate(0, self._end)
            self._engine.truncate(1, 0)
            logits.append(self._engine.forward(rows).copy())
        return _largest([_difference(beside_others, logits[0]) for beside_others in logits[1:]])

    def _prefill_opening(self, slot: int) -> FloatArray:
        return self._forward(_rows_of(self._tokens, 0, self._opening, slot=slot))

    def _prefill(self, start: int, end: int, chunk: int, *, slot: int = 0) -> None:
        """Cache the tokens from `start` to `end` without logits."""
        chunk = min(chunk, self._engine.max_rows)
        for first in range(start, end, chunk):
            self._forward(_rows_of(self._tokens, first, min(chunk, end - first), slot=slot), wanted=0)

    def _steps(self, count: int) -> FloatArray:
        """Return the logits of the first steps, one row a pass."""
        return np.concatenate([self._forward(_rows_of(self._tokens, self._end + n, 1)) for n in range(count)])

    def _forward(self, rows: list[Row], wanted: int = 1) -> FloatArray:
        """Run a pass; return a copy of the logits of its last `wanted` rows."""
        first = len(rows) - wanted
        return self._engine.forward([row._replace(wants_logits=i >= first) for i, row in enumerate(rows)]).copy()


def _rows_of(tokens: list[int], start: int, count: int, *, slot: int = 0) -> list[Row]:
    return [Row(tokens[position], slot, position, wants_logits=False) for position in range(start, start + count)]


def _listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _difference(logits: FloatArray, others: FloatArray) -> float:
    return 0.0 if np.array_equal(logits, others) else float(np.abs(logits - others).max())


def _largest(differences: list[float]) -> float:
    return float(np.max(differences, initial=0.0))
