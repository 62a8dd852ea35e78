"""What passes cost is measured once on a machine, and again when anything it depends on has changed."""

import fcntl
import json
import logging
import math
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fake_engine import FakeEngine
from specserve.engine.base import FloatArray, Row
from specserve.speculation import measure as module
from specserve.speculation.costs import CostTable, PassCosts
from specserve.speculation.measure import kv_lengths, measure, measured_costs


class MeasuredEngine(FakeEngine):
    """A fake engine that counts its passes, and loads saved tokens at any position: their keys are not used."""

    def __init__(self, n_slots: int = 1) -> None:
        super().__init__(vocabulary=50, n_slots=n_slots)
        self.passes = 0

    def forward(self, rows: list[Row]) -> FloatArray:
        self.passes += 1
        return super().forward(rows)

    def logits(self, context: list[int]) -> FloatArray:
        return super().logits(context[:1])

    def load(self, slot: int, saved: NDArray[np.uint8]) -> None:
        assert saved.shape[1:] == (self.token_bytes,)
        assert len(self.cache[slot]) + len(saved) <= self.slot_length
        self.cache[slot] += [0] * len(saved)


class Machine(MeasuredEngine):
    """An engine with its own clock: `true_cost` with relative noise, and a long delay in every seventh pass."""

    def __init__(self, noise: float = 0.0, slot_length: int = 4096) -> None:
        super().__init__()
        self.now, self.slot_length = 0.0, slot_length
        self.batches: list[list[Row]] = []
        self._noise, self._random = noise, np.random.default_rng(1)

    def forward(self, rows: list[Row]) -> FloatArray:
        self.batches.append(rows)
        noise = 1 + self._random.uniform(-self._noise, self._noise)
        self.now += noise * true_cost(len(rows), self.kv_len([0])) + (20.0 if self.passes % 7 == 6 else 0.0)
        return super().forward(rows)

    def clock(self) -> float:
        return self.now


def true_cost(rows: int, kv_len: int) -> float:
    """One second for every four rows begun; attention reads the context once, and computes for every row."""
    return -(-rows // 4) + kv_len / 8000 + rows * kv_len / 4000


def test_a_stepwise_cost_is_found_despite_delayed_passes() -> None:
    for slot_length in (4096, 8192, 32_768):
        machine = Machine(slot_length=slot_length)
        table = measure(machine, machine.clock)
        # Between 16 and 24 rows the cost jumps at 17, which a line from 16 to 24 would hide.
        assert {1, 16, 17, 32, 256} <= set(table.rows)
        costs = PassCosts(table)
        for rows in (1, 4, 8, 16, 32, 64):
            for kv_len in (64, 1024, 4032, slot_length):
                assert costs.seconds(rows, kv_len) == pytest.approx(true_cost(rows, kv_len), rel=0.05)
        assert machine.cached_len(0) == 0
        assert machine.passes <= 100
    # An engine that cannot load is timed after a context that is prefilled.
    machine = Machine(noise=0.1, slot_length=32_768)
    machine.token_bytes = None
    table = measure(machine, machine.clock)
    assert table.kv_len == (64, 1024)
    assert PassCosts(table).seconds(16, 1024) == pytest.approx(true_cost(16, 1024), rel=0.1)


def test_rows_of_a_timed_pass_have_different_tokens() -> None:
    """In a mixture of experts equal ones would share their experts, and more rows would seem to cost nothing."""
    machine = Machine()
    measure(machine, machine.clock)
    timed = [rows for rows in machine.batches if len(rows) <= machine.width]
    assert max(map(len, timed)) == 32
    assert all(len({row.token for row in rows}) == len(rows) for rows in timed)


def test_lengths_are_those_that_a_slot_has_room_for() -> None:
    expected = {64: (16, 32), 320: (64, 256), 4096: (64, 4032), 16_384: (64, 16_320), 32_768: (64, 16_384)}
    assert {length: kv_lengths(length) for length in expected} == expected
    for context, max_rows, max_logits in ((64, 256, 64), (40, 256, 64), (130, 320, 64), (4096, 6, 3)):
        machine = Machine(slot_length=context)
        machine.max_rows, machine.max_logits = max_rows, max_logits
        assert measure(machine, machine.clock).rows[-1] <= max_rows
        assert max(row.position for row in machine.decoded) < context


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "cache"))
    # Whatever else this machine does.
    monkeypatch.setattr(module, "thread_times", dict)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(3_000_000))
    return file


