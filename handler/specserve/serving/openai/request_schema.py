"""The requests of both routes as pydantic models."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from specserve.sequence import Verification
from specserve.serving.openai.body import Body, Text, at_most, disagreement
from specserve.serving.openai.neutral_fields import NeutralChatFields, NeutralCompletionFields, NeutralFields, Off

# Entries of `stop` and of `logit_bias`, and answers to one request (SECURITY.md).
MAX_STOPS = 16
_MAX_BIASES = 1024
MAX_CHOICES = 128
_INT64 = 2**63
_ANY_SEED = -1
# OpenAI's default of `max_tokens` on v1/completions.
_COMPLETION_TOKENS = 16


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: Off = False


class SpeculationOptions(Body):
    """Speculation for this request: the server's default, off, or a fixed number of draft tokens per round.

    With `sources` the response says who wrote each piece of its text.
    """

    mode: Literal["auto", "off", "fixed"] = "auto"
    gamma: int | None = Field(default=None, ge=1, le=32)
    drafter: Literal["auto", "model", "lookup", "prediction", "grammar"] = "auto"
    verification: Verification | None = None
    sources: bool = False


Bias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[Text, Field(min_length=1, max_length=1000)]


class TextPart(Body):
    """A text part of a message's content."""

    type: Literal["text"]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, part: Any) -> Any:
        if isinstance(part, dict) and part.get("type", "text") != "text":
            sentence = "must be a part of type 'text'; images, audio and files are not supported"
            raise PydanticCustomError("other_part", "{sentence}", {"sentence": sentence})
        return part


Content = Text | Annotated[list[TextPart], Field(fail_fast=True)]


