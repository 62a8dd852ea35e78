"""Tools that OpenAI and Anthropic know by their types: as functions with the published schemas, if clients run them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specserve.errors import RequestError

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_NUMBER: Json = {"type": "integer"}
_TEXTS: Json = {"type": "array", "items": _TEXT}


def _object(fields: Json) -> Json:
    """Return the schema of an object with these properties, of which those with a question mark are optional."""
    properties = {name.removesuffix("?"): schema for name, schema in fields.items()}
    required = [name for name in fields if not name.endswith("?")]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _one_of(field: str, forms: Mapping[str, Json]) -> Json:
    """Return the schema of objects whose `field` says which form they have."""
    return {"anyOf": [_object({field: {"const": name}, **form}) for name, form in forms.items()]}


_PATCHES = (
    "Creates, updates or deletes a file. Lines of a diff begin with a space (unchanged), - or +, after a line @@; "
    "those of a new file with +."
)
# By type of tool: what the model is told that it does, and the JSON schema of its arguments.
OPENAI: dict[str, tuple[str, Json]] = {
    "shell": (
        "Runs shell commands on the user's computer.",
        _object({"commands": _TEXTS, "timeout_ms?": _NUMBER, "max_output_length?": _NUMBER}),
    ),
    "local_shell": (
        "Runs a program on the user's computer.",
        _object(
            {
                "type": {"const": "exec"},
                "command": _TEXTS,
                "env": {"type": "object", "additionalProperties": _TEXT},
                "working_directory?": _TEXT,
                "timeout_ms?": _NUMBER,
                "user?": _TEXT,
            }
        ),
    ),
    "apply_patch": (
        _PATCHES,
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
_BASH = (
    "Runs a command in a bash session that goes on from call to call, or restarts it.",
    {"anyOf": [_object({"command": _TEXT}), _object({"restart": {"const": True}})]},
)
_COMMANDS: dict[str, Json] = {
    "view": {"path": _TEXT, "view_range?": {"type": "array", "items": _NUMBER, "minItems": 2, "maxItems": 2}},
    "create": {"path": _TEXT, "file_text": _TEXT},
    "str_replace": {"path": _TEXT, "old_str": _TEXT, "new_str": _TEXT},
    "insert": {"path": _TEXT, "insert_line": _NUMBER, "insert_text": _TEXT},
}
_OLD_COMMANDS = _COMMANDS | {
    "insert": {"path": _TEXT, "insert_line": _NUMBER, "new_str": _TEXT},
    "undo_edit": {"path": _TEXT},
}
_MEMORY_COMMANDS = _COMMANDS | {"delete": {"path": _TEXT}, "rename": {"old_path": _TEXT, "new_path": _TEXT}}
_EDITS = "Views, creates and edits text files: replaces a text that occurs once, or inserts one after a line."
_MEMORY = "Keeps text files below /memories for later conversations: look there first."
ANTHROPIC: dict[str, tuple[str, Json]] = {
    **dict.fromkeys(("bash_20241022", "bash_20250124"), _BASH),
    **dict.fromkeys(("text_editor_20241022", "text_editor_20250124"), (_EDITS, _one_of("command", _OLD_COMMANDS))),
    **dict.fromkeys(("text_editor_20250429", "text_editor_20250728"), (_EDITS, _one_of("command", _COMMANDS))),
    "memory_20250818": (_MEMORY, _one_of("command", _MEMORY_COMMANDS)),
}
# How the types of tools begin that run in the servers of OpenAI and Anthropic. The search for tools only adds others.
_HOSTED = ("web_", "file_search", "code_", "image_generation", "mcp", "tool_search", "programmatic_", "advisor_")


def is_hosted(kind: str | None) -> bool:
    """Whether a tool of this type runs in OpenAI's or Anthropic's servers."""
    return (kind or "").startswith(_HOSTED)


def undescribed(kind: str) -> RequestError:
    """Return the error of a tool that the client runs, and whose schema only another server's models know."""
    sentence = f"The model does not know the tool '{kind}', which is not described: offer it as a function."
    return RequestError(sentence, param="tools", code="unsupported_value")
