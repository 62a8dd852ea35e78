"""The memory that this process can still take: the machine's, and that of its cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from specserve import cgroups, memory
from specserve.memory import available_memory

GIB = 2**30
MEMINFO = f"MemTotal: {32 * GIB // 1024} kB\nMemFree: 100 kB\nMemAvailable: {20 * GIB // 1024} kB\n"
OWN = "system.slice/torchserve.service"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """20 GiB are available, and the process is in a cgroup of both versions; returns the root of these."""
    (tmp_path / "meminfo").write_text(MEMINFO)
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(cgroups, "_CGROUPS", tmp_path / "cgroup")
    read = Path.read_text
    lines = f"0::/{OWN}\n5:memory:/{OWN}\n"
    monkeypatch.setattr(
        Path, "read_text", lambda self, **kept: lines if self == Path("/proc/self/cgroup") else read(self, **kept)
    )
    return tmp_path / "cgroup"


def group(directory: Path, *, version: int, limit: str, usage: int, files: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    limit_name, usage_name = ("memory.max", "memory.current")
    if version == 1:
        limit_name, usage_name = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (directory / limit_name).write_text(f"{limit}\n")
    (directory / usage_name).write_text(f"{usage}\n")
    total = f"total_inactive_file {files}\n" if version == 1 else ""
    (directory / "memory.stat").write_text(f"anon 77\ninactive_file {files if version == 2 else 0}\n{total}")


def test_without_a_limit_it_is_what_the_machine_has_available(machine: Path) -> None:
    group(machine / OWN, version=2, limit="max", usage=3 * GIB, files=0)
    assert available_memory() == 20 * GIB


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("place", [OWN, "system.slice", "."])
def test_a_cgroup_leaves_its_limit_less_what_is_used_and_cannot_be_given_back(
    machine: Path, place: str, version: int
) -> None:
    root = machine / "memory" if version == 1 else machine
    group(root / place, version=version, limit=str(8 * GIB), usage=5 * GIB, files=2 * GIB)
    assert available_memory() == 5 * GIB


def test_a_limit_above_what_the_machine_has_changes_nothing(machine: Path) -> None:
    group(machine / "memory" / OWN, version=1, limit="9223372036854771712", usage=GIB, files=0)
    assert available_memory() == 20 * GIB


def test_a_cgroup_that_is_full_leaves_nothing(machine: Path) -> None:
    group(machine / OWN, version=2, limit=str(GIB), usage=GIB + 4096, files=0)
    assert available_memory() == 0


def test_a_system_that_does_not_tell_has_none(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MEMINFO", machine / "missing")
    assert available_memory() == 0
