"""Every row of the table of call formats: found by a template, offered, forced, read, and kept in history."""

import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from constraints import BYTES, Pieces, tags_in
from specserve.api.answer import AnswerReader, Arguments, Call, Part, Reasoning, Text
from specserve.api.call_formats import FORMATS, thinking_tags
from specserve.api.chat_template import ChatTemplate
from specserve.api.parse import parse_body
from specserve.api.request_schema import ChatRequest
from specserve.errors import RequestError
from specserve.grammar.compiler import GrammarCompiler
from specserve.grammar.notation import Notation, Scan
from specserve.grammar.tool_calls import CallConstraint, CallSyntax

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer", "minimum": 1},
    "none": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "rain": {"type": "boolean"},
    "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
    "unit": {"enum": ["metric", "#2~"]},
    "when": {"type": "object", "properties": {"at": {"type": "number"}, "by": {"type": "string"}}},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["city"], "$defs": {"tag": {"type": "string"}}}
TOOLS: dict[str, dict[str, Any]] = {"get": SCHEMA, "get_time": {"type": "object", "properties": {}}}
# Strings as they come in code; a template that prints null prints it as Python does.
ALL = {"city": 'if (a < b) {\n  "x, y"]\n}\n', "days": 3, "none": None, "rain": True, "tags": ["a", "b: c"]}
ALL |= {"unit": "#2~", "when": {"at": 1.5, "by": "you"}}
CASES: list[tuple[dict[str, Any], ...]] = [(ALL,), ({"city": ""},), ({"city": "null", "none": "3"}, ALL)]
HERMES = '<tool_call>\n{"name": "get", "arguments": {"city": "Rome"}}\n</tool_call>'
# How published templates write a call `c`, with what stands before and after all calls of a message.
PARAMETERS = "{% for k, v in c.arguments.items() %}"
RAW, PYTHON = "{{ v if v is string else v | tojson }}", "{{ v | tojson if v is iterable and v is not string else v }}"
JSON = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}'
LISTED = JSON + '}{{ ", " if not last }}'
QWEN_XML = "<function={{ c.name }}>\n" + PARAMETERS + "<parameter={{ k }}>"
QWEN_END = "{% endfor %}</function>"
CALLS, CALLS_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
FENCED = "{{ c.name }}\n```json\n{{ c.arguments | tojson }}\n```"
KIMI = "<|tool_call_begin|>functions.{{ c.name }}:{{ index }}<|tool_call_argument_begin|>{{ c.arguments | tojson }}"
COMMAND_R = '{"tool_call_id": "{{ index }}", "tool_name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
LFM2 = "{{ k }}={{ v | tojson if v is string or v is mapping else v }}{{ ', ' if not loop.last }}{% endfor %}"
LFM2 = "{{ c.name }}(" + PARAMETERS + LFM2 + "){{ ', ' if not last }}"
GEMMA = """\
{% macro value(v) %}{% if v is string %}QUOTE{{ v }}QUOTE{% elif v is mapping %}{
{%- for k, w in v | dictsort %}{{ "," if not loop.first }}{{ k }}:{{ value(w) }}{% endfor %}}
{%- elif v is sequence %}[{% for w in v %}{{ "," if not loop.first }}{{ value(w) }}{% endfor %}]
{%- elif v is boolean %}{{ v | tojson }}{% else %}{{ v }}{% endif %}{% endmacro -%}
BEGINcall:{{ c.name }}{{ value(c.arguments) }}END"""


def gemma(quote: str, begin: str, end: str) -> str:
    return GEMMA.replace("QUOTE", quote).replace("BEGIN", begin).replace("END", end)


