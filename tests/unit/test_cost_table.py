"""A cost table is measured once, and again when anything it depends on has changed."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from measured_engine import MeasuredEngine
from specserve.speculation.cost_files import measured_cost


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(3_000_000))
    return file


def cached_files(model: Path) -> list[Path]:
    return sorted((model.parent / "cache" / "costs").glob("*"))


def test_model_is_measured_once(model: Path) -> None:
    first, second = MeasuredEngine(), MeasuredEngine()
    table = measured_cost(first, model, threads=2, kernels="usual")
    assert measured_cost(second, model, threads=2, kernels="usual") == table
    assert first.passes > 10
    assert second.passes == 0
    [file] = cached_files(model)
    assert json.loads(file.read_text())["model"] == "model.gguf"


def test_workers_that_start_together_measure_once(model: Path) -> None:
    engines = [MeasuredEngine() for _ in range(4)]
    with ThreadPoolExecutor() as workers:
        tables = list(workers.map(lambda engine: measured_cost(engine, model, threads=2, kernels="usual"), engines))
    assert len(set(tables)) == 1
    assert sorted(engine.passes > 0 for engine in engines) == [False, False, False, True]


@pytest.mark.parametrize("change", ["threads", "kernels", "head", "tail", "slots", "rows"])
def test_model_is_measured_again_when_a_dependency_has_changed(model: Path, change: str) -> None:
    measured_cost(MeasuredEngine(), model, threads=2, kernels="usual")
    content = bytearray(model.read_bytes())
    if change in {"head", "tail"}:
        content[10 if change == "head" else -10] = 1
        model.write_bytes(bytes(content))
    restarted = MeasuredEngine()
    restarted.n_slots = 3 if change == "slots" else 1
    restarted.max_rows = 200 if change == "rows" else 256
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
    measured_cost(MeasuredEngine(), model, threads=2, kernels="usual")
    [file] = cached_files(model)
    file.write_text(content)
    restarted = MeasuredEngine()
    with caplog.at_level(logging.WARNING):
        measured_cost(restarted, model, threads=2, kernels="usual")
    assert restarted.passes > 10
    assert "cannot be used" in caplog.text
    assert json.loads(file.read_text())["rows"][0] == 1


def test_a_table_of_an_earlier_version_is_measured_again(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Versions before this one wrote none into the file, and had a name of their own for it."""
    measured_cost(MeasuredEngine(), model, threads=2, kernels="usual")
    [file] = cached_files(model)
    table = json.loads(file.read_text())
    file.write_text(json.dumps({**table, "method": table["method"] - 1, "seconds": [[9.0], [9.0]]}))
    restarted = MeasuredEngine()
    with caplog.at_level(logging.INFO):
        measured_cost(restarted, model, threads=2, kernels="usual")
    assert restarted.passes > 10
    assert "an earlier version" in caplog.text
    assert json.loads(file.read_text())["method"] == table["method"]


def test_unwritable_cache_is_logged(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    (model.parent / "cache").write_text("a file where the directory should be")
    with caplog.at_level(logging.WARNING):
        table = measured_cost(MeasuredEngine(), model, threads=2, kernels="usual")
    assert table.rows[0] == 1
    assert "cannot be written" in caplog.text
