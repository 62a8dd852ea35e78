"""Parses requests: validates their bodies, applies the server's limits, compiles grammars, and makes generations."""

from __future__ import annotations

import json
import math
from typing import Any, Literal

from pydantic import ValidationError

from specserve.config import HandlerConfig
from specserve.engine.base import Vocabulary
from specserve.errors import RequestError
from specserve.grammar.compiler import GrammarCompiler
from specserve.grammar.constraint import Constraint
from specserve.observability.records import family_label
from specserve.sequence import Group, RequestInfo, SamplingParams, SpeculationParams, Verification
from specserve.serving.detokenizer import with_control_tokens
from specserve.serving.generation import Generation
from specserve.serving.openai.body import DISAGREEMENT, UNKNOWN_FIELD
from specserve.serving.openai.logprobs import MAX_RESPONSE_BYTES, ResponseSize
from specserve.serving.openai.prompt import BYTES_PER_TOKEN, Prompt, too_long
from specserve.serving.openai.request_schema import (
    MAX_CHOICES,
    MAX_STOPS,
    AnyRequest,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    JsonObject,
    JsonSchema,
    SpeculationOptions,
    text_of,
)

# Bytes of JSON per log-probability, about; a response that is too large by this estimate is refused at once.
_SCORE_BYTES = 80
# Lists and objects of a body, counted by their brackets, those in strings included. Python makes them one by one, and
# no other thread runs meanwhile: 260,000 of them take 0.1 s. A prompt of as many characters fills most contexts.
_MAX_BRACKETS = 65_536

_NOT_SERVED = frozenset({"tools", "tool_choice", "functions", "function_call", "tool_calls", "modalities", "audio"})
# What is right, by the field's name or by pydantic's type of error.
_EXPECTED = {
    "prompt": f"must be a string of valid Unicode, a list of token ids, or a list of up to {MAX_CHOICES} of either",
    "stop": f"must be a string or a list of at most {MAX_STOPS} strings, none of them empty or over 1000 characters",
    "messages": "must be a list of {role, content}, role being system, developer, user or assistant and content text",
    "content": "must be a string of valid Unicode, or a list of parts of type 'text'",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
}


def parse_body(body: object, kind: type[AnyRequest]) -> AnyRequest:
    """Validate a request's body as TorchServe hands it over: a mapping, or bytes where it was not JSON.

    Raises:
        RequestError: 400; `param` names the field that is wrong.
    """
    if isinstance(body, bytes | bytearray | str):
        text = body if isinstance(body, str) else bytes(body).decode("latin-1")
        if text.count("[") + text.count("{") > _MAX_BRACKETS:
            raise RequestError(f"The request's body has more than {_MAX_BRACKETS} opening brackets.")
        try:
            body = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"The request's body is not valid JSON: {error}.") from error
    if not isinstance(body, dict):
        raise RequestError("The request's body must be a JSON object; send it with content-type application/json.")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False, include_input=False)) from error


def _explain(errors: list[Any]) -> RequestError:
    """The RequestError for errors of pydantic's: one sentence that names the field."""
    # A field that may have several types has an error for each; the type that fits best is wrong furthest inside. A
    # message with what is not served is mostly without content, too.
    error = max(
        (each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]),
        key=lambda each: (not _NOT_SERVED.isdisjoint(each["loc"]), len(each["loc"])),
    )
    if error["type"] == DISAGREEMENT:
        param, sentence = error["ctx"]["param"], error["ctx"]["sentence"]
        return RequestError(f"Invalid request: {sentence}.", param=param, code="invalid_value")
    # pydantic adds the types it tried, such as "list[TextPart]".
    path = [part for part in error["loc"] if isinstance(part, int) or part.isidentifier()]
    field, *inside = [*path, error["ctx"]["field"]] if error["type"] == UNKNOWN_FIELD else path
    if field == "response_format":
        inside = inside[1:]  # the first part is the format's type
    nested = ("speculation", "stream_options", "messages", "response_format", "prediction")
    inside = inside if field in nested else []
    param = field + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inside)
    if error["type"] == UNKNOWN_FIELD:
        return RequestError(f"Unknown field: '{param}'.", param=param, code="unknown_parameter")
    if error["type"] == "missing":
        return RequestError(f"The field '{param}' is missing.", param=param, code="missing_required_parameter")
    if error["type"] == "none_required" or not _NOT_SERVED.isdisjoint([field, *inside]):
        return RequestError(f"'{param}' is not supported by this server.", param=param, code="unsupported_value")
    message = error["msg"][0].lower() + error["msg"][1:]
    expected = _EXPECTED.get(str([field, *inside][-1]), _EXPECTED.get(error["type"], message))
    return RequestError(f"Invalid value for '{param}': {expected}.", param=param, code="invalid_value")


