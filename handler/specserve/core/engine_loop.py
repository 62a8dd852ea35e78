"""Runs the scheduler in the engine thread: in time slices, one of them while TorchServe sends the last one's output."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Event, Lock, Timer

from specserve.core.scheduler import Scheduler
from specserve.engine.placement import Placement
from specserve.errors import EngineError

logger = logging.getLogger(__name__)

# The length of a slice: TorchServe's turn between two calls takes 1.2 to 2.3 ms.
_SLICE_SECONDS = 0.04
# Seconds without a round after which the server is idle, and the least until that is looked at again.
_IDLE_SECONDS, _LOOK_AGAIN_SECONDS = 10.0, 1.0

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
    returned. Between `join` and that no slice runs, and the scheduler may be used from outside.

    Idle work begins some time after the last slice, also where the scheduler still has sequences: their client has
    left, and TorchServe makes no call before the next request. Calls that leave the scheduler without a sequence
    neither delay nor end it; meanwhile the scheduler may only be given sequences and be asked for counts.

    Args:
        scheduler: has the sequences.
        thread: runs the rounds.
        placement: chooses the cores of each round.
        idle_work: what the engine thread does while the server is idle.
        slice_seconds: after which a slice begins no further round.
        idle_seconds: without a slice, after which the server is idle.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        thread: ThreadPoolExecutor,
        placement: Placement,
        *,
        idle_work: IdleWork,
        slice_seconds: float = _SLICE_SECONDS,
        idle_seconds: float = _IDLE_SECONDS,
    ) -> None:
        self._scheduler = scheduler
        self._thread = thread
        self._placement = placement
        self._idle_work = idle_work
        self.slice_seconds = slice_seconds
        self._idle_seconds = idle_seconds
        self._slice: Future[None] | None = None
        self._begun = Event()
        self._interrupted = Event()
        # Whether the engine thread is needed, from a call that finds a sequence to the end of its `start`; and when
        # that was.
        self._wanted = Event()
        self._last_wanted = time.monotonic()
        self._working = Lock()
        self._timer: Timer | None = None

    def run(self) -> None:
        """Run a slice and wait for it."""
        self._submit().result()

    def start(self) -> None:
        """Start a slice and return, so that rounds go on during TorchServe's turn of some milliseconds.

        None is started where a prompt is prefilled: these rounds are long, and what has come during the last one is
        only known in the next call, which would wait for another one first.
        """
        if self._scheduler.busy and not self._scheduler.awaiting_first_token:
            self._slice = self._submit()
            # A compute thread that waits for the next pass has the other core: the engine thread would begin 0.8 ms
            # later, with a call's reply sent first, than now, when this one waits for it (load.py --overhead, 2 cores).
            self._begun.wait()
        if self._wanted.is_set():
            self._wanted.clear()
            self._last_wanted = time.monotonic()
            if self._timer is None:
                self._look_in(self._idle_seconds)

    def interrupt(self) -> None:
        """End the started slice after its current round."""
        self._interrupted.set()

    def join(self) -> bool:
        """Wait for the started slice; returns whether there was one."""
        if self._scheduler.busy:
            self._wanted.set()
            # Idle work ends soon, and must not see sequences being cancelled.
            with self._working:
                pass
        started, self._slice = self._slice, None
        if started is not None:
            started.result()
        return started is not None

    def _submit(self) -> Future[None]:
        self._wanted.set()
        self._interrupted.clear()
        self._begun.clear()
        return self._thread.submit(self._run_rounds)

    def _run_rounds(self) -> None:
        """Run at least one round, until the slice is over or interrupted."""
        self._begun.set()
        until = time.monotonic() + self.slice_seconds
        while self._scheduler.busy:
            try:
                self._placement.begin_round()
                self._scheduler.run_round()
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                # Raised to TorchServe, it would fail every request, those that wait included; or end the worker, if it
                # is a panic of llguidance.
                logger.exception("specserve: a round failed")
                self._scheduler.fail_all(error if isinstance(error, Exception) else EngineError(str(error)))
            if time.monotonic() >= until or self._interrupted.is_set():
                break

    def _look_in(self, seconds: float) -> None:
        """Look in so many seconds whether the server is idle."""
        self._timer = Timer(seconds, self._look)
        self._timer.daemon = True
        self._timer.start()

    def _look(self) -> None:
        left = self._last_wanted + self._idle_seconds - time.monotonic()
        if self._wanted.is_set() or left > 0:
            self._look_in(max(left, _LOOK_AGAIN_SECONDS))
            return
        self._timer = None
        # The process ends, and its engine thread has.
        with suppress(RuntimeError):
            self._thread.submit(self._work_while_idle)

    def _work_while_idle(self) -> None:
        with self._working:
            if not self._wanted.is_set():
                try:
                    self._idle_work(self._wanted.is_set)
                except Exception:
                    logger.exception("specserve: the work of an idle time failed")