def text_of(content: str | list[TextPart]) -> str:
    """The text of a content, its parts joined."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Prediction(Body):
    """The client's predicted output (OpenAI's Predicted Outputs), used as a draft."""

    type: Literal["content"]
    content: Content


class PlainText(Body):
    """No constraint."""

    type: Literal["text"]


class JsonObject(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaDescription(Body):
    """A JSON schema with OpenAI's fields around it."""

    name: str = Field(max_length=64)
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchema(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: SchemaDescription


ResponseFormat = Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")]


class GenerationRequest(NeutralFields):
    """The fields of both routes."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = Field(default=1.0, ge=0, le=2)
    top_p: float | None = Field(default=1.0, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=_INT64 - 1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-_INT64, le=_INT64 - 1)
    logit_bias: Annotated[dict[str, Bias], Field(max_length=_MAX_BIASES), at_most(_MAX_BIASES)] | None = None
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
    # Only its `prompt_family` has an effect.
    metadata: Annotated[dict[str, str], Field(max_length=16), at_most(16)] | None = None

    @field_validator("seed")
    @classmethod
    def _any_seed(cls, seed: int | None) -> int | None:
        """None for -1, which vLLM and llama.cpp take for "choose one"."""
        return None if seed == _ANY_SEED else seed

    @field_validator("stop")
    @classmethod
    def _list_of_stops(cls, stop: str | list[str] | None) -> list[str]:
        return [stop] if isinstance(stop, str) else stop or []

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        form = None if self.response_format is None else self.response_format.type
        if self.grammar is not None and form not in {None, "text"}:
            raise disagreement("grammar", "'grammar' and 'response_format' exclude each other")
        if self.ignore_eos and (self.grammar is not None or form not in {None, "text"}):
            raise disagreement("ignore_eos", "'ignore_eos' would never let an answer that follows a grammar end")
        if self.stream_options is not None and not self.stream:
            raise disagreement("stream_options", "'stream_options' needs 'stream': true")
        options = self.speculation
        if options is not None:
            if options.gamma is not None and options.mode != "fixed":
                raise disagreement("speculation.gamma", "'speculation.gamma' needs 'speculation.mode': 'fixed'")
            if options.drafter == "prediction" and self.prediction is None:
                raise disagreement("speculation.drafter", "the drafter 'prediction' needs the field 'prediction'")
            if options.drafter == "grammar" and self.grammar is None and form in {None, "text"}:
                raise disagreement("speculation.drafter", "the drafter 'grammar' needs 'response_format' or 'grammar'")
        return self

    @property
    def choices(self) -> int:
        """Number of choices per prompt."""
        return self.n or 1

    @property
    def candidates(self) -> int:
        """Number of sequences per prompt, of which the best are returned."""
        return self.choices

    @property
    def most_tokens(self) -> int | None:
        """The most output tokens; None is as many as the context holds."""
        return self.max_tokens

    @property
    def wants_sources(self) -> bool:
        """Whether to return who wrote each piece of the text."""
        return self.speculation is not None and self.speculation.sources

    @property
    def scored(self) -> int | None:
        """Number of most probable tokens to return at every position; None returns no log-probabilities."""
        return None

    @property
    def scores_prompt(self) -> bool:
        """Whether to return the log-probabilities of the prompt's tokens too."""
        return False


class CompletionRequest(GenerationRequest, NeutralCompletionFields):
    """The body of v1/completions."""

    prompt: (
        Text
        | Annotated[list[int], Field(fail_fast=True)]
        | Annotated[list[Text], Field(fail_fast=True, max_length=MAX_CHOICES)]
        | Annotated[list[Annotated[list[int], Field(fail_fast=True)]], Field(fail_fast=True, max_length=MAX_CHOICES)]
    )
    max_tokens: int | None = Field(default=_COMPLETION_TOKENS, ge=0)
    echo: bool | None = False
    best_of: int | None = Field(default=None, ge=1, le=20)
    suffix: Text | None = None
    logprobs: int | None = Field(default=None, ge=0, le=5)

    @model_validator(mode="after")
    def _best_of_agrees(self) -> Self:
        if self.best_of is not None and self.best_of < self.choices:
            raise disagreement("best_of", "'best_of' may not be smaller than 'n'")
        if self.stream and self.candidates > self.choices:
            raise disagreement("best_of", "'best_of' larger than 'n' cannot be streamed")
        if len(self.prompts) * self.candidates > MAX_CHOICES:
            raise disagreement("prompt", f"a request may ask for at most {MAX_CHOICES} answers in all")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        several = [prompt for prompt in self.prompt if not isinstance(prompt, int)]
        return [*several] or [[token for token in self.prompt if isinstance(token, int)]]

    @property
    def candidates(self) -> int:
        """Number of sequences per prompt, of which the best are returned."""
        return self.choices if self.best_of is None else self.best_of

    @property
    def most_tokens(self) -> int | None:
        """The most output tokens; null means the default."""
        return _COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def scored(self) -> int | None:
        """Number of most probable tokens to return at every position; None returns no log-probabilities."""
        return self.logprobs

    @property
    def scores_prompt(self) -> bool:
        """Whether to return the log-probabilities of the prompt's tokens too."""
        return bool(self.echo) and self.logprobs is not None


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None

    # Fields of a response's message, which clients send back in the next turn.
    refusal: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates expect it: plain text, and `system` for OpenAI's newer role `developer`."""
        return {"role": "system" if self.role == "developer" else self.role, "content": text_of(self.content)}


class ChatRequest(GenerationRequest, NeutralChatFields):
    """The body of v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(default=None, ge=0)

    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    # Without effect where the chat template does not read them.
    reasoning_effort: str | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None

    @model_validator(mode="after")
    def _logprobs_agree(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise disagreement("top_logprobs", "'top_logprobs' needs 'logprobs': true")
        return self

    @property
    def scored(self) -> int | None:
        """Number of most probable tokens to return at every position; None returns no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """The most output tokens, by OpenAI's newer name first."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


AnyRequest = TypeVar("AnyRequest", bound=GenerationRequest)
