"""Anthropic's v1/messages, as a translation: a request becomes a chat, and its answer the blocks of a message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from specserve.api.blocks import Block, BlocksResponse, Event, Stage, TextForm
from specserve.api.body import Body, Items, Json, Part, Text
from specserve.api.client_tools import ANTHROPIC, ProvidersTool, undescribed
from specserve.api.parse import parse_body
from specserve.api.prompt import PromptTooLong
from specserve.api.request_schema import ChatRequest, GenerationRequest, StopString
from specserve.errors import RequestError

# Claude Code begins its system text so, with values that change and would keep all that follows out of the cache.
_BILLING = "x-anthropic-billing-header:"
_ERRORS = {400: "invalid_request_error", 404: "not_found_error", 429: "rate_limit_error", 503: "overloaded_error"}
# This code tells Anthropic's client to send whole conversations.
_NO_THREADS = "thread_unsupported_request"
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# By kind of block: its type, the field of its text, and the type of more of it.
_KINDS = {
    "reasoning": ("thinking", "thinking", "thinking_delta"),
    "text": ("text", "text", "text_delta"),
    "call": ("tool_use", "partial_json", "input_json_delta"),
}


class AnthropicBody(Body):
    """An object of a request, without the fields that only matter to Anthropic's own servers."""

    also_known = frozenset({"cache_control", "citations", "signature", "data", "caller", "budget_tokens", "display"})


class ContentBlock(AnthropicBody, Part):
    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: Text = ""
    thinking: Text = ""
    id: Text = ""
    name: Text = ""
    input: dict[str, Any] | None = None
    tool_use_id: Text = ""
    content: Content | None = None
    is_error: bool | None = None

    def call(self) -> Json:
        function = {"name": self.name, "arguments": json.dumps(self.input or {}, ensure_ascii=False)}
        return {"id": self.id, "type": "function", "function": function}

    def result(self) -> Json:
        content = ("Error: " if self.is_error else "") + _text(self.content or "")
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": content}


Content = Text | Items[ContentBlock]


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content if block.type == "text")


