"""`probe` finds planted faults of batch invariance; with specserve's kernels real models have none."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest

import tiny_models
from fake_engine import FakeEngine
from kernel_products import SUPPORTED_VARIANTS, needs_kernels
from specserve.config import HandlerConfig, ModelConfig
from specserve.core.loading import load_models
from specserve.engine import kernel_trial, kernels
from specserve.engine.base import Engine, FloatArray, Row
from specserve.engine.invariance import Invariance, probe
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from tiny_formats import FORMATS, quantise_as
from tiny_models import ARCHITECTURES, write_tiny

NOISE = 0.25

Fault = Callable[["FaultyEngine", list[Row], Row], bool]


class FaultyEngine(FakeEngine):
    """An engine that adds `NOISE` to the logits of each row for which `fault` is true.

    It allocates KV cells as a unified cache does: the first free cell first.
    """

    def __init__(self, fault: Fault, *, n_slots: int = 2) -> None:
        super().__init__(vocabulary=24, n_slots=n_slots)
        self._fault = fault
        self.layout: list[tuple[int, int] | None] = []
        self.wide: set[tuple[int, int]] = set()

    def forward(self, rows: list[Row]) -> FloatArray:
        for row in rows:
            cell = (row.slot, row.position)
            free = self.layout.index(None) if None in self.layout else len(self.layout)
            self.layout[free : free + 1] = [cell]
            (self.wide.add if len(rows) >= 64 else self.wide.discard)(cell)
        wrong = [self._fault(self, rows, row) for row in rows if row.wants_logits]
        return super().forward(rows) + NOISE * np.array(wrong, np.float32)[:, None]

    def truncate(self, slot: int, length: int) -> None:
        super().truncate(slot, length)
        self.layout = [None if cell and cell[0] == slot and cell[1] >= length else cell for cell in self.layout]


def no_fault(_engine: FaultyEngine, _rows: list[Row], _row: Row) -> bool:
    return False


def rows_of_four(_engine: FaultyEngine, rows: list[Row], _row: Row) -> bool:
    """A kernel that rounds differently for four rows."""
    return len(rows) == 4


def single_rows_of_long_sequences(engine: FaultyEngine, rows: list[Row], _row: Row) -> bool:
    """As llama.cpp's attention does with keys and values in half precision."""
    return len(rows) == 1 and len(engine.layout) > 256


def wide_chunks(engine: FaultyEngine, _rows: list[Row], row: Row) -> bool:
    return (row.slot, row.position - 1) in engine.wide


def eight_rows(_engine: FaultyEngine, rows: list[Row], _row: Row) -> bool:
    """As llama.cpp's products do with weights that it has not repacked."""
    return len(rows) == 8


def other_cells_between(engine: FaultyEngine, _rows: list[Row], row: Row) -> bool:
    own = [number for number, cell in enumerate(engine.layout) if cell and cell[0] == row.slot]
    return own != list(range(own[0], own[0] + len(own)))


def neighbours_before(_engine: FaultyEngine, rows: list[Row], row: Row) -> bool:
    return rows[0].slot != row.slot


def neighbours_after(_engine: FaultyEngine, rows: list[Row], row: Row) -> bool:
    return rows[-1].slot != row.slot


def test_a_planted_fault_is_found_alone_or_beside_others() -> None:
    assert probe(FaultyEngine(no_fault)) == Invariance(0.0, 0.0)
    assert probe(FaultyEngine(no_fault, n_slots=1)) == Invariance(0.0, None)
    alone: list[Fault] = [rows_of_four, eight_rows, single_rows_of_long_sequences, wide_chunks]
    for fault in alone:
        assert probe(FaultyEngine(fault)).alone == pytest.approx(NOISE), fault
        assert probe(FaultyEngine(fault, n_slots=1)).largest == pytest.approx(NOISE), fault
    beside: list[Fault] = [other_cells_between, neighbours_before, neighbours_after]
    for fault in beside:
        found = probe(FaultyEngine(fault))
        assert found.alone == 0, fault
        assert found.largest == found.beside == pytest.approx(NOISE), fault


def test_nan_logits_are_not_invariant() -> None:
    engine = FaultyEngine(no_fault)
    engine.poison_after = 20
    assert np.isnan(probe(engine).alone)


def test_probe_respects_the_engines_limits_and_empties_its_cache() -> None:
    for slot_tokens in (64, 100, 269, 4096):
        for max_logits in (1, 2, 64):
            for max_rows in (1, 2, 3, 5, 68):
                engine = FaultyEngine(no_fault, n_slots=3)
                engine.max_logits, engine.max_rows, engine.slot_length = max_logits, max_rows, slot_tokens
                assert probe(engine) == Invariance(0.0, 0.0)
                assert engine.cache == [[], [], []]
                assert max(row.position for row in engine.decoded) < slot_tokens
    engine = FaultyEngine(no_fault)
    engine.fail_after = 9
    with pytest.raises(Exception, match="told to fail"):
        probe(engine)
    assert engine.cache == [[], []]


