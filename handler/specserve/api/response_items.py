"""The items of v1/responses, as messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal

from specserve.api.body import Body, Items, Part, Text
from specserve.api.response_tools import flat_name

Json = dict[str, Any]


class TextItem(Part):
    """A part of an item's content; there is only text."""

    also_known = frozenset({"annotations", "logprobs"})

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: Text


Texts = Text | Items[TextItem]


class ShellOutput(Body):
    """What a command has written."""

    stdout: Text
    stderr: Text
    outcome: dict[str, Any] | None = None


class Item(Body):
    """An item of the input: a message, the call of a tool, its output, or the reasoning before these."""

    also_known = frozenset({"phase", "encrypted_content", "environment", "max_output_length"})

    type: Literal[
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "shell_call",
        "shell_call_output",
        "local_shell_call",
        "local_shell_call_output",
        "apply_patch_call",
        "apply_patch_call_output",
    ] = "message"
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
        """Return it as a message of a chat."""
        if self.type == "message":
            return {"role": self.role, "content": _text(self.content or "")}
        if self.type == "reasoning":
            return {"role": "assistant", "reasoning_content": _text(self.content or self.summary or "")}
        if self.type.endswith("output"):
            # An output of `local_shell` may have the id of its call so; one of `apply_patch` may have no text.
            call_id = self.call_id or self.id or ""
            content = _output(self.output) or (self.status or "") * (self.type == "apply_patch_call_output")
            return {"role": "tool", "tool_call_id": call_id, "content": content}
        name, arguments = flat_name(self.name, self.namespace), self.arguments
        if self.type == "custom_tool_call":
            arguments = json.dumps({"input": self.input})
        elif self.type != "function_call":
            given = self.action or self.operation or {}
            name = self.type.removesuffix("_call")
            arguments = json.dumps({key: value for key, value in given.items() if value is not None})
        call = {"id": self.call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        return {"role": "assistant", "tool_calls": [call]}


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


def _output(output: Texts | list[ShellOutput] | None) -> str:
    """Return the output of a tool as text."""
    if output is None or isinstance(output, str):
        return output or ""
    return "".join(part.text if isinstance(part, TextItem) else part.model_dump_json() for part in output)


def _text(content: Texts) -> str:
    """Join the parts of a content to its text."""
    return content if isinstance(content, str) else "".join(part.text for part in content)
