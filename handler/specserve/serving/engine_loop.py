"""Runs the scheduler in the engine thread: in time slices, one of them while TorchServe sends the last one's output."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Event, Timer

from specserve.engine.placement import Placement
from specserve.serving.scheduler import Scheduler

logger = logging.getLogger(__name__)

# Seconds without a sequence after which the server counts as idle.
_IDLE_SECONDS = 10.0

# Does something as long as its argument, which it asks often, returns false.
IdleWork = Callable[[Callable[[], bool]], None]


def engine_thread() -> ThreadPoolExecutor:
    """The only thread that loads engines and runs their forward passes.

    OpenMP keeps a pool of compute threads for each thread that calls it. With a second such thread the pools have more
    threads than there are cores, so they sleep between passes: a step of 29 ms takes 36 ms.
    """
    return ThreadPoolExecutor(1, "engine")


class EngineLoop:
    """Runs rounds of a scheduler, one time slice at a time.

    A slice is the rounds that begin within a time, at least one. Each call of TorchServe's thread waits with `join` for
    the slice that the call before started, cut to its current round by `interrupt` where requests are new or gone; if
    there was none, `run` runs one while the call waits; `start` begins the next, which runs on after the call has
    returned. Between `join` and that no slice runs, and the scheduler may be used from outside; where it has no
    sequence, idle work may run meanwhile, and it may only be given sequences and be asked for counts.

    Args:
        scheduler: has the sequences.
        thread: runs the rounds.
        seconds: length of a slice; it has at least one round, and begins no further one after this time.
        placement: chooses the cores of each round.
        idle_work: what the engine thread does while the server is idle.
        idle_seconds: without a sequence, after which it is.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        thread: ThreadPoolExecutor,
        seconds: float,
        placement: Placement,
        *,
        idle_work: IdleWork,
        idle_seconds: float = _IDLE_SECONDS,
    ) -> None:
        self._scheduler = scheduler
        self._placement = placement
        self._idle_work, self._idle_seconds = idle_work, idle_seconds
        # Set once the server is not idle any more; each idle time has an event of its own.
        self._wanted = Event()
        self._timer: Timer | None = None
        self._seconds = seconds
        self._thread = thread
        self._slice: Future[None] | None = None
        self._interrupted = Event()
        self._begun = Event()

    def run(self) -> None:
        """Run a slice and wait for it."""
        self._submit().result()

    def start(self, *, more_may_come: bool) -> None:
        """Start a slice and return, so that rounds go on during TorchServe's turn of some milliseconds.

        A round that prefills is long, and more requests mostly come with the first: while they may, none is started.
        Without a sequence the idle time begins, or goes on.
        """
        if not self._scheduler.busy:
            self._await_idle_work()
        elif not (more_may_come and self._scheduler.awaiting_first_token):
            self._slice = self._submit()
            # A compute thread that waits for the next pass has the other core: the engine thread would begin 0.8 ms
            # later, with a call's reply sent first, than now, when this one waits for it (load.py --overhead, 2 cores).
            self._begun.wait()

    def interrupt(self) -> None:
        """End the started slice after its current round."""
        self._interrupted.set()

    def join(self) -> bool:
        """Wait for the started slice; returns whether there was one."""
        started, self._slice = self._slice, None
        if started is not None:
            started.result()
        return started is not None

    def _submit(self) -> Future[None]:
        self._wanted.set()
        if self._timer:
            self._timer.cancel()
            self._timer = None
        self._interrupted.clear()
        self._begun.clear()
        return self._thread.submit(self._run_rounds)

    def _run_rounds(self) -> None:
        """Run at least one round, until the slice is over or interrupted."""
        self._begun.set()
        until = time.monotonic() + self._seconds
        while self._scheduler.busy:
            try:
                self._placement.begin_round()
                self._scheduler.run_round()
            except Exception as error:
                # Raised to TorchServe, it would fail every request, those that wait included.
                logger.exception("specserve: a round failed")
                self._scheduler.fail_all(error)
            if time.monotonic() >= until or self._interrupted.is_set():
                break

    def _await_idle_work(self) -> None:
        """Begin the idle work after a while, once in an idle time."""
        if self._timer is None:
            self._wanted = wanted = Event()
            self._timer = Timer(self._idle_seconds, self._begin_idle_work, (wanted.is_set,))
            self._timer.daemon = True
            self._timer.start()

    def _begin_idle_work(self, interrupted: Callable[[], bool]) -> None:
        # The process ends, and its engine thread has.
        with suppress(RuntimeError):
            self._thread.submit(self._idle_work, interrupted)
