"""Reads the limits of the cgroups that this process is in, by versions 1 and 2 of cgroups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def contents(
    controller: str, unified: tuple[str, ...], legacy: tuple[str, ...], mounts: tuple[str, ...]
) -> Iterator[list[str]]:
    """Yield what these files contain, for each cgroup that the process is in and each one above that can be seen.

    Args:
        controller: its name in version 1.
        unified: names of the files in version 2.
        legacy: names of the files in version 1.
        mounts: the directories where version 1 may have mounted the controller.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names: tuple[str, ...]
        roots: tuple[Path, ...]
        if not controllers:
            names, roots = unified, (_CGROUPS, _CGROUPS / "unified")
        elif controller in controllers.split(","):
            names, roots = legacy, tuple(_CGROUPS / mount for mount in mounts)
        else:
            continue
        relative = Path(path.lstrip("/"))
        for root in roots:
            # In a container the path is the host's, and the container's own group is mounted as the root.
            for directory in {root / relative, *(root / parent for parent in relative.parents), root}:
                try:
                    yield [(directory / name).read_text(encoding="ascii") for name in names]
                except (OSError, ValueError):
                    continue