GLM = "<arg_key>{{ k }}</arg_key>\n<arg_value>" + RAW + "</arg_value>\n{% endfor %}</tool_call>"
MINIMAX = '<parameter name="{{ k }}">' + RAW + "</parameter>\n{% endfor %}</invoke>\n"
HY3 = "<arg_key>{{ k }}</arg_key>\n<arg_value>" + RAW + "</arg_value>\n{% endfor %}</tool_call>\n"
HY3 = "<tool_call>{{ c.name }}<tool_sep>\n" + PARAMETERS + HY3


def opensource(tagged: str) -> str:
    """Tags that the template puts together, as the published one does."""
    return re.sub("<([a-z/_]+)>", r"{{ '<\1{}>'.format(':opensource') }}", tagged)


WRITTEN: dict[str, tuple[str, str, str]] = {
    "Mistral": ("[TOOL_CALLS] [", JSON + ', "id": "{{ id }}"}{{ ", " if not last }}', "]"),
    "Mistral, named": ("", "[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}", ""),
    "Mistral, call ids": ("", "[TOOL_CALLS]{{ c.name }}[CALL_ID]{{ id }}[ARGS]{{ c.arguments | tojson }}", ""),
    "Granite": ("<|tool_call|>[", LISTED, "]"),
    "Granite, plain tag": ("<tool_call>[", LISTED, "]"),
    "Qwen, Hermes": ("", "\n<tool_call>\n" + JSON + "}\n</tool_call>", ""),
    "Qwen3-Coder": ("", f"\n<tool_call>\n{QWEN_XML}\n{PYTHON}\n</parameter>\n{QWEN_END}\n</tool_call>", ""),
    "Seed-OSS": ("", f"\n<seed:tool_call>\n{QWEN_XML}{RAW}</parameter>\n{QWEN_END}\n</seed:tool_call>", ""),
    "GLM": ("", "\n<tool_call>{{ c.name }}\n" + PARAMETERS + GLM, ""),
    "MiniMax": (
        "<minimax:tool_call>\n",
        f'<invoke name="{{{{ c.name }}}}">{PARAMETERS}{MINIMAX}',
        "</minimax:tool_call>",
    ),
    "DeepSeek V3.1": (CALLS, f"{CALL}{{{{ c.name }}}}{SEPARATOR}{{{{ c.arguments | tojson }}}}{CALL_END}", CALLS_END),
    "DeepSeek R1": (CALLS, f"{CALL}function{SEPARATOR}{FENCED}{CALL_END}" + '{{ "\n" if not last }}', CALLS_END),
    "Nemotron Nano 2": ("<TOOLCALL>[", LISTED, "]</TOOLCALL>"),
    "Kimi": ("<|tool_calls_section_begin|>", KIMI + "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    "Hy3": (opensource("<tool_calls>\n"), opensource(HY3), opensource("</tool_calls>")),
    "Apriel, Hunyuan": ("\n<tool_calls>[", LISTED, "]</tool_calls>"),
    "Phi-4-mini": ("<|/tool|>functools[", LISTED, "]"),
    "Command R": ("<|START_ACTION|>[\n", f"    {COMMAND_R}{{{{ ',' if not last }}}}\n", "]<|END_ACTION|>"),
    "LFM2": ("List of tools: <|tool_call_start|>[", LFM2, "]<|tool_call_end|>"),
    "gpt-oss": ("", " to=functions.{{ c.name }}<|channel|>commentary json<|message|>{{ c.arguments | tojson }}", ""),
    "Gemma 4": ("", gemma('<|"|>', "<|tool_call>", "<tool_call|>"), ""),
    "FunctionGemma": ("", gemma("<escape>", "<start_function_call>", "<end_function_call>"), ""),
    "Llama": ("", '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}', ""),
}
TURNS = (
    "{{ tools | tojson if tools }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}@before@"
    "{% for t in m.tool_calls %}{% set c, id, index, last = t.function, t.id, loop.index0, loop.last %}@call@"
    "{% endfor %}@after@{% endif %}{% endfor %}"
)
TEMPLATES = {
    name: TURNS.replace("@before@", before).replace("@call@", call).replace("@after@", after)
    for name, (before, call, after) in WRITTEN.items()
}


def render(template: ChatTemplate, arguments: tuple[dict[str, Any], ...]) -> str:
    """An assistant's message with calls, and what follows it."""
    calls = [
        {"id": f"call0000{index}", "type": "function", "function": {"name": "get", "arguments": part}}
        for index, part in enumerate(arguments)
    ]
    asked = {"role": "user", "content": "QUESTION"}
    results = [{"role": "tool", "content": "sunny", "tool_call_id": f"call0000{index}"} for index in range(len(calls))]
    tools = [{"type": "function", "function": {"name": "get", "description": "", "parameters": SCHEMA}}]
    text = template.render([asked, {"role": "assistant", "content": "", "tool_calls": calls}, *results], tools)
    offered, _, answer = text.rpartition("QUESTION")
    assert '"get"' in offered + answer or "get" in offered
    assert "sunny" in answer
    return answer


def answers(template: ChatTemplate, arguments: tuple[dict[str, Any], ...]) -> str:
    """The calls as the template writes them, from where the model goes on."""
    text = render(template, arguments)
    begins = [text.find(form.opening[0]) for form in template.calls.forms]
    return text[min(begin for begin in begins if begin >= 0) :]


def read(template: ChatTemplate, pieces: list[str]) -> list[Part]:
    reader = AnswerReader(template.calls.forms, TOOLS)
    return [part for index, piece in enumerate(pieces) for part in reader.read(piece, done=index == len(pieces) - 1)]


def calls_of(parts: list[Part]) -> list[tuple[str, Any]]:
    names = [part.name for part in parts if isinstance(part, Call)]
    texts = ["".join(p.text for p in parts if isinstance(p, Arguments) and p.index == n) for n in range(len(names))]
    return [(name, json.loads(text)) for name, text in zip(names, texts, strict=True)]


def vocabularies(syntax: CallSyntax) -> Iterator[Pieces]:
    """One of bytes, and one in which tags are control tokens."""
    yield Pieces(BYTES)
    yield Pieces(BYTES, tags_in(syntax))


def opened(constraint: CallConstraint, tokens: list[int]) -> int:
    """How many calls a text opens, each token of which is allowed."""
    count, was_open = 0, False
    for position in range(len(tokens) + 1):
        mask = constraint.allowed(tokens[:position])
        count += mask is not None and not was_open
        was_open = mask is not None
        assert mask is None or position == len(tokens) or mask[tokens[position]], bytes(
            token for token in tokens[:position] if token < 256
        )
    return count


def follows(constraint: Any, tokens: list[int]) -> bool:
    """Whether a grammar that holds from the first token on takes exactly these."""
    return bool(constraint.follows(tokens) and constraint.complete(tokens))


def check_format(template: ChatTemplate, cases: list[tuple[dict[str, Any], ...]] = CASES) -> None:
    """What the template writes is read in any two pieces, and it alone is allowed."""
    name, syntax = template.format, template.calls
    # Whose history has a message for each call.
    one = name in {"gpt-oss", "Llama"}
    for arguments in cases[: 2 if one else None]:
        text = answers(template, arguments)
        expected = [("get", part) for part in arguments]
        cuts = range(0, len(text) + 1, 1 if arguments == (ALL,) else 9)
        for pieces in [[text[:cut], text[cut:]] for cut in cuts] + [[*text, ""]]:
            assert calls_of(read(template, pieces)) == expected, text
        for vocabulary in vocabularies(syntax):
            compiler = GrammarCompiler(vocabulary)
            free = compiler.calls(TOOLS, syntax, required=False, parallel=True)
            assert isinstance(free, CallConstraint)
            blocks = 1 if syntax.forms[0].separator is not None else len(expected)
            assert opened(free, vocabulary.encode(text, special=True)) == blocks
    for vocabulary in vocabularies(syntax):
        forced = GrammarCompiler(vocabulary).calls(TOOLS, syntax, required=True, parallel=False)
        own = syntax.forms[0].write([{"name": "get", "arguments": {"city": "Rome", "rain": False}}])
        assert follows(forced.fork(), vocabulary.encode(own, special=True)), own
        hermes = follows(forced.fork(), vocabulary.encode(HERMES, special=True))
        assert hermes == (name in {"Qwen, Hermes", "any"})


@pytest.mark.parametrize("name", WRITTEN)
def test_a_format_is_offered_forced_read_and_kept_in_history(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], bos="", eos="")
    assert (template.format, template.problem) == (name, None)
    check_format(template)


