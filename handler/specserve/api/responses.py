"""OpenAI's v1/responses, as a translation: a request becomes a chat, and its answer the items of a response."""

from collections.abc import Callable, Iterator
from itertools import dropwhile
from typing import Any

from pydantic import Field

from specserve.api.blocks import Block, BlocksResponse, Event, Stage, TextForm
from specserve.api.body import Body, Items, Json, Text
from specserve.api.parse import parse_body
from specserve.api.request_schema import ChatRequest, GenerationRequest
from specserve.api.response_items import Item, Offered, ResponsesTool, ResponsesToolChoice, messages_of
from specserve.errors import RequestError

# Keeps the messages of a response, by its id, for requests that continue it.
Keep = Callable[[str, list[Json]], None]

# The events of an item by stage, with {} for what is written in it.
_PART = {
    "begin": "output_item.added content_part.added",
    "more": "{}.delta",
    "end": "{}.done content_part.done output_item.done",
}
_FUNCTION = {"begin": "output_item.added", "more": "{}.delta", "end": "{}.done output_item.done"}
_CUSTOM = {"end": "output_item.added {0}.delta {0}.done output_item.done"}
_OWN = {"end": "output_item.added output_item.done"}
# By type of item: how its id begins, the field of its text or arguments, what is written in it, and its events.
_KINDS: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "reasoning": ("rs", "text", "reasoning_text", _PART),
    "message": ("msg", "text", "output_text", _PART),
    "function_call": ("fc", "arguments", "function_call_arguments", _FUNCTION),
    "custom_tool_call": ("ctc", "input", "custom_tool_call_input", _CUSTOM),
    "shell_call": ("sh", "action", "", _OWN),
    "local_shell_call": ("lsh", "action", "", _OWN),
    "apply_patch_call": ("apc", "operation", "", _OWN),
}
# The fields of a request that its response repeats, and what they are without it.
_ECHOED: Json = {
    **dict.fromkeys(("instructions", "max_output_tokens", "previous_response_id", "reasoning", "store")),
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
}


class ResponsesReasoning(Body):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(GenerationRequest):
    input: Text | Items[Item]
    instructions: Text | None = None
    tools: Items[ResponsesTool] | None = None
    tool_choice: str | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextForm | None = None
    reasoning: ResponsesReasoning | None = None
    max_output_tokens: int | None = Field(default=None, ge=0)
    top_logprobs: int | None = Field(default=None, ge=0, le=0)
    include: Items[str] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    n: int | None = Field(default=None, ge=1, le=1)
    prompt: None = None

    def offered(self) -> list[Offered]:
        return [offered for tool in self.tools or [] for offered in tool.offered()]

    def messages(self) -> list[Json]:
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else messages_of(self.input)

    def chat(self, messages: list[Json]) -> ChatRequest:
        """Translate it to a chat of these messages, its own and those before."""
        # Most templates take one system message, the first.
        rest = [*dropwhile(lambda message: message["role"] in {"system", "developer"}, messages)]
        system = [self.instructions, *(message["content"] for message in messages[: len(messages) - len(rest)])]
        if text := "\n\n".join(filter(None, system)):
            rest.insert(0, {"role": "system", "content": text})
        choice = self.tool_choice
        # A schema beside its type is also llama.cpp's form of a chat's.
        written = self.text.format if self.text else None
        chat = self.shared_fields | {
            "messages": rest,
            "max_tokens": self.max_tokens if self.max_output_tokens is None else self.max_output_tokens,
            "tools": [{"type": "function", "function": tool.function} for tool in self.offered()] or None,
            "tool_choice": choice.choice() if isinstance(choice, ResponsesToolChoice) else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": written or self.response_format,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
        }
        if "message.output_text.logprobs" in (self.include or []):
            sentence = "Log-probabilities are returned by v1/completions and v1/chat/completions only."
            raise RequestError(sentence, param="include", code="unsupported_value")
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
        self._echoed = _ECHOED | request.model_dump(include={*_ECHOED}, exclude_none=True)
        tools = [tool for tool in request.tools or [] if not tool.is_hosted]
        self._echoed["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
        self._offered = {offered.function["name"]: offered for offered in request.offered()}
        self._sent = 0

    @staticmethod
    def error_body(error: RequestError) -> Json:
        names = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
        return BlocksResponse.error_body(error.renamed(names))

    def _events(self) -> Iterator[Event]:
        for event in super()._events():
            yield event | {"sequence_number": self._sent}
            self._sent += 1

    def _complete(self) -> Event:
        totals = self._totals()
        usage = totals["usage"]
        output = [self._item(block, done=True) for block in self._blocks]
        if self._keep is not None:
            self._keep(self._id, self._messages + messages_of(map(Item.model_validate, output)))
        response = self._object("incomplete" if self._is_cut else "completed", **totals, output=output)
        reason = "max_output_tokens" if self._sequence.finish_reason == "length" else None
        response["incomplete_details"] = {"reason": reason} if self._is_cut else None
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        reasoning = usage["completion_tokens_details"].get("reasoning_tokens", 0)
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage["total_tokens"],
        }
        return response

    @property
    def _is_cut(self) -> bool:
        """Whether the tokens ran out, or a stop string ended a call within its arguments."""
        sequence = self._sequence
        return sequence.finish_reason == "length" or (sequence.done and self._readers[sequence].is_within_call)

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
        return str(block.arguments.get("input", "")) if self._kind(block) == "custom_tool_call" else block.text

    def _item(self, block: Block, *, done: bool) -> Json:
        """Return the item of a block, with its text if it is done."""
        kind = self._kind(block)
        prefix, field, _, events = _KINDS[kind]
        cut = self._is_cut and block is self._blocks[-1]
        status = "in_progress" if not done else "incomplete" if cut else "completed"
        item: Json = {"id": f"{prefix}_{self._request_id}_{block.index}", "type": kind, "status": status}
        if block.call is None:
            content = [self._part(block, block.text)] if done else []
            more: Json = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            return item | {"content": content} | more
        item["call_id"] = block.call.id
        if events is _OWN:
            return item | {field: block.arguments}
        offered = self._offered[block.call.name]
        item |= {"name": offered.name, field: self._text(block) if done else ""}
        return item | ({"namespace": offered.namespace} if offered.namespace else {})

    def _part(self, block: Block, text: str) -> Json:
        """Return the one part of reasoning or of a message."""
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _beginning(self) -> Iterator[Event]:
        for name in ("created", "in_progress"):
            yield {"type": f"response.{name}", "response": self._object("in_progress")}

    def _block_events(self, stage: Stage, block: Block, text: str) -> Iterator[Event]:
        _, field, written, events = _KINDS[self._kind(block)]
        for name in events.get(stage, "").format(written).split():
            item = self._item(block, done=name == "output_item.done")
            text = self._text(block) if stage == "end" else text
            event: Json = {"type": f"response.{name}", "output_index": block.index}
            subject, _, change = name.partition(".")
            if subject == "output_item":
                yield event | {"item": item}
                continue
            event |= {"item_id": item["id"]} | ({} if block.call else {"content_index": 0})
            if subject == "content_part":
                event["part"] = self._part(block, text)
            else:
                event["delta" if change == "delta" else field] = text
            if subject == "output_text":
                event["logprobs"] = []
            yield event

    def _end(self, response: Event) -> Iterator[Event]:
        yield {"type": f"response.{response['status']}", "response": response}

    def _failure(self, error: RequestError) -> Event:
        detail = {"code": "server_error" if error.status >= 500 else "invalid_prompt", "message": error.message}
        return {"type": "response.failed", "response": self._object("failed", error=detail)}
