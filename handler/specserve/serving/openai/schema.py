"""The one definition of the requests that are understood, as pydantic models; validation.py reads them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from specserve.sequence import Verification

MAX_STOPS = 16
_MAX_BIASES = 1024
MAX_CHOICES = 128
_INT64 = 2**63
# OpenAI's default on v1/completions.
_SHORT_ANSWER = 16


DISAGREEMENT = "fields_disagree"
UNKNOWN_FIELD = "unknown_field"


def _disagreement(param: str, sentence: str) -> PydanticCustomError:
    """Fields that are right by themselves and wrong together; `param` is the one to change."""
    return PydanticCustomError(DISAGREEMENT, "{sentence}", {"param": param, "sentence": sentence})


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_no_unknown_field(cls, body: Any) -> Any:
        """One error for all of them, since pydantic would write a million for a million."""
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((name for name in body if name not in known), None) if isinstance(body, dict) else None
        if unknown is not None:
            field = unknown.encode("utf-8", errors="replace").decode()
            raise PydanticCustomError(UNKNOWN_FIELD, "unknown field", {"field": field})
        return body


class StreamOptions(_Body):
    """What a stream carries beside the text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class SpeculationOptions(_Body):
    """Speculation for this request: the operator's default, none, or a fixed number of drafts a round."""

    mode: Literal["auto", "off", "fixed"] = "auto"
    gamma: int | None = Field(default=None, ge=1, le=32)
    drafter: Literal["auto", "model", "lookup", "prediction", "grammar"] = "auto"
    verification: Verification | None = None


def _at_most(count: int) -> BeforeValidator:
    """Refuses a larger mapping before its values are looked at, since each wrong one would be an error."""

    def check(mapping: Any) -> Any:
        if isinstance(mapping, dict) and len(mapping) > count:
            raise PydanticCustomError("too_long", "{sentence}", {"sentence": f"may have at most {count} entries"})
        return mapping

    return BeforeValidator(check)


def _is_unicode(text: str) -> str:
    """JSON can spell half of a surrogate pair, which no tokenizer can read."""
    text.encode()  # the error of one that cannot be encoded is a ValueError, pydantic's own language
    return text


Text = Annotated[str, AfterValidator(_is_unicode)]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[Text, Field(min_length=1, max_length=1000)]


class TextPart(_Body):
    """A piece of a content."""

    type: Literal["text"]
    text: Text


Content = Text | Annotated[list[TextPart], Field(fail_fast=True)]


def text_of(content: str | list[TextPart]) -> str:
    """A content's whole text."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Prediction(_Body):
    """The client's own guess of the answer (OpenAI's Predicted Outputs); it is verified as any draft is."""

    type: Literal["content"]
    content: Content


class PlainText(_Body):
    """Any text."""

    type: Literal["text"]


class JsonObject(_Body):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaDescription(_Body):
    """A JSON schema with the names that OpenAI gives it."""

    name: str = Field(max_length=64)
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchema(_Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: SchemaDescription


ResponseFormat = Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")]


class GenerationRequest(_Body):
    """What both routes take."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = Field(default=1.0, ge=0, le=2)
    top_p: float | None = Field(default=1.0, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=_INT64 - 1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-_INT64, le=_INT64 - 1)
    logit_bias: Annotated[dict[str, Bias], Field(max_length=_MAX_BIASES), _at_most(_MAX_BIASES)] | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=10)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    ignore_eos: bool | None = False
    response_format: ResponseFormat | None = None
    grammar: Annotated[Text, Field(min_length=1)] | None = None
    prediction: Prediction | None = None
    speculation: SpeculationOptions | None = None

    # Fields that OpenAI's clients send and that mean nothing here, but for metadata's `prompt_family`.
    user: str | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16), _at_most(16)] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool | None = None

    @field_validator("stop")
    @classmethod
    def _list_of_stops(cls, stop: str | list[str] | None) -> list[str]:
        return [stop] if isinstance(stop, str) else stop or []

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        form = None if self.response_format is None else self.response_format.type
        if self.grammar is not None and form not in {None, "text"}:
            raise _disagreement("grammar", "'grammar' and 'response_format' exclude each other")
        if self.ignore_eos and (self.grammar is not None or form not in {None, "text"}):
            raise _disagreement("ignore_eos", "'ignore_eos' would never let an answer that follows a grammar end")
        if self.stream_options is not None and not self.stream:
            raise _disagreement("stream_options", "'stream_options' needs 'stream': true")
        options = self.speculation
        if options is not None:
            if options.gamma is not None and options.mode != "fixed":
                raise _disagreement("speculation.gamma", "'speculation.gamma' needs 'speculation.mode': 'fixed'")
            if options.drafter == "prediction" and self.prediction is None:
                raise _disagreement("speculation.drafter", "the drafter 'prediction' needs the field 'prediction'")
            if options.drafter == "grammar" and self.grammar is None and form in {None, "text"}:
                raise _disagreement("speculation.drafter", "the drafter 'grammar' needs 'response_format' or 'grammar'")
        return self

    @property
    def choices(self) -> int:
        """How many answers a prompt is given."""
        return self.n or 1

    @property
    def candidates(self) -> int:
        """How many answers are written for a prompt, of which the best are given."""
        return self.choices

    @property
    def most_tokens(self) -> int | None:
        """How long the answer may be; None is as long as the context lasts."""
        return self.max_tokens

    @property
    def scored(self) -> int | None:
        """How many of the most probable tokens are told at every place; None tells no log-probabilities."""
        return None

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's tokens are scored as well."""
        return False