def test_every_row_has_a_template_and_its_place_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*WRITTEN, "any"] == [*FORMATS]
    rows = dict(reversed(FORMATS.items()))
    monkeypatch.setattr("specserve.api.call_formats.FORMATS", rows)
    for name, source in TEMPLATES.items():
        assert ChatTemplate(source, bos="", eos="").format == name
    # Its marks are longer, but calls are written in another form.
    hermes = TEMPLATES["Qwen, Hermes"] + '{# "parameters": #}'
    assert ChatTemplate(hermes, bos="", eos="").format == "Qwen, Hermes"


def test_a_template_that_writes_calls_in_an_unknown_form_is_told_ours() -> None:
    source = TURNS.replace("@call@", "<tool_call>{{ c.name }}!{{ c.arguments | tojson }}")
    template = ChatTemplate(source, bos="", eos="")
    assert template.format == "any"
    asked, tool = {"role": "user", "content": "Hi"}, {"type": "function", "function": {"name": "get"}}
    assert template.render([asked], [tool]).startswith("<|system|>These functions can be called:")
    assert HERMES in render(template, ({"city": "Rome"},))


def test_calls_that_a_template_leaves_out_of_history_are_written_as_text_and_all_where_it_shows_one() -> None:
    """As those of Granite 3.3, LFM2 and Phi-4-mini do, and that of gpt-oss."""
    silent = "List of tools: {{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    template = ChatTemplate(silent, bos="", eos="")
    assert '<|tool_call_start|>[get(city="Rome", rain=True)]<|tool_call_end|>' in render(
        template, ({"city": "Rome", "rain": True},)
    )
    phi = "{% for m in messages %}{{ m.content }}{% if m.tools %}<|tool|>{{ m.tools }}<|/tool|>{% endif %}{% endfor %}"
    template = ChatTemplate(phi, bos="", eos="")
    assert 'functools[{"name": "get", "arguments": {"city": "Rome"}}]' in render(template, ({"city": "Rome"},))
    assert 'write\nfunctools[{"name": ' in template.render([{"role": "user", "content": "Hi"}], [{"name": "get"}])
    first = TEMPLATES["gpt-oss"].replace("in m.tool_calls %}", "in m.tool_calls[:1] %}")
    rendered = render(ChatTemplate(first, bos="", eos=""), ({"city": "Rome"}, {"city": "Oslo"}))
    assert rendered.index("Rome") < rendered.index("sunny") < rendered.index("Oslo")


