"""A cost table is measured once, and again when anything it depends on has changed."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fake_engine import FakeEngine
from specserve.engine.base import FloatArray, Row
from specserve.speculation.measure import measured_cost


class CountingEngine(FakeEngine):
    """An engine that counts its forward passes."""

    def __init__(self) -> None:
        super().__init__(vocabulary=50, n_slots=1)
        self.passes = 0

    def forward(self, rows: list[Row]) -> FloatArray:
        self.passes += 1
        return super().forward(rows)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(3_000_000))
    return file


def cached_files(model: Path) -> list[Path]:
    return sorted((model.parent / "cache" / "costs").glob("*"))


def test_model_is_measured_once(model: Path) -> None:
    first, second = CountingEngine(), CountingEngine()
    table = measured_cost(first, model, threads=2, kernels="usual")
    assert measured_cost(second, model, threads=2, kernels="usual") == table
    assert first.passes > 10
    assert second.passes == 0
    [file] = cached_files(model)
    assert json.loads(file.read_text())["model"] == "model.gguf"


def test_workers_that_start_together_measure_once(model: Path) -> None:
    engines = [CountingEngine() for _ in range(4)]
    with ThreadPoolExecutor() as workers:
        tables = list(workers.map(lambda engine: measured_cost(engine, model, threads=2, kernels="usual"), engines))
    assert len(set(tables)) == 1
    assert sorted(engine.passes > 0 for engine in engines) == [False, False, False, True]


@pytest.mark.parametrize("change", ["threads", "kernels", "head", "tail", "slots"])
def test_model_is_measured_again_when_a_dependency_has_changed(model: Path, change: str) -> None:
    measured_cost(CountingEngine(), model, threads=2, kernels="usual")
    content = bytearray(model.read_bytes())
    if change in {"head", "tail"}:
        content[10 if change == "head" else -10] = 1
        model.write_bytes(bytes(content))
    restarted = CountingEngine()
    restarted.n_slots = 3 if change == "slots" else 1
    kernels = "others" if change == "kernels" else "usual"
    measured_cost(restarted, model, threads=4 if change == "threads" else 2, kernels=kernels)
    assert restarted.passes > 10
    assert len(cached_files(model)) == 2


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"rows": [1], "kv_len": [1], "seconds": [[1], [1]]}', '{"rows": 1}']
)
def test_unreadable_table_is_measured_again_and_logged(
    model: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    measured_cost(CountingEngine(), model, threads=2, kernels="usual")
    [file] = cached_files(model)
    file.write_text(content)
    restarted = CountingEngine()
    with caplog.at_level(logging.WARNING):
        measured_cost(restarted, model, threads=2, kernels="usual")
    assert restarted.passes > 10
    assert "cannot be used" in caplog.text
    assert json.loads(file.read_text())["rows"][0] == 1


def test_unwritable_cache_is_logged(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    (model.parent / "cache").write_text("a file where the directory should be")
    with caplog.at_level(logging.WARNING):
        table = measured_cost(CountingEngine(), model, threads=2, kernels="usual")
    assert table.rows[0] == 1
    assert "cannot be written" in caplog.text
