"""The engine loop: how long its slices are, when one is started, and in which thread rounds run."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from fake_placement import FakeMachine, placement_on
from specserve.core.engine_loop import EngineLoop, engine_thread


class FakeScheduler:
    """A fake scheduler with `left` rounds, each of which waits for the event `may_finish`."""

    def __init__(self, left: int, *, prefilling: bool = False) -> None:
        self.left = left
        self.awaiting_first_token = int(prefilling)
        self.may_finish = threading.Event()
        self.started = threading.Event()
        self.threads: set[int] = set()
        self.faults: list[Exception] = []
        # Parts that may be stored while no sequence is left; each is one more.
        self.unstored, self.stored = 0, 0

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
        time.sleep(0.001)
        self.threads.add(threading.get_ident())
        self.stored += 1
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
        scheduler.may_finish.set()
        loop_of(scheduler, seconds).run()
        assert (scheduler.left, scheduler.faults) == (left, [])


def test_started_slice_runs_before_join() -> None:
    scheduler = FakeScheduler(5)
    loop = loop_of(scheduler)
    loop.start()
    assert scheduler.started.wait(10)
    scheduler.may_finish.set()
    assert loop.join()
    assert (scheduler.left, scheduler.faults) == (0, [])
    assert not loop.join()


def test_no_slice_starts_without_sequences_nor_beside_a_prefill_for_which_a_new_request_would_wait() -> None:
    for scheduler in (FakeScheduler(0), FakeScheduler(5, prefilling=True)):
        scheduler.may_finish.set()
        loop = loop_of(scheduler)
        loop.start()
        assert not loop.join()
        assert not scheduler.started.is_set()


def test_interrupt_ends_the_running_slice_after_its_round_and_not_the_next() -> None:
    scheduler = FakeScheduler(5)
    loop = loop_of(scheduler)
    loop.start()
    assert scheduler.started.wait(10)
    loop.interrupt()
    scheduler.may_finish.set()
    assert loop.join()
    assert scheduler.left == 4
    loop.run()
    assert (scheduler.left, scheduler.faults) == (0, [])


def test_every_round_runs_in_the_engine_thread() -> None:
    scheduler = FakeScheduler(3)
    scheduler.may_finish.set()
    loop = loop_of(scheduler, 0)
    loop.run()
    loop.start()
    loop.join()
    loop.run()
    assert len(scheduler.threads) == 1
    assert threading.get_ident() not in scheduler.threads


def test_exception_in_a_round_fails_its_sequences_and_not_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(FakeScheduler):
        def run_round(self) -> None:
            raise ZeroDivisionError("of ours")

    scheduler = Faulty(3)
    loop_of(scheduler).run()
    assert [str(fault) for fault in scheduler.faults] == ["of ours"]
    assert "a round failed" in caplog.text


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_prefixes_are_stored_once_no_sequence_is_left_until_the_next_call_or_until_all_are() -> None:
    for unstored in (5, 10**6):
        scheduler = FakeScheduler(1)
        scheduler.unstored = unstored
        scheduler.may_finish.set()
        loop = loop_of(scheduler)
        loop.run()
        assert scheduler.stored == 0
        loop.start()
        wait_until(lambda scheduler=scheduler: scheduler.stored >= 5)  # type: ignore[misc]
        assert not loop.join()
        # The call that may bring a sequence begins after the part that was being copied.
        scheduler.left, stored = 1, scheduler.stored
        loop.run()
        assert (scheduler.left, scheduler.stored) == (0, stored)
        assert len(scheduler.threads) == 1
        assert stored == 5 or unstored > 5


def test_nothing_is_stored_between_the_slices_of_a_sequence() -> None:
    scheduler = FakeScheduler(3)
    scheduler.may_finish.set()
    loop = loop_of(scheduler, 0)
    loop.run()
    loop.start()
    loop.join()
    assert (scheduler.left, scheduler.stored) == (1, 0)


def test_a_failure_to_store_is_logged_and_the_next_sequence_runs(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(FakeScheduler):
        def store_prefixes(self) -> bool:
            raise OSError("no memory is left")

    scheduler = Faulty(0)
    scheduler.may_finish.set()
    loop = loop_of(scheduler)
    loop.start()
    loop.join()
    assert "no memory is left" in caplog.text
    scheduler.left = 1
    loop.run()
    assert scheduler.left == 0
