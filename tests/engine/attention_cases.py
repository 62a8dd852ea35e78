"""Attention of some rows over a cache of several sequences, by specserve's kernels and in double precision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specserve.engine import kernel_trial

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class AttentionCase:
    """Queries [rows][heads][size], keys [cells][key heads][size], values, which may be a view of keys, the position of
    each cell, whether a row sees it [rows][cells], and of which kind the cache is."""

    queries: Floats
    keys: Floats
    values: Floats
    positions: NDArray[np.int32]
    visible: NDArray[np.bool_]
    is_8_bit: bool = False
    softcap: float = 0
    sinks: Floats | None = None  # [heads]

    def attend(self, *, threads: int = 1) -> Floats:
        """By the variant in use; [rows][heads][size of a value]."""
        inputs = self.queries, self.keys, self.values, self.positions, self.visible
        options: dict[str, Any] = {"softcap": self.softcap, "sinks": self.sinks, "is_8_bit": self.is_8_bit}
        found = kernel_trial.attend(*inputs, **options, threads=threads)
        assert found is not None
        return found

    def exact(self) -> NDArray[np.float64]:
        inputs = self.queries, self.keys, self.values, self.visible
        return kernel_trial.exact_attention(*inputs, softcap=self.softcap, sinks=self.sinks)

    def error(self, *, threads: int = 1) -> float:
        """Root mean square of the error, relative to that of the result."""
        exact = self.exact()
        return float(np.sqrt(np.mean((self.attend(threads=threads) - exact) ** 2) / np.mean(exact**2)))

    def rows(self, which: Iterable[int]) -> AttentionCase:
        rows = list(which)
        return replace(self, queries=self.queries[rows], visible=self.visible[rows])

    def with_cells(self, order: NDArray[np.int64]) -> AttentionCase:
        """The same with the cells in another order, or with some left out."""
        keys, values, positions = self.keys[order], self.values[order], self.positions[order]
        if np.may_share_memory(self.keys, self.values):
            values = keys[..., : values.shape[-1]]
        return replace(self, keys=keys, values=values, positions=positions, visible=self.visible[:, order])


def conversations(
    seed: int,
    lengths: Sequence[int],
    *,
    size: int = 64,
    value_size: int | None = None,
    key_heads: int = 2,
    shared: int = 3,
    prefix: int = 0,
    latent: bool = False,
) -> AttentionCase:
    """A row at the end of each of some sequences, whose cells lie in any order, among others that nobody sees.

    A length counts the row's own token. Heads have `size` numbers, and `shared` query heads read each key head. The
    first `prefix` positions have the same cells in all sequences. With `latent`, values are the first numbers of keys,
    whose others are 50 times as large.
    """
    value_size = value_size or size
    random = np.random.default_rng(seed)
    owners = [-1] * prefix + [-2] * 7
    positions = [*range(prefix), *[5] * 7]
    for row, length in enumerate(lengths):
        owners += [row] * (length - prefix)
        positions += range(prefix, length)
    order = random.permutation(len(owners))
    owner, position = np.array(owners)[order], np.array(positions, np.int32)[order]
    rows = np.arange(len(lengths))[:, None]
    cells = len(owners)

    def numbers(*shape: int) -> Floats:
        return random.normal(size=shape).astype(np.float32)

    # Values of all magnitudes, so that sums in another order would differ.
    values = numbers(cells, key_heads, value_size) * np.exp(numbers(cells, 1, 1))
    queries, keys = 1.5 * numbers(len(lengths), key_heads * shared, size), numbers(cells, key_heads, size)
    if latent:
        keys[..., value_size:] *= 50
        queries[..., value_size:] /= 50
        values = keys[..., :value_size]
    return AttentionCase(queries, keys, values, position, (owner == rows) | (owner == -1))
