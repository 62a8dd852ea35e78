"""The TorchServe handler with continuous batching; only it and torchserve_types.py know TorchServe's protocol.

TorchServe calls `handle` again and again while requests are live. Each call has a row per live request, with its id;
the row has the request's body until the first reply to it. A reply is a whole response, a chunk, or the last chunk.
Where a call has nothing to say yet, it deletes the row's id from `context.request_ids`: then nothing is sent, and the
row comes again, body included. Once a chunk is sent, the HTTP status is final.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from specserve.config import HandlerConfig, parse_handler
from specserve.errors import ConfigError, RequestError, SpecserveError
from specserve.observability.control_group import Holdback
from specserve.observability.metrics import Gauges, Metrics, Sample, Served
from specserve.observability.records import Observer
from specserve.observability.status import SpeculationStatus, speculation_status
from specserve.observability.trace import Trace
from specserve.serving.engine_loop import EngineLoop, engine_thread
from specserve.serving.loading import Models, load_models
from specserve.serving.openai.openapi import openapi
from specserve.serving.openai.parse import to_generations
from specserve.serving.openai.prompt import Prompt, Tokenizer
from specserve.serving.openai.request_schema import AnyRequest, ChatRequest, CompletionRequest, parse_body
from specserve.serving.openai.response import (
    ChatResponse,
    CompletionResponse,
    GenerationResponse,
    JsonResponse,
    Response,
    model_list,
    model_object,
)
from specserve.serving.scheduler import Scheduler, max_wait
from specserve.serving.torchserve_types import (
    PHRASES,
    Context,
    last_chunk,
    more_to_come,
    receive_bodies_as_bytes,
    sender,
    whole_response,
)

logger = logging.getLogger(__name__)

# How long the HTTP status of a whole response stays open, in seconds; most responses are complete by then. TorchServe
# sends the body in every call until the status is set, and a megabyte takes up to 30 ms to read: the status of a longer
# body, in bytes, is set at once.
_STATUS_SECONDS = 2.0
_LONG_BODY = 64 * 1024

# Bytes of long bodies that may wait to be parsed, beyond one that is alone; a further one is refused.
_MAX_WAITING_BYTES = 2 * 1024 * 1024

_BUSY = RequestError(
    "The server is reading other long requests; send this one again.",
    status=503,
    kind="server_error",
    code="overloaded",
)

# How long a call waits for new requests to be parsed, in seconds; most take a few milliseconds. Compiling a grammar may
# take half a second and tokenising half a megabyte a whole one. No round runs during the wait; after it they go on.
_PARSE_SECONDS = 0.1

# The routes that generate text.
_GENERATING = frozenset({"", "v1/completions", "v1/chat/completions"})


class Parsing(NamedTuple):
    """A new request: when it arrived, the bytes of its body, and its response once it is parsed."""

    arrival: float
    size: int
    response: Future[Response]


def _discard(_sample: Sample) -> None:
    """Metrics are not collected."""


class Handler:
    """Parses TorchServe's rows into generations, runs the scheduler, and replies to every row."""

    def initialize(self, context: Context) -> None:
        """Load the models; a failure is one sentence in the worker's log, and the worker exits.

        Raises:
            RuntimeError: the model cannot be loaded; TorchServe expects this type.
        """
        try:
            config = parse_handler(context.model_yaml_config.get("handler"), "the archive's model YAML")
            served = Served(context.model_name, context.manifest["model"]["modelVersion"])
            self.start(config, load_models, served, sender(context.metrics))
        except SpecserveError as error:
            logger.error("specserve cannot load: %s", error)
            raise RuntimeError(str(error)) from error

    def start(
        self,
        config: HandlerConfig,
        load: Callable[[HandlerConfig], Models],
        served: Served,
        send: Callable[[Sample], None] = _discard,
    ) -> None:
        """Load the models and begin to serve; `send` is given every sample of a metric.

        Raises:
            SpecserveError: a model cannot be loaded, or the trace cannot be written.
        """
        receive_bodies_as_bytes()
        self._config = config
        thread = engine_thread()
        models = thread.submit(load, config).result()
        self._models = models
        self._model_ids = list(dict.fromkeys([config.model_id, served.model]))
        self._created = int(time.time())
        self._tokenizer = Tokenizer(models.vocabulary, config)
        self._holdback = Holdback(config.speculation.holdback)
        self._metrics = Metrics(served, self._holdback, send, time.monotonic)
        self._draft_model_up = models.drafters.has_model
        self._max_wait_seconds = max_wait(config.max_wait_ms, models.drafters.controller.target)
        self._scheduler = Scheduler(
            models.target,
            models.drafters,
            prefill_rows=config.prefill_rows,
            idle_tokens=config.idle_tokens,
            max_wait_seconds=self._max_wait_seconds,
            begin_masks=models.grammars.begin_round,
            observers=[self._metrics, *_traces(config, models, served)],
        )
        self._loop = EngineLoop(self._scheduler, thread, config.time_slice_ms / 1000)
        self._parser = ThreadPoolExecutor(1, "parser")
        self._parsing: dict[str, Parsing] = {}
        self._responses: dict[str, Response] = {}

    def handle(self, data: list[dict[str, Any]], context: Context) -> list[str]:
        """Take new requests, drop cancelled ones, and reply to every row with what a slice of rounds has produced.

        The slice was mostly started by the call before; then new requests take part in the next one.
        """
        called = time.monotonic()
        rows = dict(context.request_ids)
        present = set(rows.values())
        if present != self._responses.keys():
            self._loop.interrupt()
        was_started = self._loop.join()
        self._drop_cancelled(present)
        new = self._parse_new(data, context, called)
        if not was_started:
            self._loop.run()
        replies = [""] * len(data)
        context.stopping_criteria = [whole_response] * len(data)
        for index, request_id in rows.items():
            response = self._responses.get(request_id)
            if response is None or (was_started and request_id in new and not response.done):
                # It is not parsed yet, or had no round yet: an error of its first round can still be its status. A row
                # that is left out comes again.
                del context.request_ids[index]
            else:
                replies[index] = self._reply(context, index, response)
        self._emit_metrics()
        self._loop.start()
        return replies

    def _parse_new(self, data: list[dict[str, Any]], context: Context, called: float) -> set[str]:
        """Parse new requests and submit what they ask for; returns the ids of those that are parsed.

        It waits for the parser for a limited time, so that no request holds up running streams.
        """
        unanswered = {i: identity for i, identity in context.request_ids.items() if identity not in self._responses}
        new = {index: request_id for index, request_id in unanswered.items() if request_id not in self._parsing}
        for index, request_id in new.items():
            route = (context.get_request_header(index, "url_path") or "").strip("/")
            size = sum(map(len, data[index].values()))
            self._parsing[request_id] = Parsing(called, size, self._parse(request_id, route, data[index], size))
        until = time.monotonic() + (_PARSE_SECONDS if new or not self._scheduler.busy else 0.0)
        parsed: set[str] = set()
        for request_id in unanswered.values():
            arrival, size, future = self._parsing[request_id]
            try:
                response = future.result(timeout=max(0.0, until - time.monotonic()))
            except TimeoutError:
                continue
            del self._parsing[request_id]
            response.status_deadline = arrival + (_STATUS_SECONDS if size <= _LONG_BODY else 0.0)
            self._responses[request_id] = response
            for generation in response.generations:
                if not generation.done:
                    self._scheduler.submit(generation, time.monotonic() - arrival)
            parsed.add(request_id)
        return parsed

    def _parse(self, request_id: str, route: str, row: dict[str, Any], size: int) -> Future[Response]:
        """Parse in the parser thread what is to be generated; other routes ask the scheduler and stay in this one."""
        others = self._parsing.values()
        waiting = sum(other.size for other in others if other.size > _LONG_BODY and not other.response.done())
        answered: Future[Response] = Future()
        if route not in _GENERATING:
            answered.set_result(self._respond(request_id, route, row))
        elif size > _LONG_BODY and waiting and waiting + size > _MAX_WAITING_BYTES:
            answered.set_result(JsonResponse(_BUSY.status, _BUSY.body()))
        else:
            return self._parser.submit(self._respond, request_id, route, row)
        return answered

    def _drop_cancelled(self, present: set[str]) -> None:
        """Forget the requests without a row: they are answered, or their clients have left."""
        for request_id in self._parsing.keys() - present:
            self._parsing.pop(request_id).response.cancel()
        for request_id in self._responses.keys() - present:
            response = self._responses.pop(request_id)
            self._cancel(response)
            for generation in response.generations:
                generation.free()

    def _cancel(self, response: Response) -> None:
        for generation in response.generations:
            self._scheduler.cancel(generation)

    def _respond(self, request_id: str, route: str, row: dict[str, Any]) -> Response:
        """The response to a request, to be generated or complete; whatever is wrong with it is an error response."""
        try:
            return self._route(request_id, route, row)
        except RequestError as error:
            return JsonResponse(error.status, error.body())
        except Exception:
            logger.exception("specserve: request %s could not be parsed", request_id)
            failure = RequestError("The server failed to read this request.", status=500, kind="server_error")
            return JsonResponse(failure.status, failure.body())

    def _route(self, request_id: str, route: str, row: dict[str, Any]) -> Response:
        if route in ("", "v1/completions"):
            return self._complete(request_id, row)
        if route == "v1/chat/completions":
            return self._chat(request_id, row)
        if route == "v1/models":
            return JsonResponse(200, model_list(self._model_ids, self._created))
        if route == "v1/speculation":
            return JsonResponse(200, self._speculation_status())
        if route == "v1/openapi.json":
            return JsonResponse(200, openapi())
        if route.startswith("v1/models/"):
            model = self._known_model(route.removeprefix("v1/models/"))
            return JsonResponse(200, model_object(model, self._created))
        raise RequestError(
            f"There is no route '{route}'; this server has v1/completions, v1/chat/completions, v1/models, "
            "v1/speculation and v1/openapi.json.",
            status=404,
            code="unknown_url",
        )

    def _speculation_status(self) -> SpeculationStatus:
        models = self._models
        return speculation_status(
            self._config,
            target=models.vocabulary,
            draft=models.draft,
            kernels=models.kernels,
            invariance=models.invariance,
            controller=models.drafters.controller,
            draft_model_up=models.drafters.has_model,
            live=self._scheduler.running,
            waiting=self._scheduler.waiting,
            holdback=self._holdback.speedup(),
            max_wait_seconds=self._max_wait_seconds,
        )

    def _complete(self, request_id: str, row: dict[str, Any]) -> Response:
        request = parse_body(_body(row), CompletionRequest)
        prompts = self._tokenizer.completion(request)
        return self._generate(CompletionResponse, request, prompts, request_id)

    def _chat(self, request_id: str, row: dict[str, Any]) -> Response:
        request = parse_body(_body(row), ChatRequest)
        if self._models.chat_template is None:
            raise RequestError("This model has no chat template; use v1/completions.", code="unsupported_value")
        text = self._models.chat_template.render([message.for_template() for message in request.messages])
        return self._generate(ChatResponse, request, [self._tokenizer.chat(text)], request_id)

    def _generate(
        self, kind: type[GenerationResponse[AnyRequest]], request: AnyRequest, prompts: list[Prompt], request_id: str
    ) -> Response:
        """The response to a valid request, with its generations before their first round."""
        models = self._models
        model = self._known_model(request.model)
        candidates = to_generations(
            request,
            prompts,
            models.vocabulary,
            models.grammars,
            self._config,
            request_id=request_id,
            held_back=self._holdback.draw(),
        )
        return kind(request, prompts, candidates, vocabulary=models.vocabulary, request_id=request_id, model=model)

    def _known_model(self, model: str | None) -> str:
        if model is None:
            return self._model_ids[0]
        if model not in self._model_ids:
            raise RequestError(
                f"The model '{model}' does not exist here; this server has {', '.join(self._model_ids)}.",
                status=404,
                param="model",
                code="model_not_found",
            )
        return model

    def _reply(self, context: Context, index: int, response: Response) -> str:
        """What this call sends to one row: a whole response, a chunk, the last chunk, or nothing yet."""
        if response.error:
            self._cancel(response)
        # An error before the first event is a response with a status, even to a request for a stream.
        if (
            isinstance(response, GenerationResponse)
            and response.streams
            and (response.status_sent or not response.error)
        ):
            return self._next_chunk(context, index, response)
        if not response.done:
            return self._wait(context, index, response)
        if response.status_sent:
            context.stopping_criteria[index] = last_chunk
        else:
            self._send_status(context, index, response, "application/json")
        return json.dumps(response.body())

    def _wait(self, context: Context, index: int, response: Response) -> str:
        """Send nothing until the status deadline, and then empty chunks, which let TorchServe notice a client's leave.

        The first of them sends the status, which is left open for as long as most responses take; a later failure is an
        error object under status 200.
        """
        if response.status_sent or time.monotonic() >= response.status_deadline:
            self._send_status(context, index, response, "application/json")
            context.stopping_criteria[index] = more_to_come
        else:
            # The row comes again with the next call, its status still open.
            del context.request_ids[index]
        return ""

    def _next_chunk(self, context: Context, index: int, response: GenerationResponse[Any]) -> str:
        """A stream's next events; an empty chunk lets TorchServe notice that the client has left."""
        # A first chunk that is also the last one would hang the client, so an empty one comes before it.
        last = response.status_sent and response.done
        events = response.next_events() if response.status_sent or not response.done else ""
        self._send_status(context, index, response, "text/event-stream")
        context.stopping_criteria[index] = last_chunk if last else more_to_come
        return events

    def _send_status(self, context: Context, index: int, response: Response, content_type: str) -> None:
        """Send the status and the content type, once."""
        if not response.status_sent:
            context.set_response_status(response.status, PHRASES[response.status], index)
            context.set_response_content_type(index, content_type)
            response.status_sent = True

    def _emit_metrics(self) -> None:
        models = self._models
        if self._draft_model_up != models.drafters.has_model:
            # The speed-up with the draft model is not the one without it.
            self._draft_model_up = models.drafters.has_model
            self._holdback.reset()
        self._metrics.emit(
            Gauges(
                self._scheduler.running,
                self._scheduler.waiting,
                self._config.sequences,
                own_kernels=models.kernels.variant is not None,
                draft_model=None if self._config.draft is None else self._draft_model_up,
            )
        )


def _traces(config: HandlerConfig, models: Models, served: Served) -> list[Observer]:
    """The configured trace, in a file of this model version."""
    trace = config.trace
    if trace is None:
        return []
    path = trace.directory / f"{served.model}-{served.version}.jsonl"
    text = models.vocabulary.piece if trace.text else None
    try:
        return [Trace(path, share=trace.share, mebibytes=trace.mebibytes, text=text)]
    except OSError as error:
        raise ConfigError(
            f"`handler.trace.directory`: {trace.directory} cannot be written ({error.strerror})."
        ) from error


def _body(row: dict[str, Any]) -> object:
    if "body" not in row and "data" not in row:
        raise RequestError("The request has no JSON body; send it with content-type application/json.")
    return row.get("body", row.get("data"))
