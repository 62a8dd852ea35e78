"""The fields of requests about tools, as pydantic models."""

import json
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from specserve.api.body import Body, Items, Text, refuse
from specserve.grammar.call_form import NAME_PATTERN

_NO_ARGUMENTS = {"type": "object", "properties": {}}


class Function(Body):
    name: str = Field(pattern=f"^{NAME_PATTERN}$")
    description: Text | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class Tool(Body):
    """A tool, or by its name the one that has to be called; every tool is a function."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Return the tool for chat templates, many of which read fields that a request may leave out."""
        function = self.function
        described = {"description": function.description or "", "parameters": function.parameters or _NO_ARGUMENTS}
        return {"type": "function", "function": {"name": function.name, **described}}


class SomeTools(Body):
    mode: Literal["auto", "required"]
    tools: Items[Tool]


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: SomeTools


class CalledFunction(Body):
    name: Text
    arguments: Text  # JSON


class ToolCall(Body):
    """A call that the assistant has made in an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # of a stream's delta, which some clients send back

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates expect it: with its arguments as an object, if they parse."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id or "", "type": self.type, "function": function}


class ToolFields(Body):
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | AllowedTools | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _choice_agrees(self) -> Self:
        names, (_, chosen) = [tool.function.name for tool in self.tools or []], self._choice
        unknown = [name for name in chosen or () if name not in names]
        refuse(
            (len({*names}) < len(names), "tools", "must each have a name of its own"),
            (unknown or chosen == [], "tool_choice", f"names no tool of 'tools': '{''.join(unknown[:1])}'"),
            (self.tool_choice == "required" and not names, "tool_choice", "'required' needs 'tools'"),
        )
        return self

    @property
    def _choice(self) -> tuple[str, list[str] | None]:
        """Whether tools may, have to or may not be called, and the names of those that may; None is any."""
        choice = self.tool_choice
        if isinstance(choice, Tool):
            return "required", [choice.function.name]
        if isinstance(choice, AllowedTools):
            return choice.allowed_tools.mode, [tool.function.name for tool in choice.allowed_tools.tools]
        return choice or "auto", None

    @property
    def requires_call(self) -> bool:
        return self._choice[0] == "required"

    @property
    def strict_tools(self) -> frozenset[str]:
        """The names of the tools whose schemas have to be followed as a whole."""
        return frozenset(tool.function.name for tool in self.tools or [] if tool.function.strict)

    @property
    def callable_tools(self) -> dict[str, dict[str, Any]]:
        """The tools that may be called, by name, and the JSON schemas of their arguments."""
        mode, names = self._choice
        tools = [tool.function for tool in self.tools or [] if mode != "none"]
        return {tool.name: tool.parameters or {} for tool in tools if names is None or tool.name in names}
