"""Tiny models in the weight formats of published files."""

import os
from pathlib import Path

import llama_cpp
import pytest

import tiny_models

FORMATS = ("q4_0", "q8_0")
_KINDS = {"q4_k": "Q4_K_S", "q5_k": "Q5_K_S", "q3_k": "Q3_K_M"}  # others have their own names


def quantise_as(source: Path, target: Path, name: str, *, pure: bool = True) -> Path:
    """Write every tensor of a file in one format, or in llama.cpp's mixture of that name; returns the target."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{_KINDS.get(name, name.upper())}")
    params.pure = pure
    assert llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), params) == 0
    return target


def tiny_model(directory: Path, form: str, architecture: str = "qwen2", *, role: str = "target", **sizes: int) -> Path:
    """A tiny model of other sizes in one format; beside it `single.gguf`, in single precision, which F32 is."""
    single = directory / "single.gguf"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(tiny_models, name, value)
        tiny_models.write_tiny(single, architecture, role)
    return single if form == "f32" else quantise_as(single, directory / f"{role}-{form}.gguf", form)
