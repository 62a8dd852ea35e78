"""Tiny models in the weight formats of published files."""

from pathlib import Path

import pytest

import tiny_models
from specserve.engine.llama_model import quantise

_KINDS = {"q4_k": "Q4_K_S", "q5_k": "Q5_K_S", "q3_k": "Q3_K_M", "mxfp4": "MXFP4_MOE"}  # others have their own names


def quantise_as(source: Path, target: Path, name: str, *, pure: bool = True) -> Path:
    """Write every tensor of a file in one format, or in llama.cpp's mixture of that name; returns the target."""
    assert quantise(source, target, _KINDS.get(name, name.upper()), pure=pure)
    return target


def tiny_model(directory: Path, form: str, architecture: str = "qwen2", *, role: str = "target", **sizes: int) -> Path:
    """A tiny model of other sizes in one format; beside it `single.gguf`, in single precision, which F32 is."""
    single = directory / "single.gguf"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(tiny_models, name, value)
        tiny_models.write_tiny(single, architecture, role)
    return single if form == "f32" else quantise_as(single, directory / f"{role}-{form}.gguf", form)
