"""The routes of the API, and the response of each."""

import hashlib
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from threading import Lock
from urllib.parse import quote

import specserve
from specserve.api.anthropic import CountRequest, MessagesRequest, MessagesResponse
from specserve.api.body import Body, Json
from specserve.api.chat_template import chat_template_of
from specserve.api.choices import ChatResponse, CompletionResponse
from specserve.api.infill import InfillRequest, InfillResponse, infill_prompt
from specserve.api.openapi import openapi
from specserve.api.parse import parse_body
from specserve.api.prompt import Tokenizer
from specserve.api.request_schema import ChatRequest, CompletionRequest
from specserve.api.resolve import resolve
from specserve.api.response import GenerationResponse, Response
from specserve.api.responses import Keep, ResponsesRequest, ResponsesResponse
from specserve.config import HandlerConfig
from specserve.core.loading import Models
from specserve.core.scheduler import Scheduler
from specserve.engine.kernels import calls
from specserve.errors import RequestError
from specserve.observability.control_group import Holdback
from specserve.shares import Shares

logger = logging.getLogger(__name__)

# Decimals of the numbers of v1/speculation.
_DIGITS = 4
# The response header that names ignored fields, and how many different names the log warns of.
_IGNORED_HEADER = "x-specserve-ignored"
_MAX_WARNINGS = 100


Generating = CompletionRequest | ChatRequest | ResponsesRequest | CountRequest | InfillRequest
# By route, its requests and responses; the bare URL of a model takes completions.
_GENERATING: dict[str, tuple[type[Generating], type[GenerationResponse]]] = {
    "": (CompletionRequest, CompletionResponse),
    "v1/completions": (CompletionRequest, CompletionResponse),
    "v1/chat/completions": (ChatRequest, ChatResponse),
    "v1/responses": (ResponsesRequest, ResponsesResponse),
    "v1/messages": (MessagesRequest, MessagesResponse),
    "v1/messages/count_tokens": (CountRequest, MessagesResponse),
    "infill": (InfillRequest, InfillResponse),
}


@dataclass(frozen=True)
class Incoming:
    """A request as it comes in, whatever brought it."""

    request_id: str  # TorchServe's
    route: str  # the path of its URL after the model's version
    body: object  # bytes or a decoded JSON value; None without one
    size: int  # of all that came, in bytes
    headers: Mapping[str, str]  # by name in lower case; several of one name are joined by commas

    @cached_property
    def client(self) -> str:
        """The client, as a hash of the API key, which itself is kept nowhere; clients see nothing of each other."""
        key = self.headers.get("authorization") or self.headers.get("x-api-key", "")
        return hashlib.sha256(key.encode()).hexdigest()[:16]


