"""Tools that clients run, which OpenAI and Anthropic know by their types: as functions, with the published schemas."""

from __future__ import annotations

from typing import Any, NamedTuple

from specserve.errors import RequestError

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_NUMBER: Json = {"type": "integer"}
_TEXTS: Json = {"type": "array", "items": _TEXT}


class ClientTool(NamedTuple):
    """What the model is told of a tool: what it does, and the JSON schema of its arguments."""

    description: str
    parameters: Json


def _object(required: Json, optional: Json | None = None) -> Json:
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def _one_of(field: str, forms: dict[str, Json], optional: Json | None = None) -> Json:
    """Return the schema of objects whose `field` says which form they have."""
    return {"anyOf": [_object({field: {"const": name}, **form}, optional) for name, form in forms.items()]}


def _editor(inserted: str, **more: Json) -> Json:
    """Return the schema of Anthropic's commands for texts, where the field `inserted` has what is inserted."""
    lines: Json = {"view_range": {"type": "array", "items": _NUMBER, "minItems": 2, "maxItems": 2}}
    view = _object({"command": {"const": "view"}, "path": _TEXT}, lines)
    forms = {
        "create": {"path": _TEXT, "file_text": _TEXT},
        "str_replace": {"path": _TEXT, "old_str": _TEXT, "new_str": _TEXT},
        "insert": {"path": _TEXT, "insert_line": _NUMBER, inserted: _TEXT},
    }
    return {"anyOf": [view, *_one_of("command", forms | more)["anyOf"]]}


OPENAI = {
    "shell": ClientTool(
        "Runs shell commands on the user's computer.",
        _object({"commands": _TEXTS}, {"timeout_ms": _NUMBER, "max_output_length": _NUMBER}),
    ),
    "local_shell": ClientTool(
        "Runs a program on the user's computer.",
        _object(
            {"type": {"const": "exec"}, "command": _TEXTS, "env": {"type": "object", "additionalProperties": _TEXT}},
            {"working_directory": _TEXT, "timeout_ms": _NUMBER, "user": _TEXT},
        ),
    ),
    "apply_patch": ClientTool(
        "Creates, updates or deletes a file. Lines of a diff begin with a space (unchanged), - or +, after a line @@; "
        "those of a new file with +.",
        _one_of(
            "type",
            {
                "create_file": {"path": _TEXT, "diff": _TEXT},
                "update_file": {"path": _TEXT, "diff": _TEXT},
                "delete_file": {"path": _TEXT},
            },
        ),
    ),
}
_BASH = ClientTool(
    "Runs a command in a bash session that goes on from call to call, or restarts it.",
    {"anyOf": [_object({"command": _TEXT}), _object({"restart": {"const": True}})]},
)
_EDITS = "Views, creates and edits text files: replaces a text that occurs once, or inserts one after a line."
_OLD_EDITOR = ClientTool(_EDITS, _editor("new_str", undo_edit={"path": _TEXT}))
_EDITOR = ClientTool(_EDITS, _editor("insert_text"))
_MEMORY = ClientTool(
    "Keeps text files below /memories for later conversations: look there first.",
    _editor("insert_text", delete={"path": _TEXT}, rename={"old_path": _TEXT, "new_path": _TEXT}),
)
ANTHROPIC = {
    **dict.fromkeys(("bash_20241022", "bash_20250124"), _BASH),
    **dict.fromkeys(("text_editor_20241022", "text_editor_20250124"), _OLD_EDITOR),
    **dict.fromkeys(("text_editor_20250429", "text_editor_20250728"), _EDITOR),
    "memory_20250818": _MEMORY,
}
# How the types of tools begin that run in the servers of OpenAI and Anthropic. The search for tools only adds others.
_HOSTED = ("web_", "file_search", "code_", "image_generation", "mcp", "tool_search", "programmatic_", "advisor_")


def is_hosted(kind: str) -> bool:
    """Whether a tool of this type runs in OpenAI's or Anthropic's servers."""
    return kind.startswith(_HOSTED)


def not_known(kind: str) -> RequestError:
    """Return the error of a tool that the client runs, and that only another server's models know."""
    sentence = f"The model does not know the tool '{kind}', which is not described: offer it as a function."
    return RequestError(sentence, param="tools", code="unsupported_value")
