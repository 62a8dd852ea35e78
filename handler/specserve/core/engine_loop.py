"""Runs the scheduler in the engine thread: in time slices, one of them while TorchServe sends the last one's output."""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

from specserve.core.scheduler import Scheduler
from specserve.engine.placement import Placement
from specserve.errors import EngineError

logger = logging.getLogger(__name__)


def engine_thread() -> ThreadPoolExecutor:
    """The only thread that opens engines and runs their forward passes.

    OpenMP keeps a pool of compute threads for each thread that calls it. With a second such thread the pools have more
    threads than there are cores, so they sleep between passes: a step of 29 ms takes 36 ms.
    """
    return ThreadPoolExecutor(1, "engine")


class EngineLoop:
    """Runs rounds of a scheduler in the engine thread, one time slice at a time.

    A slice is all rounds that begin within `slice_seconds`, at least one. Each call of TorchServe's thread first waits,
    in `join`, for the slice that the previous call started; `interrupt` ends that slice after its current round if
    requests are new or gone. If no slice was started, `run` runs one while the call waits. Finally `start` begins the
    next slice, which goes on after the call has returned. Between `join` and `start` no slice runs except in `run`, so
    the scheduler may be used from outside.

    If no sequence is left, `start` lets the engine thread store prefixes instead, until the next `join`.
    """

    # After which a slice begins no further round: TorchServe's turn between two calls takes 1.2 to 2.3 ms.
    slice_seconds = 0.04

    def __init__(self, scheduler: Scheduler, thread: ThreadPoolExecutor, placement: Placement) -> None:
        self._scheduler = scheduler
        self._thread = thread
        self._placement = placement
        self._started: Future[bool] | None = None
        self._begun, self._interrupted, self._called = Event(), Event(), Event()

    def run(self) -> None:
        """Run a slice and wait for it."""
        self._submit().result()

    def start(self) -> None:
        """Start a slice and return, so that rounds go on during TorchServe's turn of some milliseconds.

        No slice is started while a prompt is prefilled: such rounds are long, and requests that arrived during the last
        one become known only in the next call, which would first have to wait for another round.
        """
        if not self._scheduler.busy:
            self._called.clear()
            self._started = self._thread.submit(self._store_prefixes)
        elif not self._scheduler.awaiting_first_token:
            self._started = self._submit()
            # A compute thread that waits for the next pass has the other core: the engine thread would begin 0.8 ms
            # later, with a call's reply sent first, than now, when this one waits for it (load.py --overhead, 2 cores).
            self._begun.wait()

    def interrupt(self) -> None:
        """End the started slice after its current round."""
        self._interrupted.set()

    def join(self) -> bool:
        """Wait for what was started, and stop storing prefixes; returns whether there was a slice."""
        self._called.set()
        started, self._started = self._started, None
        return started is not None and started.result()

    def _submit(self) -> Future[bool]:
        self._interrupted.clear()
        self._begun.clear()
        return self._thread.submit(self._run_rounds)

    def _run_rounds(self) -> bool:
        """Run at least one round, until the slice is over or interrupted."""
        self._begun.set()
        until = time.monotonic() + self.slice_seconds
        while self._scheduler.busy:
            try:
                self._placement.choose_cores()
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
        return True

    def _store_prefixes(self) -> bool:
        """Store what ended sequences have left, a few milliseconds at a time."""
        try:
            self._scheduler.check_caches()
            while not self._called.is_set() and self._scheduler.store_prefixes():
                pass
        except Exception:
            logger.exception("specserve: prefixes cannot be stored")
        return False
