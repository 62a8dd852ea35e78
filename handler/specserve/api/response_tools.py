"""The tools of v1/responses, as functions of a chat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from specserve.api.body import Body, Items, Text
from specserve.api.client_tools import OPENAI, is_hosted, not_known
from specserve.errors import RequestError

Json = dict[str, Any]

# The arguments of a custom tool, which takes free text, as a function.
_FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class Offered(NamedTuple):
    """A function that the model is offered for a tool: the item of its calls, and the names that these have there."""

    item: str
    name: str | None
    namespace: str | None
    function: Json


class ResponsesTool(Body):
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
        """Whether it runs in OpenAI's servers."""
        return is_hosted(self.type) or (self.environment or {}).get("type", "local") != "local"

    def offered(self, namespace: str | None = None) -> Iterator[Offered]:
        """Yield what the model is offered.

        Raises:
            RequestError: 400; the client runs it, and its schema is not known.
        """
        if self.is_hosted:
            return
        if self.type == "namespace":
            for tool in self.tools or []:
                yield from tool.offered(self.name)
        elif self.type in OPENAI:
            description, parameters = OPENAI[self.type]
            function: Json = {"name": self.type, "description": description, "parameters": parameters}
            yield Offered(f"{self.type}_call", self.type, None, function)
        elif self.type in {"function", "custom"}:
            function = self.model_dump(include={"description", "parameters", "strict"}, exclude_none=True)
            if self.type == "custom":
                grammar = (self.format or {}).get("definition")
                about = [self.description, grammar and f"The input follows this grammar:\n{grammar}"]
                function |= {"parameters": _FREE_TEXT, "description": "\n".join(filter(None, about))}
            function |= {} if self.name is None else {"name": flat_name(self.name, namespace)}
            item = "custom_tool_call" if self.type == "custom" else "function_call"
            yield Offered(item, self.name, namespace, function)
        else:
            raise not_known(self.type)


class ResponsesToolChoice(Body):
    """A tool that has to be called, or those that may be."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: Items[ResponsesTool] | None = None

    def choice(self) -> Json:
        """Return it as the choice of a chat.

        Raises:
            RequestError: 400; it demands a tool that is not offered.
        """
        if self.type == "allowed_tools":
            offered = [offered for tool in self.tools or [] for offered in tool.offered()]
            named = [_named(tool.function.get("name")) for tool in offered]
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
    """Return a tool as a chat names it."""
    return {"type": "function", "function": {"name": name}}
