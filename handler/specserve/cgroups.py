"""The control groups (cgroups) that limit this process, by versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def directories(controller: str) -> Iterator[tuple[int, Path]]:
    """Yield the directories of the process's own group and of those above, which may not exist, with their version.

    Args:
        controller: the kernel's name, such as `cpu` or `memory`.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            version, roots = 2, (_ROOT, _ROOT / "unified")
        elif controller in controllers.split(","):
            version, roots = 1, (_ROOT / controller, _ROOT / controllers)
        else:
            continue
        relative = Path(path.lstrip("/"))
        # In a container the path is the host's, and the container's own group is mounted as the root.
        for directory in {root / part for root in roots for part in (relative, *relative.parents)}:
            yield version, directory
