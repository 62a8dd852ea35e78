"""Tools that OpenAI and Anthropic know by their types: as functions with the published schemas, if clients run them."""

from collections.abc import Iterator

from specserve.api.body import Body, Json
from specserve.errors import RequestError

_NUMBER: Json = {"type": "integer"}
_TEXTS: Json = {"type": "array", "items": {"type": "string"}}
# Properties that are no texts.
_PROPERTIES: dict[str, Json] = {
    "commands": _TEXTS,
    "env": {"type": "object", "additionalProperties": {"type": "string"}},
    "insert_line": _NUMBER,
    "max_output_length": _NUMBER,
    "timeout_ms": _NUMBER,
    "view_range": {"type": "array", "items": _NUMBER, "minItems": 2, "maxItems": 2},
}


def _object(names: str, **fields: Json) -> Json:
    """Return the schema of an object with these fields and properties, those with a question mark being optional."""
    properties = fields | {name: _PROPERTIES.get(name, {"type": "string"}) for name in names.replace("?", "").split()}
    required = [*fields, *(name for name in names.split() if not name.endswith("?"))]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _one_of(field: str, **forms: str) -> Json:
    """Return the schema of objects whose `field` says which form they have."""
    return {"anyOf": [_object(names, **{field: {"const": form}}) for form, names in forms.items()]}


# By tool type: the description for the model, and the JSON schema of the arguments.
OPENAI: dict[str, tuple[str, Json]] = {
    "shell": ("Runs shell commands on the user's computer.", _object("commands timeout_ms? max_output_length?")),
    "local_shell": (
        "Runs a program on the user's computer.",
        _object("env working_directory? timeout_ms? user?", type={"const": "exec"}, command=_TEXTS),
    ),
    "apply_patch": (
        (
            "Creates, updates or deletes a file. Lines of a diff begin with a space (unchanged), - or +, after a line "
            "@@; those of a new file with +."
        ),
        _one_of("type", create_file="path diff", update_file="path diff", delete_file="path"),
    ),
}
_BASH = (
    "Runs a command in a bash session that goes on from call to call, or restarts it.",
    {"anyOf": [_object("command"), _object("", restart={"const": True})]},
)
_EDITS = "Views, creates and edits text files: replaces a text that occurs once, or inserts one after a line."
_COMMANDS = {"view": "path view_range?", "create": "path file_text", "str_replace": "path old_str new_str"}
_INSERT = {"insert": "path insert_line insert_text"}
_EDITOR = _EDITS, _one_of("command", **_COMMANDS, **_INSERT)
_OLD_EDITOR = _EDITS, _one_of("command", **_COMMANDS, insert="path insert_line new_str", undo_edit="path")
_MEMORY = (
    "Keeps text files below /memories for later conversations: look there first.",
    _one_of("command", **_COMMANDS, **_INSERT, delete="path", rename="old_path new_path"),
)
ANTHROPIC: dict[str, tuple[str, Json]] = {
    **dict.fromkeys(("bash_20241022", "bash_20250124"), _BASH),
    **dict.fromkeys(("text_editor_20241022", "text_editor_20250124"), _OLD_EDITOR),
    **dict.fromkeys(("text_editor_20250429", "text_editor_20250728"), _EDITOR),
    "memory_20250818": _MEMORY,
}
# Type prefixes of tools that run on OpenAI's or Anthropic's servers; the search for tools only adds others.
_HOSTED = ("web_", "file_search", "code_", "image_generation", "mcp", "tool_search", "programmatic_", "advisor_")


class ProvidersTool(Body):
    """A tool of a protocol whose provider runs some: these are ignored."""

    type: str | None = None

    @property
    def is_hosted(self) -> bool:
        return (self.type or "").startswith(_HOSTED)

    def ignored_paths(self, path: str = "") -> Iterator[str]:
        return iter([f"{path}{self.type}"]) if self.is_hosted else super().ignored_paths(path)


def undescribed(kind: str) -> RequestError:
    """Return the error of a tool that the client runs, and whose schema only another server's models know."""
    sentence = f"The model does not know the tool '{kind}', which is not described: offer it as a function."
    return RequestError(sentence, param="tools", code="unsupported_value")
