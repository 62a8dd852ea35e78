"""The requests of completions and chats as pydantic models, and what their fields mean together."""

import math
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from specserve.api.body import Body, Items, Part, Text, at_most, refuse
from specserve.api.speculation import SpeculationOptions
from specserve.api.structured_output import StructuredOutput
from specserve.api.tools import ToolCall, ToolFields
from specserve.engine.base import Vocabulary
from specserve.errors import RequestError
from specserve.sequence import SamplingParams

# Entries of `stop`, tokens in lists of these, and answers to one request (SECURITY.md).
MAX_STOPS, _MAX_TOKENS = 16, 1024
MAX_CHOICES = 128
# OpenAI's default of `max_tokens` on v1/completions.
_COMPLETION_TOKENS = 16
_INT64 = 2**63
# vLLM and llama.cpp take this seed for "choose one".
_ANY_SEED = -1

TokenName = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Biases = Annotated[dict[TokenName, Annotated[float, Field(ge=-100, le=100)]], at_most(_MAX_TOKENS)]
StopString = Annotated[Text, Field(max_length=1000)]
Tokens = Annotated[Items[int], Field(max_length=_MAX_TOKENS)]


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class TextPart(Part):
    type: Literal["text"]
    text: Text


Content = Text | Items[TextPart]


