"""How much memory this process may still take."""

from __future__ import annotations

from collections.abc import Iterator

import psutil

from specserve.cgroups import directories

# By version of cgroups, the files that have the limit and the use, and how names of statistics begin.
_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


def free_memory() -> int:
    """Return the bytes that are available on the machine, and within the limits of the process's cgroups."""
    return max(0, min([psutil.virtual_memory().available, *_left()]))


def _left() -> Iterator[int]:
    """Yield what each cgroup with a limit leaves; pages of files count as free, since the kernel drops them first."""
    for version, directory in directories("memory"):
        limit_name, used_name, prefix = _NAMES[version]
        try:
            limit, used = ((directory / name).read_text(encoding="ascii").strip() for name in (limit_name, used_name))
            statistics = dict(
                line.split() for line in (directory / "memory.stat").read_text(encoding="ascii").splitlines()
            )
        except (OSError, ValueError):
            continue
        if limit != "max":
            files = sum(int(statistics.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            yield int(limit) - int(used) + files
