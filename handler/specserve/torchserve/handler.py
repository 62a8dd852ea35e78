"""The TorchServe handler with continuous batching; only it and types.py know TorchServe.

TorchServe calls `handle` again and again while requests are live, with an entry for each:

- An entry holds the request's body until its first reply (an empty chunk is one), which also sets the HTTP status.
- `context.stopping_criteria` says what each reply is: a whole response (None), a chunk (False), the last chunk (True).
- An entry whose id is deleted from `context.request_ids` gets no reply, and comes again with the next call.
- An exception would become the answer to all entries, so whatever one of them raises is contained.

Four threads share the work. TorchServe's thread runs `handle`: it owns the responses and replies. The engine thread
runs rounds in slices of some milliseconds (engine_loop.py); during a slice it owns the scheduler, its sequences, both
models, the metrics and the trace, and between slices TorchServe's thread does. The parser's two threads turn bodies
into responses with sequences (parser_threads.py).

A call waits for the slice that the last one started, takes new requests, runs a slice if none had been started,
replies, and starts the next one, which runs while TorchServe sends the replies.
"""

import faulthandler
import logging
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from specserve.api.parser_threads import Parser
from specserve.api.response import Response
from specserve.api.routes import Routes
from specserve.config import HandlerConfig, parse_handler
from specserve.core.engine_loop import EngineLoop, engine_thread
from specserve.core.loading import PREFILL_ROWS, Models, load_models, open_store
from specserve.core.scheduler import Scheduler, max_wait
from specserve.errors import Contained, LoggedOnce, RequestError, SpecserveError
from specserve.observability import metrics
from specserve.observability.control_group import Holdback
from specserve.observability.trace import open_traces
from specserve.torchserve import types

logger = logging.getLogger(__name__)

# How long a first reply without content is held back, of a stream and of a whole response, in seconds, so that an error
# can have an HTTP status of its own. Until then TorchServe sends the request's body with every call, so after a long
# body the status is sent at once.
_STREAM_STATUS_SECONDS, _STATUS_SECONDS = 1.0, 2.0
# How long nothing is sent after that: proxies give up after 60 seconds of silence, many clients after 300.
_SILENCE_SECONDS = 10.0
# JSON allows it before an object.
_WHITE_SPACE = " "