OSS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
OSS_CALL = '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"city": "Rome"}'
APRIEL = "Here are my reasoning steps:\nhm\n[BEGIN FINAL RESPONSE]\n"


def rome(name: str) -> str:
    return FORMATS[name][1].forms[0].write([{"name": "get", "arguments": {"city": "Rome"}}])


ANSWERS: list[tuple[str, str, str, str, int]] = [
    ("Hy3", f"<think:opensource>hm</think:opensource>{rome('Hy3')}", "hm", "", 1),
    ("Apriel, Hunyuan", f"{APRIEL}Look.\n[END FINAL RESPONSE]", "hm", "Look.\n", 0),
    ("Apriel, Hunyuan", f"{APRIEL}{rome('Apriel, Hunyuan')}", "hm", "", 1),
    ("gpt-oss", f"{OSS}<|channel|>final<|message|>Hello <b", "hm", "Hello <b", 0),
    ("gpt-oss", "<|channel|>final<|message|>Hello", "", "Hello", 0),
    ("gpt-oss", f"{OSS}{OSS_CALL}", "hm", "", 1),
    ("gpt-oss", f"{OSS}{OSS}{OSS_CALL}", "hmhm", "", 1),
    ("gpt-oss", f"{OSS}<|channel|>commentary<|message|>Look.<|end|><|start|>assistant{OSS_CALL}", "hm", "Look.", 1),
    ("Gemma 4", "<|channel>thought\nhm\n<channel|>Hello", "hm", "Hello", 0),
    ("Gemma 4", '<|channel>thought\nhm<channel|><|tool_call>call:get{city:<|"|>Rome<|"|>}<tool_call|>', "hm", "", 1),
]
THINKING = {"gpt-oss": thinking_tags(OSS), "Gemma 4": thinking_tags("<|channel>thought\n<channel|>")}
THINKING |= {"Hy3": thinking_tags("</think:opensource>"), "Apriel, Hunyuan": thinking_tags(APRIEL)}


