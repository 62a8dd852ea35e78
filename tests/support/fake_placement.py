"""A placement of compute threads that exist only in its records."""

from typing import Any

from specserve.engine.placement import Placement, Usage
from specserve.machine import Usable


class FakePool:
    """Records the cores that passes run on, and those of assistants."""

    def __init__(self) -> None:
        self.cores: list[tuple[int, ...]] = []
        self.assistants: tuple[int, ...] = ()

    def run_on(self, cores: tuple[int, ...], assistants: tuple[int, ...] = ()) -> None:
        self.cores.append(cores)
        self.assistants = assistants


class FakeMachine:
    """Counters of a machine with neighbours, a second at a time."""

    def __init__(self, cores: int = 2) -> None:
        self.now = 0.0
        # The share of each core that others take, if they are given all they want.
        self.taken = dict.fromkeys(range(cores), 0.0)
        self.allowed = set(range(cores))
        self._threads = dict.fromkeys(range(cores), (0, 0))
        self._ticks = dict.fromkeys(range(cores), (0, 0))

    def read(self) -> Usage:
        return Usage(dict(self._threads), dict(self._ticks), self.allowed)

    def run(self, placement: Placement, seconds: float = 1.0, *, times: int = 1) -> None:
        """Let passes run for so many seconds, and choose cores, so many times; a busy core is shared fairly."""
        for _ in range(times):
            for core, others in self.taken.items():
                ours = core in placement.cores
                got = max(0.5, 1 - others) if ours else 0.0
                ran, waited = self._threads[core]
                self._threads[core] = ran + int(1e9 * seconds * got), waited + int(1e9 * seconds * (ours - got))
                busy, total = self._ticks[core]
                share = 1.0 if ours else others
                self._ticks[core] = busy + int(100 * seconds * share), total + int(100 * seconds)
            self.now += seconds
            placement.choose_cores()

    def clock(self) -> float:
        return self.now


def placement_on(machine: FakeMachine, threads: int | None = None, workers: Any = None) -> Placement:
    """A placement on all cores of a machine."""
    cores = tuple(machine.taken)
    pool: Any = FakePool()
    placement = Placement(Usable(cores, threads or len(cores)), pool, workers, machine.read, machine.clock)
    placement.choose_cores()
    return placement
