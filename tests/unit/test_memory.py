"""The memory that the process may still take: of the machine, and within the limits of its cgroups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from specserve import cgroups
from specserve.memory import free_memory

GIB = 2**30
PATH = "system.slice/torchserve.service"
FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


@pytest.fixture(params=[1, 2])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    """A machine with 8 GiB available, and a process in a cgroup of this version."""
    line = f"0::/{PATH}" if request.param == 2 else f"4:memory:/{PATH}"
    read = Path.read_text
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB))
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda self, **options: f"{line}\n" if self == Path("/proc/self/cgroup") else read(self, **options),
    )
    return int(request.param)


def write(root: Path, version: int, place: str, *, limit: str, used: int, cached: int) -> None:
    directory = root / ("memory" if version == 1 else "") / place
    directory.mkdir(parents=True, exist_ok=True)
    limit_name, used_name, prefix = FILES[version]
    (directory / limit_name).write_text(f"{limit}\n")
    (directory / used_name).write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"{prefix}active_file {cached}\n{prefix}inactive_file {cached}\nother 9\n")


def test_without_a_limit_all_that_is_available_is_free(version: int, tmp_path: Path) -> None:
    assert free_memory() == 8 * GIB
    write(tmp_path, version, PATH, limit="9223372036854771712" if version == 1 else "max", used=GIB, cached=0)
    assert free_memory() == 8 * GIB


@pytest.mark.parametrize("place", [PATH, "system.slice", ""])
def test_a_limit_of_a_cgroup_counts_without_its_pages_of_files(version: int, tmp_path: Path, place: str) -> None:
    write(tmp_path, version, place, limit=str(4 * GIB), used=3 * GIB, cached=GIB // 4)
    assert free_memory() == GIB + GIB // 2


def test_a_cgroup_over_its_limit_leaves_nothing(version: int, tmp_path: Path) -> None:
    write(tmp_path, version, PATH, limit=str(GIB), used=2 * GIB, cached=0)
    assert free_memory() == 0
