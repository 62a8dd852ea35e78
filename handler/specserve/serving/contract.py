"""What TorchServe gives a handler, and how it is told what an answer is."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

from ts.metrics.metric_type_enum import MetricTypes

from specserve.observability.metrics import ALL, Sample

StoppingCriterion = Callable[[object], bool | None]
PHRASES = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Internal Server Error"}


class MetricsCache(Protocol):
    """The part of TorchServe's cache of metrics that is used here."""

    def add_metric_to_cache(
        self, metric_name: str, unit: str, dimension_names: list[str], metric_type: MetricTypes
    ) -> Any:
        """A metric with `add_or_update(value, dimension_values)`."""


class Context(Protocol):
    """The part of TorchServe's context that is used here."""

    model_name: str
    manifest: dict[str, Any]
    model_yaml_config: dict[str, Any]
    metrics: MetricsCache
    request_ids: dict[int, str]
    stopping_criteria: list[StoppingCriterion]

    def get_request_header(self, idx: int, key: str) -> str | None:
        """A header of the row's request; `url_path` is what follows the version in its URL."""

    def set_response_status(self, code: int, phrase: str, idx: int) -> None:
        """The HTTP status of the row's answer."""

    def set_response_content_type(self, idx: int, value: str) -> None:
        """The content type of the row's answer."""


def leave_bodies_unread() -> None:
    """Let TorchServe hand bodies over as bytes; it asks the environment before each.

    It parses JSON in the thread that answers all streams, and a body that waits to be read again in every call: twelve
    dense ones of a megabyte would hold streams up for a second and more.
    """
    os.environ["TS_DECODE_INPUT_REQUEST"] = "false"


def sender(cache: MetricsCache) -> Callable[[Sample], None]:
    """Hands samples to TorchServe, which tells Prometheus."""
    known = {
        metric: cache.add_metric_to_cache(metric.name, "count", list(metric.labels), MetricTypes(metric.kind))
        for metric in ALL
    }
    return lambda sample: known[sample.metric].add_or_update(sample.value, list(sample.labels))


def nothing_special(_answer: object) -> None:
    """The answer is whole and ordinary."""


def more_to_come(_answer: object) -> bool:
    """The answer is a chunk, and others follow."""
    return False


def last_chunk(_answer: object) -> bool:
    """The answer is a chunk, and the last one."""
    return True
