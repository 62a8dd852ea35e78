"""Slices of decoding: how long they are, which are begun ahead, and whose thread they run in."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from specserve.serving.engine_loop import Slices, engine_thread


class Rounds:
    """A scheduler with so many rounds left, each of which waits until it may."""

    def __init__(self, left: int, *, reading: bool = False) -> None:
        self.left = left
        self.reading = reading
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


def slices(rounds: Any, seconds: float = math.inf) -> Slices:
    return Slices(rounds, engine_thread(), seconds)


def test_a_slice_has_at_least_one_round() -> None:
    rounds = Rounds(5)
    rounds.may.set()
    slices(rounds, 0).run()
    assert (rounds.left, rounds.faults) == (4, [])


def test_a_slice_ends_with_the_texts() -> None:
    rounds = Rounds(5)
    rounds.may.set()
    slices(rounds).run()
    assert (rounds.left, rounds.faults) == (0, [])


def test_what_is_begun_ahead_runs_while_nobody_waits_for_it() -> None:
    rounds = Rounds(5)
    mine = slices(rounds)
    mine.ahead()
    assert rounds.begun.wait(10)
    rounds.may.set()
    assert mine.finish()
    assert (rounds.left, rounds.faults) == (0, [])
    assert not mine.finish()


def test_nothing_is_begun_before_a_prompt_is_read_or_when_all_is_said() -> None:
    for rounds in (Rounds(5, reading=True), Rounds(0)):
        mine = slices(rounds)
        mine.ahead()
        assert not mine.finish()
        assert not rounds.begun.is_set()


def test_news_end_a_slice_with_its_present_round_and_leave_the_next_alone() -> None:
    rounds = Rounds(5)
    mine = slices(rounds)
    mine.ahead()
    assert rounds.begun.wait(10)
    mine.hurry()
    rounds.may.set()
    assert mine.finish()
    assert rounds.left == 4
    mine.run()
    assert (rounds.left, rounds.faults) == (0, [])


def test_every_round_runs_in_one_thread_and_not_in_the_callers() -> None:
    rounds = Rounds(3)
    rounds.may.set()
    mine = slices(rounds, 0)
    mine.run()
    mine.ahead()
    mine.finish()
    mine.run()
    assert len(rounds.threads) == 1
    assert threading.get_ident() not in rounds.threads


def test_a_fault_ends_the_texts_and_not_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(Rounds):
        def step(self) -> None:
            raise ZeroDivisionError("of ours")

    rounds = Faulty(3)
    slices(rounds).run()
    assert [str(fault) for fault in rounds.faults] == ["of ours"]
    assert "a round failed" in caplog.text
