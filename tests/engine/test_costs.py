"""The costs of passes are measured for all threads and for half of them, and again, in an idle time, where doubtful."""

from __future__ import annotations

from pathlib import Path

import pytest

from fake_placement import FakeMachine, placement_on
from measured_engine import MeasuredEngine
from specserve.core.costs import Costs
from specserve.engine import kernels
from specserve.engine.base import FloatArray, Row
from specserve.errors import EngineError, ModelLoadError
from specserve.speculation.cost import Cost


class Machine(MeasuredEngine):
    """An engine whose passes take a time that the test sets, more with fewer threads; `costs` says with how many."""

    def __init__(self) -> None:
        super().__init__(n_slots=2)
        self.now, self.slow = 0.0, 1.0
        self.costs = Costs(placement_on(FakeMachine(4)), clock=lambda: self.now)

    def forward(self, rows: list[Row]) -> FloatArray:
        self.now += self.slow * len(rows) / len(self.costs.placement.cores)
        return super().forward(rows)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(kernels, "identity", lambda: "fake")
    return Machine()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


def make_doubtful(cost: Cost) -> None:
    for _ in range(20):
        cost.observe(1, 0, 0.3 * cost.table.seconds[0][0])


def test_passes_are_measured_with_all_threads_and_with_half_of_them(machine: Machine, model: Path) -> None:
    cost = machine.costs.measure(machine, model)
    assert cost.seconds(4, 0) == pytest.approx(1.0)
    assert machine.costs.placement.cores == (0, 1, 2, 3)
    machine.costs.placement.run_on((0, 2))
    assert cost.seconds(4, 0) == pytest.approx(2.0)
    machine.costs.placement.run_on((0, 1, 3))
    assert cost.seconds(4, 0) == pytest.approx(1.0)


def test_doubtful_table_is_measured_again_and_kept_for_the_next_start(machine: Machine, model: Path) -> None:
    machine.slow = 5.0
    cost = machine.costs.measure(machine, model)
    machine.slow = 1.0
    before = machine.passes
    machine.costs.measure_doubtful(lambda: False)
    assert machine.passes == before, "nothing is doubtful yet"
    make_doubtful(cost)
    machine.costs.measure_doubtful(lambda: False)
    assert cost.seconds(4, 0) == pytest.approx(1.0)
    assert not cost.doubtful
    assert machine.costs.placement.cores == (0, 1, 2, 3)
    after = machine.passes
    assert Costs(machine.costs.placement).measure(machine, model).seconds(4, 0) == pytest.approx(1.0)
    assert machine.passes == after


def test_measurement_on_a_machine_that_is_busier_still_changes_nothing(machine: Machine, model: Path) -> None:
    cost = machine.costs.measure(machine, model)
    make_doubtful(cost)
    machine.slow = 5.0
    machine.costs.measure_doubtful(lambda: False)
    assert cost.seconds(4, 0) == pytest.approx(1.0)


def test_request_ends_the_measurement_and_leaves_all_as_it_was(machine: Machine, model: Path) -> None:
    cost = machine.costs.measure(machine, model)
    make_doubtful(cost)
    known, end = cost.seconds(4, 0), machine.passes + 7
    machine.costs.measure_doubtful(lambda: machine.passes >= end)
    assert machine.passes == end
    assert cost.seconds(4, 0) == known
    assert cost.doubtful
    assert machine.cache == [[], []]


def test_measurement_waits_for_a_time_with_an_empty_slot(
    machine: Machine, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_doubtful(machine.costs.measure(machine, model))
    for slot in range(2):
        machine.forward([Row(1, slot, 0, wants_logits=False)])
    machine.costs.measure_doubtful(lambda: False)
    assert "no slot is empty" in caplog.text
    assert machine.cache == [[1], [1]]


def test_threads_are_afterwards_where_they_were(machine: Machine, model: Path) -> None:
    make_doubtful(machine.costs.measure(machine, model))
    machine.costs.placement.run_on((1,))
    machine.costs.measure_doubtful(lambda: False)
    assert machine.costs.placement.cores == (1,)


def test_failed_pass_at_load_is_a_load_error(machine: Machine, model: Path) -> None:
    machine.fail_after = 3
    with pytest.raises(ModelLoadError, match="cannot be timed") as failure:
        machine.costs.measure(machine, model)
    assert isinstance(failure.value.__cause__, EngineError)
