"""The routes of the API: what each responds to the body of a request."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import quote

import specserve
from specserve.api.anthropic import CountRequest, MessagesRequest, MessagesResponse
from specserve.api.body import Body
from specserve.api.chat_template import chat_template_of
from specserve.api.incoming import Incoming
from specserve.api.infill import InfillRequest, InfillResponse, infill_prompt
from specserve.api.openapi import openapi
from specserve.api.parse import AnyRequest, parse_body
from specserve.api.prompt import Prompt, Tokenizer
from specserve.api.request_schema import ChatRequest, CompletionRequest
from specserve.api.resolve import ResponseForm, resolve
from specserve.api.response import ChatResponse, CompletionResponse, GenerationResponse, Response
from specserve.api.response_schema import Model, ModelList, ResponseObject, SpeculationStatus
from specserve.api.response_store import ResponseStore
from specserve.api.responses import ResponsesRequest, ResponsesResponse
from specserve.config import HandlerConfig, ModelConfig, processor
from specserve.core.generation import Generation
from specserve.core.loading import Models
from specserve.core.scheduler import Scheduler
from specserve.engine.kernels import calls
from specserve.engine.llama_model import LlamaModel, build_description
from specserve.errors import Contained, RequestError
from specserve.observability.control_group import Holdback
from specserve.speculation.cost import Cost

logger = logging.getLogger(__name__)

# Whose versions v1/speculation tells, and decimals of its numbers.
_PACKAGES = ("llama-cpp-python", "llguidance", "numpy", "pydantic", "torchserve")
_DIGITS = 4
# The response header that names the fields that were ignored, and how many names the log warns of.
_IGNORED_HEADER = "x-specserve-ignored"
_MAX_WARNINGS = 100
# Routes of others that need another kind of model, with or without "v1/", by their first part.
_OTHER_MODELS = ("embedding", "embeddings", "rerank", "reranking", "score", "audio", "images", "moderations")


class Routes:
    """Makes the response to a request: one to be generated, or one that is complete.

    Args:
        config: of the server.
        models: as loaded.
        scheduler: asked by routes that do not generate, so these may not run beside a round.
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
        self._generating: dict[str, Callable[[Incoming], Response]] = {
            "": self._complete,
            "v1/completions": self._complete,
            "v1/chat/completions": self._chat,
            "v1/responses": self._create_response,
            "v1/messages": self._create_message,
            "v1/messages/count_tokens": self._count_tokens,
            "infill": self._infill,
        }
        self._describing: dict[str, Callable[[], ResponseObject | Mapping[str, Any]]] = {
            "v1/models": lambda: ModelList(object="list", data=[self._model(name) for name in self._model_ids]),
            "v1/speculation": self._speculation,
            "v1/openapi.json": openapi,
        }

    def generates(self, route: str) -> bool:
        """Tell whether a route generates text, or reads one as those that do."""
        return route in self._generating

    @staticmethod
    def refusal(route: str, error: RequestError) -> Response:
        """Make the response to a request that is refused, in the shape of its route's protocol."""
        others: dict[str, type[Response]] = {"v1/messages": MessagesResponse, "v1/responses": ResponsesResponse}
        return others.get(route.removesuffix("/count_tokens"), Response).refusal(error)

    def respond(self, incoming: Incoming) -> Response:
        """Make the response to a request; whatever is wrong with that is an error response."""
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
            return self._generating[route](incoming)
        if route in self._describing:
            return Response(self._describing[route]())
        if route.startswith("v1/models/"):
            return Response(self._model(self._known_model(route.removeprefix("v1/models/"))))
        if route.removeprefix("v1/").partition("/")[0] in _OTHER_MODELS:
            raise RequestError(
                f"This server generates text only, so it has no route '{route}'; run another server with a model for "
                "that, for example llama.cpp's llama-server --embeddings for embeddings.",
                status=404,
                code="unknown_url",
            )
        *most, last = filter(None, [*self._generating, *self._describing])
        message = f"There is no route '{route}'; this server has {', '.join(most)} and {last}."
        raise RequestError(message, status=404, code="unknown_url")

    def _speculation(self) -> SpeculationStatus:
        """Tell what this server runs, what that costs here, and what its controller has learned, without measuring."""
        config, models, scheduler = self._config, self._models, self._scheduler
        limits, controller, holdback = config.speculation, models.drafters.controller, self._holdback.speedup()
        pairs = (("target", config.target, models.vocabulary), ("draft", config.draft, models.draft))
        costs = {"target": controller.target_cost, "draft": controller.draft_cost}
        return SpeculationStatus(
            object="speculation",
            model=config.model_id,
            versions={"specserve": specserve.__version__, **{name: _version(name) for name in _PACKAGES}},
            build=build_description(),
            processor=next((line for line in processor().splitlines() if line.startswith("model name")), ""),
            threads=models.costs.placement.usable.threads,
            cores=list(models.costs.placement.cores),
            models={
                role: _model_facts(file, model) for role, file, model in pairs if file is not None and model is not None
            },
            batch_invariance={"sentence": "not measured"}
            if models.invariance is None
            else {**models.invariance._asdict(), "sentence": models.invariance.sentence},
            kernels={
                **models.kernels._asdict(),
                "prefetch": tuple(map(str, models.kernels.prefetch)),
                **calls()._asdict(),
            },
            costs={role: _table(cost) for role, cost in costs.items() if cost is not None},
            # By drafter and kind of sampling: how often drafts are accepted, those of least confidence first.
            controller={
                f"{drafter}, {'sampled' if sampled else 'greedy'}": [round(rate, _DIGITS) for rate in rates]
                for (drafter, sampled), rates in controller.acceptance.learned.items()
            },
            limits={
                "mode": limits.mode,
                "gamma": limits.gamma,
                "max_gamma": limits.max_gamma,
                "context_length": config.context_length,
                "max_wait_ms": round(1000 * scheduler.max_wait_seconds),
                "cache_tokens": config.cache_tokens,
            },
            sequences={"live": scheduler.running, "waiting": scheduler.queued, "slots": config.sequences},
            draft_model_up=models.drafters.model is not None,
            holdback=None if holdback is None else holdback._asdict(),
        )

    def _model(self, name: str) -> Model:
        """Make one entry of v1/models."""
        length = self._config.context_length
        return Model(id=name, object="model", created=self._created, owned_by="specserve", max_model_len=length)

    def _parsed(self, incoming: Incoming, kind: type[AnyRequest]) -> AnyRequest:
        return parse_body(incoming.body, kind)

    def _named(self, request: Body, response: Response) -> Response:
        """Name what was ignored of a request in its response's headers, and once in the log."""
        # What is no letter, digit or mark of a path is percent-encoded: a comma, a line break, and all but ASCII.
        names = [quote(name, safe="[]$", errors="replace") for name in (*request.ignored, *response.ignored)]
        if names:
            response.headers[_IGNORED_HEADER] = ", ".join(names)
        for name in (re.sub(r"\[\d+\]", "[]", name) for name in names):
            if name not in self._warned_of and len(self._warned_of) < _MAX_WARNINGS:
                self._warned_of.add(name)
                logger.warning("specserve: requests have the field '%s', which is ignored", name)
        return response

    def _complete(self, incoming: Incoming) -> Response:
        request = self._parsed(incoming, CompletionRequest)
        prompts = self._tokenizer.completion(request)
        return self._named(request, self._generate(CompletionResponse, request, prompts, incoming))

    def _chat(self, incoming: Incoming) -> Response:
        request = self._parsed(incoming, ChatRequest)
        return self._named(request, self._generate(ChatResponse, request, [self._chat_prompt(request)], incoming))

    def _create_response(self, incoming: Incoming) -> Response:
        request = self._parsed(incoming, ResponsesRequest)
        messages = self._store.messages(incoming.client, request.previous_response_id) + request.messages()
        chat = request.chat(messages)
        keeps = self._config.responses_store > 0 and request.store is not False
        keep = partial(self._store.put, incoming.client) if keeps else None
        kind = partial(ResponsesResponse, request, messages, keep)
        return self._named(request, self._generate(kind, chat, [self._chat_prompt(chat)], incoming))

    def _create_message(self, incoming: Incoming) -> Response:
        request = self._parsed(incoming, MessagesRequest)
        chat = request.chat()
        return self._named(request, self._generate(MessagesResponse, chat, [self._chat_prompt(chat)], incoming))

    def _count_tokens(self, incoming: Incoming) -> Response:
        request = self._parsed(incoming, CountRequest)
        chat = request.chat()
        self._known_model(chat.model)
        return self._named(request, Response({"input_tokens": len(self._chat_prompt(chat).tokens)}))

    def _chat_prompt(self, request: ChatRequest) -> Prompt:
        if self._template is None:
            raise RequestError("This model has no chat template; use v1/completions.", code="unsupported_value")
        return self._tokenizer.chat(request, self._template.prompt)

    def _infill(self, incoming: Incoming) -> Response:
        request, models = self._parsed(incoming, InfillRequest), self._models
        prompt = infill_prompt(request, self._tokenizer, models.vocabulary)
        _, [[generation]] = self._resolved(request.completion(prompt), [prompt], incoming)
        generation.warm_cache()
        return self._named(request, InfillResponse(request, generation, model=self._known_model(request.model)))

    def _generate(
        self,
        kind: Callable[..., GenerationResponse],
        request: CompletionRequest | ChatRequest,
        prompts: list[Prompt],
        incoming: Incoming,
    ) -> Response:
        """Make the response to a valid request, with its generations before their first round."""
        model = self._known_model(request.model)
        form, candidates = self._resolved(request, prompts, incoming)
        return kind(form, candidates, vocabulary=self._models.vocabulary, request_id=incoming.request_id, model=model)

    def _resolved(
        self, request: CompletionRequest | ChatRequest, prompts: list[Prompt], incoming: Incoming
    ) -> tuple[ResponseForm, list[list[Generation]]]:
        """Resolve a valid request, which may be drawn for the control group."""
        models, held_back = self._models, self._holdback.draw()
        return resolve(
            request,
            prompts,
            models.vocabulary,
            models.grammars,
            self._config,
            calls=None if self._template is None else self._template.calls,
            thinking=None if self._template is None else self._template.thinking,
            request_id=incoming.request_id,
            client=incoming.client,
            held_back=held_back,
        )

    def _known_model(self, model: str | None) -> str:
        """Return the id that a request has named, or the first one.

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


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _model_facts(file: ModelConfig, model: LlamaModel) -> dict[str, str | int | None]:
    parameters, size = model.weights
    return {
        "file": None if file.path is None else file.path.name,
        "sha256": file.sha256,
        "description": model.description(),
        "parameters": parameters,
        "bytes": size,
    }


def _table(cost: Cost) -> dict[str, list[int] | list[float]]:
    near, *_, far = cost.table.seconds
    return {
        "rows": list(cost.table.rows),
        "kv_len": list(cost.table.kv_len),
        "milliseconds_near": [round(1000 * seconds, _DIGITS) for seconds in near],
        "milliseconds_far": [round(1000 * seconds, _DIGITS) for seconds in far],
        "milliseconds_now": [round(1000 * cost.seconds(rows, 0), _DIGITS) for rows in cost.table.rows],
    }
