"""Does a text get the same logits, bit for bit, however its rows are cut into passes, laid out and accompanied?

Only then do greedy and seeded texts repeat exactly with speculation and without. It is a property of the file, of the
kernels and of the cache together, so it is measured on the engine that will serve.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specserve.engine.base import Engine, FloatArray, Row

# Kernels take rows by fours and what is left over one by one: these leave 2, 3, 0 and 1, the odd chunk 3.
_COUNTS = (2, 3, 4, 5)
_STEPS = max(_COUNTS)
# Attention takes another path for a lone row once the cache counts more than 256 kv_len ...
_TOKENS = 264 + _STEPS
# ... and for 64 rows and more.
_WIDE = 65
_CHUNK = 16
_ODD_CHUNK = 15


class Invariance(NamedTuple):
    """The largest absolute difference of a logit when one thing alone is changed; 0.0 is equality of every bit.

    `rows`: how many rows of the text share a pass. `chunks`: how its prompt was cut into passes. `layout`: where its
    kv_len lie in the cache, and what was written there before; sums in another order seldom show in a quantised file,
    so 0.0 is no proof there. `neighbours`: rows of other texts in the pass; None where a pass has no room for any.
    """

    rows: float
    chunks: float
    layout: float
    neighbours: float | None

    @property
    def alone(self) -> bool:
        """Whether a text by itself in an empty cache repeats exactly, whatever is drafted."""
        return self.rows == self.chunks == 0

    @property
    def everywhere(self) -> bool:
        """Whether a text repeats exactly in any company."""
        return self.alone and self.layout == 0 and not self.neighbours

    @property
    def largest(self) -> float:
        """The largest difference of all."""
        return float(np.max([self.rows, self.chunks, self.layout, self.neighbours or 0.0]))


def probe(engine: Engine, room: int) -> Invariance:
    """Measure how far the logits of one text of random tokens depend on what should not matter.

    It takes as long as reading a prompt of about 400 tokens; the cache must be empty, and is afterwards.

    Args:
        engine: what is measured; its `max_rows` and `max_logits` bound what is tried.
        room: how many tokens a slot can hold; below 269 a shorter text is read, and what only long texts show is
            not seen.
    """
    try:
        return _Probe(engine, room).run()
    finally:
        for slot in range(min(2, engine.n_slots)):
            engine.truncate(slot, 0)


class _Probe:
    """A text in slot 0: an opening, a prompt up to `end`, and the steps behind it whose logits are compared."""

    def __init__(self, engine: Engine, room: int) -> None:
        self._engine = engine
        length = min(room, _TOKENS)
        self._text = [int(token) for token in np.random.default_rng(0).integers(engine.width, size=length)]
        self._end = length - _STEPS
        self._opening = min(_CHUNK, engine.max_rows, self._end)

    def run(self) -> Invariance:
        """Read the text once and measure; the order spares reading more than its end again."""
        opening = self._read_opening(0)
        turn = max(self._opening, self._end + 1 - _WIDE)
        late = max(self._opening, self._end - 2 * _CHUNK)
        self._read(self._opening, turn, _WIDE)
        wide = self._chunk(turn, _WIDE)
        self._engine.truncate(0, late)
        self._read(late, self._end, _CHUNK)
        steps = self._steps(_STEPS)
        odd = self._chunk(max(late, self._end + 1 - 2 * _ODD_CHUNK), _ODD_CHUNK)
        rows = [self._rows(count, steps) for count in _COUNTS if count <= self._engine.max_rows]
        layout, neighbours = [self._rejections(steps)], None
        if self._engine.n_slots > 1:
            neighbours = self._neighbours()
            layout.append(self._interleaved(late, opening, steps))
        chunks = [_difference(chunk, steps[:1]) for chunk in (wide, odd)]
        return Invariance(_largest(rows), _largest(chunks), _largest(layout), neighbours)

    def _rows(self, count: int, steps: FloatArray) -> float:
        """The first steps, all in one pass."""
        self._engine.truncate(0, self._end)
        wanted = min(count, self._engine.max_logits)
        logits = self._pass(_rows_of(self._text, self._end, count), wanted)
        return _difference(logits, steps[count - wanted : count])

    def _chunk(self, start: int, chunk: int) -> FloatArray:
        """Logits of the first step, as the last row of a chunk that begins at `start`, or of several."""
        self._engine.truncate(0, start)
        behind = self._end + 1
        last = behind - min(chunk, self._engine.max_rows, behind - start)
        self._read(start, last, chunk)
        return self._pass(_rows_of(self._text, last, behind - last))

    def _rejections(self, steps: FloatArray) -> float:
        """The first steps again, behind drafts that were written there and cut."""
        self._engine.truncate(0, self._end)
        self._pass(_rows_of(self._text[::-1], self._end, min(3, self._engine.max_rows)))
        self._engine.truncate(0, self._end)
        return _difference(self._steps(2), steps[:2])

    def _interleaved(self, start: int, opening: FloatArray, steps: FloatArray) -> float:
        """The opening in another slot, and the prompt's end on both sides of it, the later part in cells it gave up."""
        self._engine.truncate(0, start)
        self._engine.truncate(1, 0)
        elsewhere = _difference(self._read_opening(1), opening)
        middle = min(start + _CHUNK, self._end)
        self._read(start, middle, _CHUNK)
        self._engine.truncate(1, 0)
        self._read(middle, self._end, _CHUNK)
        return _largest([elsewhere, _difference(self._steps(4), steps[:4])])

    def _neighbours(self) -> float | None:
        """Steps of the text beside as many rows of another, against a pass as large of the text alone."""
        half = min(2, self._engine.max_rows // 2)
        if half == 0:
            return None
        own = _rows_of(self._text, self._end, 2 * half)
        other = _rows_of(self._text, 0, half, slot=1)
        # Logits of the same row, whatever stands around it.
        own[half - 1] = own[half - 1]._replace(wants_logits=True)
        passes = []
        for rows in (own, own[:half] + other, other + own[:half]):
            self._engine.truncate(0, self._end)
            self._engine.truncate(1, 0)
            passes.append(self._engine.forward(rows).copy())
        return _largest([_difference(crowd, passes[0]) for crowd in passes[1:]])

    def _read_opening(self, slot: int) -> FloatArray:
        return self._pass(_rows_of(self._text, 0, self._opening, slot=slot))

    def _read(self, start: int, end: int, chunk: int) -> None:
        """Write the prompt from `start` to `end` without asking for logits."""
        chunk = min(chunk, self._engine.max_rows)
        for first in range(start, end, chunk):
            self._pass(_rows_of(self._text, first, min(chunk, end - first)), wanted=0)

    def _steps(self, count: int) -> FloatArray:
        """Logits of the first steps behind the prompt, one row a pass."""
        return np.concatenate([self._pass(_rows_of(self._text, self._end + n, 1)) for n in range(count)])

    def _pass(self, rows: list[Row], wanted: int = 1) -> FloatArray:
        """One forward pass; a copy of the logits of its last `wanted` rows."""
        silent = len(rows) - wanted
        return self._engine.forward([row._replace(wants_logits=i >= silent) for i, row in enumerate(rows)]).copy()


def _rows_of(text: list[int], start: int, count: int, *, slot: int = 0) -> list[Row]:
    return [Row(text[place], slot, place, wants_logits=False) for place in range(start, start + count)]


def _difference(one: FloatArray, other: FloatArray) -> float:
    return 0.0 if np.array_equal(one, other) else float(np.abs(one - other).max())


def _largest(differences: list[float]) -> float:
    return float(np.max(differences, initial=0.0))
