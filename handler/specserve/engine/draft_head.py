"""Chooses the columns of a draft model's head that its passes compute: a fifth of them predicts nearly all tokens.

The head, a product with a column for each token of the vocabulary, takes a quarter of a small model's pass. Tokens
that are left out have probability 0 in q, which costs acceptance, never the target's distribution (FR-Spec, arXiv
2502.14856).
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

# Columns that are computed together: kHeadGroup of library.h.
GROUP = 16
# BPE merges are numbered by their frequency, so the first tokens are the most frequent ones. A pass of the 0.5B draft
# takes 12.0 ms with the whole head (151,936), 10.4 with 65,536 columns, 9.0 with 32,768 and with 8,192 (EPYC, 2 cores);
# of the drafts that the target would accept, 0.6 to 2.8 % by family are neither among 32,768 nor recent
# (benchmarks/recordings).
_FREQUENT = 32_768
# Tokens that the model reads for as long as a token counts as recent.
_RECENT = 16_384


class DraftHead:
    """Chooses groups of columns: of frequent tokens, of what was read recently, and of `always`, such as end tokens."""

    def __init__(self, size: int, always: Iterable[int]) -> None:
        self._until = np.zeros(-(-size // GROUP), np.int64)
        forever = np.iinfo(np.int64).max
        self._until[: _FREQUENT // GROUP] = forever
        self._until[[token // GROUP for token in always]] = forever
        self._read = 0

    def groups(self, tokens: Sequence[int]) -> NDArray[np.int32]:
        """Return the groups that a pass which reads these tokens computes: their numbers, ascending."""
        self._read += len(tokens)
        among = np.array(tokens) // GROUP
        self._until[among] = np.maximum(self._until[among], self._read + _RECENT)
        return np.flatnonzero(self._until > self._read).astype(np.int32)
