"""The table of families in config/README.md: tiny models in Q4_K_M with random weights."""

from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kernel_products import SUPPORTED_VARIANTS, needs_kernels
from pairs import PLAIN, Pair, TinyFiles, fixed_gamma, open_engine
from specserve.config import ModelConfig
from specserve.core import admission
from specserve.core.loading import open_store
from specserve.core.prefix_store import BLOCK_TOKENS
from specserve.engine import kernels
from specserve.engine.base import Engine, FloatArray, Row
from specserve.engine.kernels import Mode
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from specserve.engine.recurrent import RecurrentEngine, cell_values
from specserve.errors import ModelLoadError
from test_cache_walk import Walk
from test_concurrent import run_concurrently
from test_recurrent import Walk as RecurrentWalk
from tiny_families import FAMILIES, tiny_family

pytestmark = [needs_kernels, pytest.mark.long]

INEXACT = ("refact",)
RECURRENT = [name for name, keys in FAMILIES.items() if {"ssm.conv_kernel", "shortconv.l_cache"} & keys.keys()]
GO_BACK = ("qwen35", "qwen35moe", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe")
EXACT = [name for name in FAMILIES if name not in INEXACT]
ROWS = 40
CONTEXT = 160


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
            assert engine.left_to_llama_cpp.exact == (architecture not in INEXACT), engine.left_to_llama_cpp
            assert architecture in INEXACT or np.array_equal(found, logits(engine, ROWS))
        engine.close()
        model.close()
        return found

    logits_of(quantised, "auto")
    ours, theirs = logits_of(single, "auto"), logits_of(single, "off")
    errors = np.sqrt(np.mean((ours - theirs) ** 2, axis=1))
    assert 0 < np.median(errors) < 0.005 * theirs.std(), np.median(errors) / theirs.std()


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        *((name, "does not write text token by token; choose one") for name in ("t5", "dream", "gemma-embedding")),
        ("llama-embed", "its logits are all equal, or no numbers"),
        ("cogvlm", "mixes up the tokens of a pass of this kind of model; choose another one"),
    ],
)
def test_what_writes_no_text_is_refused(architecture: str, reason: str, tmp_path: Path) -> None:
    path = tiny_family(tmp_path, architecture)
    for mode in ("auto", "off"):
        kernels.use(mode, variant=SUPPORTED_VARIANTS[0])
        with pytest.raises(ModelLoadError, match=reason):
            open_engine(path)


def eight_requests() -> list[dict[str, Any]]:
    """Prompts of 1 token to nearly the context, four and four of which begin alike; every other one has a seed."""
    text = np.random.default_rng(1).integers(200, size=CONTEXT).tolist()
    lengths = ((1, 40), (150, 4), (70, 24), (33, 1), (100, 12), (5, 50), (120, 9), (64, 16))
    return [
        {"prompt": text[number // 4 :][:length], "max_tokens": max_tokens, "ignore_eos": True}
        | ({"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0})
        for number, (length, max_tokens) in enumerate(lengths)
    ]


@pytest.mark.parametrize("architecture", EXACT)
def test_texts_of_eight_with_drafts_are_those_without_alone_where_they_take_room_and_come_back(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They begin alike and leave the cache for each other; every other gamma finds them in host memory only."""
    caplog.set_level("INFO")
    monkeypatch.setattr(admission, "_ANSWER", 2)
    drafter = "qwen3" if architecture in RECURRENT else architecture
    files = {
        role: ModelConfig(path=tiny_family(tmp_path, name, role))
        for role, name in {"target": architecture, "draft": drafter}.items()
    }
    sizes: dict[str, Any] = {"sequences": 8, "cache_tokens": CONTEXT, "prefix_cache_mib": 2}
    config = TinyFiles(tmp_path).config("qwen2", context_length=CONTEXT)
    pair = Pair(config.model_copy(update={**files, **sizes, "kernels": "auto"}))
    assert pair.models.left.exact
    store, loads = open_store(pair.config, pair.models), mock.Mock(wraps=pair.models.target.load)
    monkeypatch.setattr(pair.models.target, "load", loads)
    recurrent = architecture in RECURRENT
    assert (store.max_bytes == 0) == recurrent
    assert ("no prefixes are kept in host memory" in caplog.text) == recurrent
    requests, preemptions = eight_requests(), 0
    plain = [pair.complete(**request, speculation=PLAIN).sequence.answer for request in requests]
    for gamma in (3, 7, 15):
        speculation, scheduler = {"speculation": fixed_gamma(gamma)}, pair.scheduler(store)
        loads.reset_mock()
        found = run_concurrently(pair, [request | speculation for request in requests], Random(gamma), scheduler)
        assert [sequence.answer for sequence in found] == plain
        preemptions += sum(sequence.preemptions for sequence in found)
        drafted = sum(sequence.stats.drafted for sequence in found)
        accepted = sum(sequence.stats.accepted for sequence in found)
        assert (drafted > accepted) == (architecture in GO_BACK or not recurrent)
        # A draft of another architecture seldom guesses right.
        assert accepted > 0 or recurrent
        # No other begins with so many of the longest one's tokens, and the KV cache was empty.
        assert (found[1].cached_tokens == 4 * BLOCK_TOKENS) == (gamma > 3 and not recurrent)
        # The next turn of the one that ended last goes on in its slot.
        loads.reset_mock()
        last = max(found, key=lambda sequence: sequence.timestamps.last_token)
        turn: dict[str, Any] = {"prompt": [*last.tokens, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        [again] = run_concurrently(pair, [turn | speculation], Random(gamma), scheduler)
        assert again.cached_tokens >= len(last.tokens) - 1
        assert not loads.called
        assert again.answer == pair.complete(**turn, speculation=PLAIN).sequence.answer
    assert preemptions > 0


@pytest.mark.parametrize("architecture", [name for name in EXACT if name not in RECURRENT])
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


@pytest.mark.parametrize("architecture", RECURRENT)
def test_several_recurrent_sequences_in_a_pass_have_the_logits_of_each_alone(architecture: str, tmp_path: Path) -> None:
    """After any numbers of rows, rejected ones, copies and restarts."""
    kernels.use("auto", variant=SUPPORTED_VARIANTS[0])
    model = LlamaModel(tiny_family(tmp_path, architecture))
    # In one layer of four attention of two heads, all of 64 numbers.
    attending = {"mamba": 0, "mamba2": 0, "falcon-h1": 4}.get(architecture, 1)
    assert cell_values(model) // (2 * 2 * 64) == attending
    walk = RecurrentWalk(model, Random(5), shares_passes=architecture != "plamo2")
    for _ in range(400):
        walk.step()
    assert walk.compared > 1000
    walk.close()
    model.close()