def test_thinking_in_channels_is_split_in_whatever_pieces_it_comes() -> None:
    for name, text, thought, said, count in ANSWERS:
        tags, syntax = THINKING[name], FORMATS[name][1]
        for pieces in [[text[:cut], text[cut:]] for cut in range(len(text) + 1)] + [[*text, ""]]:
            reader = AnswerReader(syntax.forms, TOOLS, tags)
            parts = [part for n, piece in enumerate(pieces) for part in reader.read(piece, done=n == len(pieces) - 1)]
            assert "".join(part.text for part in parts if isinstance(part, Reasoning)) == thought
            assert "".join(part.text for part in parts if isinstance(part, Text)) == said
            assert calls_of(parts) == [("get", {"city": "Rome"})] * count
        for vocabulary in vocabularies(syntax):
            free = GrammarCompiler(vocabulary).calls(TOOLS, syntax, required=False, parallel=True, thinking=tags)
            assert isinstance(free, CallConstraint)
            assert opened(free, vocabulary.encode(text, special=True)) == count


def test_an_answer_with_a_format_has_the_header_of_text() -> None:
    source = TEMPLATES["gpt-oss"] + "<|start|>assistant{# " + OSS + " #}"
    fields = {"messages": [{"role": "user", "content": "Hi"}], "response_format": {"type": "json_object"}}
    prompt = ChatTemplate(source, bos="", eos="").prompt(parse_body(fields, ChatRequest))
    assert prompt.endswith("<|start|>assistant<|channel|>final<|message|>")


def test_what_a_notation_cannot_assert_is_named_or_refused() -> None:
    schema = {"properties": {"city": {"type": "string", "pattern": "^[a-z]+$"}}, "required": ["city"]}
    compiler, syntax = GrammarCompiler(Pieces(BYTES)), FORMATS["Qwen3-Coder"][1]
    assert compiler.calls({"get": schema}, syntax, required=True, parallel=False).relaxed == ("tools.get.pattern",)
    lists = {"type": "array", "items": {"type": "string", "pattern": "("}}
    uncompiled = {"properties": {"city": {"type": "string", "allOf": [{"minLength": 1}]}, "lists": lists}}
    relaxed = compiler.calls({"get": uncompiled}, syntax, required=True, parallel=False).relaxed
    assert relaxed == ("tools.get.pattern", "tools.get.allOf")
    with pytest.raises(RequestError, match="held to pattern"):
        compiler.calls({"get": schema}, syntax, required=True, parallel=False, strict=["get"])


