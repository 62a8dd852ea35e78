"""Whether a measurement had the machine to itself."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, sleep
from typing import TypeVar

import psutil

# The share of a core that others may use: two threads that wait for each other lose far more time than that.
ALLOWED = 0.05
TRIES = 3
WAIT_SECONDS, GLANCE_SECONDS = 60.0, 0.5
Measured = TypeVar("Measured")


def undisturbed(measure: Callable[[], Measured]) -> tuple[Measured, float]:
    """Measure when others leave the machine alone, again if they did not; the quietest try, and their share of a core.

    It waits a minute for quiet at most, since what is never quiet must be measured too.
    """
    tries: list[tuple[Measured, float]] = []
    while not tries or (len(tries) < TRIES and tries[-1][1] > ALLOWED):
        until = perf_counter() + WAIT_SECONDS
        while perf_counter() < until and watched(lambda: sleep(GLANCE_SECONDS))[1] > ALLOWED:
            pass
        tries.append(watched(measure))
    return min(tries, key=lambda one: one[1])


def watched(do: Callable[[], Measured]) -> tuple[Measured, float]:
    """Measure once; what came of it, and the share of a core that others used meanwhile."""
    others, begun = _others(), perf_counter()
    done = do()
    return done, (_others() - others) / (perf_counter() - begun)


def _others() -> float:
    """CPU seconds since boot that neither this process nor its children used; what the host took away counts."""
    system, own = psutil.cpu_times(), psutil.Process()
    busy = system.user + system.nice + system.system + system.irq + system.softirq + system.steal
    for process in (own, *own.children()):
        times = process.cpu_times()
        busy -= times.user + times.system
    # Of children that have ended.
    return busy - own.cpu_times().children_user - own.cpu_times().children_system
