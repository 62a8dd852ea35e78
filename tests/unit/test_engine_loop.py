"""The engine loop: how long its slices are, when one is started, and in which thread rounds run."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from fake_placement import FakeMachine, placement_on
from specserve.core.engine_loop import EngineLoop, IdleWork, engine_thread


class FakeScheduler:
    """A fake scheduler with `left` rounds, each of which waits for the event `may_finish`."""

    def __init__(self, left: int, *, prefilling: bool = False) -> None:
        self.left = left
        self.awaiting_first_token = int(prefilling)
        self.may_finish = threading.Event()
        self.started = threading.Event()
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

    def fail_all(self, reason: Exception) -> None:
        self.faults.append(reason)
        self.left = 0


def loop_of(
    scheduler: Any, seconds: float = math.inf, idle_work: IdleWork = lambda _wanted: None, idle_seconds: float = 3600.0
) -> EngineLoop:
    return EngineLoop(
        scheduler,
        engine_thread(),
        placement_on(FakeMachine()),
        idle_work=idle_work,
        slice_seconds=seconds,
        idle_seconds=idle_seconds,
    )


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


class IdleTask:
    """Idle work that goes on until it is told that the server is wanted, or for ten seconds."""

    def __init__(self) -> None:
        self.started, self.ended = threading.Event(), threading.Event()

    def __call__(self, wanted: Callable[[], bool]) -> None:
        self.started.set()
        for _ in range(1000):
            if wanted():
                self.ended.set()
                return
            time.sleep(0.01)


@pytest.fixture
def idle() -> tuple[FakeScheduler, IdleTask, EngineLoop]:
    """A server whose last sequence has ended, and that is soon idle."""
    scheduler, task = FakeScheduler(1), IdleTask()
    scheduler.may_finish.set()
    loop = loop_of(scheduler, idle_work=task, idle_seconds=0.2)
    loop.run()
    loop.start()
    return scheduler, task, loop


def test_idle_work_begins_when_no_sequence_is_left_and_ends_when_one_comes(
    idle: tuple[FakeScheduler, IdleTask, EngineLoop],
) -> None:
    scheduler, task, loop = idle
    assert task.started.wait(10)
    assert not task.ended.is_set()
    scheduler.left = 1
    loop.run()
    assert task.ended.is_set()
    assert scheduler.left == 0


def test_calls_without_a_sequence_neither_delay_idle_work_nor_end_it(
    idle: tuple[FakeScheduler, IdleTask, EngineLoop],
) -> None:
    _, task, loop = idle
    deadline = time.monotonic() + 10
    while not task.started.is_set():
        assert time.monotonic() < deadline
        loop.start()
        time.sleep(0.05)
    loop.start()
    assert not task.ended.wait(0.1)


def test_a_sequence_that_torchserve_has_abandoned_keeps_no_server_from_being_idle() -> None:
    scheduler, task = FakeScheduler(2), IdleTask()
    scheduler.may_finish.set()
    loop = loop_of(scheduler, 0, idle_work=task, idle_seconds=0.2)
    loop.join()
    loop.run()
    # No further call comes.
    loop.start()
    assert task.started.wait(10)
    assert scheduler.left == 0 or not task.ended.is_set()
    scheduler.left = 1
    loop.join()
    assert task.ended.wait(10)


def test_a_call_that_may_cancel_sequences_begins_after_idle_work_has_ended() -> None:
    def work(interrupted: Callable[[], bool]) -> None:
        started.set()
        while not interrupted():
            time.sleep(0.001)
        # The block that is being copied, or the pass that is being timed.
        time.sleep(0.2)
        ended.set()

    started, ended = threading.Event(), threading.Event()
    scheduler = FakeScheduler(2)
    scheduler.may_finish.set()
    loop = loop_of(scheduler, 0, idle_work=work, idle_seconds=0.1)
    loop.run()
    # The last sequence is cancelled, which leaves an idle server, too.
    scheduler.left = 0
    loop.start()
    assert started.wait(10)
    scheduler.left = 1
    loop.join()
    assert ended.is_set()


def test_a_failure_of_idle_work_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    failed = threading.Event()

    def fail(_interrupted: Callable[[], bool]) -> None:
        failed.set()
        raise OSError("the disk is gone")

    scheduler = FakeScheduler(1)
    scheduler.may_finish.set()
    loop = loop_of(scheduler, idle_work=fail, idle_seconds=0.0)
    loop.run()
    loop.start()
    assert failed.wait(10)
    deadline = time.monotonic() + 10
    while "the disk is gone" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_idle_work_does_not_begin_between_slices() -> None:
    scheduler, task = FakeScheduler(3), IdleTask()
    scheduler.may_finish.set()
    loop = loop_of(scheduler, 0, idle_work=task, idle_seconds=0.2)
    loop.run()
    loop.start()
    loop.join()
    assert not task.started.wait(0.5)
