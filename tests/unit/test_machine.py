"""The cores and the memory that this process may use: affinity, hardware threads, cgroups, the operator's choice."""

import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from specserve import machine
from specserve.config import HandlerConfig, parse_handler
from specserve.errors import ConfigError
from specserve.machine import Usable, free_memory, parse_cores, quota, usable_cores

GIB = 2**30
GROUP = "system.slice/torchserve.service"


@pytest.fixture
def _eight_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four physical cores with two hardware threads each, 0 and 4, 1 and 5, ...; there is no quota."""
    for core in range(8):
        topology = tmp_path / f"cpu{core}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(8)))
    monkeypatch.setattr(machine, "_CPUS", tmp_path)
    monkeypatch.setattr(machine, "quota", Mock(return_value=None))


@pytest.mark.usefixtures("_eight_cores")
def test_one_thread_runs_on_each_physical_core_and_more_on_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores() == Usable((0, 1, 2, 3), 4)
    assert usable_cores(threads=6) == Usable((0, 1, 2, 3, 4, 5), 6)
    assert usable_cores(threads=2) == Usable((0, 1, 2, 3), 2)
    assert usable_cores(threads=64).threads == 8
    for granted, threads in ((0.5, 1), (1.5, 2), (3.0, 3), (16.0, 4)):
        monkeypatch.setattr(machine, "quota", Mock(return_value=granted))
        assert usable_cores() == Usable((0, 1, 2, 3), threads)
    # The operator's choice has one thread a core.
    assert usable_cores([1, 5]) == Usable((1, 5), 2)
    assert usable_cores([1, 2, 3], 2) == Usable((1, 2, 3), 2)
    with pytest.raises(ConfigError, match="may not use core 9; it may use 0, 1, 2, 3, 4, 5, 6, 7"):
        usable_cores([0, 9])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {2, 5, 6})
    assert usable_cores() == Usable((2, 5), 2)


def test_cores_are_configured_as_linux_writes_them_as_a_list_or_a_number() -> None:
    lists = {"0": (0,), "0-3,8": (0, 1, 2, 3, 8), "4,2": (2, 4), " 1 , 2-3 ": (1, 2, 3)}
    assert {text: parse_cores(text) for text in lists} == lists
    for text in ("", "a", "1-", "-1", "3-1"):
        with pytest.raises(ValueError, match=r".*"):
            parse_cores(text)

    def handler(written: object) -> HandlerConfig:
        return parse_handler({"model_id": "m", "target": {"path": "t"}, "cores": written}, "my.yaml")

    assert [handler(written).cores for written in ("0-1", [0, 1], 1)] == [(0, 1), (0, 1), (1,)]
    for wrong in ("two", [], [-1], 1.5, True):
        with pytest.raises(ConfigError, match=r"my\.yaml: `handler\.cores"):
            handler(wrong)


# In a container the path is the host's, and the container's group is the root.
@pytest.fixture(params=[GROUP, "system.slice", ""])
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The process's own cgroup or one above, of version 2 and 1, on a machine with 8 GiB available."""
    read = Path.read_text
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB))
    own = {Path("/proc/self/cgroup"): f"4:memory:/{GROUP}\n1:cpu,cpuacct:/{GROUP}\n0::/{GROUP}\n"}
    monkeypatch.setattr(Path, "read_text", lambda self, **options: own.get(self) or read(self, **options))
    for controller in ("", "cpu", "memory"):
        (tmp_path / controller / request.param).mkdir(parents=True, exist_ok=True)
    return str(request.param)


def test_quota_is_that_of_the_process_s_own_cgroup_or_of_one_above(group: str, tmp_path: Path) -> None:
    assert quota() is None
    first, second = tmp_path / group, tmp_path / "cpu" / group
    (second / "cpu.cfs_period_us").write_text("100000\n")
    for granted, expected in (("-1", None), ("150000", 1.5)):
        (second / "cpu.cfs_quota_us").write_text(f"{granted}\n")
        assert quota() == expected
    for granted, expected in (("max", 1.5), ("50000", 0.5)):
        (first / "cpu.max").write_text(f"{granted} 100000\n")
        assert quota() == expected


def test_a_limit_of_a_cgroup_counts_without_its_pages_of_files(group: str, tmp_path: Path) -> None:
    assert free_memory() == 8 * GIB
    versions = (
        (tmp_path / group, ("memory.max", "memory.current"), "", "max"),
        (tmp_path / "memory" / group, ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_", 2**63 - 4096),
    )
    for directory, names, prefix, unlimited in versions:
        capped, exceeded = (4 * GIB, 3 * GIB, GIB // 4, GIB + GIB // 2), (GIB, 2 * GIB, 0, 0)
        for limit, used, cached, free in (capped, exceeded, (unlimited, GIB, 0, 8 * GIB)):
            for name, value in zip(names, (limit, used), strict=True):
                (directory / name).write_text(f"{value}\n")
            # In version 1 names without a prefix leave out the groups below.
            own = "active_file 9\ninactive_file 9\n"
            counted = f"{prefix}active_file {cached}\n{prefix}inactive_file {cached}\n"
            (directory / "memory.stat").write_text(f"{own}{counted}other 9\n")
            assert free_memory() == free
