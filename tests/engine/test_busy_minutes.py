"""A machine that others slow down for a while: how the controller goes through it, and what is left afterwards."""

from collections.abc import Callable

import pytest

from costs import table
from fake_engine import FakeEngine
from fake_pair import ENDLESS, FakePair
from specserve.core.text_sequence import TextSequence
from specserve.engine.base import FloatArray, Row
from specserve.sequence import SpeculationMode
from specserve.speculation.costs import PassCosts


def target_milliseconds(rows: int) -> float:
    """As of the default pair on two cores of Zen 4."""
    return 36.0 + 1.4 * rows


def draft_milliseconds(rows: int) -> float:
    """The same of its draft model."""
    return 7.5 + 0.3 * rows


class SlowMachine:
    """Lets the passes of a pair take milliseconds of a clock: those of the tables, times a factor for each model."""

    def __init__(self) -> None:
        self.now = 0.0
        self.factors = [1.0, 1.0]
        target = PassCosts(table(target_milliseconds))
        costs = target, PassCosts(table(draft_milliseconds), target=target)
        self.pair = FakePair(blend=0.1, costs=costs, clock=lambda: self.now, proposers=[])
        self._slow(self.pair.target, target_milliseconds, 0)
        self._slow(self.pair.draft, draft_milliseconds, 1)

    def _slow(self, engine: FakeEngine, cost: Callable[[int], float], model: int) -> None:
        forward = engine.forward

        def delayed(rows: list[Row]) -> FloatArray:
            self.now += self.factors[model] * cost(len(rows))
            return forward(rows)

        engine.forward = delayed  # type: ignore[method-assign] # the fake of a slower machine

    def run(self, rounds: int) -> list[int]:
        """Run so many rounds of one sequence; returns their numbers of drafts."""
        before = len(self.pair.records.rounds)
        self.pair.step(rounds)
        return [len(step.drafts) for step in self.pair.records.rounds[before:]]

    def start(self, mode: SpeculationMode = "auto") -> TextSequence:
        """Begin a sequence that does not end by itself."""
        return self.pair.submit([1, 2, 3], gamma=8, mode=mode, sampling=ENDLESS, max_tokens=9000)


@pytest.mark.parametrize("factors", [(2.0, 8.0), (3.5, 3.5), (1.5, 1.5), (4.0, 1.0)])
def test_drafting_is_back_within_20_rounds_of_the_end_of_200_slow_ones(factors: tuple[float, float]) -> None:
    machine = SlowMachine()
    machine.start()
    quiet = machine.run(100)
    assert sum(quiet[-20:]) > 20
    machine.factors = list(factors)
    machine.run(200)
    machine.factors = [1.0, 1.0]
    machine.run(20)
    after = machine.run(40)
    assert sum(after) >= 0.8 * sum(quiet[-40:])


@pytest.mark.parametrize("factors", [(2.0, 8.0), (3.5, 14.0), (1.3, 4.0)])
def test_sequence_drafts_as_before_after_a_busy_minute_that_taught_all_costs(factors: tuple[float, float]) -> None:
    """Clients that fix a number of drafts let the draft model run on the busy machine, and show what it costs there."""
    machine = SlowMachine()
    machine.start()
    quiet = machine.run(60)
    machine.factors = list(factors)
    machine.pair.scheduler.fail_all(RuntimeError("replaced"))
    fixed = machine.start("fixed")
    machine.run(200)
    machine.pair.scheduler.cancel(fixed)
    machine.start()
    machine.run(20)
    machine.factors = [1.0, 1.0]
    machine.run(20)
    assert sum(machine.run(60)) >= 0.8 * sum(quiet)


@pytest.mark.parametrize("factor", [3.0, 8.0, 30.0])
def test_draft_model_that_stays_slow_costs_little(factor: float) -> None:
    """It is tried again and again, since only drafting can show that it has become fast."""
    machine = SlowMachine()
    machine.factors = [1.0, factor]
    running = machine.start()
    machine.run(600)
    seconds = machine.now / running.generated
    assert seconds <= 1.02 * target_milliseconds(1)
