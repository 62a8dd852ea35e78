"""Rounds the feed-forward weights of a Q4_0 file to 3 bits: to 8 of the 16 values that Q4_0 has.

llama.cpp reads such a file as any other of Q4_0. Our kernels pack these weights with 3 bits (q3_0 in kernels.h), so a
pass of one row, which waits for memory, reads a fifth less: for a draft model, whose weights change no output, that is
worth more than the drafts that are lost (benchmarks/RESULTS.md, decisions).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

# Two thirds of the weights of Qwen2.5's 0.5B, and the least sensitive: with those of attention, too, greedy drafts of
# code, JSON, prose and chat hit .843, .897, .695 and .698 instead of .854, .904, .717 and .747 (.862, .914, .724 and
# .766 with 4 bits).
_FEED_FORWARD = frozenset({"ffn_gate", "ffn_up", "ffn_down"})
_BLOCK = 32
# The least and the largest weight, in units of a block's scale, and what Q4_0 adds to them.
_LEAST, _MOST, _SHIFT = -4, 3, 8
# What the weight of largest magnitude becomes before rounding, in units of the scale; the best of these is taken.
_TRIED = np.linspace(-5.4, -2.8, 14, dtype=np.float32)
# Blocks at a time; bounds memory.
_CHUNK = 2**17


def round_feed_forward(source: Path, file: Path) -> None:
    """Write the feed-forward weights of `source`, in any format that gguf reads, into `file` in place.

    Args:
        source: a GGUF.
        file: the same model in Q4_0.
    """
    published = {tensor.name: tensor for tensor in GGUFReader(source).tensors}
    reader = GGUFReader(file, "r+")
    for tensor in reader.tensors:
        if tensor.tensor_type != GGMLQuantizationType.Q4_0 or _FEED_FORWARD.isdisjoint(tensor.name.split(".")):
            continue
        original = published[tensor.name]
        weights = dequantize(original.data, original.tensor_type).reshape(-1, _BLOCK)
        chunks = [three_bit_blocks(weights[first : first + _CHUNK]) for first in range(0, len(weights), _CHUNK)]
        tensor.data[:] = np.concatenate(chunks).reshape(tensor.data.shape)
    reader.data.flush()


def three_bit_blocks(weights: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Blocks of Q4_0, shape (n, 18), of weights of shape (n, 32).

    Each block's scale is the one of those tried, improved by least squares, whose errors are least. They are weighted
    by the magnitude of the weights: with squared or equal magnitudes fewer drafts are accepted.
    """
    importance = np.abs(weights)
    largest = np.take_along_axis(weights, importance.argmax(1)[:, None], 1)
    least_error = np.full((len(weights), 1), np.inf, np.float32)
    scale = np.zeros((len(weights), 1), np.float32)
    for tried in _TRIED:
        rounded = _rounded(weights, largest / tried)
        squares = (importance * rounded * rounded).sum(1, keepdims=True)
        fitted = (importance * weights * rounded).sum(1, keepdims=True) / np.where(squares == 0, 1, squares)
        error = (importance * (weights - fitted * rounded) ** 2).sum(1, keepdims=True)
        scale = np.where(error < least_error, fitted, scale)
        least_error = np.minimum(error, least_error)
    half = scale.astype(np.float16)
    codes = (_rounded(weights, half.astype(np.float32)) + _SHIFT).astype(np.uint8)
    # Weight j is in the low half of byte j, weight 16 + j in the high one.
    return np.concatenate([half.view(np.uint8), codes[:, :16] | codes[:, 16:] << 4], axis=1)


def _rounded(weights: NDArray[np.float32], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    in_units = np.divide(weights, scale, out=np.zeros_like(weights), where=scale != 0)
    return np.clip(np.rint(in_units), _LEAST, _MOST)