class Handler:
    """Has new requests parsed, runs the scheduler, and replies to every entry."""

    def initialize(self, context: types.Context) -> None:
        """Load the models; a failure is a sentence in the worker's log, and a RuntimeError as TorchServe expects."""
        types.log_warnings_as_such()
        # The last words of a crash; a worker that ends without any was killed.
        faulthandler.enable()
        try:
            config = parse_handler(context.model_yaml_config.get("handler"), "the archive's model YAML")
            served = metrics.Served(context.model_name, context.manifest["model"]["modelVersion"])
            self.start(config, load_models, served, types.sender(context.metrics))
        except SpecserveError as error:
            logger.error("specserve cannot load: %s", error)
            raise RuntimeError(str(error)) from None  # TorchServe logs the traceback of each

    def start(
        self,
        config: HandlerConfig,
        load: Callable[[HandlerConfig], Models],
        served: metrics.Served,
        send: metrics.Send = lambda *_: None,
    ) -> None:
        """Load the models and begin to serve; `send` is given every sample of a metric."""
        types.receive_bodies_as_bytes()
        # OpenMP's compute threads belong to the thread that first runs a pass, so models are loaded in that one.
        thread = engine_thread()
        models = thread.submit(load, config).result()
        self._models = models
        store = open_store(models.config, models)
        self._max_memory = models.memory_bytes + store.max_bytes
        logger.info("specserve: the worker grows to at most %d MiB", self._max_memory >> 20)
        self._config = config = models.config
        # Requests drawn to run without drafts, which show how much drafts bring.
        self._holdback = Holdback(config.speculation.holdback)
        self._metrics = metrics.Metrics(served, self._holdback, send, time.monotonic)
        self._scheduler = Scheduler(
            models.target,
            models.drafters,
            prefill_rows=PREFILL_ROWS,
            max_wait_seconds=max_wait(config.max_wait_ms, models.drafters.controller.target_cost),
            limit_masks=models.grammars.limit_masks,
            observers=[self._metrics, *open_traces(config.trace, served)],
            store=store,
        )
        self._routes = Routes(config, models, self._scheduler, self._holdback, served.model)
        self._loop = EngineLoop(self._scheduler, thread, models.placement)
        self._parser = Parser(self._routes)
        self._responses: dict[str, Response] = {}
        self._metrics_contained = LoggedOnce("metrics cannot be sent; this is not logged again")

    def handle(self, data: list[dict[str, Any]], context: types.Context) -> list[str]:
        """Take new requests, forget old ones, and reply to every entry with what a slice of rounds has produced."""
        called = time.monotonic()
        entries = dict(context.request_ids)
        # Requests have come or gone, or are being parsed.
        others_than_before = set(entries.values()) != self._responses.keys()
        if others_than_before:
            # End the slice after its current round.
            self._loop.interrupt()
        # False if the last call started none.
        ran_meanwhile = self._loop.join()
        self._forget_absent(set(entries.values()))
        self._parse_new(data, context, called)
        self._submit_parsed()
        if not ran_meanwhile and self._scheduler.busy:
            self._loop.run()
        replies = [""] * len(data)
        context.stopping_criteria = [types.whole_response] * len(data)
        for index, request_id in entries.items():
            response = self._responses.get(request_id)
            if response is None:
                # It is still being parsed.
                del context.request_ids[index]
            else:
                replies[index] = self._reply_or_fail(context, index, response)
        self._emit_metrics()
        self._loop.start()
        return replies

    def _forget_absent(self, present: set[str]) -> None:
        """Forget the requests without an entry: they are answered, or their clients have left."""
        self._parser.forget_absent(present)
        for request_id in self._responses.keys() - present:
            self._cancel(request_id, self._responses.pop(request_id))

    def _parse_new(self, data: list[dict[str, Any]], context: types.Context, called: float) -> None:
        for index, request_id in context.request_ids.items():
            if request_id in self._responses or request_id in self._parser:
                continue
            with Contained(request_id, partial(self._refuse, request_id, "")):
                incoming = types.receive(context, index, data[index])
                if types.came_by_grpc(incoming):
                    self._refuse(request_id, "", types.NO_GRPC)
                    # It has none; only a last chunk ends unary and streaming calls alike.
                    self._responses[request_id].status_sent = True
                else:
                    self._parser.begin(incoming, called)

    def _refuse(self, request_id: str, route: str, error: RequestError) -> None:
        self._responses[request_id] = self._routes.refusal(route, error)

    def _submit_parsed(self) -> None:
        """Submit the parsed requests; `take` waits briefly for those that are being parsed."""
        for request_id, parsing in self._parser.take(idle=not self._scheduler.busy).items():
            with Contained(request_id, partial(self._refuse, request_id, parsing.incoming.route)):
                self._responses[request_id] = parsing.response.result()
            response = self._responses[request_id]
            seconds = _STREAM_STATUS_SECONDS if response.streams else _STATUS_SECONDS
            response.silent_until = parsing.arrival + (0.0 if parsing.is_long else seconds)
            with Contained(request_id, response.fail):
                for sequence in response.sequences:
                    if not sequence.done:
                        self._scheduler.submit(sequence, time.monotonic() - parsing.arrival)

    def _cancel(self, request_id: str, response: Response) -> None:
        for sequence in response.sequences:
            with Contained(request_id, response.fail):
                self._scheduler.cancel(sequence)

    def _reply_or_fail(self, context: types.Context, index: int, response: Response) -> str:
        """What this call sends to one entry; where writing that raises, the error."""
        for _ in range(2):
            with Contained(context.request_ids[index], response.fail):
                reply = self._reply(context, index, response)
                if reply:
                    response.silent_until = time.monotonic() + _SILENCE_SECONDS
                return reply
        # Its protocol's error cannot be written either.
        context.stopping_criteria[index] = types.last_chunk
        return ""

    def _reply(self, context: types.Context, index: int, response: Response) -> str:
        """Return what this call sends to one entry.

        | the response             | what is sent                                                                 |
        | ------------------------ | ---------------------------------------------------------------------------- |
        | with nothing to send yet | a sign of life if one is due; else an empty chunk if the status was sent     |
        | a stream                 | its new events, as a chunk, or as the last one if it is done                 |
        | whole, done              | the body, as a whole response, or as the last chunk if the status was sent   |

        An error makes a response done; before the status is sent, it turns a stream into a whole response.
        """
        if response.done:
            # After an error the other choices are of no use, nor is what follows a text that is complete.
            self._cancel(context.request_ids[index], response)
        is_first, streams = not response.status_sent, response.streams and (response.status_sent or not response.error)
        # A first chunk that is also the last one would hang the client, so an empty one comes before it.
        ends = response.done and not (streams and is_first)
        if streams:
            reply = "" if response.done and is_first else response.next_events()
        else:
            reply = response.text() if response.done else ""
        if not reply and not response.done:
            if time.monotonic() >= response.silent_until:
                reply = response.keep_alive if response.streams else _WHITE_SPACE
            elif is_first:
                # The entry comes again with the next call, its status still open.
                del context.request_ids[index]
                return ""
        if is_first:
            context.set_response_status(response.status, HTTPStatus(response.status).phrase, index)
            context.set_response_content_type(index, "text/event-stream" if streams else "application/json")
            for name, value in response.headers.items():
                context.set_response_header(index, name, value)
            response.status_sent = True
        if not (is_first and ends):
            context.stopping_criteria[index] = types.last_chunk if ends else types.more_to_come
        return reply

    def _emit_metrics(self) -> None:
        gauges: dict[metrics.Metric, float] = {
            metrics.LIVE: self._scheduler.running,
            metrics.WAITING: self._scheduler.queued,
            metrics.SLOTS: self._config.sequences,
            metrics.OWN_KERNELS: self._models.kernels.variant is not None,
            metrics.MAX_MEMORY: self._max_memory,
            metrics.THREADS: len(self._models.placement.cores),
        }
        if self._config.draft is not None:
            gauges[metrics.DRAFT_MODEL] = self._models.drafters.model is not None
        with self._metrics_contained:
            self._metrics.emit(gauges)
