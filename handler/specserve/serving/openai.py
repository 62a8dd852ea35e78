"""OpenAI's requests: their one definition, and their translation into what the scheduler runs."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from specserve.config import HandlerConfig
from specserve.engine.base import Vocabulary
from specserve.errors import RequestError
from specserve.sequence import SamplingParams, Sequence, SpeculationParams, Verification
from specserve.serving.generation import Generation

_MAX_STOPS = 4
_MAX_BIASES = 1024
_INT64 = 2**63


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """What a stream carries beside the text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class SpeculationOptions(_Body):
    """Speculation for this request: the operator's default, none, or a fixed number of drafts a round."""

    mode: Literal["auto", "off", "fixed"] = "auto"
    gamma: int | None = Field(default=None, ge=1, le=32)
    drafter: Literal["auto", "model"] = "auto"
    verification: Verification | None = None


def _is_unicode(text: str) -> str:
    """JSON can spell half of a surrogate pair, which no tokenizer can read."""
    text.encode()  # the error of one that cannot be encoded is a ValueError, pydantic's own language
    return text


Text = Annotated[str, AfterValidator(_is_unicode)]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[Text, Field(min_length=1, max_length=1000)]


class GenerationRequest(_Body):
    """What both routes take."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = Field(default=1.0, ge=0, le=2)
    top_p: float | None = Field(default=1.0, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=_INT64 - 1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-_INT64, le=_INT64 - 1)
    logit_bias: Annotated[dict[str, Bias], Field(max_length=_MAX_BIASES)] | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    stop: StopString | Annotated[list[StopString], Field(max_length=_MAX_STOPS)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    speculation: SpeculationOptions | None = None

    # Fields of OpenAI's reference that are not served yet; only values that ask for nothing are taken.
    n: Literal[1] | None = None

    # Fields that OpenAI's clients send and that mean nothing here.
    user: str | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool | None = None

    @field_validator("stop")
    @classmethod
    def _list_of_stops(cls, stop: str | list[str] | None) -> list[str]:
        return [stop] if isinstance(stop, str) else stop or []

    @property
    def most_tokens(self) -> int | None:
        """How long the answer may be; None is as long as the context lasts."""
        return self.max_tokens


class CompletionRequest(GenerationRequest):
    """The body of v1/completions."""

    prompt: Text | Annotated[list[int], Field(fail_fast=True)]
    max_tokens: int | None = Field(default=16, ge=0)
    echo: bool | None = False

    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None
    logprobs: None = None


class TextPart(_Body):
    """A piece of a message's content."""

    type: Literal["text"]
    text: Text


class Message(_Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates know it: plain text, and OpenAI's newer name for the system role undone."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ResponseFormat(_Body):
    """The form of the answer; JSON is not enforced yet."""

    type: Literal["text"]


class ChatRequest(GenerationRequest):
    """The body of v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(default=None, ge=0)

    logprobs: Literal[False] | None = None
    top_logprobs: None = None
    response_format: ResponseFormat | None = None
    prediction: None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none"] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["none"] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None

    @property
    def most_tokens(self) -> int | None:
        """How long the answer may be, by OpenAI's newer name for it first."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


_NOT_YET = frozenset(
    {
        *("n", "best_of", "suffix", "logprobs", "top_logprobs"),
        *("response_format", "prediction", "tools", "tool_choice", "functions", "function_call", "modalities", "audio"),
    }
)
_EXPECTED = {
    "prompt": "must be a string of valid Unicode or a list of token ids",
    "stop": f"must be a string or a list of at most {_MAX_STOPS} strings, none of them empty or over 1000 characters",
    "messages": "must be a list of {role, content}, role being system, user or assistant and content text",
}

AnyRequest = TypeVar("AnyRequest", bound=GenerationRequest)


def parse_body(body: object, kind: type[AnyRequest]) -> AnyRequest:
    """Validate what TorchServe made of a request's body: a mapping, or bytes where that was not JSON.

    Raises:
        RequestError: 400; `param` names the field that is wrong.
    """
    if isinstance(body, bytes | bytearray | str):
        try:
            body = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"The request's body is not valid JSON: {error}.") from error
    if not isinstance(body, dict):
        raise RequestError("The request's body must be a JSON object; send it with content-type application/json.")
    # Looked up here, since pydantic would write an error for each of a million unknown fields.
    unknown = next((str(field) for field in body if field not in kind.model_fields), None)
    if unknown is not None:
        raise RequestError(f"Unknown field: '{unknown}'.", param=unknown, code="unknown_parameter")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False, include_context=False, include_input=False)[0]) from error


