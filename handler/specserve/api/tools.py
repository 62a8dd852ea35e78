"""The fields of requests about tools, as pydantic models."""

from __future__ import annotations

import json
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from specserve.api.body import Body, Items, Text, disagreement
from specserve.grammar.call_form import NAME_PATTERN

_NO_ARGUMENTS = {"type": "object", "properties": {}}


class Function(Body):
    """A function that the model may call, by its name and the JSON schema of its arguments."""

    name: str = Field(pattern=f"^{NAME_PATTERN}$")
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; functions are the only ones."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it, where many read fields that may be missing in a request."""
        function = self.function
        described = {"description": function.description or "", "parameters": function.parameters or _NO_ARGUMENTS}
        return {"type": "function", "function": {"name": function.name, **described}}


class FunctionName(Body):
    """A function, by its name."""

    name: str


class NamedTool(Body):
    """A tool that has to be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedToolsList(Body):
    """Those of the tools that may be called, and whether one has to be."""

    mode: Literal["auto", "required"]
    tools: Items[NamedTool]


class AllowedTools(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolsList


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class CalledFunction(Body):
    """A function with the JSON text of the arguments that it was called with."""

    name: Text
    arguments: Text


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
    """The fields of a request for an answer that may call tools."""

    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _choice_agrees(self) -> Self:
        names, named = [tool.function.name for tool in self.tools or []], self._named_tools
        if len({*names}) < len(names):
            raise disagreement("tools", "each tool needs a name of its own")
        unknown = [name for name in named or () if name not in names]
        if unknown or named == []:
            raise disagreement("tool_choice", f"'tool_choice' names no tool of 'tools': '{''.join(unknown[:1])}'")
        if self.tool_choice == "required" and not names:
            raise disagreement("tool_choice", "'tool_choice': 'required' needs 'tools'")
        return self

    @property
    def _named_tools(self) -> list[str] | None:
        """The names in `tool_choice`; None where all tools may be called, or none."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return [choice.function.name]
        return [tool.function.name for tool in choice.allowed_tools.tools] if isinstance(choice, AllowedTools) else None

    @property
    def requires_call(self) -> bool:
        """Whether the answer has to be a call."""
        choice = self.tool_choice
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
        return mode == "required" or isinstance(choice, NamedTool)

    @property
    def strict_tools(self) -> frozenset[str]:
        """The names of the tools whose schemas have to be followed as a whole."""
        return frozenset(tool.function.name for tool in self.tools or [] if tool.function.strict)

    @property
    def callable_tools(self) -> dict[str, dict[str, Any]]:
        """The tools that may be called, by name, and the JSON schemas of their arguments."""
        named = [] if self.tool_choice == "none" else self._named_tools
        tools = [tool.function for tool in self.tools or []]
        return {tool.name: tool.parameters or {} for tool in tools if named is None or tool.name in named}
