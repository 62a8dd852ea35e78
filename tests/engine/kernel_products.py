"""The variants of specserve's kernels that this processor supports, and exact products to compare theirs with."""

import platform
import re
from collections.abc import Iterator
from contextlib import suppress

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from specserve.engine import kernels
from specserve.engine.kernel_library import library
from specserve.engine.kernel_trial import product, quantised
from specserve.errors import Unusable
from specserve.machine import processor

__all__ = ["BLOCK", "FORMATS", "SUPPORTED_VARIANTS", "exact", "needs_kernels", "product", "quantised", "variants"]

Floats = NDArray[np.float32]
# The variants that this processor supports, the best one first. Tests name their variant: without a name it is used
# only if it is faster than llama.cpp's kernels, which depends on what else the machine does.
SUPPORTED_VARIANTS = [name for name in kernels.VARIANTS if re.search(rf"\b{name}\b", processor())]
FORMATS: tuple[str, ...] = ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "Q5_0", "IQ4_NL", "Q3_K", "Q5_K", "Q4_1", "Q5_1")
FORMATS += ("Q2_K", "IQ4_XS", "MXFP4", "F32", "F16", "BF16")
# Weights of a block.
BLOCK = {name: max(32, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][0]) for name in FORMATS}


# Put the kernels into llama.cpp's list before any test loads a model, after which it does not look again: when tests
# are collected, since in a fixture it would depend on their order.
with suppress(Unusable):
    library().specserve_use(b"")
    library().specserve_take(0)

needs_kernels = pytest.mark.skipif(
    platform.machine() not in {"x86_64", "aarch64"}, reason="the kernels are for x86-64 and aarch64"
)


def variants() -> Iterator[str]:
    """Each variant that this processor supports, while it is in use."""
    for name in SUPPORTED_VARIANTS:
        assert kernels.use("auto", variant=name).formats == FORMATS
        yield name
    kernels.use("off")


def exact(name: str, blocks: NDArray[np.uint8], x: Floats) -> NDArray[np.float64]:
    """Return the product of dequantised weights and unrounded activations in double precision, [rows][columns]."""
    weights = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name]).astype(np.float64)
    return x.astype(np.float64) @ weights.T
