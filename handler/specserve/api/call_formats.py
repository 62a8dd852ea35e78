"""The table of formats: how models write tool calls and mark their reasoning, by their chat template."""

from specserve.grammar.call_form import CallForm, ThinkingTags
from specserve.grammar.notation import Notation
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
# Mistral Nemo and Apriel add ids, as in the history of their templates.
_CALL_ID = '{"name": "NAME", "arguments": ARGUMENTS, "id": "#"}'
# Of Mistral's templates some have a space.
_MISTRAL, _MISTRAL_ID = (CallForm("[TOOL_CALLS]~[", call, "]", ", ", tag="[TOOL_CALLS]") for call in (_CALL, _CALL_ID))
_MISTRAL_CALL_ID = CallForm("[TOOL_CALLS]", "NAME[CALL_ID]#[ARGS]ARGUMENTS", tag="[TOOL_CALLS]")
_MISTRAL_NAMED = CallForm("[TOOL_CALLS]", "NAME[ARGS]ARGUMENTS", tag="[TOOL_CALLS]")
_LLAMA = CallForm("", '{"name": "NAME", "parameters": ARGUMENTS}', only_first=True)
_LLAMA_BARE = CallForm("", '{~"name"~:~"NAME"~,~"parameters"~:~ARGUMENTS~}', only_first=True)
_LLAMA_TAGGED = CallForm("<|python_tag|>", '{"name": "NAME", "parameters": ARGUMENTS}', tag="<|python_tag|>")
_GPT_OSS, _GPT_OSS_PLAIN, _GPT_OSS_BARE = (
    CallForm("<|channel|>commentary to=functions.", f"NAME~{kind}<|message|>ARGUMENTS", tag="<|channel|>commentary to=")
    for kind in ("<|constrain|>json", "json", "")
)
# As the template writes them: in the message's header, which a prompt begins.
_GPT_OSS_HEADED, _GPT_OSS_HEADED_CONSTRAIN = (
    CallForm("to=functions.", f"NAME<|channel|>commentary~{kind}<|message|>ARGUMENTS", only_first=True)
    for kind in ("json", "<|constrain|>json")
)
_GPT_OSS_FORMS = (_GPT_OSS, _GPT_OSS_HEADED, _GPT_OSS_PLAIN, _GPT_OSS_BARE, _GPT_OSS_HEADED_CONSTRAIN)
_APRIEL, _APRIEL_ID = (
    CallForm("<tool_calls>[", call, "]</tool_calls>", ", ", tag="<tool_calls>") for call in (_CALL, _CALL_ID)
)
_QWEN_ITEM = Notation("<parameter=KEY>\nVALUE\n</parameter>", "\n")
_QWEN_XML = "<function=NAME>\nARGUMENTS~</function>"
_QWEN_CODER = CallForm("<tool_call>\n", _QWEN_XML, "\n</tool_call>", tag="<tool_call>", notation=_QWEN_ITEM)
# Qwen3-Coder sometimes leaves out the first tag.
_QWEN_CODER_UNTAGGED = CallForm("", _QWEN_XML, "\n</tool_call>", tag="<function=", notation=_QWEN_ITEM)
_SEED = CallForm(
    "<seed:tool_call>\n",
    _QWEN_XML,
    "\n</seed:tool_call>",
    tag="<seed:tool_call>",
    notation=Notation("<parameter=KEY>VALUE</parameter>", "\n"),
)
_GLM = CallForm(
    "<tool_call>",
    "NAME~ARGUMENTS~</tool_call>",
    tag="<tool_call>",
    notation=Notation("<arg_key>KEY</arg_key>~<arg_value>VALUE</arg_value>", "~"),
)


def _section(tag: str, call: str, notation: Notation) -> CallForm:
    """Return the form of calls one after the other within a tag and its counterpart."""
    return CallForm(f"{tag}\n", call, "</".join(tag.rsplit("<", 1)), "", tag=tag, notation=notation)


_MINIMAX = _section(
    "<minimax:tool_call>",
    '<invoke name="NAME">~ARGUMENTS~</invoke>\n',
    Notation('<parameter name="KEY">VALUE</parameter>', "\n"),
)
_HY3 = _section(
    "<tool_calls:opensource>",
    "<tool_call:opensource>NAME<tool_sep:opensource>~ARGUMENTS~</tool_call:opensource>\n",
    Notation("<arg_key:opensource>KEY</arg_key:opensource>~<arg_value:opensource>VALUE</arg_value:opensource>", "~"),
)
# With full-width bars, and blocks for spaces.
_CALLS, _CALLS_END, _ONE, _ONE_END, _SEPARATOR = (
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
)
_DEEPSEEK = CallForm(_CALLS, f"{_ONE}NAME{_SEPARATOR}ARGUMENTS{_ONE_END}", _CALLS_END, "", tag=_CALLS)
_DEEPSEEK_FENCED = f"{_ONE}function{_SEPARATOR}NAME\n```json\nARGUMENTS\n```{_ONE_END}"
_DEEPSEEK_R1 = CallForm(_CALLS, _DEEPSEEK_FENCED, _CALLS_END, "\n", tag=_CALLS)
_PHI_4 = CallForm("functools[", _CALL, "]", ", ", tag="functools[")
_NEMOTRON_2 = CallForm("<TOOLCALL>[", _CALL, "]</TOOLCALL>", ", ", tag="<TOOLCALL>")
_KIMI = CallForm(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>functions.NAME:#<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "",
    tag="<|tool_calls_section_begin|>",
)
_COMMAND_R = CallForm(
    "<|START_ACTION|>[~",
    '{"tool_call_id": "#", "tool_name": "NAME", "parameters": ARGUMENTS}',
    "~]<|END_ACTION|>",
    ",~",
    tag="<|START_ACTION|>",
)
_LFM2 = CallForm(
    "<|tool_call_start|>[",
    "NAME(ARGUMENTS)",
    "]<|tool_call_end|>",
    ", ",
    tag="<|tool_call_start|>",
    notation=Notation("KEY=VALUE", ", ", "python"),
)
_GEMMA_4 = CallForm(
    "<|tool_call>",
    "call:NAME{ARGUMENTS}",
    "<tool_call|>",
    tag="<|tool_call>",
    notation=Notation("KEY:VALUE", ",", "quoted", '<|"|>'),
)
_FUNCTION_GEMMA = CallForm(
    "<start_function_call>",
    "call:NAME{ARGUMENTS}",
    "<end_function_call>",
    tag="<start_function_call>",
    notation=Notation("KEY:VALUE", ",", "quoted", "<escape>"),
)

