"""The engine loop: how long its slices are, which are started, and in which thread they run."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from specserve.serving.engine_loop import EngineLoop, engine_thread


class Rounds:
    """A scheduler with `left` rounds, each of which waits for `may`."""

    def __init__(self, left: int, *, prefilling: bool = False) -> None:
        self.left = left
        self.prefilling = prefilling
        self.may = threading.Event()
        self.begun = threading.Event()
        self.threads: set[int] = set()
        self.faults: list[Exception] = []

    @property
    def busy(self) -> bool:
        return self.left > 0

    def step(self) -> None:
        self.begun.set()
        assert self.may.wait(10)
        self.threads.add(threading.get_ident())
        self.left -= 1

    def fail_all(self, reason: Exception) -> None:
        self.faults.append(reason)
        self.left = 0


def loop_of(rounds: Any, seconds: float = math.inf) -> EngineLoop:
    return EngineLoop(rounds, engine_thread(), seconds)


def test_a_slice_has_at_least_one_round() -> None:
    rounds = Rounds(5)
    rounds.may.set()
    loop_of(rounds, 0).run()
    assert (rounds.left, rounds.faults) == (4, [])


def test_a_slice_ends_with_the_last_sequence() -> None:
    rounds = Rounds(5)
    rounds.may.set()
    loop_of(rounds).run()
    assert (rounds.left, rounds.faults) == (0, [])


def test_a_started_slice_runs_before_join() -> None:
    rounds = Rounds(5)
    loop = loop_of(rounds)
    loop.start()
    assert rounds.begun.wait(10)
    rounds.may.set()
    assert loop.join()
    assert (rounds.left, rounds.faults) == (0, [])
    assert not loop.join()


def test_no_slice_is_started_with_a_prefill_or_without_sequences() -> None:
    for rounds in (Rounds(5, prefilling=True), Rounds(0)):
        loop = loop_of(rounds)
        loop.start()
        assert not loop.join()
        assert not rounds.begun.is_set()


def test_an_interrupt_ends_a_slice_after_its_current_round_and_not_the_next_one() -> None:
    rounds = Rounds(5)
    loop = loop_of(rounds)
    loop.start()
    assert rounds.begun.wait(10)
    loop.interrupt()
    rounds.may.set()
    assert loop.join()
    assert rounds.left == 4
    loop.run()
    assert (rounds.left, rounds.faults) == (0, [])


def test_every_round_runs_in_the_engine_thread() -> None:
    rounds = Rounds(3)
    rounds.may.set()
    loop = loop_of(rounds, 0)
    loop.run()
    loop.start()
    loop.join()
    loop.run()
    assert len(rounds.threads) == 1
    assert threading.get_ident() not in rounds.threads


def test_an_exception_fails_the_sequences_and_not_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(Rounds):
        def step(self) -> None:
            raise ZeroDivisionError("of ours")

    rounds = Faulty(3)
    loop_of(rounds).run()
    assert [str(fault) for fault in rounds.faults] == ["of ours"]
    assert "a round failed" in caplog.text
