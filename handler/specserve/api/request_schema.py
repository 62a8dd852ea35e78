"""The requests of both routes as pydantic models; resolve.py says what they mean."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from specserve.api.body import Body, Items, Part, Text, at_most, disagreement
from specserve.api.dialects import KNOWN, translated
from specserve.api.tools import ToolCall, ToolFields
from specserve.sequence import Verification

# Entries of `stop`, of lists of tokens, and of `bad_words`, and answers to one request (SECURITY.md).
MAX_STOPS = 16
MAX_TOKENS = 1024
_MAX_WORDS = 64
MAX_CHOICES = 128
_INT64 = 2**63
# OpenAI's default of `max_tokens` on v1/completions.
_COMPLETION_TOKENS = 16


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class SpeculationOptions(Body):
    """Speculation for this request: the server's default, off, or a fixed number of draft tokens per round.

    With `sources` the response says who wrote what. Lookups search answers of the same `pool`; an empty one has none.
    """

    mode: Literal["auto", "off", "fixed"] = "auto"
    gamma: int | None = Field(default=None, ge=1, le=32)
    drafter: Literal["auto", "model", "lookup", "prediction", "grammar"] = "auto"
    verification: Verification | None = None
    sources: bool = False
    pool: Annotated[Text, Field(max_length=200)] | None = None


Bias = Annotated[float, Field(ge=-100, le=100)]
# llama.cpp's [token or text, bias]; false is "never".
BiasPair = Annotated[list[bool | float | Text], Field(min_length=2, max_length=2)]
StopString = Annotated[Text, Field(max_length=1000)]
Tokens = Annotated[Items[int], Field(max_length=MAX_TOKENS)]


class TextPart(Part):
    """A text part of a message's content."""

    type: Literal["text"]
    text: Text


Content = Text | Items[TextPart]


def text_of(content: str | list[TextPart]) -> str:
    """Join the parts of a content to its text."""
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

    also_known: ClassVar[frozenset[str]] = frozenset({"schema"})  # llama.cpp's, then it is a JsonSchema

    type: Literal["json_object"]


class SchemaDescription(Body):
    """A JSON schema with OpenAI's fields around it."""

    name: str | None = Field(default=None, max_length=64)
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchema(Body):
    """JSON that follows a schema."""

    also_known: ClassVar[frozenset[str]] = frozenset({"schema"})

    type: Literal["json_schema"]
    json_schema: SchemaDescription


class Regex(Body):
    """Text that matches a regular expression as a whole, as vLLM's `guided_regex` and `structured_outputs` ask for."""

    type: Literal["regex"]
    regex: Annotated[Text, Field(min_length=1)]


ResponseFormat = Annotated[PlainText | JsonObject | JsonSchema | Regex, Field(discriminator="type")]