# By marks that a template has all; `any` has none. Where several rows match, the one that reads the calls of the
# template's own history is its format, or else the one with the longest marks.
FORMATS: dict[str, tuple[tuple[str, ...], CallSyntax]] = {
    "Mistral": (("[TOOL_CALLS]",), CallSyntax((_MISTRAL, _MISTRAL_ID))),
    "Mistral, named": (("[TOOL_CALLS]", "[ARGS]"), CallSyntax((_MISTRAL_NAMED,))),
    "Mistral, call ids": (("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), CallSyntax((_MISTRAL_CALL_ID,))),
    "Granite": (("<|tool_call|>",), CallSyntax((_GRANITE,))),
    "Granite, plain tag": (("<tool_call>[",), CallSyntax((_GRANITE_2,))),
    "Qwen, Hermes": (("<tool_call>",), CallSyntax((_QWEN, *_UNTAGGED), "\n")),
    "Qwen3-Coder": (("<tool_call>", "<function="), CallSyntax((_QWEN_CODER, _QWEN_CODER_UNTAGGED), "\n")),
    "Seed-OSS": (("<seed:tool_call>", "<function="), CallSyntax((_SEED,), "\n")),
    "GLM": (("<tool_call>", "<arg_key>"), CallSyntax((_GLM,), "\n")),
    "MiniMax": (("<minimax:tool_call>", "<invoke name="), CallSyntax((_MINIMAX,))),
    "DeepSeek V3.1": ((_CALLS, _SEPARATOR), CallSyntax((_DEEPSEEK,))),
    "DeepSeek R1": ((_CALLS, _SEPARATOR, "```json"), CallSyntax((_DEEPSEEK_R1,))),
    "Nemotron Nano 2": (("<TOOLCALL>[",), CallSyntax((_NEMOTRON_2,))),
    "Kimi": (("<|tool_calls_section_begin|>",), CallSyntax((_KIMI,))),
    "Hy3": (("<tool_sep:opensource>",), CallSyntax((_HY3,))),
    "Apriel, Hunyuan": (("<tool_calls>[",), CallSyntax((_APRIEL, _APRIEL_ID))),
    "Phi-4-mini": (("<|/tool|>",), CallSyntax((_PHI_4,))),
    "Command R": (("<|START_ACTION|>", '"tool_name"'), CallSyntax((_COMMAND_R,))),
    "LFM2": (("List of tools: ",), CallSyntax((_LFM2,))),
    "gpt-oss": (("<|channel|>commentary", "functions."), CallSyntax(_GPT_OSS_FORMS, None)),
    "Gemma 4": (("<|tool_call>",), CallSyntax((_GEMMA_4,))),
    "FunctionGemma": (("<start_function_call>",), CallSyntax((_FUNCTION_GEMMA,))),
    "Llama": (('"parameters": ',), CallSyntax((_LLAMA, _LLAMA_TAGGED, _LLAMA_BARE), "; ")),
    "any": ((), CallSyntax((_QWEN, *_UNTAGGED), "\n")),
}


def formats_of(template: str) -> list[str]:
    """Return the names of the formats whose marks a chat template has, those with the longest marks first."""
    matching = [name for name, (marks, _) in FORMATS.items() if all(mark in template for mark in marks)]
    return sorted(matching, key=lambda name: -len("".join(FORMATS[name][0])))


# Of Qwen3, DeepSeek-R1 and many others; of Magistral, Command A, Seed-OSS, Hy3, Gemma 4, gpt-oss and Apriel.
_THINKING = (
    ThinkingTags("<think>", "</think>"),
    ThinkingTags("[THINK]", "[/THINK]"),
    ThinkingTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ThinkingTags("<seed:think>", "</seed:think>"),
    ThinkingTags("<think:opensource>", "</think:opensource>"),
    ThinkingTags("<|channel>thought", "<channel|>"),
    ThinkingTags(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        ("<|end|>", "<|start|>assistant", "<|channel|>commentary<|message|>", "<|channel|>final<|message|>"),
    ),
    ThinkingTags(
        "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", ("[END FINAL RESPONSE]", "[BEGIN FINAL RESPONSE]")
    ),
)


def thinking_tags(template: str) -> ThinkingTags | None:
    """Return the tags around reasoning that a chat template knows, if it knows any."""
    for tags in _THINKING:
        # `<|end|>` alone ends the messages of other models, too.
        if tags.end in template and (tags.begin in template or tags.end != "<|end|>"):
            return tags
    return None