def test_arguments_have_all_that_is_required_and_nothing_that_is_forbidden() -> None:
    schema = {"properties": {"a": {"type": "integer"}, "no": False}, "required": ["b"]}
    compiler, syntax = GrammarCompiler(Pieces(BYTES)), FORMATS["Gemma 4"][1]
    for arguments, fits in (({"a": 5, "b": ["c", {"d": None}]}, True), ({"a": 5}, False), ({"b": 1, "no": 1}, False)):
        text = syntax.forms[0].write([{"name": "get", "arguments": arguments}])
        grammar = compiler.calls({"get": schema}, syntax, required=True, parallel=False)
        assert follows(grammar, [*text.encode()]) == fits


def test_raw_arguments_have_the_types_of_their_schemas() -> None:
    notation = Notation("<KEY>VALUE</>", "")
    for schema, text, value in (
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, " null ", " null "),
        ({"type": "string"}, '"x"', '"x"'),
        ({"type": "integer"}, "5", 5),
        ({"type": "number"}, "5", 5),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "boolean"}, "True", True),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "array"}, '["a"]', ["a"]),
        ({"$ref": "#/$defs/a"}, "5", "5"),
        ({"type": "integer"}, "five", "five"),
        ({}, '{"a": 1}', {"a": 1}),
        ({}, "{a", "{a"),
    ):
        root = {"properties": {"a": schema}, "$defs": {"a": {"type": "string"}}}
        assert notation.take(f"<a>{text}</>", root, Scan()) == (len(text) + 6, '"a"', json.dumps(value))
    assert notation.take("<a>5</>", {"additionalProperties": {"type": "string"}}, Scan()) == (7, '"a"', '"5"')


def test_an_argument_that_comes_in_pieces_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a long one takes the time of its square, and other requests wait."""
    values = [7, "a, ] }", "'\\\"", True, 1.5] * 50
    unread = 0

    def take(notation: Notation, text: str, schema: Any, scan: Scan) -> tuple[int, str, str] | None:
        nonlocal unread
        unread += len(text) - scan.position
        return original(notation, text, schema, scan)

    original = Notation.take
    monkeypatch.setattr(Notation, "take", take)
    for name in ("LFM2", "Gemma 4", "FunctionGemma"):
        form = FORMATS[name][1].forms[0]
        text = form.write([{"name": "get", "arguments": {"list": values, "text": "b, " * 500}}])
        reader, unread = AnswerReader([form], TOOLS), 0
        assert calls_of([part for character in text for part in reader.read(character, done=False)]) == [
            ("get", {"list": values, "text": "b, " * 500})
        ]
        assert unread < 20 * len(text)


def test_references_hold_within_an_argument_that_is_json() -> None:
    tags, trees = ({"type": "array", "items": {"$ref": reference}} for reference in ("#/$defs/tag", "#"))
    properties = {"tags": {"$ref": "#/$defs/tags"}, "trees": trees}
    closed = {"type": "object", "additionalProperties": False}
    tool = {**closed, "properties": properties, "$defs": {"tags": tags, "tag": {"enum": ["a", "b"]}}}
    vocabulary, syntax = Pieces(BYTES), FORMATS["Qwen3-Coder"][1]
    constraint: Any = GrammarCompiler(vocabulary).calls({"get": tool}, syntax, required=True, parallel=False)
    assert constraint.relaxed == ()
    for arguments, is_valid in (
        ({"tags": ["a", "b"]}, True),
        ({"tags": ["c"]}, False),
        ({"trees": [{"tags": ["b"], "trees": []}]}, True),
        ({"trees": [{"tags": ["c"]}]}, False),
    ):
        text = syntax.forms[0].write([{"name": "get", "arguments": arguments}])
        assert follows(constraint.fork(), vocabulary.encode(text)) == is_valid, text


def test_an_argument_whose_schema_has_a_type_that_is_none_is_read() -> None:
    """A tool without `strict` may have any schema."""
    own, malformed = FORMATS["Qwen3-Coder"][1].forms[0], list[Any]([None, 5, {}, [[]], ["string", 5], "strnig"])
    for named in malformed:
        reader = AnswerReader([own], {"get": {"properties": {"city": {"type": named}}}})
        text = own.write([{"name": "get", "arguments": {"city": "Rome"}}])
        assert calls_of(reader.read(text, done=True)) == [("get", {"city": "Rome"})], named


def test_a_call_cut_off_that_is_sent_back_is_refused_by_a_sentence_where_the_template_needs_an_object() -> None:
    call = {"id": "call00000", "type": "function", "function": {"name": "get", "arguments": '{"city": "Ro'}}
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    with pytest.raises(RequestError, match="arguments of a tool call are no JSON object; leave out calls"):
        ChatTemplate(TEMPLATES["Qwen3-Coder"], bos="", eos="").render([{"role": "user", "content": "Hi"}, message])


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The templates in llama-cpp-python's source package, by name."""
    folder, package = tmp_path_factory.mktemp("source"), "llama-cpp-python"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", package, "--no-build-isolation"]
    subprocess.run([*command, "-d", str(folder), f"{package}=={version(package)}"], check=True)
    [archive] = folder.glob("*.tar.gz")
    templates: dict[str, str] = {}
    with tarfile.open(archive) as files:
        for member in files:
            if "/models/templates/" in member.name and (content := files.extractfile(member)):
                templates[Path(member.name).stem] = content.read().decode()
    return templates


