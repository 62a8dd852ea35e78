"""What the machine is, and what this process may use of it: cores and memory, within affinity and control groups."""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import psutil

from specserve.errors import ConfigError

_CGROUPS = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


class Usable(NamedTuple):
    # A hardware thread of each physical core, ascending, then the others where more threads are asked for.
    cores: tuple[int, ...]
    threads: int  # at most so many, and no more than cores


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
        threads: None for a thread on each physical core, and no more than a cgroup's quota, rounded up.

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


def processor() -> str:
    """Return the processor's name and features, by which measurements are kept."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = "model name", "flags", "CPU implementer", "CPU part", "Features"  # the last three of ARM's processors
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))


def quota() -> float | None:
    """Return the time that cgroups grant this process, in cores; None if they grant all."""
    files = chain(_cgroup_files("", "cpu.max"), _cgroup_files("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us"))
    limits = map(str.split, files)
    return min((int(time) / int(period) for time, period in limits if time not in {"max", "-1"}), default=None)


def free_memory() -> int:
    """Return the bytes that are available on the machine, and within the limits of the process's cgroups.

    Pages of files count as free, since the kernel drops them first.
    """
    free = [psutil.virtual_memory().available]
    second = _cgroup_files("", "memory.max", "memory.current", "memory.stat")
    first = _cgroup_files("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    for text in chain(second, first):
        limit, used, *words = text.split()
        statistics = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        # Version 1 counts the groups below under names of their own.
        pages = (statistics.get(f"total_{kind}", statistics.get(kind, 0)) for kind in ("active_file", "inactive_file"))
        if limit != "max":
            free.append(int(limit) - int(used) + sum(pages))
    return max(0, min(free))


def _cgroup_files(controller: str, *names: str) -> Iterator[str]:
    """Yield the joined text of these files for the process's own control group (cgroup) and those above.

    `controller` is empty in version 2, which has one hierarchy; in version 1 each has its own.
    """
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        entries = (line.split(":", 2) for line in lines)
        group = Path(next(path.lstrip("/") for _, owners, path in entries if controller in owners.split(",")))
        # In a container the path is the host's, and the container's own group is mounted as the root.
        for directory in (group, *group.parents):
            with suppress(OSError, ValueError):
                files = (_CGROUPS / controller / directory / name for name in names)
                yield " ".join(file.read_text(encoding="ascii") for file in files)


def thread_times() -> dict[int, tuple[int, int]]:
    """Return the nanoseconds that each of this process's threads has run, and that it has waited to run."""
    times = {}
    for task in Path("/proc/self/task").iterdir():
        # A thread may end meanwhile, and some kernels keep no such statistics.
        with suppress(OSError, ValueError):
            ran, waited, _ = map(int, (task / "schedstat").read_text(encoding="ascii").split())
            times[int(task.name)] = ran, waited
    return times
