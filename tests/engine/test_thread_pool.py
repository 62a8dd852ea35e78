"""Compute threads of real llama.cpp contexts: bound to the cores that they are given, with the same results on any."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from pairs import KERNELS, open_engine
from specserve.engine import kernels
from specserve.engine.base import FloatArray, Row
from specserve.engine.placement import read_usage
from specserve.engine.thread_pool import ThreadPool

CORES = tuple(sorted(os.sched_getaffinity(0)))[:2]
Result = TypeVar("Result")


class Engine:
    """An engine with a pool, in a thread of its own as in a worker."""

    def __init__(self, path: Path) -> None:
        self._thread = ThreadPoolExecutor(1)
        self.run(lambda: self._open(path))

    def _open(self, path: Path) -> None:
        kernels.use(KERNELS)
        self.pool = ThreadPool()
        self.pool.run_on(CORES)
        self._placed: tuple[tuple[int, ...], tuple[int, ...]] = CORES, ()
        self.engine = open_engine(path, n_slots=1, threads=len(CORES), pool=self.pool)

    def run(self, work: Callable[[], Result]) -> Result:
        return self._thread.submit(work).result()

    def logits(self, cores: tuple[int, ...], assistants: tuple[int, ...] = ()) -> FloatArray:
        """Of some tokens, computed on these cores."""

        def work() -> FloatArray:
            if (cores, assistants) != self._placed:
                self.pool.run_on(cores, assistants)
                self._placed = cores, assistants
            found = self.engine.forward([Row(7 + i, 0, i, wants_logits=True) for i in range(5)]).copy()
            self.engine.truncate(0, 0)
            return found

        return self.run(work)


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    engine = Engine(tiny)
    yield engine
    engine.run(engine.engine.close)


def test_the_engine_thread_is_bound_at_its_first_pass_and_not_before() -> None:
    """What it starts until then, such as threads of the grammar's compiler, may run on all cores."""

    def bound() -> list[set[int]]:
        pool = ThreadPool()
        pool.run_on(CORES[:1])
        found = [os.sched_getaffinity(0)]
        with pool.computing():
            found.append(os.sched_getaffinity(0))
        return found

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(bound).result() == [os.sched_getaffinity(0), set(CORES[:1])]


def test_a_core_that_does_not_exist_costs_no_pass(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    expected = engine.logits(CORES[:1])
    assert np.array_equal(engine.logits((511,)), expected)
    assert "no thread can run on core 511 any more" in caplog.text
    # Beyond the mask that llama.cpp has for them.
    assert np.array_equal(engine.logits((600, 601)), expected)
    assert np.array_equal(engine.logits(CORES[:1]), expected)


def test_each_thread_computes_on_a_core_of_its_own_with_the_same_bits(engine: Engine) -> None:
    expected = engine.logits(CORES)
    for cores in (CORES[:1], CORES[-1:], CORES):
        engine.logits(cores)
        before = read_usage().threads
        for _ in range(20):
            assert np.array_equal(engine.logits(cores), expected)
        after = read_usage().threads
        # A thread that computed on another core may sleep there.
        assert {core for core in after if sum(after[core]) > sum(before[core])} == set(cores)
        assert engine.run(lambda: os.sched_getaffinity(0)) == {cores[0]}


@pytest.mark.skipif(len(CORES) < 2, reason="an assistant needs a second core")
@pytest.mark.skipif(KERNELS == "off", reason="assistants help with specserve's kernels: unset SPECSERVE_TEST_KERNELS")
def test_assisted_passes_have_the_same_bits_however_the_assistant_is_interrupted(engine: Engine) -> None:
    """A neighbour takes the assistant's core, so that pieces are taken away from it in the middle."""
    expected = engine.logits(CORES)
    loop = f"import os; os.sched_setaffinity(0, [{CORES[1]}])\nwhile True: pass"
    before = read_usage().threads.get(CORES[1], (0, 0))
    with subprocess.Popen([sys.executable, "-c", loop]) as neighbour:
        found = [engine.logits(CORES[:1], CORES[1:]) for _ in range(300)]
        after = read_usage().threads[CORES[1]]
        neighbour.kill()
    assert all(np.array_equal(logits, expected) for logits in found)
    assert after[0] > before[0], "the assistant has never run"
    assert np.array_equal(engine.logits(CORES), expected)


def test_other_threads_of_the_process_keep_all_cores(engine: Engine) -> None:
    engine.logits(CORES[:1])
    with ThreadPoolExecutor(1) as other:
        assert other.submit(os.sched_getaffinity, 0).result() == os.sched_getaffinity(0)
    assert len(os.sched_getaffinity(0)) >= len(CORES)


def test_main_thread_gets_its_cores_back_after_each_pass(tiny: Path) -> None:
    """A benchmark starts servers after it has run passes; they would run on one core."""
    assert threading.current_thread() is threading.main_thread()
    all_cores = os.sched_getaffinity(0)
    pool = ThreadPool()
    for cores in (CORES, CORES[:1]):
        pool.run_on(cores)
        engine = open_engine(tiny, n_slots=1, pool=pool)
        engine.forward([Row(7, 0, 0, wants_logits=True)])
        engine.close()
        assert os.sched_getaffinity(0) == all_cores
