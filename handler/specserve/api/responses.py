"""OpenAI's v1/responses, as a translation: a request becomes a chat, and its answer the items of a response."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import dropwhile
from typing import Any, Literal

from pydantic import Field

from specserve.api.answer import Call
from specserve.api.blocks import Block, BlocksResponse, Event, arguments_of, generation_fields
from specserve.api.body import Body, Items, Text
from specserve.api.logprobs import chat_logprobs, output_positions
from specserve.api.parse import parse_body
from specserve.api.request_schema import ChatRequest, GenerationRequest
from specserve.api.response_items import Item, messages_of
from specserve.api.response_schema import ResponseObject, TokenLogprob
from specserve.api.response_tools import Offered, ResponsesTool, ResponsesToolChoice
from specserve.errors import RequestError

Json = dict[str, Any]
# Keeps the messages of a response, by its id, for requests that continue it.
Keep = Callable[[str, list[Json]], None]

# By kind of item: how its id begins, the field of its text or arguments, and the events of that, if it has any.
_KINDS = {
    "reasoning": ("rs", "text", "response.reasoning_text"),
    "message": ("msg", "text", "response.output_text"),
    "function_call": ("fc", "arguments", "response.function_call_arguments"),
    "custom_tool_call": ("ctc", "input", "response.custom_tool_call_input"),
    "shell_call": ("sh", "action", None),
    "local_shell_call": ("lsh", "action", None),
    "apply_patch_call": ("apc", "operation", None),
}
# The fields of a request that its response repeats, and those of them that are not null without it.
_DEFAULTS: Json = {
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "top_p": 1.0,
}
_ECHOED = {"instructions", "max_output_tokens", "previous_response_id", "reasoning", "store", "tools", *_DEFAULTS}


class ResponsesText(Body):
    """How the text is to be; `format` is validated as the `response_format` of a chat."""

    format: dict[str, Any] | None = None


class ResponsesReasoning(Body):
    """How the model is to think; there are no summaries of it."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(GenerationRequest):
    """The body of v1/responses."""

    input: Text | Items[Item]
    instructions: Text | None = None
    tools: Items[ResponsesTool] | None = None
    tool_choice: str | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: ResponsesText | None = None
    reasoning: ResponsesReasoning | None = None
    max_output_tokens: int | None = Field(default=None, ge=0)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    include: Items[str] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    n: Literal[1] | None = None
    background: Literal[False] | None = None
    conversation: None = None
    prompt: None = None

    def _not_offered(self) -> Iterator[str]:
        for index, tool in enumerate(self.tools or []):
            if tool.is_hosted:
                yield f"tools[{index}].{tool.type}"

    def offered(self) -> list[Offered]:
        """Return the functions that the model is offered."""
        return [offered for tool in self.tools or [] for offered in tool.offered()]

    def messages(self) -> list[Json]:
        """Return the input as messages of a chat."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else messages_of(self.input)

    def chat(self, messages: list[Json]) -> ChatRequest:
        """Translate it to a chat of these messages, its own and those before.

        Raises:
            RequestError: 400; a field is wrong.
        """
        # Most templates take one message of the system, the first.
        rest = [*dropwhile(lambda message: message["role"] in {"system", "developer"}, messages)]
        system = [message["content"] for message in messages[: len(messages) - len(rest)]]
        system = [self.instructions, *system] if self.instructions else system
        choice = self.tool_choice
        written = self.text.format if self.text else None
        if written and written.get("type") == "json_schema":
            schema = {name: value for name, value in written.items() if name != "type"}
            written = {"type": "json_schema", "json_schema": schema}
        chat = generation_fields(self)
        chat |= {
            "messages": [*([{"role": "system", "content": "\n\n".join(system)}] if system else []), *rest],
            "max_tokens": self.max_tokens if self.max_output_tokens is None else self.max_output_tokens,
            "tools": [{"type": "function", "function": tool.function} for tool in self.offered()] or None,
            "tool_choice": choice.choice() if isinstance(choice, ResponsesToolChoice) else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": written or self.response_format,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
        }
        if self.top_logprobs or "message.output_text.logprobs" in (self.include or []):
            chat |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return parse_body(chat, ChatRequest)


class ResponsesResponse(BlocksResponse):
    """Writes the response of v1/responses to a request, and keeps the messages with the answer."""

    def __init__(
        self, request: ResponsesRequest, messages: list[Json], keep: Keep | None, *args: Any, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._id = f"resp_{self._request_id}"
        self._messages = messages
        self._keep = keep
        echoed = dict.fromkeys(_ECHOED) | request.model_dump(include=_ECHOED, exclude_none=True)
        tools = [tool for tool in request.tools or [] if not tool.is_hosted]
        defaults = {name: value for name, value in _DEFAULTS.items() if echoed[name] is None}
        self._echoed = echoed | defaults | {"tools": [tool.model_dump(exclude_none=True) for tool in tools]}
        self._offered = {offered.function.get("name"): offered for offered in request.offered()}
        self._logprobs: dict[int, list[TokenLogprob]] = {}
        self._sent = 0

    @staticmethod
    def error_body(error: RequestError) -> ResponseObject | Mapping[str, Any]:
        """Return the body of the response to a request that is refused or fails."""
        names = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
        return BlocksResponse.error_body(error.renamed(names))

    def _events(self) -> Iterator[Event]:
        for event in super()._events():
            yield event | {"sequence_number": self._sent}
            self._sent += 1

    def _whole(self) -> Event:
        totals = self._totals()
        usage = totals["usage"]
        cached = {"cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0}
        reasoning = {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens or 0}
        output = [self._item(block, done=True) for block in self._blocks]
        for index, scores in self._logprobs.items():
            output[index]["content"][0]["logprobs"] = scores
        if self._keep is not None:
            self._keep(self._id, self._messages + messages_of(map(Item.model_validate, output)))
        response = self._object("incomplete" if self._is_cut else "completed", **totals, output=output)
        reason = "max_output_tokens" if self.generations[0].finish_reason == "length" else None
        response["incomplete_details"] = {"reason": reason} if self._is_cut else None
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": cached,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": reasoning,
            "total_tokens": usage.total_tokens,
        }
        return response

    @property
    def _is_cut(self) -> bool:
        """Whether the tokens ran out, or a stop string ended a call within its arguments."""
        [generation] = self.generations
        reader = self._readers.get(generation)
        is_within_call = reader is not None and reader.is_within_call
        return generation.finish_reason == "length" or (generation.done and is_within_call)

    def _object(self, status: str, **fields: Any) -> Json:
        """Return the response; what is not known is null."""
        known = {"id": self._id, "object": "response", "created_at": self._created, "model": self._model}
        later: Json = {"error": None, "incomplete_details": None, "output": [], "usage": None}
        return known | {"status": status, "background": False} | self._echoed | later | fields

    def _kind(self, block: Block) -> str:
        if block.call is None:
            return "reasoning" if block.kind == "reasoning" else "message"
        return self._offered[block.call.name].item

    def _text(self, block: Block) -> str:
        """Return its text; that of a custom tool, which may be cut off, without the JSON around it."""
        if self._kind(block) != "custom_tool_call":
            return block.text
        return str(arguments_of(block).get("input", ""))

    def _call(self, block: Block, call: Call, *, done: bool) -> Json:
        """Return what the item of a call has beside what all have."""
        kind = self._kind(block)
        _, field, events = _KINDS[kind]
        if events is None:
            return {"call_id": call.id, field: arguments_of(block)}
        offered = self._offered[call.name]
        within = {"namespace": offered.namespace} if offered.namespace else {}
        return {"call_id": call.id, "name": offered.name, field: self._text(block) if done else "", **within}

    def _item(self, block: Block, *, done: bool) -> Json:
        """Return the item of a block, with its text if it is done."""
        kind = self._kind(block)
        prefix, *_ = _KINDS[kind]
        cut = self._is_cut and block is self._blocks[-1]
        status = "in_progress" if not done else "incomplete" if cut else "completed"
        item: Json = {"id": f"{prefix}_{self._request_id}_{block.index}", "type": kind, "status": status}
        if block.call is not None:
            return item | self._call(block, block.call, done=done)
        content = [self._part(block, block.text)] if done else []
        more: Json = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
        return item | {"content": content} | more

    def _part(self, block: Block, text: str) -> Json:
        """Return the one part of reasoning or of a message."""
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        # Scores come with their tokens and in the whole response only: to write megabytes of them takes long.
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _beginning(self) -> Iterator[Event]:
        for name in ("created", "in_progress"):
            yield {"type": f"response.{name}", "response": self._object("in_progress")}

    def _block_beginning(self, block: Block) -> Iterator[Event]:
        *_, events = _KINDS[self._kind(block)]
        if events is not None:
            yield self._added(block)
        if block.call is None:
            yield self._event(block, "response.content_part.added", part=self._part(block, ""))

    def _block_news(self, block: Block, text: str) -> Iterator[Event]:
        *_, name = _KINDS[self._kind(block)]
        # Those since the last event; a call is read later than its first tokens, which are among them.
        fields: Json = {}
        if block.kind == "text":
            [generation] = self.generations
            tokens = generation.take_tokens() if self._form.top_logprobs is not None else []
            # Those of the reasoning before it were released with it.
            positions = output_positions(
                token for token in tokens if token.offset >= self._readers[generation].reasoned
            )
            fields["logprobs"] = chat_logprobs(positions, self._vocabulary).content
            self._logprobs.setdefault(block.index, []).extend(fields["logprobs"])
        # The JSON around the text of a custom tool is not shown, so that comes at its end, as do objects.
        if name is not None and self._kind(block) != "custom_tool_call":
            yield self._event(block, f"{name}.delta", delta=text, **fields)

    def _block_end(self, block: Block) -> Iterator[Event]:
        _, field, name = _KINDS[self._kind(block)]
        text = self._text(block)
        if self._kind(block) == "custom_tool_call":
            yield self._event(block, f"{name}.delta", delta=text)
        logprobs: Json = {"logprobs": []} if block.kind == "text" else {}
        if name is None:
            yield self._added(block)
        else:
            yield self._event(block, f"{name}.done", **{field: text}, **logprobs)
        if block.call is None:
            yield self._event(block, "response.content_part.done", part=self._part(block, text))
        item = self._item(block, done=True)
        yield {"type": "response.output_item.done", "output_index": block.index, "item": item}

    def _added(self, block: Block) -> Event:
        item = self._item(block, done=False)
        return {"type": "response.output_item.added", "output_index": block.index, "item": item}

    def _event(self, block: Block, name: str, **fields: Any) -> Event:
        """Make an event of a block."""
        place = {"item_id": self._item(block, done=False)["id"], "output_index": block.index}
        return {"type": name, **place, **({} if block.call else {"content_index": 0}), **fields}

    def _end(self) -> Iterator[Event]:
        response = self._whole()
        yield {"type": f"response.{response['status']}", "response": response}

    def _failure(self, error: RequestError) -> Iterator[Event]:
        detail = {"code": "server_error" if error.status >= 500 else "invalid_prompt", "message": error.message}
        yield {"type": "response.failed", "response": self._object("failed", error=detail)}