class MessagesMessage(AnthropicBody):
    role: Literal["user", "assistant", "system"]
    content: Content

    def messages(self) -> list[Json]:
        """Return it as messages of a chat, where each result of a tool is one."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        message: Json = {"role": self.role}
        if any(block.type == "text" for block in self.content):
            message["content"] = _text(self.content)
        if calls := [block.call() for block in self.content if block.type == "tool_use"]:
            message["tool_calls"] = calls
        has_content = len(message) > 1
        if thoughts := [block.thinking for block in self.content if block.type == "thinking"]:
            message["reasoning_content"] = "".join(thoughts)
        results = [block.result() for block in self.content if block.type == "tool_result"]
        return [*results, message] if has_content else results


class MessagesTool(AnthropicBody, ProvidersTool):
    """A tool; those with types of their own are described by Anthropic, and run by the client or Anthropic."""

    name: Text = ""
    description: Text | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    def function(self) -> Json:
        """Return it as a tool of a chat; raise a 400 if the client runs it and its schema is not known."""
        if self.type not in {None, "custom", *ANTHROPIC}:
            raise undescribed(str(self.type))
        description, parameters = ANTHROPIC.get(self.type or "", (self.description, self.input_schema))
        function = {"name": self.name, "description": description, "parameters": parameters, "strict": self.strict}
        return {"type": "function", "function": function}


class MessagesToolChoice(AnthropicBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(AnthropicBody):
    """Whether the model thinks first, where its chat template has a variable for that."""

    type: Literal["enabled", "disabled", "adaptive"]


class CountRequest(GenerationRequest, AnthropicBody):
    messages: Annotated[Items[MessagesMessage], Field(min_length=1)]
    system: Content | None = None
    tools: Items[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: TextForm | None = None
    output_format: dict[str, Any] | None = None
    stop_sequences: Items[StopString] | None = None
    temperature: float = Field(default=1.0, ge=0, le=1)
    metadata: dict[str, Any] | None = None
    thread: Any = None
    n: int | None = Field(default=None, ge=1, le=1)

    def chat(self) -> ChatRequest:
        if self.thread is not None:
            sentence = "This server keeps no threads: send the whole conversation without 'thread'."
            raise RequestError(sentence, param="thread", code=_NO_THREADS)
        messages = [message for sent in self.messages for message in sent.messages()]
        last = messages[-1] if messages else {}
        system = self.system or ""
        if not isinstance(system, str):
            system = [block for block in system if not block.text.startswith(_BILLING)]
        if text := _text(system):
            messages.insert(0, {"role": "system", "content": text})
        choice = self.tool_choice or MessagesToolChoice(type="auto")
        named = {"type": "function", "function": {"name": choice.name}}
        written = (self.output_config and self.output_config.format) or self.output_format
        family = (self.metadata or {}).get("prompt_family")
        chat: Json = {
            "messages": messages,
            "metadata": {"prompt_family": family} if family else None,
            # A text of the assistant at the end is the beginning of the answer.
            "continue_final_message": last.get("role") == "assistant" and "tool_calls" not in last,
            "stop": self.stop_sequences or self.stop,
            "tools": [tool.function() for tool in self.tools or [] if not tool.is_hosted] or None,
            "tool_choice": _CHOICES.get(choice.type, named),
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
            "response_format": written or self.response_format,
            "chat_template_kwargs": self.thinking and {"enable_thinking": self.thinking.type != "disabled"},
        }
        return parse_body(self.shared_fields | chat, ChatRequest)


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=0)


class MessagesResponse(BlocksResponse):
    keep_alive = 'event: ping\ndata: {"type": "ping"}\n\n'

    @staticmethod
    def error_body(error: RequestError) -> Json:
        message = error.renamed({"stop": "stop_sequences", "response_format": "output_config.format"}).message
        if isinstance(error, PromptTooLong):
            # Clients know by these words that they have to shorten the conversation, and by the numbers how much.
            message = f"prompt is too long: {error.tokens} tokens > {error.most} maximum"
        body = {"type": _ERRORS.get(error.status, "api_error"), "message": message}
        details = {"details": {"error_code": _NO_THREADS}} if error.code == _NO_THREADS else {}
        return {"type": "error", "error": body | details}

    def _complete(self) -> Event:
        reason = self._finish_reason(self._sequence) or "stop"
        stop = self._sequence.stop if reason == "stop" else ""
        return self._message() | {
            "content": [self._content(block) for block in self._blocks],
            "stop_reason": "stop_sequence" if stop else _STOP_REASONS[reason],
            "stop_sequence": stop or None,
            "speculation": self._totals()["speculation"],
        }

    def _message(self) -> Json:
        """Return the message as far as it is known before its content."""
        sequence = self._sequence
        return {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": sequence.prompt_length - sequence.cached_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": sequence.cached_tokens,
                "output_tokens": sequence.generated,
            },
        }

    def _content(self, block: Block) -> Json:
        kind, field, _ = _KINDS[block.kind]
        if block.call is not None:
            return {"type": kind, "id": block.call.id, "name": block.call.name, "input": block.arguments}
        return {"type": kind, field: block.text} | ({"signature": ""} if block.kind == "reasoning" else {})

    def _beginning(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": self._message()}

    def _block_events(self, stage: Stage, block: Block, text: str) -> Iterator[Event]:
        if stage == "begin":
            yield {"type": "content_block_start", "index": block.index, "content_block": self._content(block)}
            if block.index == 0:
                yield {"type": "ping"}
        elif stage == "more":
            _, field, kind = _KINDS[block.kind]
            yield {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, field: text}}
        else:
            yield {"type": "content_block_stop", "index": block.index}

    def _end(self, response: Event) -> Iterator[Event]:
        delta = {name: response[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": delta} | {name: response[name] for name in ("usage", "speculation")}
        yield {"type": "message_stop"}