class Routes:
    """Maps requests to responses, which are complete or to be generated.

    Routes that generate nothing ask the scheduler, so they must not run during a round.
    """

    def __init__(
        self, config: HandlerConfig, models: Models, scheduler: Scheduler, holdback: Holdback, name: str
    ) -> None:
        self._config = config
        self._models = models
        self._scheduler = scheduler
        self._holdback = holdback
        self._model_ids = list(dict.fromkeys([config.model_id, name]))
        self._created = int(time.time())
        # The messages of the last responses and the answers; the parser's threads read, TorchServe's writes.
        self._conversations: Shares[str, list[Json]] = Shares(config.responses_store)
        self._lock = Lock()
        self._warned_of: set[str] = set()
        self._template = chat_template_of(models.vocabulary)
        self._tokenizer = Tokenizer(models.vocabulary, config)
        self._describing: dict[str, Callable[[], Json]] = {
            "v1/models": lambda: {"object": "list", "data": [self._model(name) for name in self._model_ids]},
            "v1/speculation": self._speculation,
            "v1/openapi.json": cache(self._document),
        }

    @staticmethod
    def generates(route: str) -> bool:
        """Whether a route tokenizes, and is parsed in a thread of its own."""
        return route in _GENERATING

    @staticmethod
    def refusal(route: str, error: RequestError) -> Response:
        """Return the response to a refused request, in the protocol of its route."""
        _, kind = _GENERATING.get(route, (None, Response))
        return Response(kind.error_body(error), status=error.status)

    def respond(self, incoming: Incoming) -> Response:
        """Return the response to a request, or raise the RequestError by which it is refused."""
        route = incoming.route
        if route in _GENERATING:
            if incoming.body is None:
                raise RequestError(
                    "The request has no JSON body. Send it with the header 'Content-Type: application/json' (curl: "
                    "--json instead of -d): TorchServe reads what is announced as a form itself, and passes on fields."
                )
            request = parse_body(incoming.body, _GENERATING[route][0])
            return self._named(request, self._generate(request, incoming))
        if route in self._describing:
            return Response(self._describing[route]())
        if route.startswith("v1/models/"):
            return Response(self._model(self._known_model(route.removeprefix("v1/models/"))))
        *most, last = filter(None, [*_GENERATING, *self._describing])
        message = f"There is no route '{route}': this server generates text only, and has {', '.join(most)} and {last}."
        raise RequestError(message, status=404, code="unknown_url")

    def _document(self) -> Json:
        posted = {route: kind for route, (kind, _) in _GENERATING.items() if route}
        return openapi(posted | dict.fromkeys([*self._describing, "v1/models/{id}"]))

    def _speculation(self) -> Json:
        """Return what this server runs, its measured costs and its learned acceptance; nothing is measured now."""
        config, models, scheduler = self._config, self._models, self._scheduler
        limits, controller, holdback = config.speculation, models.drafters.controller, self._holdback.speedup()
        pairs = (("target", config.target, models.vocabulary), ("draft", config.draft, models.draft))
        costs = {"target": controller.target_cost, "draft": controller.draft_cost}
        return {
            "object": "speculation",
            "model": config.model_id,
            "version": specserve.__version__,
            "threads": models.placement.usable.threads,
            "cores": list(models.placement.cores),
            "models": {
                role: {
                    "file": None if file.path is None else file.path.name,
                    "sha256": file.sha256,
                    "description": model.description(),
                    **dict(zip(("parameters", "bytes"), model.weights, strict=True)),
                }
                for role, file, model in pairs
                if file is not None and model is not None
            },
            "batch_invariance": {"exact": models.left.exact, "sentence": models.left.sentence},
            "left_to_llama_cpp": models.left._asdict(),
            "kernels": {**models.kernels._asdict(), **dict(zip(("products", "attentions"), calls(), strict=True))},
            # Of passes after short texts.
            "costs": {
                role: {
                    "rows": list(cost.table.rows),
                    "milliseconds_near": [round(1000 * seconds, _DIGITS) for seconds in cost.table.seconds[0]],
                }
                for role, cost in costs.items()
                if cost is not None
            },
            # Acceptance rate by drafter and kind of sampling, from the least confident drafts to the most.
            "controller": {
                f"{drafter}, {'sampled' if sampled else 'greedy'}": [round(rate, _DIGITS) for rate in rates]
                for (drafter, sampled), rates in controller.acceptance.learned.items()
            },
            "limits": {
                **limits.model_dump(include={"mode", "gamma", "max_gamma"}),
                "context_length": config.context_length,
                "max_wait_ms": round(1000 * scheduler.max_wait_seconds),
                "cache_tokens": config.cache_tokens,
            },
            "sequences": {"live": scheduler.running, "waiting": scheduler.queued, "slots": config.sequences},
            "draft_model_up": models.drafters.model is not None,
            "holdback": None if holdback is None else holdback._asdict(),
        }

    def _model(self, name: str) -> Json:
        """Return one entry of v1/models; vLLM calls the context length `max_model_len`."""
        known = {"id": name, "object": "model", "created": self._created, "owned_by": "specserve"}
        return known | {"max_model_len": self._config.context_length, "exact": self._models.left.exact}

    def _named(self, request: Body, response: Response) -> Response:
        """Name the ignored fields of a request in a response header, and each of them once in the log."""
        # Commas, line breaks and everything beyond ASCII are percent-encoded.
        names = [quote(name, safe="[]$", errors="replace") for name in (*request.ignored, *response.ignored)]
        if names:
            response.headers[_IGNORED_HEADER] = ", ".join(names)
        for name in (re.sub(r"\[\d+\]", "[]", name) for name in names):
            if name not in self._warned_of and len(self._warned_of) < _MAX_WARNINGS:
                self._warned_of.add(name)
                logger.warning("specserve: requests have the field '%s', which is ignored", name)
        return response

    def _generate(self, request: Generating, incoming: Incoming) -> Response:
        """Return the response to a valid request, with its sequences; it may be drawn for the control group."""
        model, vocabulary, template = self._known_model(request.model), self._models.vocabulary, self._template
        kind: Callable[..., Response] = _GENERATING[incoming.route][1]
        asked: CompletionRequest | ChatRequest
        if isinstance(request, InfillRequest):
            kind, asked = partial(kind, request), request.completion()
        elif isinstance(request, ResponsesRequest):
            messages, keep = self._conversation(request, incoming.client)
            kind, asked = partial(kind, request, messages, keep), request.chat(messages)
        else:
            asked = request.chat() if isinstance(request, CountRequest) else request
        if isinstance(request, InfillRequest):
            prompts = [infill_prompt(request, self._tokenizer, vocabulary)]
        elif isinstance(asked, CompletionRequest):
            prompts = self._tokenizer.completion(asked)
        elif template is None:
            raise RequestError("This model has no chat template; use v1/completions.", code="unsupported_value")
        else:
            prompts = [self._tokenizer.chat(asked, template.prompt)]
        if incoming.route == "v1/messages/count_tokens":
            return Response({"input_tokens": len(prompts[0].tokens)})
        form, sequences = resolve(
            asked,
            prompts,
            vocabulary,
            self._models.grammars,
            self._config,
            calls=template.calls if template else None,
            thinking=template.thinking if template else None,
            request_id=incoming.request_id,
            client=incoming.client,
            held_back=self._holdback.draw(),
        )
        return kind(form, sequences, vocabulary=vocabulary, request_id=incoming.request_id, model=model)

    def _conversation(self, request: ResponsesRequest, client: str) -> tuple[list[Json], Keep | None]:
        """Return a request's messages and those before, and what keeps them; raise a 400 if those are not kept."""
        previous, size = request.previous_response_id, self._conversations.limit

        def keep(response_id: str, messages: list[Json]) -> None:
            with self._lock:
                self._conversations.put(client, response_id, messages)

        with self._lock:
            before = [] if previous is None else self._conversations.use(client, previous)
        if before is None:
            kept = f"the last {size} responses, and not '{previous}'" if size else "no responses"
            sentence = f"This server keeps {kept}: send the whole conversation as 'input'."
            raise RequestError(sentence, param="previous_response_id", code="previous_response_not_found")
        return before + request.messages(), keep if size and request.store is not False else None

    def _known_model(self, model: str | None) -> str:
        """Return the model id that a request names, or the default; raise a 404 if there is no such model."""
        if model in (None, *self._model_ids):
            return model or self._model_ids[0]
        sentence = f"The model '{model}' does not exist here; this server has {', '.join(self._model_ids)}."
        raise RequestError(sentence, status=404, param="model", code="model_not_found")
