"""The requests of completions and chats as pydantic models, and what their fields mean together."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from specserve.api.body import Body, Items, Part, Text, at_most, disagreement
from specserve.api.dialects import KNOWN, translated
from specserve.api.sampling_fields import SamplingFields, StopString
from specserve.api.speculation import SpeculationOptions
from specserve.api.structured_output import StructuredOutput
from specserve.api.tools import ToolCall, ToolFields

# Entries of `stop`, and answers to one request (SECURITY.md).
MAX_STOPS = 16
MAX_CHOICES = 128
# OpenAI's default of `max_tokens` on v1/completions.
_COMPLETION_TOKENS = 16
# llama.cpp takes this number of tokens for "no limit".
_UNLIMITED = -1


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


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


class GenerationRequest(SamplingFields, StructuredOutput):
    """The fields of both routes, and of those that are translated to them."""

    also_known: ClassVar[frozenset[str]] = KNOWN
    # The fields to which errors point.
    prompt_field: ClassVar[str] = "prompt"
    scores_field: ClassVar[str] = "logprobs"

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=-1)
    stop: StopString | Annotated[Items[StopString], Field(max_length=MAX_STOPS)] | None = None
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    t_max_predict_ms: float | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    cache_prompt: bool | None = True
    cache_salt: Annotated[Text, Field(max_length=200)] | None = None
    prediction: Prediction | None = None
    speculation: SpeculationOptions | None = None
    # Only its `prompt_family` has an effect.
    metadata: Annotated[dict[str, str], at_most(16)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _translate(cls, body: Any) -> Any:
        return translated(body, cls.model_fields) if isinstance(body, dict) else body

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        options = self.speculation_options
        if self.grammar is not None and self.format != "text":
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
    def speculation_options(self) -> SpeculationOptions:
        """What it says about speculation, or the defaults."""
        return self.speculation or SpeculationOptions()

    @property
    def limit_field(self) -> str:
        """The field that limits the tokens of an answer."""
        return "max_tokens"

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer; None is no limit, while null is the same as leaving the field out."""
        given = getattr(self, self.limit_field)
        limit: int | None = type(self).model_fields[self.limit_field].default if given is None else given
        return None if limit == _UNLIMITED else limit

    @property
    def answers(self) -> int:
        """How many answers to each prompt are returned."""
        return self.n or 1

    @property
    def candidates(self) -> int:
        """How many answers to each prompt are generated; the best of them are returned."""
        return self.answers

    @property
    def echoes(self) -> bool:
        """Whether an answer begins with its prompt."""
        return False

    @property
    def scores(self) -> int | None:
        """How many of the most probable tokens are returned at every position; None: no log-probabilities."""
        return None

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [*filter(None, [self.stop] if isinstance(self.stop, str) else self.stop or [])]

    @property
    def usage_in_stream(self) -> Literal["none", "end", "all"]:
        """Which events of a stream have the `usage`."""
        options = self.stream_options or StreamOptions()
        if not options.include_usage:
            return "none"
        return "all" if options.continuous_usage_stats else "end"


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
        if self.candidates < self.answers:
            raise disagreement("best_of", "'best_of' may not be smaller than 'n'")
        if self.stream and self.candidates > self.answers:
            raise disagreement("best_of", "'best_of' larger than 'n' cannot be streamed")
        if len(self.prompts) * self.candidates > MAX_CHOICES:
            raise disagreement("prompt", f"a request may ask for at most {MAX_CHOICES} answers in all")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as a list, where a list of integers is one of them."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        several = [prompt for prompt in self.prompt if not isinstance(prompt, int)]
        return [*several] or [[token for token in self.prompt if isinstance(token, int)]]

    @property
    def candidates(self) -> int:
        """How many answers to each prompt are generated."""
        return self.best_of or self.answers

    @property
    def echoes(self) -> bool:
        """Whether an answer begins with its prompt."""
        return bool(self.echo)

    @property
    def scores(self) -> int | None:
        """How many of the most probable tokens are returned at every position."""
        return self.logprobs


class Message(Body):
    """One message of a chat; an answer to a call has the role `tool`, and the id of the call."""

    # Fields of a response's message, which clients send back in the next turn.
    also_known: ClassVar[frozenset[str]] = frozenset({"annotations"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: Text | None = None
    refusal: None = None
    function_call: None = None
    audio: None = None

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

    prompt_field: ClassVar[str] = "messages"
    scores_field: ClassVar[str] = "top_logprobs"

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=-1)

    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    # Without effect where the chat template does not read them.
    reasoning_effort: str | None = None
    chat_template_kwargs: Annotated[dict[str, Any], at_most(64)] | None = None
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] | None = None

    @model_validator(mode="after")
    def _chat_agrees(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise disagreement("top_logprobs", "'top_logprobs' needs 'logprobs': true")
        if self.callable_tools and (self.grammar is not None or self.format == "regex"):
            raise disagreement("grammar", "a grammar or a regular expression and 'tools' exclude each other")
        if self.requires_call and self.ignore_eos:
            raise disagreement("ignore_eos", "'ignore_eos' would never let an answer that has to be a call end")
        return self

    @property
    def limit_field(self) -> str:
        """The field that limits the tokens of an answer; the newer one comes first."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def scores(self) -> int | None:
        """How many of the most probable tokens are returned at every position."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def forbids_reasoning(self) -> bool:
        """Whether no reasoning is told apart: a grammar holds from the first token on, or all is wanted as text."""
        return self.follows_grammar or self.requires_call or self.reasoning_format == "none"
