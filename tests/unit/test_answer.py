"""Answers are read into text and calls alike, in whatever pieces their text comes; a template shows their format."""

import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from specserve.api.answer import AnswerReader, Arguments, Call, Part, Text
from specserve.api.call_formats import FORMATS

QWEN_FORMS = FORMATS["Qwen, Hermes"][1].forms
NAMES: dict[str, dict[str, Any]] = {"get": {}, "get_time": {}, "run-2": {}}
DEEP = '{"a": [1, {"b": "}] \\" {"}], "c": ""}'
QWEN = f'<tool_call>\n{{"name": "get", "arguments": {DEEP}}}\n</tool_call>'
EMPTY = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
TIME = '{"name": "get_time", "arguments": {}}'
PRETTY = f'{{\n  "name": "get",\n  "arguments": {DEEP}\n}}'
LLAMA = f'{{"name": "get", "parameters": {DEEP}}}'
BOTH = ["get", DEEP, "get_time", "{}"]

ONLY_TEXT = ["", " plain text \n", "<tool_cal", "1 < 2 <tool <tool_cell>", '```json\n{"name": "Bob"}\n```']
ONLY_TEXT += ['{"name": "got", "arguments": {}}', '{"name": "get"}\n', 'Write {"name": "get", "arguments": {}}.']
# By format, texts and what they consist of: text, and the name and arguments of each call.
ANSWERS: list[tuple[str, str, str, list[str]]] = [
    ("Qwen, Hermes", f"Let me see. \n\n{QWEN}\n{EMPTY}\n", "Let me see.", BOTH),
    ("Qwen, Hermes", f"a\n{QWEN}\n\nb ", "a\n\nb ", ["get", DEEP]),
    ("Qwen, Hermes", f"\n{PRETTY}\n", "", ["get", DEEP]),
    ("Qwen, Hermes", f"{{{PRETTY}}}", "", ["get", DEEP]),
    ("Qwen, Hermes", f"{PRETTY}\n{PRETTY}", "", ["get", DEEP] * 2),
    ("Qwen, Hermes", f"Like this:\n```json\n{PRETTY}\n```", "Like this:", ["get", DEEP]),
    ("Llama", LLAMA, "", ["get", DEEP]),
    ("Llama", f"<|python_tag|>{LLAMA}; {LLAMA}", "", ["get", DEEP] * 2),
    ("Mistral", f'[TOOL_CALLS][{{"name": "get", "arguments": {DEEP}}}, {TIME}]', "", BOTH),
    ("Mistral", f'[TOOL_CALLS] [{{"name": "get", "arguments": {DEEP}}}]', "", ["get", DEEP]),
    ("Mistral, named", f"a[TOOL_CALLS]get[ARGS]{DEEP}[TOOL_CALLS]get_time[ARGS]{{}}", "a", BOTH),
    ("Granite", f'<|tool_call|>[{{"name": "get", "arguments": {DEEP}}}]', "", ["get", DEEP]),
    ("Granite, plain tag", f'<tool_call>[{{"name": "get", "arguments": {DEEP}}}]', "", ["get", DEEP]),
    # What only looks like a call is text, to the last character.
    *(("Qwen, Hermes", text, text, list[str]()) for text in ONLY_TEXT),
    # A call that the last allowed token cuts is as long as it came.
    ("Qwen, Hermes", 'a\n<tool_call>\n{"na', "a", []),
    ("Qwen, Hermes", '<tool_call>\n{"name": "get", "argu', "", ["get", ""]),
    ("Qwen, Hermes", '<tool_call>\n{"name": "get", "arguments": {"a": "b', "", ["get", '{"a": "b']),
    ("Qwen, Hermes", '<tool_call>\n{"name": "get", "arguments": {}}\n</tool', "", ["get", "{}"]),
]


def read(reader: AnswerReader, pieces: Sequence[str]) -> tuple[str, list[str]]:
    parts: list[Part] = []
    for index, piece in enumerate(pieces):
        parts += reader.read(piece, done=index == len(pieces) - 1)
    text, calls = "", list[str]()
    for part in parts:
        if isinstance(part, Call):
            assert part.index == len(calls) // 2
            assert part.id.startswith("call_")
            calls += [part.name, ""]
        elif isinstance(part, Arguments):
            assert part.index == len(calls) // 2 - 1
            calls[-1] += part.text
        else:
            assert part.text
            text += part.text
    assert reader.calls == len(calls) // 2
    return text, calls


def test_text_and_calls_are_read_in_any_two_pieces_and_character_by_character() -> None:
    for name, text, content, calls in ANSWERS:
        forms = FORMATS[name][1].forms
        for cut in range(len(text) + 1):
            assert read(AnswerReader(forms, NAMES), [text[:cut], text[cut:]]) == (content, calls)
        assert read(AnswerReader(forms, NAMES), [*text, ""]) == (content, calls)


FRAGMENTS = ("<tool_call>", '\n{"name": "', "get", '", "arguments": ', "{}", "}\n</tool_call>", "```json\n", "{", " ")


@given(
    st.lists(st.sampled_from(FRAGMENTS) | st.sampled_from([QWEN, EMPTY, PRETTY]), max_size=8).map("".join),
    st.lists(st.integers(0, 400)),
)
def test_an_answer_is_read_alike_in_all_pieces(text: str, cuts: list[int]) -> None:
    at = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[begin:end] for begin, end in itertools.pairwise(at)] or [""]
    assert read(AnswerReader(QWEN_FORMS, NAMES), pieces) == read(AnswerReader(QWEN_FORMS, NAMES), [text])


def test_what_cannot_become_a_call_is_returned_at_once_and_arguments_as_they_come() -> None:
    reader = AnswerReader(QWEN_FORMS, NAMES)
    assert reader.read("a <tool", done=False) == [Text("a")]
    assert reader.read("box", done=False) == [Text(" <toolbox")]
    assert reader.read('<tool_call>\n{"name": "get', done=False) == []
    [call] = reader.read('"', done=False)
    assert isinstance(call, Call)
    assert reader.read(', "arguments": {"a', done=False) == [Arguments(0, '{"a')]
    assert reader.read('": 1}', done=False) == [Arguments(0, '": 1}')]


def test_without_forms_everything_is_text() -> None:
    assert read(AnswerReader(), [QWEN[:9], QWEN[9:]]) == (QWEN, [])
