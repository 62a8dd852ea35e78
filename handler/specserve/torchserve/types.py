"""The parts of TorchServe's interface that the handler uses."""

import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ts.metrics.metric_type_enum import MetricTypes

from specserve.api.routes import Incoming
from specserve.errors import RequestError
from specserve.observability.metrics import ALL, Send

StoppingCriterion = Callable[[object], bool | None]

# What all gRPC requests are told: TorchServe passes on neither route nor key, and ends a stream after its first chunk.
NO_GRPC = RequestError("This server has no gRPC API: send the request as JSON by HTTP.", code="unsupported_protocol")
# Headers that TorchServe makes for requests by gRPC.
_OF_GRPC = "ts_request_sequence_"


class Context(Protocol):
    """TorchServe's context of one call of `handle`; `idx` is that of an entry."""

    model_name: str
    manifest: dict[str, Any]
    model_yaml_config: dict[str, Any]
    metrics: Any  # makes each metric by `add_metric_to_cache`
    request_ids: dict[int, str]
    stopping_criteria: list[StoppingCriterion]

    def get_all_request_header(self, idx: int) -> dict[str, Any]:
        """The headers of the entry's request and `url_path`, which is what follows the version in the URL."""

    def set_response_status(self, code: int, phrase: str, idx: int) -> None: ...

    def set_response_content_type(self, idx: int, value: str) -> None: ...

    def set_response_header(self, idx: int, key: str, value: str) -> None: ...


def receive(context: Context, index: int, data: Mapping[str, Any]) -> Incoming:
    """Read a request that TorchServe hands over.

    TorchServe keeps headers as the client spelled them; of several with the same spelling, it keeps the last. Among the
    headers it puts what it knows of the parts of a form, as dictionaries by their names.
    """
    given = {name: value for name, value in context.get_all_request_header(index).items() if isinstance(value, str)}
    headers: dict[str, str] = {}
    for name, value in sorted(given.items()):
        headers[name.lower()] = ", ".join(filter(None, [headers.get(name.lower()), value]))
    # In this spelling it is TorchServe's, not the client's.
    route = given.get("url_path", "").strip("/")
    body, size = data.get("body", data.get("data")), sum(map(len, data.values()))
    return Incoming(context.request_ids[index], route, body, size, headers)


def came_by_grpc(incoming: Incoming) -> bool:
    """Tell whether a request came by gRPC, whose headers TorchServe does not pass on; by HTTP it always has some."""
    return all(name.startswith(_OF_GRPC) for name in incoming.headers)


def receive_bodies_as_bytes() -> None:
    """Make TorchServe pass bodies on as bytes; it asks the environment before each.

    It would parse JSON in the thread that replies to all streams, and a waiting body again in every call: twelve dense
    bodies of a megabyte delay streams by more than a second.
    """
    os.environ["TS_DECODE_INPUT_REQUEST"] = "false"


def log_warnings_as_such() -> None:
    """Write warnings and errors to stderr, with their level: TorchServe logs those lines as warnings.

    Its workers write everything to stdout, which it logs as information.
    """
    own = logging.StreamHandler(sys.stderr)
    own.setLevel(logging.WARNING)
    own.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logging.getLogger("specserve").addHandler(own)
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: record.levelno < logging.WARNING or not record.name.startswith("specserve."))


def sender(cache: Any) -> Send:
    """Return what hands samples to TorchServe, where Prometheus reads them."""
    known = {
        metric: cache.add_metric_to_cache(metric.name, "count", list(metric.labels), MetricTypes(metric.kind))
        for metric in ALL
    }
    return lambda metric, labels, value: known[metric].add_or_update(value, list(labels))


def _always(kind: bool | None) -> StoppingCriterion:
    return lambda _reply: kind


# What a reply is: a whole response, a chunk that others follow, or the last chunk.
whole_response, more_to_come, last_chunk = map(_always, (None, False, True))
