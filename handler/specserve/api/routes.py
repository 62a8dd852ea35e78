"""The routes of the API, and the response of each."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import quote

import specserve
from specserve.api.anthropic import CountRequest, MessagesRequest, MessagesResponse
from specserve.api.body import Body
from specserve.api.chat_template import chat_template_of
from specserve.api.choices import ChatResponse, CompletionResponse
from specserve.api.incoming import Incoming
from specserve.api.infill import InfillRequest, InfillResponse, infill_prompt
from specserve.api.openapi import openapi
from specserve.api.parse import parse_body
from specserve.api.prompt import Prompt, Tokenizer
from specserve.api.request_schema import ChatRequest, CompletionRequest
from specserve.api.resolve import ResponseForm, resolve
from specserve.api.response import GenerationResponse, Json, Response
from specserve.api.response_store import ResponseStore
from specserve.api.responses import ResponsesRequest, ResponsesResponse
from specserve.config import HandlerConfig, ModelConfig
from specserve.core.generation import Generation
from specserve.core.loading import Models
from specserve.core.scheduler import Scheduler
from specserve.engine.kernels import calls
from specserve.engine.llama_model import LlamaModel
from specserve.errors import Contained, RequestError
from specserve.observability.control_group import Holdback
from specserve.speculation.costs import PassCosts

logger = logging.getLogger(__name__)

# Decimals of the numbers of v1/speculation.
_DIGITS = 4
# The response header that names ignored fields, and how many different names the log warns of.
_IGNORED_HEADER = "x-specserve-ignored"
_MAX_WARNINGS = 100


class Routes:
    """Maps requests to responses, which are complete or to be generated.

    Args:
        config: of the server.
        models: as loaded.
        scheduler: asked by routes that generate nothing; they must not run during an engine step.
        holdback: draws the control group.
        name: of the model in TorchServe, which is one of its ids.
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
        self._store = ResponseStore(config.responses_store)
        self._warned_of: set[str] = set()
        self._template = chat_template_of(models.vocabulary)
        self._tokenizer = Tokenizer(models.vocabulary, config)
        # The bare URL of a model takes completions.
        self._generating: dict[str, tuple[type[Body], Callable[[Any, Incoming], Response]]] = {
            "": (CompletionRequest, self._complete),
            "v1/completions": (CompletionRequest, self._complete),
            "v1/chat/completions": (ChatRequest, self._chat),
            "v1/responses": (ResponsesRequest, self._create_response),
            "v1/messages": (MessagesRequest, self._create_message),
            "v1/messages/count_tokens": (CountRequest, self._count_tokens),
            "infill": (InfillRequest, self._infill),
        }
        self._describing: dict[str, Callable[[], Json]] = {
            "v1/models": lambda: {"object": "list", "data": [self._model(name) for name in self._model_ids]},
            "v1/speculation": self._speculation,
            "v1/openapi.json": openapi,
        }

    def generates(self, route: str) -> bool:
        """Whether a route tokenizes, and is parsed in a thread of its own."""
        return route in self._generating

    @staticmethod
    def refusal(route: str, error: RequestError) -> Response:
        """Return the response to a refused request, in the protocol of its route."""
        others: dict[str, type[Response]] = {"v1/messages": MessagesResponse, "v1/responses": ResponsesResponse}
        return others.get(route.removesuffix("/count_tokens"), Response).refusal(error)

    def respond(self, incoming: Incoming) -> Response:
        """Return the response to a request; any failure becomes an error response."""
        errors: list[RequestError] = []
        with Contained(incoming.request_id, errors.append):
            return self._respond(incoming)
        return self.refusal(incoming.route, *errors)

    def _respond(self, incoming: Incoming) -> Response:
        route = incoming.route
        if route in self._generating:
            if incoming.body is None:
                raise RequestError(
                    "The request has no JSON body. Send it with the header 'Content-Type: application/json' (curl: "
                    "--json instead of -d): TorchServe reads what is announced as a form itself, and passes on fields."
                )
            kind, respond = self._generating[route]
            request = parse_body(incoming.body, kind)
            return self._named(request, respond(request, incoming))
        if route in self._describing:
            return Response(self._describing[route]())
        if route.startswith("v1/models/"):
            return Response(self._model(self._known_model(route.removeprefix("v1/models/"))))
        *most, last = filter(None, [*self._generating, *self._describing])
        message = f"There is no route '{route}': this server generates text only, and has {', '.join(most)} and {last}."
        raise RequestError(message, status=404, code="unknown_url")

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
                role: _model_facts(file, model) for role, file, model in pairs if file is not None and model is not None
            },
            "batch_invariance": {"sentence": models.repeats},
            "kernels": {**models.kernels._asdict(), **dict(zip(("products", "attentions"), calls(), strict=True))},
            "costs": {role: _table(cost) for role, cost in costs.items() if cost is not None},
            # Acceptance rate by drafter and kind of sampling, from the least confident drafts to the most.
            "controller": {
                f"{drafter}, {'sampled' if sampled else 'greedy'}": [round(rate, _DIGITS) for rate in rates]
                for (drafter, sampled), rates in controller.acceptance.learned.items()
            },
            "limits": {
                "mode": limits.mode,
                "gamma": limits.gamma,
                "max_gamma": limits.max_gamma,
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
        return known | {"max_model_len": self._config.context_length}

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

    def _complete(self, request: CompletionRequest, incoming: Incoming) -> Response:
        return self._generate(CompletionResponse, request, self._tokenizer.completion(request), incoming)

    def _chat(self, request: ChatRequest, incoming: Incoming) -> Response:
        return self._generate(ChatResponse, request, [self._chat_prompt(request)], incoming)

    def _create_response(self, request: ResponsesRequest, incoming: Incoming) -> Response:
        messages = self._store.messages(incoming.client, request.previous_response_id) + request.messages()
        chat = request.chat(messages)
        keeps = self._config.responses_store > 0 and request.store is not False
        keep = partial(self._store.put, incoming.client) if keeps else None
        kind = partial(ResponsesResponse, request, messages, keep)
        return self._generate(kind, chat, [self._chat_prompt(chat)], incoming)

    def _create_message(self, request: MessagesRequest, incoming: Incoming) -> Response:
        chat = request.chat()
        return self._generate(MessagesResponse, chat, [self._chat_prompt(chat)], incoming)

    def _count_tokens(self, request: CountRequest, _incoming: Incoming) -> Response:
        chat = request.chat()
        self._known_model(chat.model)
        return Response({"input_tokens": len(self._chat_prompt(chat).tokens)})

    def _chat_prompt(self, request: ChatRequest) -> Prompt:
        if self._template is None:
            raise RequestError("This model has no chat template; use v1/completions.", code="unsupported_value")
        return self._tokenizer.chat(request, self._template.prompt)

    def _infill(self, request: InfillRequest, incoming: Incoming) -> Response:
        prompt = infill_prompt(request, self._tokenizer, self._models.vocabulary)
        _, [[generation]] = self._resolved(request.completion(prompt), [prompt], incoming)
        generation.warm_cache()
        return InfillResponse(request, generation, model=self._known_model(request.model))

    def _generate(
        self,
        kind: Callable[..., GenerationResponse],
        request: CompletionRequest | ChatRequest,
        prompts: list[Prompt],
        incoming: Incoming,
    ) -> Response:
        """Return the response to a valid request, with its generations."""
        model = self._known_model(request.model)
        form, candidates = self._resolved(request, prompts, incoming)
        return kind(form, candidates, vocabulary=self._models.vocabulary, request_id=incoming.request_id, model=model)

    def _resolved(
        self, request: CompletionRequest | ChatRequest, prompts: list[Prompt], incoming: Incoming
    ) -> tuple[ResponseForm, list[list[Generation]]]:
        """Resolve a valid request; it may be drawn for the control group."""
        template = self._template
        return resolve(
            request,
            prompts,
            self._models.vocabulary,
            self._models.grammars,
            self._config,
            calls=template.calls if template else None,
            thinking=template.thinking if template else None,
            request_id=incoming.request_id,
            client=incoming.client,
            held_back=self._holdback.draw(),
        )

    def _known_model(self, model: str | None) -> str:
        """Return the model id that a request names, or the default.

        Raises:
            RequestError: 404; there is no such model.
        """
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


def _model_facts(file: ModelConfig, model: LlamaModel) -> dict[str, str | int | None]:
    parameters, size = model.weights
    return {
        "file": None if file.path is None else file.path.name,
        "sha256": file.sha256,
        "description": model.description(),
        "parameters": parameters,
        "bytes": size,
    }


def _table(cost: PassCosts) -> dict[str, list[int] | list[float]]:
    near, *_, far = cost.table.seconds
    return {
        "rows": list(cost.table.rows),
        "kv_len": list(cost.table.kv_len),
        "milliseconds_near": [round(1000 * seconds, _DIGITS) for seconds in near],
        "milliseconds_far": [round(1000 * seconds, _DIGITS) for seconds in far],
        "milliseconds_now": [round(1000 * cost.seconds(rows, 0), _DIGITS) for rows in cost.table.rows],
    }
