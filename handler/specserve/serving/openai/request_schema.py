"""The requests of both routes as pydantic models; resolve.py says what they mean."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from specserve.errors import RequestError
from specserve.sequence import Verification
from specserve.serving.openai.body import Body, Text, at_most
from specserve.serving.openai.neutral_fields import NeutralChatFields, NeutralCompletionFields, NeutralFields, Off

# Entries of `stop` and of `logit_bias`, and answers to one request (SECURITY.md).
MAX_STOPS = 16
_MAX_BIASES = 1024
MAX_CHOICES = 128
_INT64 = 2**63
# OpenAI's default of `max_tokens` on v1/completions.
COMPLETION_TOKENS = 16


def _disagreement(param: str, sentence: str) -> RequestError:
    """Return the error of fields that exclude or need each other, which pydantic lets pass; `param` has to change."""
    return RequestError.invalid(param, f"Invalid request: {sentence}.")


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: Off = False


class SpeculationOptions(Body):
    """Speculation for this request: the server's default, off, or a fixed number of draft tokens per round.

    With `sources` the response says who wrote each piece of its text. Lookups also search what answers of the same
    `pool` wrote; an empty name is no pool.
    """

    mode: Literal["auto", "off", "fixed"] = "auto"
    gamma: int | None = Field(default=None, ge=1, le=32)
    drafter: Literal["auto", "model", "lookup", "prediction", "grammar"] = "auto"
    verification: Verification | None = None
    sources: bool = False
    pool: Annotated[Text, Field(max_length=200)] | None = None


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

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        options = self.speculation or SpeculationOptions()
        is_formatted = self.response_format is not None and self.response_format.type != "text"
        if self.grammar is not None and is_formatted:
            raise _disagreement("grammar", "'grammar' and 'response_format' exclude each other")
        if self.ignore_eos and (self.grammar is not None or is_formatted):
            raise _disagreement("ignore_eos", "'ignore_eos' would never let an answer that follows a grammar end")
        if self.stream_options is not None and not self.stream:
            raise _disagreement("stream_options", "'stream_options' needs 'stream': true")
        if options.gamma is not None and options.mode != "fixed":
            raise _disagreement("speculation.gamma", "'speculation.gamma' needs 'speculation.mode': 'fixed'")
        if options.drafter == "prediction" and self.prediction is None:
            raise _disagreement("speculation.drafter", "the drafter 'prediction' needs the field 'prediction'")
        if options.drafter == "grammar" and self.grammar is None and not is_formatted:
            raise _disagreement("speculation.drafter", "the drafter 'grammar' needs 'response_format' or 'grammar'")
        return self


class CompletionRequest(GenerationRequest, NeutralCompletionFields):
    """The body of v1/completions."""

    prompt: (
        Text
        | Annotated[list[int], Field(fail_fast=True)]
        | Annotated[list[Text], Field(fail_fast=True, max_length=MAX_CHOICES)]
        | Annotated[list[Annotated[list[int], Field(fail_fast=True)]], Field(fail_fast=True, max_length=MAX_CHOICES)]
    )
    max_tokens: int | None = Field(default=COMPLETION_TOKENS, ge=0)
    echo: bool | None = False
    best_of: int | None = Field(default=None, ge=1, le=20)
    suffix: Text | None = None
    logprobs: int | None = Field(default=None, ge=0, le=5)

    @model_validator(mode="after")
    def _best_of_agrees(self) -> Self:
        choices = self.n or 1
        candidates = self.best_of or choices
        if candidates < choices:
            raise _disagreement("best_of", "'best_of' may not be smaller than 'n'")
        if self.stream and candidates > choices:
            raise _disagreement("best_of", "'best_of' larger than 'n' cannot be streamed")
        if len(self.prompts) * candidates > MAX_CHOICES:
            raise _disagreement("prompt", f"a request may ask for at most {MAX_CHOICES} answers in all")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as a list, where a list of integers is one of them."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        several = [prompt for prompt in self.prompt if not isinstance(prompt, int)]
        return [*several] or [[token for token in self.prompt if isinstance(token, int)]]


class Function(Body):
    """A function that the model may call, by its name and the JSON schema of its arguments."""

    name: Annotated[Text, Field(min_length=1, max_length=128)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; functions are the only ones."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """A function, by its name."""

    name: str


class NamedTool(Body):
    """A tool that has to be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedToolsList(Body):
    """Those of the tools that may be called, and whether one has to be."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedTools(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolsList


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class CalledFunction(Body):
    """A function with the JSON text of the arguments that it was called with."""

    name: Text
    arguments: Text


class ToolCall(Body):
    """A call that the assistant has made in an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One message of a chat; an answer to a call has the role `tool`, and the id of the call."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: Text | None = None

    # Fields of a response's message, which clients send back in the next turn.
    refusal: None = None
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it; OpenAI's newer role `developer` is `system` there."""
        return {"role": "system" if self.role == "developer" else self.role, "content": text_of(self.content or "")}


class ChatRequest(GenerationRequest, NeutralChatFields):
    """The body of v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(default=None, ge=0)

    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    # Without effect where the chat template does not read them.
    reasoning_effort: str | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None

    @model_validator(mode="after")
    def _logprobs_agree(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise _disagreement("top_logprobs", "'top_logprobs' needs 'logprobs': true")
        return self