# Of each family the published template, and its format.
PUBLISHED = {
    "Qwen3-Coder": "Qwen3-Coder",
    "Qwen3.5-4B": "Qwen3-Coder",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "Qwen3-Coder",
    "StepFun3.5-Flash": "Qwen3-Coder",
    "GLM-4.6": "GLM",
    "GLM-4.7-Flash": "GLM",
    "inclusionai-ling-3.0-flash": "GLM",
    "ByteDance-Seed-OSS": "Seed-OSS",
    "MiniMax-M2": "MiniMax",
    "deepseek-ai-DeepSeek-V3.1": "DeepSeek V3.1",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "DeepSeek R1",
    "moonshotai-Kimi-K2": "Kimi",
    "Kimi-K2-Thinking": "Kimi",
    "tencent-Hy3": "Hy3",
    "unsloth-Apriel-1.5": "Apriel, Hunyuan",
    "Apriel-1.6-15b-Thinker-fixed": "Apriel, Hunyuan",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "Command R",
    "LFM2-8B-A1B": "LFM2",
    "LFM2.5-8B-A1B": "LFM2",
    "openai-gpt-oss-120b": "gpt-oss",
    "google-gemma-4-31B-it": "Gemma 4",
    "Mistral-Small-3.2-24B-Instruct-2506": "Mistral, call ids",
    "mistralai-Mistral-Nemo-Instruct-2407": "Mistral",
    "unsloth-mistral-Devstral-Small-2507": "Mistral, named",
    "NVIDIA-Nemotron-Nano-v2": "Nemotron Nano 2",
    "ibm-granite-granite-3.3-2B-Instruct": "Granite",
    "ibm-granite-granite-4.0": "Qwen, Hermes",
    "Qwen-Qwen3-0.6B": "Qwen, Hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "Qwen, Hermes",
    "meta-llama-Llama-3.1-8B-Instruct": "Llama",
}


@pytest.mark.long
def test_published_templates_are_read_in_their_own_forms(published: dict[str, str]) -> None:
    for name, form in PUBLISHED.items():
        template = ChatTemplate(published[name], bos="<s>", eos="</s>")
        assert (name, template.format, template.problem) == (name, form, None)
        # That of Seed-OSS prints lists and objects as Python does.
        check_format(template, [({**ALL, "tags": [], "when": {}},), CASES[1]] if form == "Seed-OSS" else CASES)
        assert form not in THINKING or template.thinking == THINKING[form]