def cached_files(model: Path) -> list[Path]:
    return sorted((model.parent / "cache" / "costs").glob("*.json"))


def start(model: Path, *, slots: int = 1, rows: int = 256, **changed: Any) -> tuple[int, CostTable]:
    engine = MeasuredEngine(n_slots=slots)
    engine.max_rows = rows
    usual: dict[str, Any] = {"threads": 2, "kernels": "usual"}
    table = measured_costs(engine, model, **usual | changed)
    return engine.passes, table


def test_workers_that_start_together_measure_once(model: Path) -> None:
    with ThreadPoolExecutor() as workers:
        started = list(workers.map(lambda _: start(model), range(4)))
    assert len({table for _, table in started}) == 1
    assert sorted(passes > 0 for passes, _ in started) == [False, False, False, True]
    [file] = cached_files(model)
    assert json.loads(file.read_text())["model"] == "model.gguf"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_model_is_measured_again_when_anything_that_costs_depend_on_has_changed(model: Path) -> None:
    start(model)
    for changed in ({"threads": 4}, {"kernels": "others"}, {"slots": 3}, {"rows": 200}):
        assert start(model, **changed)[0] > 10
    for position in (10, -10):
        content = bytearray(model.read_bytes())
        content[position] = 1
        model.write_bytes(bytes(content))
        assert start(model)[0] > 10
    assert len(cached_files(model)) == 7
    assert start(model)[0] == 0


def test_a_table_that_was_measured_while_others_took_the_cores_is_not_kept(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for waited, kept in ((300, 0), (20, 1)):
        times = iter([(1000, 50), (1700, 50 + waited)])
        monkeypatch.setattr(module, "thread_times", lambda times=times: {1: next(times)})
        assert start(model)[0] > 10
        assert len(cached_files(model)) == kept
        assert ("others took the cores for 30 % of the time" in caplog.text) == (not kept)
        caplog.clear()


def test_a_damaged_table_is_a_line_of_the_log_and_measured_again(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, expected = start(model)
    [file] = cached_files(model)
    good = json.loads(file.read_text())
    small = {"rows": [1, 2], "kv_len": [64], "seconds": [[1.0, 2.0]]}
    for content in (
        *("", "{", "[]", "\0" * 500, "[" * 100_000, '"text"', {"rows": 1}),
        *(good | changed for changed in ({"rows": 1}, {"seconds": [1.0, 2.0]}, {"kv_len": None})),
        *(small | {"seconds": [[1.0, second]]} for second in (None, 0.0, math.nan)),
        *(small | changed for changed in ({"rows": [1, math.inf]}, {"rows": [2, 1]}, {"kv_len": [64, 128]})),
    ):
        caplog.clear()
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        passes, table = start(model)
        assert (passes > 10, table.rows) == (True, expected.rows)
        [message] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert message.startswith(f"specserve: {file} cannot be used (")
        assert start(model) == (0, table)


def test_what_another_user_may_have_planted_is_not_read_or_written(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(model)
    [file] = cached_files(model)
    target, text = model.parent / "target", file.read_text()
    target.write_text(text)
    target.chmod(0o600)
    lock = file.with_name("lock")
    for planted in (lock, file):
        file.unlink()
        planted.unlink(missing_ok=True)
        planted.symlink_to(target)
        assert start(model)[0] > 10
        assert target.read_text() == text
    assert f"{file} cannot be used" in caplog.text
    assert stat.S_IMODE(file.lstat().st_mode) == 0o600
    # A lock that others may open, and so hold, is not waited for; its own they may not open.
    lock.unlink()
    assert (start(model)[0], stat.S_IMODE(lock.stat().st_mode)) == (0, 0o600)
    lock.chmod(0o666)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert start(model)[0] == 0
    file.unlink()
    file.mkdir()
    assert start(model)[0] > 10


def test_a_cache_that_cannot_be_written_is_logged(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    (model.parent / "cache").write_text("a file where the directory should be")
    assert start(model)[1].rows[0] == 1
    assert "cannot be written" in caplog.text
