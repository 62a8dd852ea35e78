"""Finds how much memory this process can still take: what the machine has available, within the limits of cgroups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from specserve import cgroups

_MEMINFO = Path("/proc/meminfo")


def available_memory() -> int:
    """Return the bytes that the process can take without swapping; 0 if the system does not tell."""
    return max(0, min((*_of_machine(), *_of_cgroups()), default=0))


def _of_machine() -> Iterator[int]:
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def _of_cgroups() -> Iterator[int]:
    """Yield what each cgroup leaves; pages of files that were not used lately are given back when they are needed."""
    unified = ("memory.max", "memory.current", "memory.stat")
    legacy = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    for limit, usage, statistics in cgroups.contents("memory", unified, legacy, ("memory",)):
        if limit.strip().isdigit():
            counts = dict(line.split(maxsplit=1) for line in statistics.splitlines())
            files = counts.get("total_inactive_file", counts.get("inactive_file", "0"))
            yield int(limit) - int(usage) + int(files)
