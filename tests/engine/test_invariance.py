"""The probe finds what makes logits depend on rows, chunks, kv_len or neighbours, and says so in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from fake_engine import FakeEngine
from kernel_products import needs_kernels
from specserve.engine import kernels
from specserve.engine.base import FloatArray, Row
from specserve.engine.invariance import Invariance, probe
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from specserve.observability.status import describe
from tiny_formats import FORMATS, quantise_as
from tiny_models import ARCHITECTURES, write_tiny

ROOM = 512
NOISE = 0.25

Fault = Callable[["Planted", list[Row], Row], bool]


class Planted(FakeEngine):
    """An engine whose logits are wrong by a little wherever `fault` says so of a pass and a row of it.

    It keeps kv_len as a shared cache does: the first free ones are written first.
    """

    def __init__(self, fault: Fault, *, n_slots: int = 2) -> None:
        super().__init__(vocabulary=24, n_slots=n_slots)
        self._fault = fault
        self.layout: list[tuple[int, int] | None] = []
        self.wide: set[tuple[int, int]] = set()

    def forward(self, rows: list[Row]) -> FloatArray:
        for row in rows:
            place = (row.slot, row.position)
            free = self.layout.index(None) if None in self.layout else len(self.layout)
            self.layout[free : free + 1] = [place]
            (self.wide.add if len(rows) >= 64 else self.wide.discard)(place)
        wrong = [self._fault(self, rows, row) for row in rows if row.wants_logits]
        return super().forward(rows) + NOISE * np.array(wrong, np.float32)[:, None]

    def truncate(self, slot: int, length: int) -> None:
        super().truncate(slot, length)
        self.layout = [None if cell and cell[0] == slot and cell[1] >= length else cell for cell in self.layout]


def never(_engine: Planted, _rows: list[Row], _row: Row) -> bool:
    return False


def rows_of_four(_engine: Planted, rows: list[Row], row: Row) -> bool:
    """A kernel that takes four rows of a text together, and rounds otherwise."""
    return len(rows) < 16 and [other.slot for other in rows].count(row.slot) == len(rows) == 4


def lone_rows_of_long_texts(engine: Planted, rows: list[Row], _row: Row) -> bool:
    """What llama.cpp does with keys and values in half precision."""
    return len(rows) == 1 and len(engine.layout) > 256


def wide_chunks(engine: Planted, _rows: list[Row], row: Row) -> bool:
    return (row.slot, row.position - 1) in engine.wide


def cells_out_of_order(engine: Planted, _rows: list[Row], row: Row) -> bool:
    own = [cell[1] for cell in engine.layout if cell and cell[0] == row.slot]
    return own != sorted(own)


def other_slots(_engine: Planted, _rows: list[Row], row: Row) -> bool:
    return row.slot != 0


def neighbours_before(_engine: Planted, rows: list[Row], row: Row) -> bool:
    return rows[0].slot != row.slot


def neighbours_behind(_engine: Planted, rows: list[Row], row: Row) -> bool:
    return rows[-1].slot != row.slot


def test_an_engine_without_a_fault_is_invariant_everywhere() -> None:
    assert probe(Planted(never), ROOM) == Invariance(0.0, 0.0, 0.0, 0.0)
    assert probe(Planted(never), ROOM).everywhere


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (rows_of_four, "rows"),
        (lone_rows_of_long_texts, "rows"),
        (wide_chunks, "chunks"),
        (cells_out_of_order, "layout"),
        (other_slots, "layout"),
        (neighbours_before, "neighbours"),
        (neighbours_behind, "neighbours"),
    ],
)
def test_a_planted_fault_is_found_and_named(fault: Fault, found: str) -> None:
    invariance = probe(Planted(fault), ROOM)
    assert getattr(invariance, found) == pytest.approx(NOISE)
    assert not invariance.everywhere
    assert invariance.alone == (found in {"layout", "neighbours"})


@pytest.mark.parametrize("fault", [cells_out_of_order, neighbours_before, neighbours_behind])
def test_a_fault_in_one_thing_is_not_blamed_on_another(fault: Fault) -> None:
    invariance = probe(Planted(fault), ROOM)
    assert [bool(difference) for difference in invariance].count(True) == 1


def test_logits_that_are_not_numbers_are_no_invariance() -> None:
    engine = Planted(never)
    engine.poison_after = 20
    assert not probe(engine, ROOM).everywhere


def test_one_slot_has_no_neighbours_and_is_probed_all_the_same() -> None:
    assert probe(Planted(never, n_slots=1), ROOM) == Invariance(0.0, 0.0, 0.0, None)
    assert probe(Planted(never, n_slots=1), ROOM).everywhere
    assert not probe(Planted(rows_of_four, n_slots=1), ROOM).alone


@pytest.mark.parametrize("room", [64, 100, 269, 4096])
@pytest.mark.parametrize("max_logits", [1, 2, 64])
@pytest.mark.parametrize("max_rows", [1, 2, 3, 68])
def test_the_engines_limits_are_kept_and_its_cache_is_left_empty(room: int, max_logits: int, max_rows: int) -> None:
    engine = Planted(never, n_slots=3)
    engine.max_logits, engine.max_rows = max_logits, max_rows
    assert probe(engine, room).everywhere
    assert engine.cache == [[], [], []]
    assert max(row.position for row in engine.decoded) < room


def test_the_cache_is_left_empty_when_a_pass_fails() -> None:
    engine = FakeEngine(vocabulary=24, n_slots=2)
    engine.fail_after = 9
    with pytest.raises(Exception, match="told to fail"):
        probe(engine, ROOM)
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
    kernels.use(mode, threads=threads)
    model = LlamaModel(path)
    engine = LlamaEngine(model, n_slots=2, context_length=ROOM, threads=threads, max_rows=128, max_logits=64)
    try:
        return probe(engine, ROOM)
    finally:
        engine.close()
        model.close()


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("form", FORMATS)
def test_with_our_kernels_texts_repeat_in_any_company(tiny: dict[str, Path], form: str, threads: int) -> None:
    assert measure(tiny[form], "auto", threads=threads).everywhere


def test_with_llama_cpps_kernels_texts_do_not_repeat_and_the_probe_sees_it(tiny: dict[str, Path]) -> None:
    """Its attention has other kernels for 64 rows and more, and adds values up in the order in which they lie."""
    invariance = measure(tiny["q4_0"], "off")
    assert not invariance.alone
    assert 0 < invariance.chunks < 1


def test_the_sentence_says_what_to_expect() -> None:
    everywhere = describe(Invariance(0.0, 0.0, 0.0, None))
    assert "repeat exactly" in everywhere
    rows = describe(Invariance(0.02, 0.0, 0.0, 0.0))
    assert "the number of rows in a forward pass (by up to 0.02)" in rows
    crowd = describe(Invariance(0.0, 0.0, 0.3, 0.0))
    assert "the position in the cache (by up to 0.3)" in crowd
    assert "repeat exactly alone" in crowd
