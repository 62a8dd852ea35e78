"""Tiny models in the weight formats of published files."""

import os
from pathlib import Path

import llama_cpp
import pytest

import tiny_models

FORMATS = ("q4_0", "q8_0")
_KINDS = {
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S,
    "iq4_xs": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_XS,
}


def quantise_as(source: Path, target: Path, name: str) -> Path:
    """Write every tensor of a file in one format; returns the target."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = _KINDS[name]
    params.pure = True
    assert llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), params) == 0
    return target


def tiny_model(directory: Path, form: str, architecture: str = "qwen2", **sizes: int) -> Path:
    """A tiny target of other sizes in one format; beside it `single.gguf`, in single precision."""
    single = directory / "single.gguf"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(tiny_models, name, value)
        tiny_models.write_tiny(single, architecture, "target")
    return quantise_as(single, directory / f"{form}.gguf", form)