def to_generations(
    request: GenerationRequest,
    prompts: list[Prompt],
    vocabulary: Vocabulary,
    grammars: GrammarCompiler,
    config: HandlerConfig,
    *,
    request_id: str = "",
    held_back: bool = False,
) -> list[list[Generation]]:
    """The sequences of a request: by prompt, the candidates of which the best are returned.

    A request that is `held_back` was drawn for the control group, which it joins unless it sets `speculation`.

    Raises:
        RequestError: 400; a prompt, a grammar or `speculation` does not fit.
    """
    _check_caps(request, prompts, config)
    sampling = _sampling(request, vocabulary)
    # Only requests that leave speculation to the server, and the server to the controller, are randomised.
    randomised = request.speculation is None and config.speculation.mode == "auto"
    group: Group = "holdback" if randomised and held_back else _mode(request, config)
    family = family_label((request.metadata or {}).get("prompt_family", ""))
    info = RequestInfo(request_id, family, group, randomised)
    speculation = _speculation(request, sampling, config, group)
    grammar = _grammar(request, grammars)
    prediction = "" if request.prediction is None else text_of(request.prediction.content)
    # As far as an output can reach.
    most = config.context_length
    predicted = vocabulary.encode(prediction[: BYTES_PER_TOKEN * most], begin=False)[:most] if prediction else []
    scored = request.scored
    if scored is None and request.candidates > request.choices:
        scored = 0  # the best candidates are those with the highest log-probability
    size = ResponseSize(
        vocabulary,
        chat=isinstance(request, ChatRequest),
        sources=request.wants_sources,
        choices=request.choices,
        initial=_echoed(request, prompts),
    )
    stops, marks = with_control_tokens(request.stop or (), vocabulary)
    result = [
        [
            Generation(
                prompt.tokens,
                sampling,
                speculation,
                vocabulary,
                stops,
                marks=marks,
                info=info,
                index=number * request.candidates + choice,
                size=size,
                max_tokens=_max_tokens(request, prompt, config),
                choice=choice,
                top_logprobs=scored,
                scores_prompt=request.scores_prompt and choice == 0,
                constraint=None if grammar is None else grammar.fork(),
                prediction=predicted,
                keeps_sources=request.wants_sources,
            )
            for choice in range(request.candidates)
        ]
        for number, prompt in enumerate(prompts)
    ]
    _check_response_size(request, prompts, result)
    return result


def _max_tokens(request: GenerationRequest, prompt: Prompt, config: HandlerConfig) -> int:
    """The most output tokens, as far as the context has room after the prompt."""
    # A prompt without output may fill it.
    rest = config.context_length - len(prompt.tokens)
    if rest < (request.most_tokens != 0):
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        raise too_long(param, config.context_length, str(len(prompt.tokens)))
    most = rest if config.max_tokens is None else min(rest, config.max_tokens)
    return most if request.most_tokens is None else min(request.most_tokens, most)


def _check_caps(request: GenerationRequest, prompts: list[Prompt], config: HandlerConfig) -> None:
    """Refuse what exceeds the operator's caps."""
    asked, cap = request.most_tokens, config.max_tokens
    if asked is not None and cap is not None and asked > cap:
        chat = isinstance(request, ChatRequest) and request.max_completion_tokens is not None
        raise RequestError.invalid(
            "max_completion_tokens" if chat else "max_tokens", f"An answer has at most {cap} tokens here."
        )
    if len(prompts) * request.candidates > config.max_answers:
        raise RequestError.invalid(
            "n" if request.candidates == request.choices else "best_of",
            f"A request may ask for at most {config.max_answers} answers in all on this server.",
        )


