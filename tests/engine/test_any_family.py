"""The table of families in config/README.md: tiny models in Q4_K_M with random weights."""

from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from kernel_products import SUPPORTED_VARIANTS, needs_kernels
from pairs import PLAIN, Pair, TinyFiles, fixed_gamma
from specserve.config import ModelConfig
from specserve.core import admission
from specserve.engine import kernels
from specserve.engine.base import Engine, FloatArray, Row
from specserve.engine.kernels import Mode
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from specserve.engine.recurrent import RecurrentEngine
from test_cache_walk import Walk
from test_concurrent import run_concurrently
from tiny_families import FAMILIES, tiny_family

pytestmark = [needs_kernels, pytest.mark.long]

RECURRENT = [name for name, keys in FAMILIES.items() if {"ssm.conv_kernel", "shortconv.l_cache"} & keys.keys()]
GO_BACK = ("qwen35", "lfm2", "nemotron_h")
ROWS = 40


def logits(engine: Engine, passes: int) -> FloatArray:
    """Of the same random tokens, read in so many passes."""
    engine.truncate(0, 0)
    tokens, ends = np.random.default_rng(0).integers(200, size=ROWS), np.linspace(0, ROWS, passes + 1, dtype=int)
    rows = [Row(int(token), 0, position, wants_logits=True) for position, token in enumerate(tokens)]
    return np.concatenate([engine.forward(rows[start:end]).copy() for start, end in pairwise(ends)])


@pytest.mark.parametrize("architecture", FAMILIES)
def test_40_rows_in_a_pass_have_the_bits_of_40_passes_and_are_near_llama_cpps(
    architecture: str, tmp_path: Path
) -> None:
    """Near in single precision, and most rows only: where two experts are nearly as good, the other one is asked."""
    quantised, single = tiny_family(tmp_path, architecture), tmp_path / f"{architecture}.gguf"

    def logits_of(path: Path, mode: Mode) -> FloatArray:
        kernels.use(mode, variant=SUPPORTED_VARIANTS[0])
        model = LlamaModel(path)
        assert model.recurrent == (architecture in RECURRENT)
        options: dict[str, Any] = {"n_slots": 2, "context_length": 64, "threads": 2, "max_rows": 64, "max_logits": 64}
        engine = (RecurrentEngine if model.recurrent else LlamaEngine)(model, **options)
        found = logits(engine, 1)
        if path == quantised:
            assert engine.left_to_llama_cpp.exact, engine.left_to_llama_cpp
            assert np.array_equal(found, logits(engine, ROWS))
        engine.close()
        model.close()
        return found

    logits_of(quantised, "auto")
    ours, theirs = logits_of(single, "auto"), logits_of(single, "off")
    errors = np.sqrt(np.mean((ours - theirs) ** 2, axis=1))
    assert 0 < np.median(errors) < 0.005 * theirs.std(), np.median(errors) / theirs.std()


@pytest.mark.parametrize("architecture", FAMILIES)
def test_texts_with_drafts_are_those_without_beside_another_that_takes_their_room(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences begin alike, leave the cache for each other and return."""
    monkeypatch.setattr(admission, "_ANSWER", 8)
    drafter = "qwen3" if architecture in RECURRENT else architecture
    files = {
        role: ModelConfig(path=tiny_family(tmp_path, name, role))
        for role, name in {"target": architecture, "draft": drafter}.items()
    }
    config = TinyFiles(tmp_path).config("qwen2", context_length=80)
    pair = Pair(config.model_copy(update={**files, "kernels": "auto", "cache_tokens": 80}))
    assert pair.models.left.exact
    fields: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    requests = [fields | {"prompt": f"The quick brown {animal}"} for animal in ("fox", "dog jumps")]
    preemptions = 0
    plain = [pair.complete(**request, speculation=PLAIN).sequence.answer for request in requests]
    for gamma in (3, 7, 15):
        drafting = [request | {"speculation": fixed_gamma(gamma)} for request in requests]
        found = run_concurrently(pair, drafting, Random(gamma))
        assert [sequence.answer for sequence in found] == plain
        preemptions += sum(sequence.preemptions for sequence in found)
        drafted = sum(sequence.stats.drafted for sequence in found)
        accepted = sum(sequence.stats.accepted for sequence in found)
        assert (drafted > accepted) == (architecture in GO_BACK or architecture not in RECURRENT)
        # A draft of another architecture seldom guesses right.
        assert accepted > 0 or architecture in RECURRENT
    assert preemptions > 0


@pytest.mark.parametrize("architecture", [name for name in FAMILIES if name not in RECURRENT])
def test_logits_are_those_of_a_fresh_pass_after_any_alternatives_copies_and_truncations(
    architecture: str, tmp_path: Path
) -> None:
    kernels.use("auto", variant=SUPPORTED_VARIANTS[0])
    model = LlamaModel(tiny_family(tmp_path, architecture))
    walk = Walk(model, Random(5), 0.0)
    for _ in range(40):
        walk.step()
    assert walk.compared > 80
    walk.close()
    model.close()