class GenerationRequest(Body):
    """The fields of both routes."""

    also_known: ClassVar[frozenset[str]] = KNOWN

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=-1)
    min_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = Field(default=1.0, ge=0, le=2)
    top_p: float | None = Field(default=1.0, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=_INT64 - 1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-_INT64, le=_INT64 - 1)
    logit_bias: (
        Annotated[dict[str, Bias], Field(max_length=MAX_TOKENS), at_most(MAX_TOKENS)]
        | Annotated[Items[BiasPair], Field(max_length=MAX_TOKENS)]
        | None
    ) = None
    allowed_token_ids: Annotated[Tokens, Field(min_length=1)] | None = None
    bad_words: Annotated[Items[StopString], Field(max_length=_MAX_WORDS)] | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=10)
    stop: StopString | Annotated[Items[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    ignore_eos: bool | None = False
    t_max_predict_ms: float | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    cache_prompt: bool | None = True
    cache_salt: Annotated[Text, Field(max_length=200)] | None = None
    response_format: ResponseFormat | None = None
    grammar: Annotated[Text, Field(min_length=1)] | None = None
    prediction: Prediction | None = None
    speculation: SpeculationOptions | None = None
    # Only its `prompt_family` has an effect.
    metadata: Annotated[dict[str, str], Field(max_length=16), at_most(16)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _translate(cls, body: Any) -> Any:
        return translated(body, cls.model_fields) if isinstance(body, dict) else body

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        options = self.speculation or SpeculationOptions()
        if self.grammar is not None and self.response_format is not None and self.response_format.type != "text":
            raise disagreement("grammar", "'grammar' and 'response_format' exclude each other")
        if self.ignore_eos and self.follows_grammar:
            raise disagreement("ignore_eos", "'ignore_eos' would never let an answer that follows a grammar end")
        if self.stream_options is not None and not self.stream:
            raise disagreement("stream_options", "'stream_options' needs 'stream': true")
        if options.gamma is not None and options.mode != "fixed":
            raise disagreement("speculation.gamma", "'speculation.gamma' needs 'speculation.mode': 'fixed'")
        if options.drafter == "prediction" and self.prediction is None:
            raise disagreement("speculation.drafter", "the drafter 'prediction' needs the field 'prediction'")
        if options.drafter == "grammar" and not (self.follows_grammar or getattr(self, "tools", None)):
            sentence = "the drafter 'grammar' needs 'response_format', 'grammar' or 'tools'"
            raise disagreement("speculation.drafter", sentence)
        return self

    @property
    def output_limit(self) -> tuple[str, int | None]:
        """The field that limits the tokens of an answer, and its value; null is the same as leaving it out."""
        default = type(self).model_fields["max_tokens"].default
        return "max_tokens", default if self.max_tokens is None else self.max_tokens

    @property
    def follows_grammar(self) -> bool:
        """Whether a grammar or a format holds from the first token on."""
        return self.grammar is not None or (self.response_format is not None and self.response_format.type != "text")


class CompletionRequest(GenerationRequest):
    """The body of v1/completions."""

    prompt: (
        Text
        | Items[int]
        | Annotated[Items[Text], Field(max_length=MAX_CHOICES)]
        | Annotated[Items[Items[int]], Field(max_length=MAX_CHOICES)]
    )
    max_tokens: int | None = Field(default=_COMPLETION_TOKENS, ge=-1)
    add_special_tokens: bool | None = True
    echo: bool | None = False
    best_of: int | None = Field(default=None, ge=1, le=20)
    suffix: Text | None = None
    logprobs: int | None = Field(default=None, ge=0, le=5)

    @model_validator(mode="after")
    def _best_of_agrees(self) -> Self:
        choices = self.n or 1
        candidates = self.best_of or choices
        if candidates < choices:
            raise disagreement("best_of", "'best_of' may not be smaller than 'n'")
        if self.stream and candidates > choices:
            raise disagreement("best_of", "'best_of' larger than 'n' cannot be streamed")
        if len(self.prompts) * candidates > MAX_CHOICES:
            raise disagreement("prompt", f"a request may ask for at most {MAX_CHOICES} answers in all")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as a list, where a list of integers is one of them."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        several = [prompt for prompt in self.prompt if not isinstance(prompt, int)]
        return [*several] or [[token for token in self.prompt if isinstance(token, int)]]


class Message(Body):
    """One message of a chat; an answer to a call has the role `tool`, and the id of the call."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: Text | None = None

    # Fields of a response's message, which clients send back in the next turn.
    refusal: None = None
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("no_content", "a message without 'content' is an assistant's with 'tool_calls'")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it; OpenAI's newer role `developer` is `system` there."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": text_of(self.content or ""),
        }
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        given = {"name": self.name, "tool_call_id": self.tool_call_id} if self.role == "tool" else {}
        given |= {"reasoning_content": self.reasoning_content}
        return message | {key: value for key, value in given.items() if value is not None}


class ChatRequest(GenerationRequest, ToolFields):
    """The body of v1/chat/completions."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=-1)

    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    # Without effect where the chat template does not read them.
    reasoning_effort: str | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] | None = None

    @model_validator(mode="after")
    def _logprobs_agree(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise disagreement("top_logprobs", "'top_logprobs' needs 'logprobs': true")
        return self

    @model_validator(mode="after")
    def _tools_agree(self) -> Self:
        if self.callable_tools and (self.grammar is not None or isinstance(self.response_format, Regex)):
            raise disagreement("grammar", "a grammar or a regular expression and 'tools' exclude each other")
        if self.requires_call and self.ignore_eos:
            raise disagreement("ignore_eos", "'ignore_eos' would never let an answer that has to be a call end")
        return self

    @property
    def output_limit(self) -> tuple[str, int | None]:
        """The field that limits the tokens of an answer, and its value."""
        newer = self.max_completion_tokens
        return super().output_limit if newer is None else ("max_completion_tokens", newer)

    @property
    def forbids_reasoning(self) -> bool:
        """Whether no reasoning is told apart: a grammar holds from the first token on, or all is wanted as text."""
        return self.follows_grammar or self.requires_call or self.reasoning_format == "none"