def _echoed(request: GenerationRequest, prompts: list[Prompt]) -> int:
    """Bytes of JSON that echoed prompts take in all choices."""
    if not (isinstance(request, CompletionRequest) and request.echo):
        return 0
    times = request.choices * (1 + request.wants_sources)
    return times * sum(len(json.dumps(prompt.text)) for prompt in prompts)


def _check_response_size(request: GenerationRequest, prompts: list[Prompt], groups: list[list[Generation]]) -> None:
    """Refuse a request whose response would be too large for TorchServe."""
    positions = sum(group[0].max_tokens for group in groups)
    if request.scores_prompt:
        positions += sum(group[0].prompt_length for group in groups)
    scores = 0 if request.scored is None else positions * (1 + request.scored) * _SCORE_BYTES
    # Scores spell the prompt's tokens again.
    echoed = (1 + request.scores_prompt) * _echoed(request, prompts)
    size = request.choices * scores + echoed
    if size > MAX_RESPONSE_BYTES:
        chat = isinstance(request, ChatRequest)
        raise RequestError.invalid(
            "top_logprobs" if chat else "logprobs" if scores > echoed else "echo",
            f"The log-probabilities and echoed prompts of this request may take {size // 2**20} MB, over "
            f"{MAX_RESPONSE_BYTES // 2**20}: ask for fewer answers, tokens or alternatives, or set 'max_tokens'.",
        )


def _sampling(request: GenerationRequest, vocabulary: Vocabulary) -> SamplingParams:
    never = vocabulary.end_tokens() if request.ignore_eos else []
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=max(0, request.top_k or 0),
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        seed=request.seed,
        logit_bias=(*_biases(request.logit_bias or {}, vocabulary), *((token, -math.inf) for token in never)),
        repetition_penalty=request.repetition_penalty or 1.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
    )


def _biases(biases: dict[str, float], vocabulary: Vocabulary) -> tuple[tuple[int, float], ...]:
    for token in biases:
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocabulary.size):
            raise RequestError.invalid(
                "logit_bias",
                f"'logit_bias' names tokens by their ids, 0 to {vocabulary.size - 1}; '{token}' is none.",
            )
    return tuple((int(token), bias) for token, bias in biases.items())


def _grammar(request: GenerationRequest, grammars: GrammarCompiler) -> Constraint | None:
    if request.grammar is not None:
        return grammars.gbnf(request.grammar)
    if isinstance(request.response_format, JsonSchema):
        return grammars.json_schema(request.response_format.json_schema.json_schema)
    if isinstance(request.response_format, JsonObject):
        return grammars.json_object()
    return None


def _mode(request: GenerationRequest, config: HandlerConfig) -> Literal["auto", "fixed", "off"]:
    """The request's speculation mode; `auto` is the server's."""
    if request.speculation is not None and request.speculation.mode != "auto":
        return request.speculation.mode
    return config.speculation.mode


def _speculation(
    request: GenerationRequest, sampling: SamplingParams, config: HandlerConfig, group: Group
) -> SpeculationParams:
    options = request.speculation or SpeculationOptions()
    limits = config.speculation
    drafter = None if options.drafter == "auto" else options.drafter
    if config.draft is None and drafter == "model":
        raise RequestError.invalid("speculation.drafter", "This server has no draft model.")
    verification = options.verification or _verification(sampling)
    if group == "auto":
        return SpeculationParams(limits.max_gamma, verification, drafter, "auto")
    if group != "fixed":
        return SpeculationParams(0, verification, drafter, "off")
    gamma = limits.gamma if options.gamma is None else options.gamma
    if gamma > limits.max_gamma:
        raise RequestError.invalid(
            "speculation.gamma", f"'speculation.gamma' may be at most {limits.max_gamma} on this server."
        )
    return SpeculationParams(gamma, verification, drafter, "fixed")


def _verification(sampling: SamplingParams) -> Verification:
    """`coupled` with a seed, so that the text repeats; else the rule that accepts most. Greedy, all are the same."""
    if sampling.temperature == 0:
        return "token"  # the name that describes `accept_equal` best
    return "block" if sampling.seed is None else "coupled"
