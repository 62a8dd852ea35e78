"""OpenAI's v1/responses, as a translation: a request becomes a chat, and its answer the items of a response."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import dropwhile
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json

from specserve.errors import RequestError
from specserve.serving.blocks import Block, BlocksResponse, Event
from specserve.serving.openai.body import LooseBody, Text
from specserve.serving.openai.logprobs import chat_logprobs, output_positions
from specserve.serving.openai.neutral_fields import Off
from specserve.serving.openai.parse import parse_body
from specserve.serving.openai.request_schema import (
    ChatRequest,
    GenerationRequest,
    JsonObject,
    PlainText,
    SchemaDescription,
)
from specserve.serving.openai.response_schema import TokenLogprob

Json = dict[str, Any]

# The arguments of a tool that takes free text, offered as a function.
_FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_OFFERED = ("function", "custom")
# By kind of item: how its id begins, the field of its text, and the events of that.
_KINDS = {
    "reasoning": ("rs", "text", "response.reasoning_text"),
    "message": ("msg", "text", "response.output_text"),
    "function_call": ("fc", "arguments", "response.function_call_arguments"),
    "custom_tool_call": ("ctc", "input", "response.custom_tool_call_input"),
}
# The fields of a request that its response repeats, and what they are without it.
_DEFAULTS: Json = {
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "top_p": 1.0,
}
_ECHOED = {
    *("instructions", "max_output_tokens", "previous_response_id", "prompt_cache_key", "reasoning"),
    *("safety_identifier", "service_tier", "store", "tools", "top_logprobs", "user", *_DEFAULTS),
}


class TextItem(LooseBody):
    """A part of an item's content; there is only text."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: Text


Texts = Text | Annotated[list[TextItem], Field(fail_fast=True)]