def _explain(error: Any) -> RequestError:
    """OpenAI's error for pydantic's: one sentence that names the field."""
    field = str(error["loc"][0])
    nested = ("speculation", "stream_options", "messages")
    param = ".".join(str(part) for part in error["loc"][:3]) if field in nested else field
    if error["type"] == "extra_forbidden":
        return RequestError(f"Unknown field: '{param}'.", param=param, code="unknown_parameter")
    if error["type"] == "missing":
        return RequestError(f"The field '{param}' is missing.", param=param, code="missing_required_parameter")
    if field in _NOT_YET:
        return RequestError(f"'{param}' is not supported by this server yet.", param=param, code="unsupported_value")
    expected = _EXPECTED.get(field)
    if expected is None:
        message = str(error["msg"])
        expected = message[0].lower() + message[1:]
    return RequestError(f"Invalid value for '{param}': {expected}.", param=param, code="invalid_value")


def to_generation(
    request: GenerationRequest, prompt: list[int], vocabulary: Vocabulary, config: HandlerConfig
) -> Generation:
    """The sequence a request asks for behind its tokenised prompt, with every limit applied.

    Raises:
        RequestError: 400; the prompt or `speculation` does not fit.
    """
    room = config.context_length - len(prompt)
    if room < 1:
        raise RequestError(
            f"This model's context holds {config.context_length} tokens, prompt and answer together; "
            f"the prompt alone has {len(prompt)}.",
            param="messages" if isinstance(request, ChatRequest) else "prompt",
            code="context_length_exceeded",
        )
    wanted = room if request.most_tokens is None else request.most_tokens
    sampling = SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=request.top_k or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        seed=request.seed,
        logit_bias=_biases(request.logit_bias or {}, vocabulary),
        repetition_penalty=request.repetition_penalty or 1.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
    )
    options = request.speculation or SpeculationOptions()
    speculation = SpeculationParams(_gamma(options, config), options.verification or _verification(sampling))
    sequence = Sequence(prompt, sampling, speculation, max_tokens=min(wanted, room))
    return Generation(sequence, vocabulary, list(request.stop or []))


def prompt_tokens(prompt: str | list[int], vocabulary: Vocabulary) -> list[int]:
    """The tokens of a prompt; an empty one is the token that begins a text.

    Raises:
        RequestError: 400; a token id is out of range, or an empty prompt means nothing to this model.
    """
    if isinstance(prompt, str):
        tokens = vocabulary.encode(prompt, special=True)
    else:
        tokens = prompt
        if any(not 0 <= token < vocabulary.size for token in tokens):
            raise RequestError(
                f"Token ids must lie between 0 and {vocabulary.size - 1}.",
                param="prompt",
                code="invalid_value",
            )
    if not tokens:
        start = vocabulary.start_token()
        if start is None:
            raise RequestError("The prompt is empty; this model needs at least one token.", param="prompt")
        tokens = [start]
    return tokens


def _biases(biases: dict[str, float], vocabulary: Vocabulary) -> tuple[tuple[int, float], ...]:
    for token in biases:
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocabulary.size):
            raise RequestError(
                f"'logit_bias' names tokens by their ids, 0 to {vocabulary.size - 1}; '{token}' is none.",
                param="logit_bias",
                code="invalid_value",
            )
    return tuple((int(token), bias) for token, bias in biases.items())


def _gamma(options: SpeculationOptions, config: HandlerConfig) -> int:
    limits = config.speculation
    if config.draft is None and (options.mode == "fixed" or options.drafter == "model"):
        raise RequestError("This server has no draft model.", param="speculation", code="invalid_value")
    if options.gamma is not None and options.mode != "fixed":
        raise RequestError(
            "'speculation.gamma' needs 'speculation.mode': 'fixed'.",
            param="speculation.gamma",
            code="invalid_value",
        )
    if options.mode == "off" or config.draft is None:
        return 0
    if options.gamma is None:
        return limits.gamma
    if options.gamma > limits.max_gamma:
        raise RequestError(
            f"'speculation.gamma' may be at most {limits.max_gamma} on this server.",
            param="speculation.gamma",
            code="invalid_value",
        )
    return options.gamma


def _verification(sampling: SamplingParams) -> Verification:
    """Coupled where a seed asks for one text, else the rule that accepts most; all agree on greedy text."""
    if sampling.temperature == 0:
        return "token"  # reads the fewest rows
    return "block" if sampling.seed is None else "coupled"