@needs_kernels
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_batch_invariant_with_specserves_kernels(architecture: str, tmp_path: Path) -> None:
    write_tiny(tmp_path / "single.gguf", architecture, "target")
    for form in FORMATS:
        for threads in (1, 2):
            assert kernels.use("auto", variant=SUPPORTED_VARIANTS[0]).variant
            model = LlamaModel(quantise_as(tmp_path / "single.gguf", tmp_path / f"{form}.gguf", form))
            engine = LlamaEngine(model, n_slots=2, context_length=512, threads=threads, max_rows=128, max_logits=64)
            assert probe(engine) == Invariance(0.0, 0.0)
            engine.close()
            model.close()
    kernels.use("off")


class TinyModel:
    """Writes tiny models with rows of 256 weights, a block of some formats, and makes configurations for them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def config(self, architecture: str, form: str, mode: kernels.Mode, *, threads: int = 1) -> HandlerConfig:
        single, path = (self._directory / f"{name}.gguf" for name in ("single", form))
        write_tiny(single, architecture, "target")
        return HandlerConfig(
            model_id="tiny",
            kernels=mode,
            target=ModelConfig(path=quantise_as(single, path, form)),
            sequences=3,
            context_length=512,
            threads=threads,
        )


@pytest.fixture
def wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyModel:
    monkeypatch.setattr(tiny_models, "WIDTH", 256)
    monkeypatch.setattr(tiny_models, "FEED_FORWARD", 512)
    # Whether the kernels are faster than llama.cpp's depends on what else the machine does.
    monkeypatch.setattr(kernel_trial, "run", dict)
    return TinyModel(tmp_path)


def last_logits(engine: Engine, tokens: list[int], chunks: list[int]) -> FloatArray:
    """The logits after a prompt that is read in these chunks."""
    engine.truncate(0, 0)
    for start, end in pairwise([0, *accumulate(chunks)]):
        rows = [Row(tokens[position], 0, position, position == len(tokens) - 1) for position in range(start, end)]
        logits = engine.forward(rows).copy()
    assert end == len(tokens)
    return logits


def largest_difference(engine: Engine) -> float:
    """Between prompts that are read in chunks of 64, in chunks of 5, and in chunks of 64 but for their last tokens."""
    tokens = [int(token) for token in np.random.default_rng(1).integers(engine.width, size=320)]
    differences = []
    for length in (70, 195, 320):
        prompt = tokens[:length]
        cold = [64] * (length // 64)
        rest = length % 64
        expected = last_logits(engine, prompt, [*cold, rest] if rest else cold)
        warm = ([5] * (length // 5), [*cold[:-1], 59, *[1] * (rest + 5)])
        differences += [float(np.abs(last_logits(engine, prompt, chunks) - expected).max()) for chunks in warm]
    engine.truncate(0, 0)
    return max(differences)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_server_measures_what_llama_cpp_computes_and_promises_no_repetition_that_does_not_hold(
    architecture: str, wide: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    """IQ4_XS has no kernel of specserve's, and llama.cpp has two for it: for fewer than 8 rows, and for more."""
    modes: list[tuple[str, kernels.Mode]] = [("q4_0", "auto"), ("iq4_xs", "auto"), ("q4_0", "off"), ("iq4_xs", "off")]
    for form, mode in modes:
        caplog.clear()
        models = load_models(wide.config(architecture, form, mode))
        difference = largest_difference(models.target.engine)
        left = f"{form}.gguf: llama.cpp's own kernels compute matrix products of this model"
        assert (left in caplog.text) == (form == "iq4_xs" and kernels.in_use().variant is not None)
        if models.invariance is None:
            assert (form, mode, difference) == ("q4_0", "auto", 0)
        else:
            assert (models.invariance.alone == 0) == (difference == 0)


@needs_kernels
def test_the_trial_at_load_sees_how_llama_cpps_attention_changes_with_the_length(wide: TinyModel) -> None:
    """Above 256 tokens in the cache, for a single row and several threads."""
    models = load_models(wide.config("qwen2", "q4_0", "off", threads=2))
    assert models.invariance is not None
    assert models.invariance.alone > 0


def test_the_sentence_says_what_repeats_and_promises_no_bound_that_a_trial_cannot_know() -> None:
    """Where a rounding error turns a quantised activation, logits differ a thousand times as much."""
    assert "seeded outputs repeat exactly, as far as" in Invariance(0.0, 0.0).sentence
    assert "repeat exactly alone in an empty cache" in Invariance(0.0, 0.3).sentence
    split = Invariance(3.8e-06, 0.0).sentence
    assert "differed by 3.8e-06" in split
    assert "may differ by more" in split
    assert "repeat exactly" not in split
