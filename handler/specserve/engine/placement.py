"""Chooses the cores that the next passes run on: fewer threads compute where other processes keep a core busy.

The threads of a pass meet at some 650 barriers. A core that its thread has to share delays them all, so a pass over
two cores with one neighbour takes two to a hundred times as long as one over the free core alone
(benchmarks/neighbours.py).

Every thread is bound to a core of its own. Four times a second the system is asked how long each thread waited for its
core, and how busy others kept the cores that are not in use; then the cores are chosen that promise the fastest pass.
If that is one core, threads on the others assist: they help while they get their core, and nobody waits for them.
"""

import errno
import fcntl
import hashlib
import logging
import math
import os
import stat
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, time
from typing import NamedTuple

from specserve.engine.thread_pool import ThreadPool
from specserve.machine import Usable, thread_times

logger = logging.getLogger(__name__)

# Between two looks at the machine; each takes .2 ms.
_LOOK_SECONDS = 0.25
# Between two lines of the log.
_LOG_SECONDS = 600.0
# The speed of a pass grows with its threads to the power of this: two are 1.5 times as fast as one, memory being shared
# (benchmarks/neighbours.py).
_SCALING = 0.6
# A new choice has to promise this much more speed than the present one, divided by its number of threads: a third of
# what one more thread brings. The threshold exists because the shares are estimates.
_MARGIN = 0.2
# The share of a core that others may take without being counted: system services do.
_NEGLIGIBLE = 0.1
# The minimum share of a busy core that is expected: the scheduler would give half of it to us.
_MIN_BUSY_SHARE = 0.5
# The minimum time that a thread has to have wanted its core for between two looks, to tell its share.
_MIN_WANTED_NANOSECONDS = 10_000_000
# After a round began a worker counts as busy for so long.
_BUSY_SECONDS = 1.0


class Usage(NamedTuple):
    """What the system has counted since it started."""

    # By core with a thread of ours bound to it, the nanoseconds that it ran, and that it waited to run.
    threads: Mapping[int, tuple[int, int]]
    cores: Mapping[int, tuple[int, int]]  # by core, the ticks in which it was busy, with anything, and all ticks
    allowed: Collection[int]  # the cores that the process may run on by now, as its main thread, which is not bound


def read_usage() -> Usage:
    """Read the counters of Linux; what it does not tell is left out."""
    threads: dict[int, tuple[int, int]] = {}
    for thread, (ran, waited) in thread_times().items():
        with suppress(OSError):  # it has ended
            affinity = os.sched_getaffinity(thread)
            if len(affinity) == 1:
                before = threads.get(core := affinity.pop(), (0, 0))
                threads[core] = before[0] + ran, before[1] + waited
    cores: dict[int, tuple[int, int]] = {}
    with suppress(OSError):
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            name, *numbers = line.split()
            if name.startswith("cpu") and name != "cpu":
                # User, nice, system, idle, iowait, irq, softirq, steal; guest time is part of the first two.
                ticks = [int(number) for number in numbers[:8]]
                cores[int(name[3:])] = sum(ticks) - ticks[3] - ticks[4], sum(ticks)
    return Usage(threads, cores, os.sched_getaffinity(os.getpid()))


def fastest(available: Mapping[int, float], max_threads: int) -> tuple[tuple[int, ...], float]:
    """Return the cores that promise the fastest pass, and its speed, in passes of one free core.

    A pass advances only while all its threads run, so the shares that the threads get of their cores multiply. Of cores
    with equal shares available the first are taken.
    """
    ranked = sorted(available, key=lambda core: -available[core])
    speeds = [speed([available[core] for core in ranked[:count]]) for count in range(1, max_threads + 1)]
    best = max(speeds)
    return tuple(sorted(ranked[: speeds.index(best) + 1])), best


def speed(shares: Sequence[float]) -> float:
    """Return the speed of a pass whose threads get these shares of their cores, in passes of one free core."""
    return math.prod(shares, start=float(len(shares) ** _SCALING))


