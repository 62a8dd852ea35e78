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

# Seconds without a round after which the server counts as idle; and until it is looked again during a call.
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
    returned. Between `join` and that no slice runs, and the scheduler may be used from outside; where it has no
    sequence, idle work may run meanwhile, and it may only be given sequences and be asked for counts. A sequence whose
    client has left, after which TorchServe may make no call for hours, keeps no server from being idle.

    Args:
        scheduler: has the sequences.
        thread: runs the rounds.
        seconds: length of a slice; it has at least one round, and begins no further one after this time.
        placement: chooses the cores of each round.
        idle_work: what the engine thread does while the server is idle.
        idle_seconds: without a round, after which it is.
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
        # How many slices there were, the last one's time, and after how many idle work was begun.
        self._slices, self._last_slice, self._idle_after = 0, time.monotonic(), -1
        # Whether TorchServe's thread may use the scheduler, which has sequences.
        self._in_call = False
        self._lock = Lock()
        self._timer: Timer | None = None
        self._idle: Future[None] | None = None
        self._seconds = seconds
        self._thread = thread
        self._slice: Future[None] | None = None
        self._interrupted = Event()
        self._begun = Event()

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
        self._in_call = False
        self._watch(self._idle_seconds)

    def interrupt(self) -> None:
        """End the started slice after its current round."""
        self._interrupted.set()

    def join(self) -> bool:
        """Wait for the started slice; returns whether there was one."""
        with self._lock:
            self._in_call = self._scheduler.busy
        if self._in_call and self._idle is not None:
            # It ends soon, and must not see sequences being cancelled.
            self._idle.result()
        started, self._slice = self._slice, None
        if started is not None:
            started.result()
        return started is not None

    def _submit(self) -> Future[None]:
        with self._lock:
            self._slices += 1
            self._in_call = True
        self._interrupted.clear()
        self._begun.clear()
        return self._thread.submit(self._run_rounds)

    def _run_rounds(self) -> None:
        """Run at least one round, until the slice is over or interrupted."""
        self._last_slice = time.monotonic()
        self._begun.set()
        until = self._last_slice + self._seconds
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

    def _watch(self, seconds: float) -> None:
        """Look in so many seconds whether the server is idle, once in an idle time."""
        with self._lock:
            if self._timer is None and self._idle_after != self._slices:
                self._timer = Timer(seconds, self._look)
                self._timer.daemon = True
                self._timer.start()

    def _look(self) -> None:
        """Begin the idle work if there was no slice for long enough, also where TorchServe abandoned a sequence."""
        with self._lock:
            self._timer = None
            count = self._slices
            left = self._last_slice + self._idle_seconds - time.monotonic()
            if left <= 0 and not self._in_call:
                self._idle_after = count
                # The process ends, and its engine thread has.
                with suppress(RuntimeError):
                    self._idle = self._thread.submit(
                        self._work_while_idle, lambda: self._slices != count or self._in_call
                    )
                return
        self._watch(max(left, _LOOK_AGAIN_SECONDS))

    def _work_while_idle(self, interrupted: Callable[[], bool]) -> None:
        try:
            self._idle_work(interrupted)
        except Exception:
            logger.exception("specserve: the work of an idle time failed")
