"""`probe` measures batch invariance: it finds planted faults, and the condition under which each occurs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import tiny_models
from fake_engine import FakeEngine
from kernel_products import SUPPORTED_VARIANTS, needs_kernels
from specserve.config import HandlerConfig, ModelConfig
from specserve.core.loading import load_models
from specserve.engine import kernels
from specserve.engine.base import Engine, FloatArray, Row
from specserve.engine.invariance import Invariance, probe
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from tiny_formats import FORMATS, quantise_as
from tiny_models import ARCHITECTURES, write_tiny

SLOT_TOKENS = 512
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
        self.adopted: set[int] = set()

    def forward(self, rows: list[Row]) -> FloatArray:
        for row in rows:
            cell = (row.slot, row.position)
            free = self.layout.index(None) if None in self.layout else len(self.layout)
            self.layout[free : free + 1] = [cell]
            (self.wide.add if len(rows) >= 64 else self.wide.discard)(cell)
        wrong = [self._fault(self, rows, row) for row in rows if row.wants_logits]
        return super().forward(rows) + NOISE * np.array(wrong, np.float32)[:, None]

    def adopt(self, slot: int, number: int) -> None:
        super().adopt(slot, number)
        self.adopted = {self.cached_len(slot) - 1}

    def truncate(self, slot: int, length: int) -> None:
        super().truncate(slot, length)
        self.adopted.clear()
        self.layout = [None if cell and cell[0] == slot and cell[1] >= length else cell for cell in self.layout]


def no_fault(_engine: FaultyEngine, _rows: list[Row], _row: Row) -> bool:
    return False


def rows_of_four(_engine: FaultyEngine, rows: list[Row], row: Row) -> bool:
    """A kernel that rounds differently for four rows of a sequence."""
    return len(rows) < 16 and [other.slot for other in rows].count(row.slot) == len(rows) == 4


def single_rows_of_long_sequences(engine: FaultyEngine, rows: list[Row], _row: Row) -> bool:
    """As llama.cpp's attention does with keys and values in half precision."""
    return len(rows) == 1 and len(engine.layout) > 256


def wide_chunks(engine: FaultyEngine, _rows: list[Row], row: Row) -> bool:
    return (row.slot, row.position - 1) in engine.wide


def cells_out_of_order(engine: FaultyEngine, _rows: list[Row], row: Row) -> bool:
    own = [cell[1] for cell in engine.layout if cell and cell[0] == row.slot]
    return own != sorted(own)


def other_slots(_engine: FaultyEngine, _rows: list[Row], row: Row) -> bool:
    return row.slot != 0


def neighbours_before(_engine: FaultyEngine, rows: list[Row], row: Row) -> bool:
    return rows[0].slot != row.slot


def full_caches(engine: FaultyEngine, _rows: list[Row], _row: Row) -> bool:
    """As llama.cpp's attention does in a slot of fewer tokens than that beside others."""
    return len(engine.layout) > 256


def eight_rows(_engine: FaultyEngine, rows: list[Row], _row: Row) -> bool:
    """As llama.cpp's products do with weights that it has not repacked."""
    return len(rows) == 8


def alternatives_read(_engine: FaultyEngine, _rows: list[Row], row: Row) -> bool:
    return row.alternative


def alternatives_adopted(engine: FaultyEngine, _rows: list[Row], row: Row) -> bool:
    return row.position - 1 in engine.adopted


def neighbours_after(_engine: FaultyEngine, rows: list[Row], row: Row) -> bool:
    return rows[-1].slot != row.slot


@pytest.mark.parametrize("thorough", [False, True])
def test_an_engine_without_a_fault_is_invariant(*, thorough: bool) -> None:
    assert probe(FaultyEngine(no_fault), thorough=thorough) == Invariance(0.0, 0.0, 0.0, 0.0, 0.0)
    assert probe(FaultyEngine(no_fault), thorough=thorough).any_batch


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (rows_of_four, "rows"),
        (eight_rows, "rows"),
        (alternatives_read, "alternatives"),
        (alternatives_adopted, "alternatives"),
        (single_rows_of_long_sequences, "rows"),
        (wide_chunks, "chunks"),
        (cells_out_of_order, "layout"),
        (other_slots, "layout"),
        (neighbours_before, "neighbours"),
        (neighbours_after, "neighbours"),
    ],
)
def test_a_planted_fault_is_found_under_its_condition(fault: Fault, found: str) -> None:
    invariance = probe(FaultyEngine(fault), thorough=True)
    assert getattr(invariance, found) == pytest.approx(NOISE)
    assert not invariance.any_batch
    assert invariance.single_sequence == (found in {"layout", "neighbours"})


@pytest.mark.parametrize("fault", [rows_of_four, alternatives_read, wide_chunks, other_slots, neighbours_after])
def test_a_short_trial_finds_faults_that_do_not_depend_on_the_length(fault: Fault) -> None:
    assert not probe(FaultyEngine(fault), thorough=False).any_batch


def test_a_fault_of_full_caches_is_found_if_a_slot_is_shorter_than_that() -> None:
    engine = FaultyEngine(full_caches, n_slots=4)
    engine.slot_length = 100
    invariance = probe(engine, thorough=True)
    assert invariance.layout == pytest.approx(NOISE)
    assert invariance.single_sequence


@pytest.mark.parametrize(
    "fault",
    [alternatives_read, alternatives_adopted, eight_rows, cells_out_of_order, neighbours_before, neighbours_after],
)
def test_a_fault_is_attributed_to_one_condition(fault: Fault) -> None:
    invariance = probe(FaultyEngine(fault), thorough=True)
    assert [bool(difference) for difference in invariance].count(True) == 1