class Workers:
    """The workers of one user on the same cores, which divide them while several are busy.

    Each has a file in a directory that all with these cores know, and touches it while it computes. Containers with a
    /dev/shm of their own cannot see each other.

    Raises:
        OSError: the directory cannot be used.
    """

    def __init__(self, cores: tuple[int, ...], parent: Path = Path("/dev/shm")) -> None:  # noqa: S108 - if it is ours
        # A list of many cores is longer than a file's name may be.
        digest = hashlib.sha256(repr(cores).encode()).hexdigest()[:16]
        directory = parent / f"specserve-workers-{os.geteuid()}-{digest}"
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise OSError(errno.EPERM, "it is not a directory of this user's alone", str(directory))
        for left in directory.iterdir():
            # A worker that runs holds a lock; others may be clearing up, too.
            with suppress(OSError), left.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
        # Never closed, so that the lock lasts as long as the process.
        descriptor, name = tempfile.mkstemp(dir=directory)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        self._file = Path(name)
        os.utime(self._file, (0, 0))  # nothing has been computed

    def part(self, cores: tuple[int, ...]) -> tuple[int, ...]:
        """Return the cores of this worker, which computes now: all, or its part of them while others compute, too."""
        try:
            self._file.touch()
            files = sorted(os.scandir(self._file.parent), key=lambda entry: entry.name)
            busy = [entry.name for entry in files if abs(time() - entry.stat().st_mtime) < _BUSY_SECONDS]
            rank = busy.index(self._file.name)
        except (OSError, ValueError):
            # Somebody has cleared /dev/shm.
            return cores
        first, last = (len(cores) * share // len(busy) for share in (rank, rank + 1))
        return cores[first:last] or (cores[rank % len(cores)],)


class Placement:
    """Chooses the cores of passes, and moves the compute threads; for the thread that runs passes alone."""

    def __init__(
        self,
        usable: Usable,
        pool: ThreadPool,
        workers: Workers | None = None,  # others on the same cores; None where the operator has chosen the cores
        read: Callable[[], Usage] = read_usage,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.usable = usable
        self.pool = pool
        self.cores = tuple(sorted(usable.cores[: usable.threads]))
        self._workers = workers
        self._read = read
        self._clock = clock
        # Of the usable ones, those that this worker shares with no other, and those that a cgroup has not taken away.
        self._mine = self._left = usable.cores
        self._available = dict.fromkeys(usable.cores, 1.0)
        self._last: Usage | None = None
        self._next_look = -math.inf
        self._next_log = -math.inf
        pool.run_on(self.cores)

    def choose_cores(self) -> None:
        """Choose the cores of the next passes; to be called before each round."""
        now = self._clock()
        looks = now >= self._next_look
        if looks:
            self._look(self._read())
            self._next_look = now + _LOOK_SECONDS
        mine = self._workers.part(self._left) if self._workers else self._left
        if not looks and mine == self._mine:
            return
        threads = min(self.usable.threads, len(mine))
        best, promised = fastest({core: self._available[core] for core in mine}, threads)
        present = speed([self._available[core] for core in self.cores])
        if mine != self._mine or promised > (1 + _MARGIN / len(best)) * present:
            self._mine = mine
            if best == self.cores:
                return
            if now >= self._next_log:
                names = f"core{'s' * (len(best) > 1)} {', '.join(map(str, best))}"
                logger.info("specserve: others are busy: passes run on %s, and change as these come and go", names)
                self._next_log = now + _LOG_SECONDS
            # What is known of threads on other cores says nothing of these.
            self.cores, self._last = best, None
            others = tuple(core for core in mine if core not in best) if len(best) == 1 else ()
            self.pool.run_on(best, others[: threads - 1])

    def _look(self, now: Usage) -> None:
        """Update which cores there are, and the share of each that a thread would get, since the last look."""
        self._left = tuple(core for core in self.usable.cores if core in now.allowed) or self.usable.cores
        last, self._last = self._last, now
        if last is None:
            return
        for core in self.usable.cores:
            ran, waited = _since(last.threads, now.threads, core)
            busy, total = _since(last.cores, now.cores, core)
            if ran + waited >= _MIN_WANTED_NANOSECONDS:
                self._available[core] = _share(waited / (ran + waited))
            elif core not in self.cores and total:
                self._available[core] = max(_MIN_BUSY_SHARE, _share(busy / total))


def _share(taken: float) -> float:
    return 1.0 if taken < _NEGLIGIBLE else 1 - taken


def _since(last: Mapping[int, tuple[int, int]], now: Mapping[int, tuple[int, int]], core: int) -> tuple[int, int]:
    """Return how far both counters of a core have advanced; not at all where they are not known."""
    after = now.get(core, (0, 0))
    before = last.get(core, after)
    return after[0] - before[0], after[1] - before[1]
