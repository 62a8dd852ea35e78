"""The shapes of what clients read, OpenAI's and beside them the account of speculation."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

FinishReason = Literal["stop", "length"]


class CompletionLogprobs(TypedDict):
    """Log-probabilities as v1/completions tells them, place by place."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TopLogprob(TypedDict):
    """A token that was possible, by v1/chat/completions."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that was written, by v1/chat/completions."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities as v1/chat/completions tells them."""

    content: list[TokenLogprob]
    refusal: None


class CompletionChoice(TypedDict):
    """One answer of v1/completions, or the next piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class ChatMessage(TypedDict):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    """One answer of v1/chat/completions."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatDelta(TypedDict):
    """The next piece of what the assistant says."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChatChunkChoice(TypedDict):
    """The next piece of one answer of v1/chat/completions."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class PromptDetails(TypedDict):
    """How much of the prompts needed no reading."""

    cached_tokens: int


class CompletionDetails(TypedDict):
    """What became of the tokens that the client predicted and that were tried."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """Numbers of tokens; every prompt counts once, every written candidate counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class DrafterAccount(TypedDict):
    """What one drafter gave, and how much of it stayed."""

    drafted: int
    accepted: int


class Seconds(TypedDict):
    """Where the request's share of the time went; `plain_estimate` is what plain decoding would have taken."""

    prefill: float
    draft: float
    target: float
    other: float
    plain_estimate: float


class Speculation(TypedDict):
    """The account of a request's speculation."""

    mode: Literal["auto", "off", "fixed"]
    verification: Literal["token", "block", "coupled"]
    rounds: int
    drafted_tokens: int
    accepted_tokens: int
    mean_acceptance_length: float
    gamma_histogram: dict[str, int]
    drafters: dict[str, DrafterAccount]
    seconds: Seconds
    estimated_speedup: float | None


class Totals(TypedDict):
    """What a request has used."""

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
    """An event of a stream of v1/completions; the last one may have no choices but the totals."""

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
    """An event of a stream of v1/chat/completions; the last one may have no choices but the totals."""

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


class Speculator(TypedDict):
    """The response of v1/speculation: what an operator may want to know of this server."""

    object: Literal["speculation"]
    model: str
    versions: dict[str, str]
    build: str
    processor: str
    threads: int
    models: dict[str, dict[str, str | int | None]]
    batch_invariance: dict[str, float | str | None]
    kernels: dict[str, str | int | tuple[str, ...] | None]
    costs: dict[str, dict[str, list[int] | list[float]]]
    controller: dict[str, list[float]]
    limits: dict[str, int | str]
    sequences: dict[str, int]
    draft_model_up: bool
    holdback: dict[str, float] | None
    plain_rounds: dict[str, float] | None


class ErrorDetail(TypedDict):
    """What is wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(TypedDict):
    """The response to a request that cannot be answered."""

    error: ErrorDetail


class FrontEndError(TypedDict):
    """What TorchServe says of a request that it does not hand on: no token, a full queue, a body too large."""

    code: int
    type: str
    message: str
