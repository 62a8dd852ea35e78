"""What this process may use of the machine: its cores and its memory, within its affinity and its control groups."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from specserve.errors import ConfigError

_CGROUPS = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


class Usable(NamedTuple):
    """The cores that compute threads may run on, and the maximum number of threads.

    `cores` has a hardware thread of each physical core, ascending, then the others where more threads are asked for;
    `threads` is at most their number.
    """

    cores: tuple[int, ...]
    threads: int


def parse_cores(text: str) -> tuple[int, ...]:
    """Return the cores of a list as Linux writes it, such as `0-3,8`.

    Raises:
        ValueError: it is not such a list.
    """
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        cores |= set(range(int(first), int(last) + 1)) if dash else {int(first)}
    if not cores or min(cores) < 0:
        raise ValueError("no cores")
    return tuple(sorted(cores))


def usable_cores(chosen: Sequence[int] | None = None, threads: int | None = None) -> Usable:
    """Return the cores that compute threads may run on, and their number.

    Args:
        chosen: the operator's cores; None for all that the process may use.
        threads: as configured; None for a thread on each physical core, and no more than a cgroup's quota, rounded up.

    Raises:
        ConfigError: the process may not use a chosen core.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if missing := sorted({*(chosen or ())} - {*allowed}):
        raise ConfigError(
            f"`cores`: this process may not use core{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}; "
            f"it may use {', '.join(map(str, allowed))}."
        )
    cores = sorted(set(chosen)) if chosen else allowed
    # The first hardware thread of each physical core.
    first: dict[str, int] = {}
    for core in cores:
        first.setdefault(_siblings(core), core)
    firsts = sorted(first.values())
    default = len(cores) if chosen else len(firsts)
    if (granted := quota()) is not None:
        default = min(default, math.ceil(granted))
    count = min(threads or default, len(cores))
    ordered = (*firsts, *(core for core in cores if core not in firsts))
    return Usable(ordered[: max(count, len(firsts))], count)


def _siblings(core: int) -> str:
    """Return the hardware threads that share a core's physical core; itself where the system does not tell."""
    try:
        return (_CPUS / f"cpu{core}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return str(core)


def quota() -> float | None:
    """Return the time that cgroups grant this process, in cores; None if they grant all."""
    limits = map(str.split, _cgroup_files("cpu", ["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]))
    return min((int(time) / int(period) for time, period in limits if time not in {"max", "-1"}), default=None)


def free_memory() -> int:
    """Return the bytes that are available on the machine, and within the limits of the process's cgroups.

    Pages of files count as free, since the kernel drops them first.
    """
    free = [psutil.virtual_memory().available]
    legacy = ["memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"]
    for text in _cgroup_files("memory", ["memory.max", "memory.current", "memory.stat"], legacy):
        limit, used, *words = text.split()
        statistics = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        # Version 1 has names of their own for what groups below take.
        files = (statistics.get(f"total_{kind}", statistics.get(kind, 0)) for kind in ("active_file", "inactive_file"))
        if limit != "max":
            free.append(int(limit) - int(used) + sum(files))
    return max(0, min(free))


def _cgroup_files(controller: str, names: list[str], legacy: list[str]) -> Iterator[str]:
    """Yield the joined text of some files for each control group (cgroup) of the process that has them.

    These are its own group and those above.

    Args:
        controller: the kernel's name, such as `cpu` or `memory`.
        names: of the files in version 2.
        legacy: in version 1.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files, roots = names, {_CGROUPS, _CGROUPS / "unified"}
        elif controller in controllers.split(","):
            files, roots = legacy, {_CGROUPS / controller, _CGROUPS / controllers}
        else:
            continue
        relative = Path(path.lstrip("/"))
        # In a container the path is the host's, and the container's own group is mounted as the root.
        for directory in {root / part for root in roots for part in (relative, *relative.parents)}:
            try:
                yield " ".join((directory / file).read_text(encoding="ascii") for file in files)
            except (OSError, ValueError):
                continue
