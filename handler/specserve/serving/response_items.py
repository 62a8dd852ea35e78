"""The items of v1/responses, as messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal

from specserve.serving.openai.body import Body, Items, Part, Text

Json = dict[str, Any]


class TextItem(Part):
    """A part of an item's content; there is only text."""

    also_known = frozenset({"annotations", "logprobs"})

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: Text


Texts = Text | Items[TextItem]


class Item(Body):
    """An item of the input: a message, the call of a tool, its output, or the reasoning before these."""

    also_known = frozenset({"id", "status", "phase", "encrypted_content"})

    type: Literal[
        "message", "reasoning", "function_call", "custom_tool_call", "function_call_output", "custom_tool_call_output"
    ] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: Texts | None = None
    summary: Items[TextItem] | None = None
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
            return {"role": "assistant", "reasoning_content": _text(self.content or self.summary or "")}
        if self.type.endswith("output"):
            return {"role": "tool", "tool_call_id": self.call_id, "content": _text(self.output)}
        arguments = json.dumps({"input": self.input}) if self.type == "custom_tool_call" else self.arguments
        call = {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": arguments}}
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


def _text(content: Texts) -> str:
    """Join the parts of a content to its text."""
    return content if isinstance(content, str) else "".join(part.text for part in content)
