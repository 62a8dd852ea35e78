"""The engine loop: how long its slices are, when one is started, and in which thread rounds run."""

import math
import threading
from typing import Any
from unittest.mock import patch

import pytest

from fake_placement import FakeMachine, placement_on
from specserve.core.engine_loop import EngineLoop, engine_thread


class FakeScheduler:
    """A scheduler with `left` rounds and, while none is left, `unstored` parts of prefixes."""

    def __init__(self, left: int, *, unstored: int = 0) -> None:
        self.left, self.awaiting_first_token = left, 0
        self.unstored, self.stored = unstored, 0
        self.may_finish, self.started, self.stored_five = threading.Event(), threading.Event(), threading.Event()
        self.may_finish.set()
        self.threads: set[int] = set()
        self.faults: list[Exception] = []

    @property
    def busy(self) -> bool:
        return self.left > 0

    def run_round(self) -> None:
        self.started.set()
        assert self.may_finish.wait(10)
        self.threads.add(threading.get_ident())
        self.left -= 1

    def check_caches(self) -> None:
        """They are right."""

    def store_prefixes(self) -> bool:
        assert not self.busy
        self.threads.add(threading.get_ident())
        self.stored += 1
        if self.stored == 5:
            self.stored_five.set()
        return self.stored < self.unstored

    def fail_all(self, reason: Exception) -> None:
        self.faults.append(reason)
        self.left = 0


def loop_of(scheduler: Any, seconds: float = math.inf) -> EngineLoop:
    loop = EngineLoop(scheduler, engine_thread(), placement_on(FakeMachine()))
    loop.slice_seconds = seconds
    return loop


def test_a_slice_has_at_least_one_round_and_ends_in_time_or_with_the_last_sequence() -> None:
    for seconds, left in ((0, 4), (math.inf, 0)):
        scheduler = FakeScheduler(5)
        loop_of(scheduler, seconds).run()
        assert (scheduler.left, scheduler.faults) == (left, [])


def test_a_started_slice_runs_before_join_and_may_be_interrupted_after_its_round_but_not_the_next() -> None:
    for interrupts in (False, True):
        scheduler = FakeScheduler(5)
        scheduler.may_finish.clear()
        loop = loop_of(scheduler)
        loop.start()
        assert scheduler.started.wait(10)
        if interrupts:
            loop.interrupt()
        scheduler.may_finish.set()
        assert loop.join()
        assert scheduler.left == (4 if interrupts else 0)
        assert not loop.join()
        loop.run()
        assert (scheduler.left, scheduler.faults) == (0, [])


def test_no_slice_starts_without_sequences_nor_beside_a_prefill_for_which_a_new_request_would_wait() -> None:
    prefilling = FakeScheduler(5)
    prefilling.awaiting_first_token = 1
    for scheduler in (FakeScheduler(0), prefilling):
        loop = loop_of(scheduler)
        loop.start()
        assert not loop.join()
        assert not scheduler.started.is_set()


def test_every_round_runs_in_the_engine_thread() -> None:
    scheduler = FakeScheduler(3)
    loop = loop_of(scheduler, 0)
    loop.run()
    loop.start()
    loop.join()
    assert (scheduler.left, scheduler.stored) == (1, 0), "nothing is stored between the slices of a sequence"
    loop.run()
    assert len(scheduler.threads) == 1
    assert threading.get_ident() not in scheduler.threads


def test_an_exception_in_a_round_fails_sequences_and_one_while_storing_none(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = FakeScheduler(3)
    with patch.object(scheduler, "run_round", side_effect=ZeroDivisionError("division by zero")):
        loop_of(scheduler).run()
    assert [str(fault) for fault in scheduler.faults] == ["division by zero"]
    assert "a round failed" in caplog.text
    caplog.clear()
    scheduler = FakeScheduler(0)
    loop = loop_of(scheduler)
    with patch.object(scheduler, "check_caches", side_effect=ZeroDivisionError):
        loop.start()
        loop.join()
        assert "ZeroDivisionError" in caplog.text
        scheduler.left = 1
        loop.run()
    assert scheduler.left == 0


def test_prefixes_are_stored_once_no_sequence_is_left_until_the_next_call_or_until_all_are() -> None:
    for unstored in (5, 10**7):
        scheduler = FakeScheduler(1, unstored=unstored)
        loop = loop_of(scheduler)
        loop.run()
        assert scheduler.stored == 0
        loop.start()
        assert scheduler.stored_five.wait(10)
        assert not loop.join()
        # The call that may bring a sequence begins after the part that was being copied.
        scheduler.left, stored = 1, scheduler.stored
        loop.run()
        assert (scheduler.left, scheduler.stored) == (0, stored)
        assert len(scheduler.threads) == 1
        assert stored == 5 or 5 < stored < unstored
