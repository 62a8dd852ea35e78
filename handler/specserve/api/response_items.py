"""What v1/responses has in its input, as parts of a chat: items as messages, tools as functions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from specserve.api.body import Body, Items, Json, Part, Text
from specserve.api.client_tools import OPENAI, ProvidersTool, undescribed
from specserve.errors import RequestError

# The arguments of a custom tool, which takes free text, as a function.
_FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
# The types of items that are tool calls; their outputs are named after them.
_CALLS = {"function_call", "custom_tool_call", *(f"{kind}_call" for kind in OPENAI)}


class TextItem(Part):
    also_known = frozenset({"annotations", "logprobs"})

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: Text


Texts = Text | Items[TextItem]


class ShellOutput(Body):
    stdout: Text
    stderr: Text
    outcome: dict[str, Any] | None = None


class Item(Body):
    """An item of the input: a message, a tool call, its output, or the reasoning before these."""

    also_known = frozenset({"phase", "encrypted_content", "environment", "max_output_length"})

    type: str = "message"
    id: Text | None = None
    status: Text | None = None
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: Texts | None = None
    summary: Items[TextItem] | None = None
    call_id: Text = ""
    name: Text = ""
    namespace: Text | None = None
    arguments: Text = "{}"
    input: Text = ""
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    output: Texts | Items[ShellOutput] | None = None

    def message(self) -> Json:
        if self.type == "message":
            return {"role": self.role, "content": _text(self.content)}
        if self.type == "reasoning":
            return {"role": "assistant", "reasoning_content": _text(self.content or self.summary)}
        call = self.type.removesuffix("_output")
        if call not in _CALLS:
            raise RequestError.invalid("input", f"'input' has an item of type '{self.type}', which is not supported.")
        if call != self.type:
            # `local_shell` may name its call by the item's id; `apply_patch` may have no text.
            content = _text(self.output) or (self.status or "") * (call == "apply_patch_call")
            return {"role": "tool", "tool_call_id": self.call_id or self.id or "", "content": content}
        name, arguments = flat_name(self.name, self.namespace), self.arguments
        if call == "custom_tool_call":
            arguments = json.dumps({"input": self.input})
        elif call != "function_call":
            given = self.action or self.operation or {}
            name = call.removesuffix("_call")
            arguments = json.dumps({key: value for key, value in given.items() if value is not None})
        function = {"name": name, "arguments": arguments}
        return {"role": "assistant", "tool_calls": [{"id": self.call_id, "type": "function", "function": function}]}


def messages_of(items: Iterable[Item]) -> list[Json]:
    """Translate items to messages of a chat, where those of one answer are one."""
    messages: list[Json] = []
    for message in (item.message() for item in items):
        last = messages[-1] if messages else {}
        if message["role"] == last.get("role") == "assistant" and "tool_calls" in message:
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
        elif "content" in message and message["role"] == "assistant" and last.keys() == {"role", "reasoning_content"}:
            last.update(message)
        else:
            messages.append(message)
    # Reasoning without the answer that it led to is no message.
    return [message for message in messages if message.keys() != {"role", "reasoning_content"}]


def _text(content: str | Iterable[TextItem | ShellOutput] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text if isinstance(part, TextItem) else part.model_dump_json() for part in content)


class Offered(NamedTuple):
    """A function that the model is offered for a tool."""

    item: str  # the type of its calls
    name: str | None  # in these
    namespace: str | None  # in these
    function: Json


class ResponsesTool(ProvidersTool):
    """A tool, or a namespace with tools."""

    type: str
    name: Text | None = None
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: Items[ResponsesTool] | None = None
    environment: dict[str, Any] | None = None

    @property
    def is_hosted(self) -> bool:
        return super().is_hosted or (self.environment or {}).get("type", "local") != "local"

    def offered(self, namespace: str | None = None) -> Iterator[Offered]:
        """Yield what the model is offered; raise a 400 for a tool of the client whose schema is not known."""
        if self.is_hosted:
            return
        if self.type == "namespace":
            for tool in self.tools or []:
                yield from tool.offered(self.name)
            return
        item, name = f"{self.type}_call", self.name and flat_name(self.name, namespace)
        description, parameters = self.description, self.parameters
        if self.type in OPENAI:
            name = self.type
            description, parameters = OPENAI[self.type]
        elif self.type == "custom":
            item, parameters = "custom_tool_call", _FREE_TEXT
            grammar = (self.format or {}).get("definition")
            about = [self.description, grammar and f"The input follows this grammar:\n{grammar}"]
            description = "\n".join(filter(None, about))
        elif self.type != "function":
            raise undescribed(self.type)
        function = {"name": name, "description": description, "parameters": parameters, "strict": self.strict}
        yield Offered(item, self.name, namespace, function)


class ResponsesToolChoice(Body):
    """A tool that has to be called, or those that may be."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: Items[ResponsesTool] | None = None

    def choice(self) -> Json:
        if self.type == "allowed_tools":
            named = [_named(offered.function["name"]) for tool in self.tools or [] for offered in tool.offered()]
            return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": named}}
        if self.type in OPENAI:
            return _named(self.type)
        if self.type not in {"function", "custom"}:
            raise RequestError.invalid("tool_choice", f"The model is offered functions only, and no '{self.type}'.")
        return _named(self.name)


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name of a tool in a namespace as the model knows it, which is as clients name the tools of MCP."""
    return f"{namespace}__{name}" if namespace else name


def _named(name: str | None) -> Json:
    return {"type": "function", "function": {"name": name}}
