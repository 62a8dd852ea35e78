"""A cost table is measured once, and again when anything it depends on has changed."""

from __future__ import annotations

import json
import logging
import math
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from measured_engine import MeasuredEngine
from specserve.speculation.cost import CostTable
from specserve.speculation.cost_files import measured_cost


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(3_000_000))
    return file


def cached_files(model: Path) -> list[Path]:
    return sorted((model.parent / "cache" / "costs").glob("*.json"))


def tables(file: Path) -> dict[str, Any]:
    """A table's arguments."""
    table = json.loads(file.read_text())
    return {
        "rows": tuple(table["rows"]),
        "kv_len": tuple(table["kv_len"]),
        "seconds": tuple(map(tuple, table["seconds"])),
    }


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


def a_table(rows: list[Any], *seconds: list[Any]) -> dict[str, object]:
    return {"rows": rows, "kv_len": [64 * (number + 1) for number in range(len(seconds))], "seconds": seconds}


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "\0" * 500, "[" * 100_000, '{"rows": 1}', '"text"'),
        *({"rows": 1}, {"rows": "1"}, {"seconds": [1.0, 2.0]}, {"kv_len": None}),
        *(a_table([]), a_table([], []), a_table([1, 2]), a_table([1, 2], [1.0]), a_table([1, 1], [1.0, 2.0])),
        *(a_table([1], [1.0], []), a_table([2, 4], [1.0, 2.0]), a_table([1, math.inf], [1.0, 2.0])),
        *(a_table([1, 2], [1.0, wrong]) for wrong in (0, -1.0, math.nan, math.inf, 1e-400, None)),
    ],
)
def test_damaged_table_is_one_line_of_the_log_and_measured_again(
    model: Path, content: str | dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    expected = measured_cost(MeasuredEngine(), model, threads=2, kernels="usual")
    [file] = cached_files(model)
    file.write_text(content if isinstance(content, str) else json.dumps({**json.loads(file.read_text()), **content}))
    restarted = MeasuredEngine()
    measured = measured_cost(restarted, model, threads=2, kernels="usual")
    assert restarted.passes > 10
    assert measured.rows == expected.rows
    [message] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert message.startswith(f"specserve: {file} cannot be used (")
    assert measured_cost(MeasuredEngine(), model, threads=2, kernels="usual") == measured


@pytest.mark.parametrize("planted", ["link", "pipe", "directory", "open to others"])
def test_what_another_user_may_have_planted_is_neither_read_nor_written(
    model: Path, planted: str, caplog: pytest.LogCaptureFixture
) -> None:
    table = measured_cost(MeasuredEngine(), model, threads=2, kernels="usual")
    [file] = cached_files(model)
    target = model.parent / "target"
    target.write_text(file.read_text())
    target.chmod(0o600)
    file.chmod(0o666)
    if planted != "open to others":
        file.unlink()
    if planted == "link":
        file.symlink_to(target)
    elif planted == "pipe":
        os.mkfifo(file)
    elif planted == "directory":
        file.mkdir()
    restarted = MeasuredEngine()
    assert measured_cost(restarted, model, threads=2, kernels="usual").rows == table.rows
    assert restarted.passes > 10
    assert f"{file} cannot be used" in caplog.text
    assert CostTable(**tables(target)) == table
    if planted != "directory":
        assert stat.S_IMODE(file.lstat().st_mode) == 0o600
        assert file.is_file()


def test_no_link_is_followed_to_write_a_table_or_to_lock(model: Path) -> None:
    measured_cost(MeasuredEngine(), model, threads=2, kernels="usual")
    [file] = cached_files(model)
    file.unlink()
    target = model.parent / "target"
    target.write_text("keep")
    file.with_name("lock").unlink()
    for link in ("lock", f"{file.stem}.{os.getpid()}.part", "../costs.lock"):
        (file.parent / link).symlink_to(target)
    restarted = MeasuredEngine()
    measured_cost(restarted, model, threads=2, kernels="usual")
    assert restarted.passes > 10
    assert cached_files(model) == [file]
    assert target.read_text() == "keep"


def test_what_killed_processes_have_left_is_removed(model: Path) -> None:
    directory = model.parent / "cache" / "costs"
    directory.mkdir(parents=True)
    (directory / "old.part").write_text("{")
    os.utime(directory / "old.part", (1, 1))
    (directory / "a directory.part").mkdir()
    (directory / "being written.part").write_text("{")
    measured_cost(MeasuredEngine(), model, threads=2, kernels="usual")
    [file] = cached_files(model)
    names = {path.name for path in directory.iterdir()}
    assert names == {file.name, "lock", "a directory.part", "being written.part"}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


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
