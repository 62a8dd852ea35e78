"""What operators see of a running server: metrics, traces, and the control group."""

from __future__ import annotations

import time
from collections.abc import Callable

from specserve.config import HandlerConfig
from specserve.errors import ConfigError
from specserve.observability.control_group import Holdback, PlainRounds
from specserve.observability.metrics import Emitter, Metrics, Now, Sample, Served
from specserve.observability.records import Observer
from specserve.observability.trace import Trace
from specserve.serving.loading import Models
from specserve.serving.scheduler import Scheduler

# Metrics go out this often while requests live, and when the last one ends.
_EMITTED_EVERY_SECONDS = 2.0


class Telemetry:
    """Observes a server's scheduler.

    Args:
        config: of the server.
        models: that it has loaded.
        served: by which its metrics are told from others'.
        send: told of every sample of a metric.

    Raises:
        ConfigError: the trace cannot be written.
    """

    def __init__(self, config: HandlerConfig, models: Models, served: Served, send: Callable[[Sample], None]) -> None:
        self._config = config
        self._models = models
        self._has_model = models.drafters.has_model
        self.holdback = Holdback(config.speculation.holdback)
        self.plain_rounds = PlainRounds(config.speculation.holdback)
        metrics = Metrics(served, self.holdback, self.plain_rounds)
        self._emitter = Emitter(metrics, send, time.monotonic, _EMITTED_EVERY_SECONDS)
        self.observers: list[Observer] = [metrics, *_traces(config, models, served)]

    def emit(self, scheduler: Scheduler) -> None:
        """Hand metrics on, if it is time."""
        if self._has_model != self._models.drafters.has_model:
            # What speculation has brought with the draft model is not what it brings without.
            self._has_model = self._models.drafters.has_model
            self.holdback.forget()
            self.plain_rounds.forget()
        draft_model = None if self._config.draft is None else self._has_model
        own_kernels = self._models.kernels.variant is not None
        slots = self._config.sequences
        self._emitter.emit(Now(scheduler.live, scheduler.waiting, slots, own_kernels, draft_model))


def _traces(config: HandlerConfig, models: Models, served: Served) -> list[Observer]:
    """The trace that the operator wants, in a file of this version's own."""
    wanted = config.trace
    if wanted is None:
        return []
    text = models.vocabulary.piece if wanted.text else None
    try:
        path = wanted.directory / f"{served.model}-{served.version}.jsonl"
        return [Trace(path, share=wanted.share, mebibytes=wanted.mebibytes, text=text)]
    except OSError as error:
        raise ConfigError(
            f"`handler.trace.directory`: {wanted.directory} cannot be written ({error.strerror})."
        ) from error
