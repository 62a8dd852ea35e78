"""The responses of all routes as typed dictionaries: OpenAI's, with the field `speculation`."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from specserve.sequence import Source
from specserve.serving.generation import FinishReason


class CompletionLogprobs(TypedDict):
    """Log-probabilities of v1/completions, by position."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TopLogprob(TypedDict):
    """An alternative token of v1/chat/completions."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """An output token of v1/chat/completions."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of v1/chat/completions."""

    content: list[TokenLogprob]
    refusal: None


class Sourced(TypedDict):
    """The pieces of a choice's text and who wrote each, if the request asks for it; `echo` repeats a prompt."""

    sources: NotRequired[list[tuple[str, Literal[Source, "prompt"]]]]


class CompletionChoice(Sourced):
    """A choice of v1/completions, whole or a chunk of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class ChatMessage(TypedDict):
    """The message of a choice."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Sourced):
    """A choice of v1/chat/completions."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatDelta(TypedDict):
    """The next part of a message."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChatChunkChoice(Sourced):
    """A chunk of a choice of v1/chat/completions."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class PromptDetails(TypedDict):
    """The prompt tokens that needed no prefill."""

    cached_tokens: int


class CompletionDetails(TypedDict):
    """The tokens of the client's prediction that were drafted."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """Numbers of tokens: every prompt once, and every candidate of `best_of`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class DrafterCounts(TypedDict):
    """Drafted and accepted tokens of one drafter."""

    drafted: int
    accepted: int


class AlternativeCounts(TypedDict):
    """Tokens that the target read as alternatives to drafts, and those of them that it adopted."""

    read: int
    adopted: int


class Seconds(TypedDict):
    """The request's share of the time; `plain_estimate` is the estimate for decoding without drafts."""

    prefill: float
    draft: float
    target: float
    other: float
    plain_estimate: float


class Speculation(TypedDict):
    """Statistics of a request's speculative decoding."""

    mode: Literal["auto", "off", "fixed"]
    verification: Literal["token", "block", "coupled"]
    rounds: int
    drafted_tokens: int
    accepted_tokens: int
    mean_acceptance_length: float
    gamma_histogram: dict[str, int]
    drafters: dict[str, DrafterCounts]
    alternatives: AlternativeCounts
    seconds: Seconds
    estimated_speedup: float | None


class Totals(TypedDict):
    """Usage and speculation statistics of a request."""

    usage: Usage
    speculation: Speculation


class Completion(Totals):
    """The response of v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]


class CompletionChunk(TypedDict):
    """An event of a stream of v1/completions; the last one may have the totals and no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    speculation: NotRequired[Speculation]


class ChatCompletion(Totals):
    """The response of v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]


class ChatCompletionChunk(TypedDict):
    """An event of a stream of v1/chat/completions; the last one may have the totals and no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    speculation: NotRequired[Speculation]


class Model(TypedDict):
    """One entry of v1/models."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(TypedDict):
    """The response of v1/models."""

    object: Literal["list"]
    data: list[Model]


class SpeculationStatus(TypedDict):
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


class ErrorDetail(TypedDict):
    """What is wrong, and in which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(TypedDict):
    """The response to a request that is refused or fails."""

    error: ErrorDetail


class FrontEndError(TypedDict):
    """TorchServe's own error, of a request that does not reach the handler: no token, a full queue, a large body."""

    code: int
    type: str
    message: str
