"""Attention of some rows over a cache of several sequences, by specserve's kernels and in double precision."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specserve.engine import kernels

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class AttentionCase:
    """Queries [rows][heads][size], keys and values [cells][key heads][size], the position of each cell, whether a row
    sees it [rows][cells], and of which kind the cache is."""

    queries: Floats
    keys: Floats
    values: Floats
    positions: NDArray[np.int32]
    visible: NDArray[np.bool_]
    is_8_bit: bool = False

    @property
    def scale(self) -> float:
        return float(self.queries.shape[2] ** -0.5)

    def attend(self, *, threads: int = 1, library: Any = None) -> Floats:
        """By way of a graph of llama.cpp's; [rows][heads][size]."""
        rows, heads, size = self.queries.shape
        cells, key_heads, _ = self.keys.shape
        mask = np.where(self.visible, np.float16(0), np.float16(-np.inf))
        queries = np.ascontiguousarray(self.queries.transpose(1, 0, 2))
        inputs = [np.ascontiguousarray(array) for array in (queries, self.keys, self.values, self.positions, mask)]
        out = np.full(self.queries.shape, np.nan, np.float32)
        attend = (library or kernels.library()).specserve_attend
        arrays = [array.ctypes.data for array in inputs]
        assert attend(size, cells, key_heads, heads, rows, self.scale, *arrays, self.is_8_bit, threads, out.ctypes.data)
        return out

    def exact(self) -> NDArray[np.float64]:
        shared = self.queries.shape[1] // self.keys.shape[1]
        q, k, v = (array.astype(np.float64) for array in (self.queries, self.keys, self.values))
        k, v = np.repeat(k, shared, axis=1), np.repeat(v, shared, axis=1)
        scores = np.where(self.visible[:, None, :], np.einsum("rhd,chd->rhc", q, k) * self.scale, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        result: NDArray[np.float64] = np.einsum("rhc,chd->rhd", weights / weights.sum(axis=-1, keepdims=True), v)
        return result

    def error(self, *, threads: int = 1, library: Any = None) -> float:
        """Root mean square of the error, relative to that of the result."""
        exact = self.exact()
        return float(np.sqrt(np.mean((self.attend(threads=threads, library=library) - exact) ** 2) / np.mean(exact**2)))

    def in_half_precision(self) -> AttentionCase:
        return replace(self, keys=self.keys.astype(np.float16).astype(np.float32),
                       values=self.values.astype(np.float16).astype(np.float32))  # fmt: skip

    def rows(self, which: Iterable[int]) -> AttentionCase:
        rows = list(which)
        return replace(self, queries=self.queries[rows], visible=self.visible[rows])

    def with_cells(self, order: NDArray[np.int64]) -> AttentionCase:
        """The same with the cells in another order, or with some left out."""
        return replace(
            self,
            keys=self.keys[order],
            values=self.values[order],
            positions=self.positions[order],
            visible=self.visible[:, order],
        )


def conversations(
    seed: int, lengths: Iterable[int], *, size: int = 64, key_heads: int = 2, shared: int = 3, prefix: int = 0
) -> AttentionCase:
    """A row at the end of each of some sequences, whose cells lie in any order, among others that nobody sees.

    Args:
        seed: of all numbers.
        lengths: of the sequences, the row's own token included.
        size: of a head.
        key_heads: number of key heads.
        shared: query heads to a key head.
        prefix: how many positions at the beginning have the same cells for all sequences.
    """
    random = np.random.default_rng(seed)
    lengths = list(lengths)
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
    values = numbers(cells, key_heads, size) * np.exp(numbers(cells, 1, 1))
    return AttentionCase(
        1.5 * numbers(len(lengths), key_heads * shared, size),
        numbers(cells, key_heads, size),
        values,
        position,
        (owner == rows) | (owner == -1),
    )
