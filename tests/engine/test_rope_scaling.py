"""Models whose context was extended: positions are scaled as their files say, and nothing of ours says otherwise."""

from itertools import product
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from gguf import GGUFWriter, RopeScalingType

import tiny_models as tiny
from pairs import Pair, TinyFiles, open_engine
from specserve.engine.base import FloatArray, Row
from specserve.errors import ModelLoadError

ORIGINAL, FACTOR = 512, 4
LENGTH = 600
SCALINGS = {
    RopeScalingType.LINEAR: llama_cpp.LLAMA_ROPE_SCALING_TYPE_LINEAR,
    RopeScalingType.YARN: llama_cpp.LLAMA_ROPE_SCALING_TYPE_YARN,
}


@pytest.fixture(params=SCALINGS, ids=lambda scaling: scaling.value)
def scaling(request: pytest.FixtureRequest) -> RopeScalingType:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def scaled(scaling: RopeScalingType, tmp_path: Path) -> TinyFiles:
    """Files whose context was extended from 512 tokens to the 2,048 of all tiny models."""
    write, files = tiny._write_hyperparameters, TinyFiles(tmp_path)

    def extended(writer: GGUFWriter, architecture: str) -> None:
        write(writer, architecture)
        writer.add_rope_scaling_type(scaling)
        writer.add_rope_scaling_factor(FACTOR)
        writer.add_rope_scaling_orig_ctx_len(ORIGINAL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "_write_hyperparameters", extended)
        for architecture, role in product(("qwen2", "llama"), ("target", "draft")):
            files.path(architecture, role)
    return files


def logits_at_length(path: Path) -> FloatArray:
    """The logits after many tokens of a cache that holds more than one such sequence."""
    engine = open_engine(path, n_slots=2, context_length=LENGTH + 8, n_cells=2048)
    tokens = [int(token) for token in np.random.default_rng(0).integers(engine.width, size=LENGTH)]
    for start in range(0, LENGTH, 50):
        rows = [Row(tokens[n], 0, n, wants_logits=n == LENGTH - 1) for n in range(start, start + 50)]
        logits = engine.forward(rows).copy()
    engine.close()
    return logits


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_positions_are_scaled_as_the_file_says(
    architecture: str, scaling: RopeScalingType, scaled: TinyFiles, files: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where every context is told to scale, and the file says nothing of it."""
    by_file = logits_at_length(scaled.path(architecture, "target"))
    plain = files.path(architecture, "target")
    unscaled = logits_at_length(plain)
    defaults = llama_cpp.llama_context_default_params

    def told() -> Any:
        params = defaults()
        params.rope_scaling_type = SCALINGS[scaling]
        params.rope_freq_scale = 1 / FACTOR
        params.yarn_orig_ctx = ORIGINAL
        return params

    monkeypatch.setattr(llama_cpp, "llama_context_default_params", told)
    assert np.array_equal(logits_at_length(plain), by_file)
    assert np.abs(unscaled - by_file).max() > 0.1


def test_the_extended_context_is_served_and_no_more(scaled: TinyFiles) -> None:
    config = scaled.config("qwen2", context_length=ORIGINAL * FACTOR)
    pair = Pair(config.model_copy(update={"sequences": 1}))
    answer = pair.complete([5] * (ORIGINAL + 100), max_tokens=10, temperature=0).sequence
    assert answer.generated == 10 or answer.ended_by_eos
    with pytest.raises(ModelLoadError, match="was trained for 2048 tokens; lower `context_length` from 2049"):
        Pair(scaled.config("qwen2", context_length=ORIGINAL * FACTOR + 1))