def test_nan_logits_are_not_invariant() -> None:
    engine = FaultyEngine(no_fault)
    engine.poison_after = 20
    assert not probe(engine, thorough=False).any_batch


def test_an_engine_with_one_slot_is_probed_without_neighbours() -> None:
    assert probe(FaultyEngine(no_fault, n_slots=1), thorough=True) == Invariance(0.0, 0.0, 0.0, None, 0.0)
    assert probe(FaultyEngine(no_fault, n_slots=1), thorough=True).any_batch
    assert not probe(FaultyEngine(rows_of_four, n_slots=1), thorough=True).single_sequence


def test_an_engine_without_alternatives_is_probed_without_them() -> None:
    engine = FaultyEngine(no_fault)
    engine.max_alternatives = 0
    assert probe(engine, thorough=True) == Invariance(0.0, 0.0, 0.0, 0.0, None)


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("slot_tokens", [64, 100, 269, 4096])
@pytest.mark.parametrize("max_logits", [1, 2, 64])
@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 68])
def test_probe_respects_the_engines_limits_and_empties_its_cache(
    slot_tokens: int, max_logits: int, max_rows: int, *, thorough: bool
) -> None:
    engine = FaultyEngine(no_fault, n_slots=3)
    engine.max_logits, engine.max_rows, engine.slot_length = max_logits, max_rows, slot_tokens
    assert probe(engine, thorough=thorough).any_batch
    assert engine.cache == [[], [], []]
    assert max(row.position for row in engine.decoded) < slot_tokens


def test_probe_empties_the_cache_when_a_pass_fails() -> None:
    engine = FakeEngine(vocabulary=24, n_slots=2)
    engine.fail_after = 9
    with pytest.raises(Exception, match="told to fail"):
        probe(engine, thorough=False)
    assert engine.cache == [[], []]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One generated model in single precision and quantised."""
    directory = tmp_path_factory.mktemp("tiny")
    files = {name: directory / f"{name}.gguf" for name in ("single", *FORMATS)}
    write_tiny(files["single"], request.param, "target")
    for name in FORMATS:
        quantise_as(files["single"], files[name], name)
    return files


def measure(path: Path, mode: Literal["auto", "off"], *, threads: int = 2) -> Invariance:
    kernels.use(mode, threads=threads, variant=next(iter(SUPPORTED_VARIANTS), None))
    model = LlamaModel(path)
    engine = LlamaEngine(
        model,
        n_slots=2,
        context_length=SLOT_TOKENS,
        threads=threads,
        max_rows=128,
        max_logits=64,
        max_alternatives=2,
    )
    try:
        return probe(engine, thorough=True)
    finally:
        engine.close()
        model.close()


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("form", FORMATS)
def test_logits_are_batch_invariant_with_specserves_kernels(tiny: dict[str, Path], form: str, threads: int) -> None:
    assert measure(tiny[form], "auto", threads=threads).any_batch


def test_logits_are_not_batch_invariant_with_llama_cpps_kernels(tiny: dict[str, Path]) -> None:
    """Its attention uses another kernel for 64 rows and more, and sums in the order of the cells."""
    invariance = measure(tiny["q4_0"], "off")
    assert not invariance.single_sequence
    assert 0 < invariance.chunks < 1


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
    monkeypatch.setattr(kernels, "speed", lambda *_: 2.0)
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


@pytest.mark.parametrize("mode", ["auto", "off"])
@pytest.mark.parametrize("form", [*FORMATS, "iq4_xs"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_trial_at_load_promises_no_repetition_that_does_not_hold(
    architecture: str, form: str, mode: kernels.Mode, wide: TinyModel
) -> None:
    """IQ4_XS has no kernel of specserve's, and llama.cpp has two for it: for fewer than 8 rows, and for more."""
    models = load_models(wide.config(architecture, form, mode))
    assert models.invariance is not None
    assert models.invariance.single_sequence == (largest_difference(models.target.engine) == 0)


@needs_kernels
def test_the_trial_at_load_sees_how_llama_cpps_attention_changes_with_the_length(wide: TinyModel) -> None:
    """Above 256 tokens in the cache, for a single row and several threads."""
    models = load_models(wide.config("qwen2", "q4_0", "off", threads=2))
    assert models.invariance is not None
    assert models.invariance.rows > 0


@needs_kernels
def test_the_log_says_what_llama_cpp_computes_although_the_kernels_are_in_use(
    wide: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    load_models(wide.config("qwen2", "iq4_xs", "auto"))
    assert "iq4_xs.gguf: llama.cpp's own kernels compute matrix products of this model" in caplog.text
    caplog.clear()
    load_models(wide.config("qwen2", "q4_0", "auto"))
    assert "of this model" not in caplog.text


def test_the_sentence_names_the_conditions() -> None:
    invariant = Invariance(0.0, 0.0, 0.0, None, None).sentence
    assert "all numbers of rows, prefill chunks and cache positions that were tried" in invariant
    assert "repeat exactly" in invariant
    assert "neighbours and alternatives" in Invariance(0.0, 0.0, 0.0, 0.0, 0.0).sentence
    rows = Invariance(0.02, 0.0, 0.0, 0.0, 0.1).sentence
    assert "differed between numbers of rows (by 0.02) and alternatives (by 0.1)" in rows
    layout = Invariance(0.0, 0.0, 0.3, 0.0, None).sentence
    assert "cache positions (by 0.3)" in layout
    assert "repeat exactly alone" in layout


def test_the_sentence_promises_no_bound_for_what_a_trial_cannot_bound() -> None:
    """Where a rounding error turns a quantised activation, logits differ a thousand times as much."""
    assert "may differ by more" in Invariance(0.0, 3.8e-06, 0.0, 0.0, None).sentence
