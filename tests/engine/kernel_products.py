"""Matrix products and attention by specserve's kernels, by llama.cpp and in double precision, for comparison."""

from __future__ import annotations

import ctypes
import platform
import re
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from specserve.config import processor
from specserve.engine import kernels

Floats = NDArray[np.float32]
# The variants that this processor supports, the best one first. Tests name their variant: without a name it is used
# only if it is faster than llama.cpp's kernels, which depends on what else the machine does.
SUPPORTED_VARIANTS = [name for name in kernels.VARIANTS if re.search(rf"\b{name}\b", processor())]
BLOCK = {"Q4_0": 32, "Q8_0": 32, "Q4_K": 256, "Q6_K": 256}


def _register() -> None:
    """Put the kernels into llama.cpp's list before any test loads a model, after which it does not look again."""
    try:
        library = kernels.library()
    except kernels.Unusable:
        return
    library.specserve_use(b"")
    library.specserve_take(0)


# When tests are collected; in a fixture, it would depend on their order.
_register()

needs_kernels = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the kernels are for x86-64: run them on such a machine"
)


def quantised(name: str, weights: Floats) -> NDArray[np.uint8]:
    """Quantise weights [columns][k] by llama.cpp, as in a GGUF file."""
    kernels.library()
    kind = gguf.GGMLQuantizationType[name]
    columns, k = weights.shape
    block, size = gguf.GGML_QUANT_SIZES[kind]
    out = np.zeros((columns, k // block * size), np.uint8)
    quantise = ctypes.CDLL("libggml-base.so.0").ggml_quantize_chunk
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    quantise.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
    quantise(int(kind), weights.ctypes.data, out.ctypes.data, 0, columns, k, None)
    return out


def exact(name: str, blocks: NDArray[np.uint8], x: Floats) -> NDArray[np.float64]:
    """Return the product of dequantised weights and unrounded activations in double precision, [rows][columns]."""
    weights = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name]).astype(np.float64)
    return x.astype(np.float64) @ weights.T


def product(
    name: str,
    blocks: NDArray[np.uint8],
    x: Floats,
    *,
    threads: int = 1,
    ours: bool = True,
    library: Any = None,
    pieces: int = 1,
) -> Floats:
    """Return the product by the variant in use, or by llama.cpp's kernels in a graph; [rows][columns].

    The weights are written to their buffer in so many pieces.
    """
    rows, k = x.shape
    x = np.ascontiguousarray(x, np.float32)
    out = np.zeros((rows, len(blocks)), np.float32)
    number = kernels.FORMATS.index(name)
    sizes = k, len(blocks)
    run = (library or kernels.library()).specserve_run_product
    seconds = run(ours, number, *sizes, blocks.ctypes.data, pieces, rows, x.ctypes.data, threads, out.ctypes.data)
    assert np.isfinite(seconds)
    return out
