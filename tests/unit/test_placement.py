"""The placement of compute threads: fewer where neighbours keep cores busy, all again when they have gone."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from time import sleep

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_placement import FakeMachine, FakePool, placement_on
from specserve.config import HandlerConfig
from specserve.core import loading
from specserve.engine import placement as placement_module
from specserve.engine.placement import Usage, Workers, fastest, read_usage, speed
from specserve.machine import Usable

shares = st.lists(st.floats(0.05, 1.0), min_size=1, max_size=5)


@given(available=shares, threads=st.integers(1, 5))
def test_fastest_cores_are_those_of_brute_force(available: list[float], threads: int) -> None:
    threads = min(threads, len(available))
    cores, promised = fastest(dict(enumerate(available)), threads)
    every = [choice for n in range(1, threads + 1) for choice in combinations(range(len(available)), n)]
    assert promised == pytest.approx(max(speed([available[core] for core in choice]) for choice in every))
    assert promised == pytest.approx(speed([available[core] for core in cores]))
    assert cores == tuple(sorted(cores))
    # One hardware thread of each physical core comes first.
    assert fastest(dict.fromkeys([0, 2, 1, 3], 1.0), 2)[0] == (0, 2)


def test_passes_stay_on_all_cores_of_a_quiet_machine_and_of_one_that_tells_nothing() -> None:
    """Also beside short interruptions, as by TorchServe's front end: a tenth of a core beside sixteen streams."""
    for taken in ((0.0,) * 4, (0.1, 0.15), (0.05,) * 64):
        machine = FakeMachine(len(taken))
        placement = placement_on(machine)
        machine.taken = dict(enumerate(taken))
        machine.run(placement, times=20)
        assert isinstance(placement.pool, FakePool)
        assert placement.pool.cores == [tuple(range(len(taken)))]
    silent = FakeMachine(0)
    silent.taken = {0: 1.0, 1: 1.0}
    placement = placement_on(silent)
    for _ in range(5):
        silent.now += 1
        placement.choose_cores()
    assert placement.cores == (0, 1)


def test_core_that_a_neighbour_takes_is_left_within_a_second_and_taken_back_within_two() -> None:
    for cores, taken in ((2, 0), (2, 1), (4, 1), (64, 0)):
        machine = FakeMachine(cores)
        placement = placement_on(machine)
        machine.run(placement, 0.25)
        machine.taken[taken] = 1.0
        machine.run(placement, 0.25, times=4)
        others = tuple(core for core in range(cores) if core != taken)
        assert placement.cores == others
        assert isinstance(placement.pool, FakePool)
        # A thread on the core that is taken helps one that computes alone.
        assert placement.pool.assistants == ((taken,) if cores == 2 else ())
        machine.taken[taken] = 0.0
        machine.run(placement, 0.25, times=8)
        assert (placement.cores, placement.pool.assistants) == (tuple(range(cores)), ())
        machine.allowed = {*others}
        machine.run(placement, 0.25)
        assert placement.cores == others, "a cgroup has taken it away"
        machine.allowed = {*range(cores)}
        machine.run(placement, 0.25, times=2)
        assert placement.cores == tuple(range(cores))


def test_a_single_thread_moves_to_the_free_core_and_stays_where_all_are_taken() -> None:
    machine = FakeMachine(2)
    placement = placement_on(machine, threads=1)
    machine.run(placement)
    assert placement.cores == (0,)
    machine.taken[0] = 1.0
    machine.run(placement, times=4)
    assert placement.cores == (1,)
    assert isinstance(placement.pool, FakePool)
    assert placement.pool.assistants == (), "there are never more threads than configured"
    for threads in (1, 2):
        placement = placement_on(machine, threads)
        machine.taken = {0: 1.0, 1: 1.0}
        chosen = set()
        for _ in range(10):
            machine.run(placement)
            chosen.add(placement.cores)
        assert len(placement.cores) == 1
        assert len(chosen) <= 2


# A process of its own that is a busy worker until it is killed.
BUSY_WORKER = """
import sys, time
from pathlib import Path
from specserve.engine.placement import Workers
workers = Workers((0, 1, 2, 3), Path(sys.argv[1]))
while True:
    workers.part((0, 1, 2, 3))
    print("computes", flush=True)
    time.sleep(0.01)
"""


def test_busy_workers_of_one_user_never_share_a_core(tmp_path: Path) -> None:
    cores = (0, 1, 2, 3)
    workers = [Workers(cores, tmp_path) for _ in range(3)]
    assert workers[0].part(cores) == cores
    command = [sys.executable, "-c", BUSY_WORKER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "computes\n"
        for worker in workers:
            worker.part(cores)
        parts = [worker.part(cores) for worker in workers]
        # As a worker that crashes.
        other.kill()
    assert len(set(parts)) == 3
    assert all(len(part) == 1 for part in parts)
    # More workers than cores get one each.
    assert all(len(worker.part((2, 3))) == 1 for worker in workers)
    sleep(placement_module._BUSY_SECONDS + 0.2)
    assert workers[1].part(cores) == cores
    # The next one to start removes what it left.
    [directory] = tmp_path.iterdir()
    assert len(list(directory.iterdir())) == 4
    workers.append(Workers(cores, tmp_path))
    assert {*directory.iterdir()} == {worker._file for worker in workers}


def test_workers_go_on_alone_where_their_directory_was_deleted(tmp_path: Path) -> None:
    worker = Workers((0, 1), tmp_path)
    [directory] = tmp_path.iterdir()
    shutil.rmtree(directory)
    assert worker.part((0, 1)) == (0, 1)
    most = tuple(range(512))
    for cores in (most, (*most[:-1], 600), most):
        Workers(cores, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2, "one for each set of cores, however long its list"


@pytest.mark.parametrize("problem", ["open to others", "a link", "another user's"])
def test_a_shared_directory_that_others_may_have_touched_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, problem: str
) -> None:
    Workers((0, 1), tmp_path)
    [path] = tmp_path.iterdir()
    if problem == "open to others":
        path.chmod(0o777)
    elif problem == "a link":
        path.rename(tmp_path / "target")
        path.symlink_to(tmp_path / "target")
    else:
        me, another = os.geteuid(), os.geteuid() + 1
        path.rename(path.with_name(path.name.replace(f"-{me}-", f"-{another}-")))
        monkeypatch.setattr(os, "geteuid", lambda: another)
    monkeypatch.setattr(loading, "ThreadPool", FakePool)
    monkeypatch.setattr(loading, "usable_cores", lambda *_: Usable((0, 1), 2))
    monkeypatch.setattr(loading, "Workers", lambda cores: Workers(cores, tmp_path))
    config = HandlerConfig.model_validate({"model_id": "m", "target": {"path": "m.gguf"}})
    placement = loading._placement(config)
    placement.choose_cores()
    assert placement.cores == (0, 1)
    assert [record.getMessage().count("other workers cannot be seen") for record in caplog.records] == [1]


def test_usage_of_this_machine_has_its_bound_threads_and_its_cores() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    core = allowed[0]

    def measured() -> tuple[Usage, Usage]:
        os.sched_setaffinity(0, [core])
        before = read_usage()
        sum(range(5_000_000))
        return before, read_usage()

    with ThreadPoolExecutor(1) as thread:
        before, after = thread.submit(measured).result()
    assert sum(after.threads[core]) > sum(before.threads[core])
    assert set(allowed) <= set(after.cores)
    busy, total = after.cores[core]
    assert 0 < busy <= total
