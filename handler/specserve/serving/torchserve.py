"""The TorchServe handler under continuous batching: the only module, with `contract`, that knows how TorchServe talks.

`handle` is called again and again while requests live. A row is named by its request id; its body is there until
something is said of the row. Every call says for every row whether its answer is whole, a chunk, or the last chunk.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from specserve.config import HandlerConfig, parse_handler
from specserve.errors import RequestError, SpecserveError
from specserve.observability.metrics import Sample, Served
from specserve.serving.answers import Answer, ChatAnswer, CompletionAnswer, model_list, model_object
from specserve.serving.contract import (
    PHRASES,
    Context,
    last_chunk,
    leave_bodies_unread,
    more_to_come,
    nothing_special,
    sender,
)
from specserve.serving.loading import Models, load_models
from specserve.serving.openai import Prompt, Tokenizer, to_generations
from specserve.serving.openapi import openapi
from specserve.serving.requests import ChatRequest, CompletionRequest
from specserve.serving.responses import Speculator
from specserve.serving.scheduler import Scheduler, longest_wait
from specserve.serving.slices import Slices, engine_thread
from specserve.serving.status import speculator
from specserve.serving.telemetry import Telemetry
from specserve.serving.validation import AnyRequest, parse_body

logger = logging.getLogger(__name__)

# So long the status of a whole answer stays open; most are complete by then. Meanwhile TorchServe hands the body over
# in every call, and reads a megabyte in up to 30 ms: a longer body (in bytes) leaves its status open for no time.
_SETTLED_AFTER_SECONDS = 2.0
_LONG_BODY = 64 * 1024

# So long a call waits for requests to be read: most take a few milliseconds. Compiling a grammar may take half a second
# and tokenising half a megabyte a whole one, and streams go on beside that.
_READING_SECONDS = 0.1

# The routes that ask for an answer of the model.
_GENERATING = frozenset({"", "v1/completions", "v1/chat/completions"})

AnyAnswer = TypeVar("AnyAnswer", bound=Answer[Any])


@dataclass
class WholeAnswer:
    """An answer that is complete: an error, a light route, or what was written to its end."""

    status: int
    body: Mapping[str, Any]

    @classmethod
    def refusing(cls, error: RequestError) -> WholeAnswer:
        """The answer that an error is."""
        return cls(error.status, error.body())


@dataclass
class Exchange:
    """One live request, when its status will be sent at the latest, and whether it has been."""

    answer: WholeAnswer | Answer[Any]
    settles: float
    opened: bool = False

    @property
    def unfinished(self) -> bool:
        """Whether more is to come than is known."""
        return isinstance(self.answer, Answer) and not self.answer.done


def _keep_to_oneself(_sample: Sample) -> None:
    """Nobody asks for metrics."""


class Handler:
    """Turns TorchServe's rows into generations, runs the scheduler, and hands the texts back."""

    def initialize(self, context: Context) -> None:
        """Load the models; a failure is one sentence in the worker's log, and the worker ends.

        Raises:
            RuntimeError: TorchServe's way to hear that the model cannot be loaded.
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
        send: Callable[[Sample], None] = _keep_to_oneself,
    ) -> None:
        """Load the models, and begin to serve; `send` is told of every sample of a metric.

        Raises:
            SpecserveError: a model cannot be loaded, or the trace cannot be written.
        """
        leave_bodies_unread()
        self._config = config
        thread = engine_thread()
        models = thread.submit(load, config).result()
        self._models = models
        self._model_ids = list(dict.fromkeys([config.model_id, served.model]))
        self._created = int(time.time())
        self._tokenizer = Tokenizer(models.vocabulary, config)
        self._telemetry = Telemetry(config, models, served, send)
        self._max_wait_seconds = longest_wait(config.max_wait_ms, models.drafters.controller.target)
        self._scheduler = Scheduler(
            models.target,
            models.drafters,
            prefill_rows=config.prefill_rows,
            idle_tokens=config.idle_tokens,
            max_wait_seconds=self._max_wait_seconds,
            begin_masks=models.grammars.begin_round,
            observers=self._telemetry.observers,
            plain_rounds=self._telemetry.plain_rounds,
        )
        self._slices = Slices(self._scheduler, thread, config.time_slice_ms / 1000)
        self._exchanges: dict[str, Exchange] = {}
        # When those came that are not read yet, and what becomes of them.
        self._unread: dict[str, float] = {}
        self._reader = ThreadPoolExecutor(1, "reader")
        self._readings: dict[str, Future[WholeAnswer | Answer[Any]]] = {}

    def handle(self, data: list[dict[str, Any]], context: Context) -> list[str]:
        """Take in new requests, forget vanished ones, and answer every row by what a slice of decoding has brought.

        That slice was mostly begun in the call before; then new requests have a part in the next one.
        """
        called = time.monotonic()
        rows = dict(context.request_ids)
        present = set(rows.values())
        if present != self._exchanges.keys():
            self._slices.hurry()
        was_ahead = self._slices.finish()
        self._forget_vanished(present)
        self._unread = {identity: self._unread.get(identity, called) for identity in present - self._exchanges.keys()}
        fresh = self._read_some(data, context)
        if not was_ahead:
            self._slices.run()
        answers = [""] * len(data)
        context.stopping_criteria = [nothing_special] * len(data)
        for index, identity in rows.items():
            exchange = self._exchanges.get(identity)
            if exchange is None or (was_ahead and identity in fresh and exchange.unfinished):
                # Nothing was read, and its body comes again; or nothing was tried, and what its first round finds
                # wrong with a request shall still be its status.
                del context.request_ids[index]
            else:
                answers[index] = self._answer(context, index, exchange)
        self._telemetry.emit(self._scheduler)
        self._slices.ahead()
        return answers

    def _read_some(self, data: list[dict[str, Any]], context: Context) -> set[str]:
        """Read requests that have come, in a thread of its own, and open those that are read; returns which.

        Whatever a request is made of, its reading makes streams wait for no longer than a call waits for it.
        """
        unread = [(index, identity) for index, identity in context.request_ids.items() if identity in self._unread]
        come = [(index, identity) for index, identity in unread if identity not in self._readings]
        for index, identity in come:
            route = (context.get_request_header(index, "url_path") or "").strip("/")
            self._readings[identity] = self._begin_reading(identity, route, data[index])
        until = time.monotonic() + (_READING_SECONDS if come or not self._scheduler.busy else 0.0)
        opened: set[str] = set()
        for index, identity in unread:
            try:
                answer = self._readings[identity].result(timeout=max(0.0, until - time.monotonic()))
            except TimeoutError:
                continue
            del self._readings[identity]
            came = self._unread.pop(identity)
            self._start_generations(answer, came)
            self._exchanges[identity] = Exchange(answer, came + _open_seconds(context, index))
            opened.add(identity)
        return opened

    def _begin_reading(self, identity: str, route: str, row: dict[str, Any]) -> Future[WholeAnswer | Answer[Any]]:
        """What is asked of a model is read aside; what is asked of the scheduler can be asked only here."""
        held_back = self._telemetry.holdback.chooses()
        if route in _GENERATING:
            return self._reader.submit(self._read, identity, route, row, held_back=held_back)
        answered: Future[WholeAnswer | Answer[Any]] = Future()
        answered.set_result(self._read(identity, route, row, held_back=held_back))
        return answered

    def _forget_vanished(self, present: set[str]) -> None:
        """A request that is missing from the rows was cancelled by its client."""
        for identity in self._readings.keys() - present:
            self._readings.pop(identity).cancel()
        for identity in self._exchanges.keys() - present:
            answer = self._exchanges.pop(identity).answer
            if isinstance(answer, Answer):
                self._cancel(answer)
                for generation in answer.generations:
                    generation.sequence.forget_all_but_tokens()

    def _cancel(self, answer: Answer[Any]) -> None:
        for generation in answer.generations:
            self._scheduler.cancel(generation)

    def _read(self, identity: str, route: str, row: dict[str, Any], *, held_back: bool) -> WholeAnswer | Answer[Any]:
        """Validate a request; what is wrong with it is answered to it alone."""
        try:
            return self._route(identity, route, row, held_back=held_back)
        except RequestError as error:
            return WholeAnswer.refusing(error)
        except Exception:
            logger.exception("specserve: request %s could not be read", identity)
            failure = RequestError("The server failed to read this request.", status=500, kind="server_error")
            return WholeAnswer.refusing(failure)

    def _start_generations(self, answer: WholeAnswer | Answer[Any], came: float) -> None:
        """Start what a request that came at this moment asks for."""
        for generation in answer.generations if isinstance(answer, Answer) else ():
            if not generation.done:
                self._scheduler.submit(generation, time.monotonic() - came)

    def _route(self, identity: str, route: str, row: dict[str, Any], *, held_back: bool) -> WholeAnswer | Answer[Any]:
        if route in ("", "v1/completions"):
            return self._complete(identity, row, held_back=held_back)
        if route == "v1/chat/completions":
            return self._chat(identity, row, held_back=held_back)
        if route == "v1/models":
            return WholeAnswer(200, model_list(self._model_ids, self._created))
        if route == "v1/speculation":
            return WholeAnswer(200, self._speculator())
        if route == "v1/openapi.json":
            return WholeAnswer(200, openapi())
        if route.startswith("v1/models/"):
            model = self._known_model(route.removeprefix("v1/models/"))
            return WholeAnswer(200, model_object(model, self._created))
        raise RequestError(
            f"There is no route '{route}'; this server has v1/completions, v1/chat/completions, v1/models, "
            "v1/speculation and v1/openapi.json.",
            status=404,
            code="unknown_url",
        )

    def _speculator(self) -> Speculator:
        comparisons = self._telemetry.holdback.speedup(), self._telemetry.plain_rounds.speedup()
        return speculator(self._config, self._models, self._scheduler, comparisons, self._max_wait_seconds)

    def _complete(self, identity: str, row: dict[str, Any], *, held_back: bool) -> CompletionAnswer:
        request = parse_body(_body(row), CompletionRequest)
        prompts = self._tokenizer.completion(request)
        return self._start(CompletionAnswer, request, prompts, identity, held_back=held_back)

    def _chat(self, identity: str, row: dict[str, Any], *, held_back: bool) -> ChatAnswer:
        request = parse_body(_body(row), ChatRequest)
        if self._models.chat_template is None:
            raise RequestError("This model has no chat template; use v1/completions.", code="unsupported_value")
        text = self._models.chat_template.render([message.for_template() for message in request.messages])
        return self._start(ChatAnswer, request, [self._tokenizer.chat(text)], identity, held_back=held_back)

    def _start(
        self,
        kind: Callable[..., AnyAnswer],
        request: AnyRequest,
        prompts: list[Prompt],
        identity: str,
        *,
        held_back: bool,
    ) -> AnyAnswer:
        """What a valid request asks for, before the first round of it."""
        models = self._models
        model = self._known_model(request.model)
        candidates = to_generations(
            request,
            prompts,
            models.vocabulary,
            models.grammars,
            self._config,
            identity=identity,
            held_back=held_back,
        )
        return kind(
            request,
            prompts,
            candidates,
            vocabulary=models.vocabulary,
            identity=identity,
            model=model,
        )

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

    def _answer(self, context: Context, index: int, exchange: Exchange) -> str:
        """What this call says to one row: its whole answer, a chunk, the last chunk, or nothing yet."""
        answer = exchange.answer
        if isinstance(answer, Answer) and answer.error:
            self._cancel(answer)
            if not (exchange.opened and answer.streams):
                answer = WholeAnswer.refusing(answer.error)
        if isinstance(answer, Answer):
            if answer.streams:
                return self._next_chunk(context, index, exchange, answer)
            if not answer.done:
                return self._wait(context, index, exchange)
            answer = WholeAnswer(200, answer.body())
        if exchange.opened:
            context.stopping_criteria[index] = last_chunk
        else:
            context.set_response_status(answer.status, PHRASES[answer.status], index)
            context.set_response_content_type(index, "application/json")
        return json.dumps(answer.body)

    def _wait(self, context: Context, index: int, exchange: Exchange) -> str:
        """Say nothing yet, and after a while not even that: empty chunks let TorchServe notice a client's leave.

        They settle the status, so it is left open for as long as most answers take; what goes wrong later, be it the
        model or a grammar that becomes too costly, is an error under that status.
        """
        if exchange.opened or time.monotonic() >= exchange.settles:
            self._open_with(context, index, exchange, "application/json")
            context.stopping_criteria[index] = more_to_come
        else:
            # A row left out of the answer waits on, its status still open.
            del context.request_ids[index]
        return ""

    def _next_chunk(self, context: Context, index: int, exchange: Exchange, answer: Answer[Any]) -> str:
        """A stream's next events; an empty chunk lets TorchServe notice that the client has left."""
        # A first chunk that is also the last one would hang the client: then an empty one opens the stream.
        last = exchange.opened and answer.done
        events = answer.next_events() if exchange.opened or not answer.done else ""
        self._open_with(context, index, exchange, "text/event-stream")
        context.stopping_criteria[index] = last_chunk if last else more_to_come
        return events

    def _open_with(self, context: Context, index: int, exchange: Exchange, content_type: str) -> None:
        """Send the status, once."""
        if not exchange.opened:
            context.set_response_status(200, PHRASES[200], index)
            context.set_response_content_type(index, content_type)
            exchange.opened = True


def _open_seconds(context: Context, index: int) -> float:
    """How long the status of a row's answer stays open."""
    # As clients spell it; a body in chunks has none, and may be long.
    spelled = (context.get_request_header(index, name) for name in ("content-length", "Content-Length"))
    length = next((int(value) for value in spelled if value and value.isdecimal()), math.inf)
    return _SETTLED_AFTER_SECONDS if length <= _LONG_BODY else 0.0


def _body(row: dict[str, Any]) -> object:
    if "body" not in row and "data" not in row:
        raise RequestError("The request has no JSON body; send it with content-type application/json.")
    return row.get("body", row.get("data"))
