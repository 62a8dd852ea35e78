"""Runs the scheduler in the engine thread: in time slices, one of them while TorchServe sends the last one's output."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

from specserve.core.scheduler import Scheduler
from specserve.engine.placement import Placement
from specserve.errors import EngineError

logger = logging.getLogger(__name__)


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

    Where no sequence is left, `start` lets the engine thread store prefixes instead, until the next `join`.

    Args:
        scheduler: has the sequences.
        thread: runs the rounds.
        placement: chooses the cores of each round.
    """

    # After which a slice begins no further round: TorchServe's turn between two calls takes 1.2 to 2.3 ms.
    slice_seconds = 0.04

    def __init__(self, scheduler: Scheduler, thread: ThreadPoolExecutor, placement: Placement) -> None:
        self._scheduler = scheduler
        self._thread = thread
        self._placement = placement
        self._slice: Future[None] | None = None
        self._idle_work: Future[None] | None = None
        self._begun = Event()
        self._interrupted = Event()

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
        elif not self._scheduler.busy:
            self._interrupted.clear()
            self._idle_work = self._thread.submit(self._store_prefixes)

    def interrupt(self) -> None:
        """End the started slice after its current round."""
        self._interrupted.set()

    def join(self) -> bool:
        """Wait for the started slice, and end the idle work; returns whether there was a slice."""
        if self._idle_work is not None:
            self.interrupt()
            self._idle_work.result()
            self._idle_work = None
        started, self._slice = self._slice, None
        if started is not None:
            started.result()
        return started is not None

    def _submit(self) -> Future[None]:
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

    def _store_prefixes(self) -> None:
        """Store what ended sequences have left, a few milliseconds at a time."""
        try:
            self._scheduler.check_caches()
            while not self._interrupted.is_set() and self._scheduler.store_prefixes():
                pass
        except Exception:
            logger.exception("specserve: prefixes cannot be stored")
