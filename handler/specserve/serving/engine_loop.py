"""Decoding in slices of time, one of them while TorchServe hands the last one's texts on."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

from specserve.serving.scheduler import Scheduler

logger = logging.getLogger(__name__)


def engine_thread() -> ThreadPoolExecutor:
    """The one thread that loads engines and runs their passes.

    OpenMP keeps compute threads for every thread that calls it, and where those are more than the cores, they no longer
    wait awake: with a second such thread a step of 29 ms takes 36.
    """
    return ThreadPoolExecutor(1, "engine")


class Slices:
    """Runs the scheduler in the engines' thread, beside the one that talks to TorchServe.

    Between `finish` and `ahead` no slice runs: then, and only then, the scheduler may be told and asked things.

    Args:
        scheduler: what is run.
        thread: where.
        seconds: a slice has at least one round, and no further one when these are over.
    """

    def __init__(self, scheduler: Scheduler, thread: ThreadPoolExecutor, seconds: float) -> None:
        self._scheduler = scheduler
        self._seconds = seconds
        self._thread = thread
        self._ahead: Future[None] | None = None
        self._news = Event()

    def hurry(self) -> None:
        """End the slice that was begun ahead with its present round."""
        self._news.set()

    def finish(self) -> bool:
        """Wait for the slice that was begun ahead; whether there was one."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.result()
        return ahead is not None

    def run(self) -> None:
        """Decode for a slice, and wait for it."""
        self._begin().result()

    def ahead(self) -> None:
        """Begin a slice and do not wait; TorchServe's turn, some milliseconds, would be lost otherwise.

        Whoever comes in that time waits a round longer for its own first one. A round that reads prompts is long, and
        mostly more prompts follow it, so no slice is begun with one.
        """
        if self._scheduler.busy and not self._scheduler.reading:
            self._ahead = self._begin()

    def _begin(self) -> Future[None]:
        self._news.clear()
        return self._thread.submit(self._decode)

    def _decode(self) -> None:
        """Step at least once, until the slice is used or there is news."""
        until = time.monotonic() + self._seconds
        while self._scheduler.busy:
            try:
                self._scheduler.step()
            except Exception as error:
                # A fault of ours must not reach TorchServe, which would fail the rows of everyone, waiting ones too.
                logger.exception("specserve: a round failed")
                self._scheduler.fail_all(error)
            if time.monotonic() >= until or self._news.is_set():
                return
