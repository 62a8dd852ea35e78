"""The format of calls is found by what a chat template shows."""

from __future__ import annotations

from specserve.api.call_formats import FORMATS, format_of

# How templates write calls of earlier turns, or tell the model to.
TEMPLATES = {
    "Qwen, Hermes": r"""{{- '\n<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}""",
    "Llama": """{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments }}""",
    "Mistral": """{{- "[TOOL_CALLS][" }}{%- for tool_call in message.tool_calls %}""",
    "Mistral, spaced": """{{- "[TOOL_CALLS] [" }}{%- for tool_call in message.tool_calls %}""",
    "Mistral, named": """{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}""",
    "Granite": "respond only with <|tool_call|> followed by a JSON list of tools used",
    "Granite, plain tag": "respond with <tool_call>[{...}]",
    "any": "{{ messages[0].content }}",
}


def test_a_format_is_found_by_its_template() -> None:
    assert [format_of(template) for template in TEMPLATES.values()] == list(TEMPLATES)
    assert TEMPLATES.keys() == FORMATS.keys()


def test_only_the_last_format_is_for_any_template() -> None:
    assert [bool(marks) for marks, _ in FORMATS.values()] == [True] * (len(FORMATS) - 1) + [False]
