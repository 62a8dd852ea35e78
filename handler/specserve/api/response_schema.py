"""The responses of all routes as pydantic models: OpenAI's, with the field `speculation`.

Responses are built from them and v1/openapi.json describes them. A field with a default is written only where it was
given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypedDict

from specserve.sequence import Source, Verification

# Why an answer ended: by itself or a stop string, at its last allowed token, or with calls.
FinishReason = Literal["stop", "length", "tool_calls"]


def _without_defaults(schema: dict[str, Any]) -> None:
    """Leave out what stands in place of a field that is not written."""
    for described in schema.get("properties", {}).values():
        described.pop("default", None)


class ResponseObject(BaseModel):
    """A JSON object of a response; fields that were not given are not written."""

    model_config = ConfigDict(json_schema_extra=_without_defaults)

    def written(self) -> dict[str, Any]:
        """Return the fields that were given, in order."""
        fields, given = vars(self), self.model_fields_set
        return fields if len(given) == len(fields) else {name: fields[name] for name in fields if name in given}


_ENCODER = json.JSONEncoder(default=ResponseObject.written)


def as_json(body: ResponseObject | Mapping[str, Any]) -> str:
    """Write an object and those in it as JSON text; pydantic's own dump would copy every number first."""
    return _ENCODER.encode(body)


# The type of a field that is not written; a client never sees null.
_Absent = SkipJsonSchema[None]


class CompletionLogprobs(ResponseObject):
    """Log-probabilities of v1/completions, by position."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


# Dictionaries, since one token of a response may have 21 of them, and models take more than twice as long.
class TopLogprob(TypedDict):
    """An alternative token of v1/chat/completions."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """An output token of v1/chat/completions."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseObject):
    """Log-probabilities of v1/chat/completions."""

    content: list[TokenLogprob]
    refusal: None


# The pieces of a choice's text and who wrote each, if the request asks for it; `echo` repeats a prompt.
Sources = list[tuple[str, Literal[Source, "prompt"]]]


class CompletionChoice(ResponseObject):
    """A choice of v1/completions, whole or a chunk of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    sources: Sources | _Absent = None


class CalledFunction(ResponseObject):
    """A function, and the JSON text of its arguments; the chunks of a call after its first have only more of these."""

    name: str | _Absent = None
    arguments: str


class ToolCall(ResponseObject):
    """A call of a tool, whole or a chunk of it, which has an index."""

    index: int | _Absent = None
    id: str | _Absent = None
    type: Literal["function"] | _Absent = None
    function: CalledFunction


class ChatMessage(ResponseObject):
    """The message of a choice."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | _Absent = None
    tool_calls: list[ToolCall] | _Absent = None


class ChatChoice(ResponseObject):
    """A choice of v1/chat/completions."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    sources: Sources | _Absent = None


class ChatDelta(ResponseObject):
    """The next part of a message."""

    role: Literal["assistant"] | _Absent = None
    content: str | _Absent = None
    reasoning_content: str | _Absent = None
    tool_calls: list[ToolCall] | _Absent = None


class ChatChunkChoice(ResponseObject):
    """A chunk of a choice of v1/chat/completions."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    sources: Sources | _Absent = None


class PromptDetails(ResponseObject):
    """The prompt tokens that needed no prefill."""

    cached_tokens: int


class CompletionDetails(ResponseObject):
    """The tokens of the client's prediction that were drafted, and of a model that reasons those of its reasoning."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int | _Absent = None


class Usage(ResponseObject):
    """Numbers of tokens: every prompt once, and every candidate of `best_of`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class DrafterCounts(ResponseObject):
    """Drafted and accepted tokens of one drafter."""

    drafted: int
    accepted: int


class AlternativeCounts(ResponseObject):
    """Tokens that the target read as alternatives to drafts, and those of them that it adopted."""

    read: int
    adopted: int


class Seconds(ResponseObject):
    """The request's share of the time; `plain_estimate` is the estimate for decoding without drafts."""

    prefill: float
    draft: float
    target: float
    other: float
    plain_estimate: float


class Speculation(ResponseObject):
    """Statistics of a request's speculative decoding."""

    mode: Literal["auto", "off", "fixed"]
    verification: Verification
    rounds: int
    drafted_tokens: int
    accepted_tokens: int
    mean_acceptance_length: float
    gamma_histogram: dict[str, int]
    drafters: dict[str, DrafterCounts]
    alternatives: AlternativeCounts
    seconds: Seconds
    estimated_speedup: float | None


Choice = TypeVar("Choice", CompletionChoice, ChatChoice, ChatChunkChoice)


class GeneratedObject(ResponseObject, Generic[Choice]):
    """A whole response of a route that generates, or an event of its stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    speculation: Speculation | _Absent = None


class Completion(GeneratedObject[CompletionChoice]):
    """The response of v1/completions."""

    object: Literal["text_completion"]
    usage: Usage
    speculation: Speculation


class CompletionChunk(GeneratedObject[CompletionChoice]):
    """An event of a stream of v1/completions; the last one may have the totals and no choices."""

    object: Literal["text_completion"]


class ChatCompletion(GeneratedObject[ChatChoice]):
    """The response of v1/chat/completions."""

    object: Literal["chat.completion"]
    usage: Usage
    speculation: Speculation


class ChatCompletionChunk(GeneratedObject[ChatChunkChoice]):
    """An event of a stream of v1/chat/completions; the last one may have the totals and no choices."""

    object: Literal["chat.completion.chunk"]


class Model(ResponseObject):
    """One entry of v1/models."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """Tokens of prompt and answer, by vLLM's name."""


class ModelList(ResponseObject):
    """The response of v1/models."""

    object: Literal["list"]
    data: list[Model]


class SpeculationStatus(ResponseObject):
    """The response of v1/speculation, for operators."""

    object: Literal["speculation"]
    model: str
    versions: dict[str, str]
    build: str
    processor: str
    threads: int
    cores: list[int]
    models: dict[str, dict[str, str | int | None]]
    batch_invariance: dict[str, float | str | None]
    kernels: dict[str, str | int | tuple[str, ...] | None]
    costs: dict[str, dict[str, list[int] | list[float]]]
    controller: dict[str, list[float]]
    limits: dict[str, int | str]
    sequences: dict[str, int]
    draft_model_up: bool
    holdback: dict[str, float] | None


class ErrorDetail(ResponseObject):
    """What is wrong, and in which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseObject):
    """The response to a request that is refused or fails."""

    error: ErrorDetail


class FrontEndError(ResponseObject):
    """TorchServe's own error, of a request that does not reach the handler: no token, a full queue, a large body."""

    code: int
    type: str
    message: str