class Item(LooseBody):
    """An item of the input: a message, the call of a tool, its output, or the reasoning before these."""

    type: Literal[
        "message", "reasoning", "function_call", "custom_tool_call", "function_call_output", "custom_tool_call_output"
    ] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: Texts | None = None
    summary: list[TextItem] = []
    call_id: Text = ""
    name: Text = ""
    arguments: Text = "{}"
    input: Text = ""
    output: Texts = ""

    def message(self) -> Json:
        """Return it as a message of a chat."""
        if self.type == "message":
            return {"role": self.role, "content": _text(self.content or "")}
        if self.type == "reasoning":
            return {"role": "assistant", "reasoning_content": _text(self.content or self.summary)}
        if self.type.endswith("output"):
            return {"role": "tool", "tool_call_id": self.call_id, "content": _text(self.output)}
        arguments = json.dumps({"input": self.input}) if self.type == "custom_tool_call" else self.arguments
        call = {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": arguments}}
        return {"role": "assistant", "tool_calls": [call]}


class ResponsesTool(LooseBody):
    """A tool: a function, or a custom one, which takes free text; the others run in OpenAI's servers only."""

    type: str
    name: Text | None = None
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None

    def function(self) -> Json:
        """Return it as a tool of a chat."""
        function = self.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
        if self.type == "custom":
            grammar = (self.format or {}).get("definition")
            about = [self.description, grammar and f"The input follows this grammar:\n{grammar}"]
            function |= {"parameters": _FREE_TEXT, "description": "\n".join(filter(None, about))}
        return {"type": "function", "function": function}


class ResponsesToolChoice(LooseBody):
    """A tool that has to be called, or those that may be."""

    type: str
    name: str | None = None
    mode: str = "auto"
    tools: list[dict[str, Any]] = []

    def choice(self) -> Json:
        """Return it as the choice of a chat.

        Raises:
            RequestError: 400; it demands a tool that is not offered.
        """
        if self.type == "allowed_tools":
            named = [_named(tool.get("name")) for tool in self.tools if tool.get("type") in _OFFERED]
            return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": named}}
        if self.type not in _OFFERED:
            raise RequestError.invalid("tool_choice", f"This server has no tools of its own such as '{self.type}'.")
        return _named(self.name)


class JsonSchemaFormat(SchemaDescription):
    """JSON that follows a schema."""

    type: Literal["json_schema"]


class TextOptions(LooseBody):
    """The format of the text."""

    format: Annotated[PlainText | JsonObject | JsonSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: str | None = None


class ReasoningOptions(LooseBody):
    """How much the model reasons, where its chat template has a variable for that."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(GenerationRequest, LooseBody):
    """The body of v1/responses."""

    input: Text | Annotated[list[Item], Field(fail_fast=True)]
    instructions: Text | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: int | None = Field(default=None, ge=0)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    include: list[str] | None = None
    previous_response_id: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    n: Literal[1] | None = None
    background: Off | None = None
    conversation: None = None
    prompt: None = None

    def messages(self) -> list[Json]:
        """Return the input as messages of a chat; the items of one answer become one message."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[Json] = []
        for message in (item.message() for item in self.input):
            last = messages[-1] if messages else {}
            continues = "tool_calls" in message or last.keys() == {"role", "reasoning_content"}
            if message["role"] == last.get("role") == "assistant" and continues and "reasoning_content" not in message:
                calls = [*last.get("tool_calls", []), *message.get("tool_calls", [])]
                last.update(message, **({"tool_calls": calls} if calls else {}))
            else:
                messages.append(message)
        return [message for message in messages if message.keys() != {"role", "reasoning_content"}]

    def chat(self, messages: list[Json]) -> ChatRequest:
        """Translate it to a chat of these messages, those of earlier responses included.

        Raises:
            RequestError: 400; a field is wrong.
        """
        # Most templates take one message of the system, the first.
        rest = [*dropwhile(lambda message: message["role"] in {"system", "developer"}, messages)]
        system = [message["content"] for message in messages[: len(messages) - len(rest)]]
        system = [self.instructions, *system] if self.instructions else system
        choice, options = self.tool_choice, self.text or TextOptions()
        written: Any = options.format
        if isinstance(written, JsonSchemaFormat):
            schema = written.model_dump(exclude={"type"}, by_alias=True)
            written = {"type": "json_schema", "json_schema": schema}
        wants_scores = self.top_logprobs or "message.output_text.logprobs" in (self.include or [])
        chat = {name: getattr(self, name) for name in GenerationRequest.model_fields if name in self.model_fields_set}
        chat |= {
            "messages": [*([{"role": "system", "content": "\n\n".join(system)}] if system else []), *rest],
            "max_tokens": self.max_output_tokens,
            "tools": [tool.function() for tool in self.tools or [] if tool.type in _OFFERED] or None,
            "tool_choice": choice.choice() if isinstance(choice, ResponsesToolChoice) else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": written,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            **({"logprobs": True, "top_logprobs": self.top_logprobs or 0} if wants_scores else {}),
        }
        return parse_body(chat, ChatRequest)


class ResponsesResponse(BlocksResponse):
    """Writes the response of v1/responses to a request."""

    def __init__(self, request: ResponsesRequest, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._echoed = request.model_dump(include=_ECHOED, by_alias=True)
        tools = [tool for tool in self._echoed.pop("tools") or [] if tool["type"] in _OFFERED]
        self._echoed |= {"tools": tools, "truncation": "disabled"}
        self._echoed |= {name: value for name, value in _DEFAULTS.items() if self._echoed[name] is None}
        self._custom = {tool["name"] for tool in tools if tool["type"] == "custom"}
        self._scores: dict[int, list[TokenLogprob]] = {}
        self._sent = 0

    def _events(self) -> Iterator[Event]:
        for event in super()._events():
            yield {**event, "sequence_number": self._sent}
            self._sent += 1

    def _whole(self) -> Event:
        cut = self.generations[0].finish_reason == "length"
        totals = self._totals()
        usage = totals["usage"]
        return self._object("incomplete" if cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._item(block, done=True) for block in self._blocks],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.total_tokens,
            },
            "speculation": totals["speculation"],
        }

    def _object(self, status: str) -> Json:
        """Return the response as far as it is known before its output."""
        known = {"id": f"resp_{self._request_id}", "object": "response", "created_at": self._created, "status": status}
        unknown = {"error": None, "incomplete_details": None, "output": [], "usage": None}
        return known | unknown | {"model": self._model, "background": False} | self._echoed

    def _item(self, block: Block, *, done: bool) -> Json:
        """Return the item of a block, without its text unless it is done."""
        kind = self._kind(block)
        prefix, field, _ = _KINDS[kind]
        item: Json = {"id": f"{prefix}_{self._request_id}_{block.index}", "type": kind, "status": "in_progress"}
        if done:
            cut = self.generations[0].finish_reason == "length" and block is self._blocks[-1]
            item["status"] = "incomplete" if cut else "completed"
        if block.call is not None:
            return item | {"call_id": block.call.id, "name": block.call.name, field: self._text(block) if done else ""}
        content = [self._content(block, self._text(block))] if done else []
        return item | {"content": content} | ({"summary": []} if kind == "reasoning" else {"role": "assistant"})

    def _content(self, block: Block, text: str) -> Json:
        """Return the part that reasoning and messages consist of."""
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._scores.get(block.index, [])}

    def _kind(self, block: Block) -> str:
        if block.call is None:
            return "reasoning" if block.kind == "reasoning" else "message"
        return "custom_tool_call" if block.call.name in self._custom else "function_call"

    def _text(self, block: Block) -> str:
        """Return its text; that of a custom tool's call, whose arguments may be cut off, without the JSON around it."""
        if self._kind(block) != "custom_tool_call":
            return block.text
        return str(from_json(block.text or "{}", allow_partial="trailing-strings").get("input", ""))

    def _beginning(self) -> Iterator[Event]:
        yield {"type": "response.created", "response": self._object("in_progress")}
        yield {"type": "response.in_progress", "response": self._object("in_progress")}

    def _block_beginning(self, block: Block) -> Iterator[Event]:
        item = self._item(block, done=False)
        yield {"type": "response.output_item.added", "output_index": block.index, "item": item}
        if block.call is None:
            yield self._event(block, "response.content_part.added", part=self._content(block, ""))

    def _block_news(self, block: Block, text: str) -> Iterator[Event]:
        # The input of a custom tool comes at once, when its JSON is complete.
        if self._kind(block) != "custom_tool_call":
            yield self._delta(block, text)

    def _block_end(self, block: Block) -> Iterator[Event]:
        _, field, name = _KINDS[self._kind(block)]
        text = self._text(block)
        if self._kind(block) == "custom_tool_call":
            yield self._delta(block, text)
        elif scores := self._new_scores(block):
            yield self._delta(block, "") | {"logprobs": scores}
        logprobs = {"logprobs": self._scores.get(block.index, [])} if block.kind == "text" else {}
        yield self._event(block, f"{name}.done", **{field: text}, **logprobs)
        if block.call is None:
            yield self._event(block, "response.content_part.done", part=self._content(block, text))
        item = self._item(block, done=True)
        yield {"type": "response.output_item.done", "output_index": block.index, "item": item}

    def _delta(self, block: Block, text: str) -> Event:
        """Make the event of more text."""
        logprobs = {"logprobs": self._new_scores(block)} if block.kind == "text" else {}
        return self._event(block, f"{_KINDS[self._kind(block)][2]}.delta", delta=text, **logprobs)

    def _event(self, block: Block, name: str, **fields: Any) -> Event:
        """Make an event of a block."""
        place = {"item_id": self._item(block, done=False)["id"], "output_index": block.index}
        return {"type": name, **place, **({} if block.call else {"content_index": 0}), **fields}

    def _new_scores(self, block: Block) -> list[TokenLogprob]:
        """Return the log-probabilities of the tokens since the last event, if the request asks for them."""
        if block.kind != "text" or self._form.top_logprobs is None:
            return []
        positions = output_positions(self.generations[0].take_tokens())
        scores = chat_logprobs(positions, self._vocabulary).content
        self._scores.setdefault(block.index, []).extend(scores)
        return scores

    def _end(self) -> Iterator[Event]:
        response = self._whole()
        yield {"type": f"response.{response['status']}", "response": response}

    def _failure(self, error: RequestError) -> Iterator[Event]:
        detail = {"code": "server_error" if error.status >= 500 else "invalid_prompt", "message": error.message}
        yield {"type": "response.failed", "response": self._object("failed") | {"error": detail}}


def _text(content: Texts) -> str:
    """Join the parts of a content to its text."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _named(name: object) -> Json:
    """Return a tool of a chat's choice."""
    return {"type": "function", "function": {"name": name}}