def text_of(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def check_tokens(param: str, tokens: Iterable[int], vocabulary: Vocabulary) -> None:
    """Refuse ids that are no tokens by a 400 that names their field."""
    if any(not 0 <= token < vocabulary.size for token in tokens):
        sentence = f"Token ids of '{param}' must lie between 0 and {vocabulary.size - 1}."
        raise RequestError.invalid(param, sentence)


class Prediction(Body):
    """The client's predicted output (OpenAI's Predicted Outputs), used as a draft."""

    type: Literal["content"]
    content: Content


class GenerationRequest(StructuredOutput):
    """The fields of completions and chats, and of the requests that are translated to them."""

    prompt_field: ClassVar[str] = "prompt"

    model: str | None = None
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    top_k: int = Field(default=0, ge=-1, le=_INT64 - 1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-_INT64, le=_INT64 - 1)
    logit_bias: Biases | None = None
    allowed_token_ids: Annotated[Tokens, Field(min_length=1)] | None = None
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=10)
    min_tokens: int = Field(default=0, ge=0)
    stop_token_ids: Tokens | None = None
    ignore_eos: bool = False
    max_tokens: int | None = Field(default=None, ge=-1)  # -1 is no limit
    stop: StopString | Annotated[Items[StopString], Field(max_length=MAX_STOPS)] = ""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    t_max_predict_ms: float = 0.0
    cache_prompt: bool = True
    cache_salt: Annotated[Text, Field(max_length=200)] = ""
    prediction: Prediction | None = None
    speculation: SpeculationOptions = SpeculationOptions()
    # Only its `prompt_family` has an effect.
    metadata: Annotated[dict[str, str], at_most(16)] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        options, structure = self.speculation, self.structure
        needs = {
            "prediction": (self.prediction, "'prediction'"),
            "grammar": (structure or getattr(self, "tools", None), "'response_format', 'grammar' or 'tools'"),
        }
        is_given, needed = needs.get(options.drafter, (True, ""))
        refuse(
            (self.ignore_eos and structure, "ignore_eos", "would never let an answer with a form end"),
            (self.stream_options and not self.stream, "stream_options", "needs 'stream': true"),
            (options.gamma and options.mode != "fixed", "speculation.gamma", "needs 'speculation.mode': 'fixed'"),
            (not is_given, "speculation.drafter", f"'{options.drafter}' needs {needed}"),
        )
        return self

    def sampling_params(self, vocabulary: Vocabulary) -> SamplingParams:
        """Return how tokens are sampled; end tokens that are ignored never are.

        Raises:
            RequestError: 400; a field names something that is no token.
        """
        ends, stop_tokens = vocabulary.end_tokens(), self.stop_token_ids or []
        biases = [(int(token), bias) for token, bias in (self.logit_bias or {}).items()]
        check_tokens("stop_token_ids", stop_tokens, vocabulary)
        check_tokens("allowed_token_ids", self.allowed_token_ids or [], vocabulary)
        check_tokens("logit_bias", (token for token, _ in biases), vocabulary)
        return SamplingParams(
            temperature=self.temperature,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=None if self.seed == _ANY_SEED else self.seed,
            logit_bias=(*biases, *((token, -math.inf) for token in ends if self.ignore_eos)),
            allowed_tokens=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            min_tokens=self.min_tokens,
            end_tokens=(*ends, *stop_tokens) if self.min_tokens else (),
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
        )

    @property
    def shared_fields(self) -> dict[str, Any]:
        """The fields that it sets and that the request has, too, to which it is translated."""
        return {name: getattr(self, name) for name in GenerationRequest.model_fields if name in self.model_fields_set}

    @property
    def limit_field(self) -> str:
        return "max_tokens"

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer."""
        limit: int | None = getattr(self, self.limit_field)
        return None if limit == -1 else limit

    @property
    def answers(self) -> int:
        """How many answers each prompt gets."""
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        return [*filter(None, [self.stop] if isinstance(self.stop, str) else self.stop)]


class CompletionRequest(GenerationRequest):
    callable_tools: ClassVar[dict[str, dict[str, Any]]] = {}
    forbids_reasoning: ClassVar[bool] = True

    prompt: (
        Text
        | Items[int]
        | Annotated[Items[Text], Field(max_length=MAX_CHOICES)]
        | Annotated[Items[Items[int]], Field(max_length=MAX_CHOICES)]
    )
    max_tokens: int | None = Field(default=_COMPLETION_TOKENS, ge=-1)
    add_special_tokens: bool = True
    echo: bool = False
    suffix: Text | None = None
    logprobs: int | None = Field(default=None, ge=0, le=5)

    @model_validator(mode="after")
    def _has_few_answers(self) -> Self:
        refuse(
            (len(self.prompts) * self.answers > MAX_CHOICES, "prompt", f"and 'n' ask for over {MAX_CHOICES} answers")
        )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as a list, where a list of integers is one of them."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        several = [prompt for prompt in self.prompt if not isinstance(prompt, int)]
        return [*several] or [[token for token in self.prompt if isinstance(token, int)]]

    @property
    def scores(self) -> int | None:
        """How many of the most probable tokens are returned at every position; None: no log-probabilities."""
        return self.logprobs


class Message(Body):
    """A message of a chat; the answer to a call has the role `tool`, and the id of the call."""

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
        # gpt-oss's template calls it `thinking`, and takes that or the text beside calls.
        thinking = None if self.content and self.tool_calls else self.reasoning_content
        given |= {"reasoning_content": self.reasoning_content, "thinking": thinking}
        return message | {key: value for key, value in given.items() if value is not None}


class ChatRequest(GenerationRequest, ToolFields):
    prompt_field: ClassVar[str] = "messages"
    echo: ClassVar[bool] = False

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=-1)

    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    # Without effect where the chat template does not read them.
    reasoning_effort: str | None = None
    chat_template_kwargs: Annotated[dict[str, Any], at_most(64)] | None = None
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] | None = None

    @model_validator(mode="after")
    def _chat_agrees(self) -> Self:
        structure = self.structure
        is_text = structure is not None and structure.kind != "json_schema"
        refuse(
            (self.top_logprobs is not None and not self.logprobs, "top_logprobs", "needs 'logprobs': true"),
            (self.callable_tools and is_text, structure.param if structure else "", "and 'tools' exclude each other"),
            (
                self.requires_call and self.ignore_eos,
                "ignore_eos",
                "would never let an answer that has to be a call end",
            ),
        )
        return self

    @property
    def limit_field(self) -> str:
        """The field that limits the tokens of an answer; the newer one comes first."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def scores(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def forbids_reasoning(self) -> bool:
        """Whether no reasoning is told apart: the form holds from the first token on, or all is wanted as text."""
        return self.structure is not None or self.requires_call or self.reasoning_format == "none"
