"""Finds the cores that this process may compute on: by its affinity, a container's quota and the operator's choice."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from specserve.cgroups import directories
from specserve.errors import ConfigError

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
    if chosen is not None and (missing := set(chosen) - set(allowed)):
        raise ConfigError(
            f"`cores`: this process may not use {'core' if len(missing) == 1 else 'cores'} "
            f"{_listed(missing)}; it may use {_listed(allowed)}."
        )
    cores = sorted(set(chosen)) if chosen is not None else allowed
    ordered, physical = _physical_first(cores)
    default = physical if chosen is None else len(cores)
    if (granted := quota()) is not None:
        default = min(default, math.ceil(granted))
    count = min(threads or default, len(cores))
    return Usable(tuple(ordered[: max(count, physical)]), count)


def _listed(cores: Sequence[int] | set[int]) -> str:
    return ", ".join(map(str, sorted(cores)))


def _physical_first(cores: list[int]) -> tuple[list[int], int]:
    """Return the cores, the first hardware thread of each physical core before all others; and how many come first."""
    first: dict[str, int] = {}
    for core in cores:
        first.setdefault(_siblings(core), core)
    firsts = sorted(first.values())
    return [*firsts, *(core for core in cores if core not in firsts)], len(firsts)


def _siblings(core: int) -> str:
    """Return the hardware threads that share a core's physical core; itself where the system does not tell."""
    try:
        return (_CPUS / f"cpu{core}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return str(core)


def quota() -> float | None:
    """Return the time that cgroups grant this process, in cores; None if they grant all."""
    return min(_quotas(), default=None)


def _quotas() -> Iterator[float]:
    """Yield the quota of each cgroup that the process is in."""
    for version, directory in directories("cpu"):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        try:
            time, period = " ".join((directory / name).read_text(encoding="ascii") for name in names).split()
        except (OSError, ValueError):
            continue
        if time not in {"max", "-1"}:
            yield int(time) / int(period)
