"""The cores that this process may compute on: affinity, hardware threads, quotas of cgroups, the operator's choice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specserve import cgroups, cores
from specserve.config import HandlerConfig, parse_handler
from specserve.cores import Usable, parse_cores, quota, usable_cores
from specserve.errors import ConfigError


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Four physical cores with two hardware threads each, 0 and 4, 1 and 5, ..., without a quota."""
    for core in range(8):
        topology = tmp_path / f"cpu/cpu{core}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(8)))
    monkeypatch.setattr(cores, "_CPUS", tmp_path / "cpu")
    monkeypatch.setattr(cores, "quota", lambda: None)
    return tmp_path


def test_one_thread_runs_on_each_physical_core(machine: Path) -> None:
    assert machine.exists()
    assert usable_cores() == Usable((0, 1, 2, 3), 4)


def test_more_threads_than_physical_cores_use_further_hardware_threads_last(machine: Path) -> None:
    assert machine.exists()
    assert usable_cores(threads=6) == Usable((0, 1, 2, 3, 4, 5), 6)


def test_fewer_threads_may_run_on_any_physical_core(machine: Path) -> None:
    assert machine.exists()
    assert usable_cores(threads=2) == Usable((0, 1, 2, 3), 2)


def test_threads_are_at_most_as_many_as_cores(machine: Path) -> None:
    assert machine.exists()
    assert usable_cores(threads=64).threads == 8


def test_affinity_is_kept_to(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.exists()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {2, 5, 6})
    assert usable_cores() == Usable((2, 5), 2)


@pytest.mark.parametrize(("granted", "threads"), [(0.5, 1), (1.5, 2), (3.0, 3), (16.0, 4)])
def test_threads_are_at_most_the_quota_rounded_up(
    machine: Path, monkeypatch: pytest.MonkeyPatch, granted: float, threads: int
) -> None:
    assert machine.exists()
    monkeypatch.setattr(cores, "quota", lambda: granted)
    assert usable_cores() == Usable((0, 1, 2, 3), threads)


def test_operators_choice_counts_and_has_one_thread_a_core(machine: Path) -> None:
    assert machine.exists()
    assert usable_cores([1, 5]) == Usable((1, 5), 2)
    assert usable_cores([1, 2, 3], 2) == Usable((1, 2, 3), 2)


def test_core_that_the_process_may_not_use_is_refused(machine: Path) -> None:
    assert machine.exists()
    with pytest.raises(ConfigError, match="may not use core 9; it may use 0, 1, 2, 3, 4, 5, 6, 7"):
        usable_cores([0, 9])


@pytest.mark.parametrize(
    ("text", "expected"), [("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), ("4,2", (2, 4)), (" 1 , 2-3 ", (1, 2, 3))]
)
def test_list_of_cores_is_read_as_linux_writes_it(text: str, expected: tuple[int, ...]) -> None:
    assert parse_cores(text) == expected


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1"])
def test_other_lists_of_cores_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_cores(text)


def handler(written: object) -> HandlerConfig:
    return parse_handler({"model_id": "m", "target": {"path": "t"}, "cores": written}, "my.yaml")


@pytest.mark.parametrize("written", ["0-1", [0, 1], (0, 1)])
def test_cores_are_configured_as_text_or_as_a_list(written: object) -> None:
    assert handler(written).cores == (0, 1)


def test_one_core_may_be_configured_as_a_number() -> None:
    assert handler(1).cores == (1,)


@pytest.mark.parametrize("written", ["two", [], [-1], 1.5, True])
def test_configuration_of_cores_that_makes_no_sense_is_a_sentence(written: object) -> None:
    with pytest.raises(ConfigError, match=r"my\.yaml: `handler\.cores"):
        handler(written)


def cgroup(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("place", ["own", "above", "container"])
def test_quota_is_that_of_the_process_s_own_cgroup_or_of_one_above(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: int, place: str
) -> None:
    root = tmp_path if version == 2 else tmp_path / "cpu"
    path = "system.slice/torchserve.service"
    # In a container the path is the host's, and the container's group is the root.
    directory = {"own": root / path, "above": root / "system.slice", "container": root}[place]
    if version == 2:
        cgroup(directory, cpu__max="150000 100000\n")
    else:
        cgroup(directory, cpu__cfs_quota_us="150000\n", cpu__cfs_period_us="100000\n")
    line = f"0::/{path}" if version == 2 else f"4:cpu,cpuacct:/{path}"
    read = Path.read_text
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path)
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda self, **options: f"{line}\n" if self == Path("/proc/self/cgroup") else read(self, **options),
    )
    assert quota() == 1.5


def test_without_a_limit_there_is_no_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cgroup(tmp_path, cpu__max="max 100000\n")
    cgroup(tmp_path / "cpu", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path)
    assert quota() is None
