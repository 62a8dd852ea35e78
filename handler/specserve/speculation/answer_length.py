"""How many more tokens an answer is likely to have, by those that ended before.

The draft model reads the prompt before it drafts, which takes as long as some five steps of plain decoding. An answer
that ends soon does not earn that back, so what counts is not the mean, but how many tokens nearly all answers that have
come so far still have.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque

# The share of such answers that may be shorter (benchmarks/decisions/tried.md).
_SHORTER = 0.1
# Answers that are remembered.
_MEMORY = 200
# Lengths, in tokens, that a new server assumes to have seen: about as many are to follow as an answer has.
_ASSUMED = tuple(2.0**power for power in range(1, 12))


class AnswerLengths:
    """The lengths of the last answers."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(_ASSUMED, _MEMORY)
        self._ascending = list(_ASSUMED)

    def following(self, generated: int) -> float:
        """The tokens that all but a tenth of the answers that had as many as this one had after those."""
        first = bisect_right(self._ascending, generated)
        longer = len(self._ascending) - first
        if not longer:
            return generated
        return self._ascending[first + int(_SHORTER * longer)] - generated

    def learn(self, generated: int, *, is_cut_off: bool) -> None:
        """Count an answer that has ended, or that its client gave up; one that was cut off at its limit would go on."""
        length = math.inf if is_cut_off else float(generated)
        if len(self._recent) == _MEMORY:
            self._ascending.remove(self._recent[0])
        self._recent.append(length)
        insort(self._ascending, length)
