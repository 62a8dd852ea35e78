"""Where a long text has its tokens, its pairs of tokens, and longer runs again: found at once by sorting, in NumPy.

Token by token, in Python, an index of 32,768 tokens takes more than a hundred times as long.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.integer]
Booleans = NDArray[np.bool_]
Number = TypeVar("Number", int, Integers)


@dataclass(frozen=True)
class Runs:
    """The runs of one length that a text has more than once.

    Args:
        length: in tokens.
        last: positions of the runs' last tokens: those of equal runs together, ascending.
        is_again: by index of `last`, whether the run equals the one before it there.
        size: of the text, in tokens.
    """

    length: int
    last: Integers
    is_again: Booleans
    size: int

    @cached_property
    def names(self) -> Integers:
        """By position in the text, a number that only equal runs share; 0 where the run occurs once."""
        # NumPy sorts numbers of 16 bits in linear time.
        names: Integers = np.zeros(self.size, np.uint16 if self.size < 2**16 else np.uint32)
        names[self.last] = np.cumsum(~self.is_again, dtype=names.dtype)
        return names


class TokenIndex:
    """Where a text has each token and each pair of tokens.

    Args:
        tokens: of the text.
    """

    def __init__(self, tokens: abc.Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.text = text = np.array(self.tokens, np.int64)
        # Each number occurs once, which sorts fastest.
        self._singles = np.sort(text * 2**32 + np.arange(text.size)) & (2**32 - 1)
        self._values = text[self._singles]
        is_again = self._values[1:] == self._values[:-1]
        self._tokens_again = _repeated(1, self._singles, is_again, text.size)
        # In the order of the second token, and of the first where that is equal.
        seconds = self._singles[self._singles < text.size - 1] + 1
        ranks = np.zeros(text.size, self._tokens_again.names.dtype)
        ranks[self._singles[1:]] = np.cumsum(~is_again, dtype=ranks.dtype)
        self._seconds = seconds[np.argsort(ranks[seconds], kind="stable")]
        self._pairs = _pair(text[self._seconds - 1], text[self._seconds])
        self._ends = self._seconds + 1

    def positions(self, token: int) -> Integers:
        """The positions of a token, ascending."""
        return self._singles[slice(*self._values.searchsorted((token, token + 1)))]

    def ends(self, first: int, second: int) -> Integers:
        """The positions after each occurrence of a pair of tokens, ascending."""
        pair = _pair(first, second)
        return self._ends[slice(*self._pairs.searchsorted((pair, pair + 1)))]

    def runs(self, lengths: abc.Sequence[int]) -> Iterator[Runs]:
        """The runs of these lengths that the text has more than once.

        Args:
            lengths: ascending, 2 first; with each length also the power of two below it, and what is missing to it.
        """
        pairs = _repeated(2, self._seconds, self._pairs[1:] == self._pairs[:-1], len(self.tokens))
        known = {1: self._tokens_again, 2: pairs}
        for length in lengths:
            if length not in known:
                end = 2 ** ((length - 1).bit_length() - 1)
                known[length] = _joined(known[length - end], known[end])
            yield known[length]


def _pair(first: Number, second: Number) -> Number:
    """One number for two tokens, in the order of the second."""
    return second * 2**32 + first


def _repeated(length: int, last: Integers, is_equal: Booleans, size: int) -> Runs:
    """Runs without those that occur once.

    Args:
        length: of each.
        last: positions of all, those of equal ones together, ascending.
        is_equal: whether each but the first equals the one before it.
        size: of the text.
    """
    is_again = np.concatenate([[False], is_equal])[: last.size]
    kept = is_again.copy()
    kept[:-1] |= is_equal
    return Runs(length, last[kept], is_again[kept], size)


def _joined(begin: Runs, end: Runs) -> Runs:
    """The runs that begin with one of `begin` and end with one of `end`."""
    # By the names of their beginnings, as `begin.last` is; after a stable sort by those of their ends as well.
    last = begin.last + end.length
    last = last[last < end.size]
    ends = end.names[last]
    order = np.argsort(ends, kind="stable")
    # Those that end with a run that occurs once come first.
    order = order[np.count_nonzero(ends == 0) :]
    last, ends = last[order], ends[order]
    begins = begin.names[last - end.length]
    is_equal = (ends[1:] == ends[:-1]) & (begins[1:] == begins[:-1])
    return _repeated(begin.length + end.length, last, is_equal, end.size)
