"""The table of formats: how models write tool calls and mark their reasoning, by their chat template."""

from specserve.grammar.call_form import CallForm, ThinkingTags
from specserve.grammar.tool_calls import CallSyntax

# JSON without tags, which many models write whatever their template asks for; in braces twice as in an example of the
# template of Qwen2.5, or in a fence.
_JSON = '{~"name"~:~"NAME"~,~"arguments"~:~ARGUMENTS~}'
_UNTAGGED = (
    CallForm("```json~", _JSON, "~```"),
    CallForm("", _JSON, only_first=True),
    CallForm("{", _JSON, "}", only_first=True),
)
_CALL = '{"name": "NAME", "arguments": ARGUMENTS}'
_QWEN = CallForm("<tool_call>\n", _CALL, "\n</tool_call>", tag="<tool_call>")
_GRANITE = CallForm("<|tool_call|>[", _CALL, "]", ", ", tag="<|tool_call|>")
_GRANITE_2 = CallForm("<tool_call>[", _CALL, "]", ", ", tag="<tool_call>")
_MISTRAL = CallForm("[TOOL_CALLS][", _CALL, "]", ", ", tag="[TOOL_CALLS]")
_MISTRAL_SPACED = CallForm("[TOOL_CALLS] [", _CALL, "]", ", ", tag="[TOOL_CALLS]")
_MISTRAL_NAMED = CallForm("[TOOL_CALLS]", "NAME[ARGS]ARGUMENTS", tag="[TOOL_CALLS]")
_LLAMA = CallForm("", '{"name": "NAME", "parameters": ARGUMENTS}', only_first=True)
_LLAMA_BARE = CallForm("", '{~"name"~:~"NAME"~,~"parameters"~:~ARGUMENTS~}', only_first=True)
_LLAMA_TAGGED = CallForm("<|python_tag|>", '{"name": "NAME", "parameters": ARGUMENTS}', tag="<|python_tag|>")


# Of those whose marks a template has all, the first is its format; `any` has no marks.
FORMATS: dict[str, tuple[tuple[str, ...], CallSyntax]] = {
    "Mistral, named": (("[TOOL_CALLS]", "[ARGS]"), CallSyntax((_MISTRAL_NAMED,))),
    "Mistral, spaced": (("[TOOL_CALLS] [",), CallSyntax((_MISTRAL_SPACED,))),
    "Mistral": (("[TOOL_CALLS]",), CallSyntax((_MISTRAL,))),
    "Granite": (("<|tool_call|>",), CallSyntax((_GRANITE,))),
    "Granite, plain tag": (("<tool_call>[",), CallSyntax((_GRANITE_2,))),
    "Qwen, Hermes": (("<tool_call>",), CallSyntax((_QWEN, *_UNTAGGED), "\n")),
    "Llama": (('"parameters": ',), CallSyntax((_LLAMA, _LLAMA_TAGGED, _LLAMA_BARE), "; ")),
    "any": ((), CallSyntax((_QWEN, *_UNTAGGED), "\n")),
}


def format_of(template: str) -> str:
    """Return the name of the format of the calls that a chat template shows."""
    return next(name for name, (marks, _) in FORMATS.items() if all(mark in template for mark in marks))


# Of Qwen3, DeepSeek-R1 and many others; of Magistral, Command A and Seed-OSS.
_THINKING = (
    ThinkingTags("<think>", "</think>"),
    ThinkingTags("[THINK]", "[/THINK]"),
    ThinkingTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ThinkingTags("<seed:think>", "</seed:think>"),
)


def thinking_tags(template: str) -> ThinkingTags | None:
    """Return the tags around reasoning that a chat template knows, if it knows any."""
    return next((tags for tags in _THINKING if tags.end in template), None)