class CompletionRequest(GenerationRequest):
    """The body of v1/completions."""

    prompt: (
        Text
        | Annotated[list[int], Field(fail_fast=True)]
        | Annotated[list[Text], Field(fail_fast=True, max_length=MAX_CHOICES)]
        | Annotated[list[Annotated[list[int], Field(fail_fast=True)]], Field(fail_fast=True, max_length=MAX_CHOICES)]
    )
    max_tokens: int | None = Field(default=_SHORT_ANSWER, ge=0)
    echo: bool | None = False
    best_of: int | None = Field(default=None, ge=1, le=20)
    suffix: Text | None = None
    logprobs: int | None = Field(default=None, ge=0, le=5)

    @model_validator(mode="after")
    def _best_of_agrees(self) -> Self:
        if self.best_of is not None and self.best_of < self.choices:
            raise _disagreement("best_of", "'best_of' may not be smaller than 'n'")
        if self.stream and self.candidates > self.choices:
            raise _disagreement("best_of", "'best_of' larger than 'n' cannot be streamed")
        if len(self.prompts) * self.candidates > MAX_CHOICES:
            raise _disagreement("prompt", f"a request may ask for at most {MAX_CHOICES} answers in all")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, of which a request may have several."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        several = [prompt for prompt in self.prompt if not isinstance(prompt, int)]
        return [*several] or [[token for token in self.prompt if isinstance(token, int)]]

    @property
    def candidates(self) -> int:
        """How many answers are written for a prompt, of which the best are given."""
        return self.choices if self.best_of is None else self.best_of

    @property
    def most_tokens(self) -> int | None:
        """How long the answer may be; null is the default, as if it were left out."""
        return _SHORT_ANSWER if self.max_tokens is None else self.max_tokens

    @property
    def scored(self) -> int | None:
        """How many of the most probable tokens are told at every place; None tells no log-probabilities."""
        return self.logprobs

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's tokens are scored as well."""
        return bool(self.echo) and self.logprobs is not None


class Message(_Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None

    # What an answer has beside its content, as clients send it back in the next turn.
    refusal: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates know it: plain text, and OpenAI's newer name for the system role undone."""
        return {"role": "system" if self.role == "developer" else self.role, "content": text_of(self.content)}


class ChatRequest(GenerationRequest):
    """The body of v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(default=None, ge=0)

    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    # Fields of OpenAI's reference that are not served; only values that ask for nothing are taken.
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none"] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["none"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1, fail_fast=True)] | None = None
    audio: None = None

    @model_validator(mode="after")
    def _logprobs_agree(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise _disagreement("top_logprobs", "'top_logprobs' needs 'logprobs': true")
        return self

    @property
    def scored(self) -> int | None:
        """How many of the most probable tokens are told at every place; None tells no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """How long the answer may be, by OpenAI's newer name for it first."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
