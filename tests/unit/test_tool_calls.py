"""Tool calls are always valid; beside them the model is as free as without tools."""

import json
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from constraints import BYTES, Pieces, tags_in
from specserve.api import client_tools
from specserve.api.answer import AnswerReader, Arguments, Call, Text
from specserve.api.call_formats import FORMATS
from specserve.engine.llama_model import LlamaModel
from specserve.errors import ConstraintError, MaskDeferred, RequestError
from specserve.grammar import compiler as compiler_module
from specserve.grammar.call_form import ThinkingTags
from specserve.grammar.compiler import MAX_TOOLS, GrammarCompiler
from specserve.grammar.constraint import Constraint
from specserve.grammar.tool_calls import CallConstraint, CallSyntax
from test_grammar import sample_tokens
from tiny_models import write_tiny

WEATHER = {
    "city": {"type": "string", "maxLength": 5, "examples": ["Rome"]},
    "unit": {"enum": ["celsius", "fahrenheit"], "default": "celsius"},
    "day": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 7}, {"type": "null"}], "nullable": True},
}
STEP = {"do": {"const": "wait"}, "date": {"type": "string", "format": "date", "maxLength": 10}}
CLOSED = {"type": "object", "additionalProperties": False}
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {**CLOSED, "title": "Weather", "properties": WEATHER, "required": ["city"]},
    "get_weather_now": {"properties": {}, "additionalProperties": False},
    "plan": {
        **CLOSED,
        "properties": {"steps": {"type": "array", "items": {"$ref": "#/$defs/step"}, "maxItems": 2}},
        "required": ["steps"],
        "$defs": {"step": {**CLOSED, "properties": STEP, "required": ["do", "date"]}},
    },
}
SYNTAX = {name: syntax for name, (_, syntax) in FORMATS.items()}
QWEN = SYNTAX["Qwen, Hermes"]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
PRETTY = '{\n "name": "get_weather",\n "arguments": {\n  "city": "Rome"\n }\n}'
# Bytes, and tokens that reach beyond triggers.
BEYOND_TRIGGERS = [b" <tool", b"_call>", b"_call>\n", b"_call>\n{", b"_call>x", b'weather"', b'weather",', b'weather"}']
WORDS = Pieces([*BYTES, *BEYOND_TRIGGERS])
TAGGED = Pieces(BYTES, sorted({tag for syntax in SYNTAX.values() for tag in tags_in(syntax)}))
COMPILER = GrammarCompiler(WORDS)


def calls(compiler: GrammarCompiler = COMPILER, **options: Any) -> Constraint | CallConstraint:
    return compiler.calls(TOOLS, QWEN, **{"required": False, "parallel": True} | options)


def mask_of(constraint: Constraint | CallConstraint, tokens: Sequence[int]) -> list[int] | None:
    """The allowed tokens; None where all are."""
    mask = constraint.allowed(tokens)
    return None if mask is None else np.flatnonzero(mask).tolist()


def check(text: str, syntax: CallSyntax, count: int | None = None, tools: dict[str, Any] = TOOLS) -> None:
    """A text consists of calls that are valid."""
    parts = AnswerReader(syntax.forms[:1], tools).read(text, done=True)
    assert not any(isinstance(part, Text) for part in parts)
    names = {part.index: part.name for part in parts if isinstance(part, Call)}
    arguments = dict.fromkeys(names, "")
    for part in parts:
        if isinstance(part, Arguments):
            arguments[part.index] += part.text
    assert names
    assert count in (None, len(names))
    for index, name in names.items():
        jsonschema.validate(json.loads(arguments[index]), tools[name])


def sample(constraint: Any, vocabulary: Any, seed: int, tags: dict[int, str]) -> str:
    """Sample an answer that the grammar holds from its first token on, with a call or several."""
    tokens = sample_tokens(constraint, vocabulary, seed, 40 * seed)
    return b"".join(tags[token].encode() if token in tags else vocabulary.piece(token) for token in tokens).decode()


def test_a_required_answer_is_valid_calls(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model.gguf", "qwen2", "target")
    model = LlamaModel(tmp_path / "model.gguf")
    vocabularies: list[Any] = [TAGGED, model]
    for vocabulary, (name, syntax) in product(vocabularies, SYNTAX.items()):
        compiler, tags = GrammarCompiler(vocabulary), syntax.tags(vocabulary)
        assert bool(tags) == (vocabulary is TAGGED) or name in {"Llama", "Phi-4-mini"}
        for parallel in (False, True):
            constraint = compiler.calls(TOOLS, syntax, required=True, parallel=parallel)
            for seed in range(6):
                check(sample(constraint.fork(), vocabulary, seed, tags), syntax, None if parallel else 1)


def test_the_schemas_of_tools_that_clients_run_can_be_guaranteed() -> None:
    for _, schema in [*client_tools.OPENAI.values(), *client_tools.ANTHROPIC.values()]:
        constraint = COMPILER.calls({"tool": schema}, QWEN, required=True, parallel=False)
        for seed in range(3):
            check(sample(constraint.fork(), WORDS, seed, {}), QWEN, 1, {"tool": schema})


def states(constraint: Constraint | CallConstraint, tokens: Sequence[int]) -> list[bool]:
    """After each number of tokens, whether any token may follow; every next one has to be allowed."""
    free = []
    for count in range(len(tokens) + 1):
        mask = constraint.allowed(tokens[:count])
        free.append(mask is None)
        assert mask is None or count == len(tokens) or mask[tokens[count]], tokens[:count]
    return free


def test_the_grammar_holds_from_the_trigger_to_the_end_of_a_call() -> None:
    for before, opens, call in (
        ("Let me see.\n", "<tool_call>", CALL),
        ("", "<tool_call>", CALL),
        ("\n", PRETTY[: PRETTY.index(",")], PRETTY),
        ("", f"{{{PRETTY[: PRETTY.index(',')]}", f"{{{PRETTY}}}"),
        ("So:\n", f"```json\n{PRETTY[: PRETTY.index(',')]}", f"```json\n{PRETTY}\n```"),
    ):
        free = states(calls(), f"{before}{call}\nDone <tool_cal".encode())
        begin, end = len((before + opens).encode()), len((before + call).encode())
        assert free == [not begin <= count < end for count in range(len(free))]


def test_what_was_asked_about_once_needs_no_time_when_it_is_asked_about_again() -> None:
    """As verification asks about drafts, from the first one on, in a round that has no more time for masks."""
    compiler = GrammarCompiler(WORDS)
    constraint, tokens = calls(compiler), f"So: {CALL}".encode()[:30]
    masks = [mask_of(constraint, tokens[:count]) for count in range(len(tokens))]
    compiler.limit_masks(0.0)
    for count, mask in enumerate(masks):
        assert mask_of(constraint, tokens[:count]) == mask
        assert not constraint.complete(tokens[:count])
    # Another text after the trigger is followed anew.
    with pytest.raises(MaskDeferred):
        constraint.allowed([*tokens[: tokens.index(b">") + 1], *b"{"])


def test_free_text_has_no_masks_and_takes_none_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """So its distribution is the model's; the planted fault is a constraint that computes masks there."""
    monkeypatch.setattr(compiler_module, "MAX_SECONDS", 0.0)
    for text in (
        "Hello.",
        'A person: {"name": "get_weather", "arguments": {}}',
        '{"name": "get_weather_then"}',
        '```json\n{"name": "Bob"}\n```',
        "<tool_calls> <tool_cal",
        " " * 300,
        "世界 \N{GRINNING FACE}",
    ):
        constraint = calls()
        tokens = text.encode()
        assert all(states(constraint, tokens))
        assert constraint.forced(tokens, 8) == []
        assert not constraint.complete(tokens)
        with pytest.raises(ConstraintError):
            constraint.allowed(b"<tool_call>")


def test_a_token_beyond_a_trigger_opens_a_call_if_the_grammar_allows_it() -> None:
    for tokens, is_open in (
        ([256, 257], True),
        ([256, 258], True),
        ([256, 259], True),
        ([256, 260], False),
        ([*b'{"name": "get_', 261], True),
        ([*b'{"name": "get_', 262], True),
        ([*b'{"name": "get_', 263], False),
        # More whitespace than a form takes.
        ([*b"{", *b" " * 41, *b'"name": "get_weather", "arguments": {'], False),
    ):
        constraint = calls()
        assert (constraint.allowed(tokens) is not None) == is_open
        text = b"".join(map(WORDS.piece, tokens)).decode()
        if not is_open:
            # A later call is one.
            assert constraint.allowed([*tokens, *b"\n<tool_call>"]) is not None
            assert AnswerReader(QWEN.forms, TOOLS).read(text, done=True) == [Text(text)]


def test_a_token_may_be_a_whole_call() -> None:
    call = '{"name": "get_weather_now", "arguments": {}}'
    compiler = GrammarCompiler(Pieces([*BYTES, call.encode()]))
    assert all(states(calls(compiler), [256, *b"\nSo"]))
    assert calls(compiler, parallel=False).complete([256])


def test_required_calls_may_be_several_unless_an_answer_has_one_block() -> None:
    call = {"name": "get_weather", "arguments": {"city": "Rome"}}
    for name, syntax in SYNTAX.items():
        own = syntax.forms[0]
        both = [own.write([call, call])] if own.separator is not None else [own.write([call])] * 2
        tokens = (syntax.joiner or "").join(both).encode()
        for parallel in (False, True):
            constraint = COMPILER.calls(TOOLS, syntax, required=True, parallel=parallel)
            assert isinstance(constraint, Constraint)
            assert constraint.follows(tokens) == (parallel and name != "gpt-oss"), name


FRAGMENTS = ["<tool_call>", "\n", '{"name": "', "get_weather", '", "arguments": ', "{}", "}", "```json\n", "a"]


@settings(max_examples=50)
@given(st.lists(st.sampled_from([*FRAGMENTS, CALL, PRETTY]), max_size=6).map("".join), st.integers(0, 2**32))
def test_what_the_grammar_takes_for_a_call_is_read_as_one_and_nothing_else(text: str, seed: int) -> None:
    """The text as far as the grammar allows it, in random tokens, and then what that allows."""
    constraint, generator, tokens = calls(), random.Random(seed), list[int]()
    rest, opened, was_open = text.encode(), 0, False
    for _ in range(600):
        options = mask_of(constraint, tokens)
        opened += options is not None and not was_open
        was_open = options is not None
        fitting = [token for token in range(WORDS.size - 1) if rest and rest.startswith(WORDS.piece(token))]
        if options is not None:
            closing = [token for token in options if WORDS.piece(token) in {b'"', b"}", b"]"}]
            fitting = [token for token in fitting if token in options] or closing or options
        if not fitting:
            break
        tokens.append(generator.choice(fitting))
        piece = WORDS.piece(tokens[-1])
        rest = rest[len(piece) :] if piece and rest.startswith(piece) else b""
    reader = AnswerReader(QWEN.forms, TOOLS)
    reader.read(b"".join(map(WORDS.piece, tokens)).decode(), done=True)
    assert reader.calls == opened


def test_the_state_depends_on_the_tokens_alone() -> None:
    """In whatever order it is asked: rejected drafts leave nothing behind."""
    tokens = f"Hi.\n{CALL}\n{CALL}".encode()
    lengths = list(range(len(tokens) + 1))
    fresh, asked = calls(), calls()
    masks = [mask_of(fresh, tokens[:length]) for length in lengths]
    random.Random(3).shuffle(lengths)
    for length in lengths:
        asked.allowed([*tokens[:length], *b"<tool_call>\n{"])
        assert mask_of(asked, tokens[:length]) == masks[length]


def test_the_fixed_text_of_a_call_is_forced() -> None:
    for required, before in ((True, ""), (False, "Hi.\n")):
        constraint = calls(required=required)
        for begin, text in (("<tool_call>", '\n{"name": "'), (CALL[: CALL.index("Rome")] + 'R"}', "}\n</tool_")):
            tokens = (before + begin).encode()
            forced = constraint.forced(tokens, 100)
            assert b"".join(map(WORDS.piece, forced)).decode().startswith(text)


def test_beside_a_format_the_answer_is_a_call_or_formatted() -> None:
    other = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    constraint = calls(otherwise=other)
    for text in (CALL, '{"answer": 4}'):
        states(constraint.fork(), text.encode())
    with pytest.raises(AssertionError):
        states(constraint.fork(), b"Hello")
    overlap = {"oneOf": [{"type": "number"}, {"type": "integer"}]}
    with pytest.raises(RequestError, match="branches 0 and 1 of 'oneOf'") as caught:
        calls(otherwise=overlap)
    assert caught.value.param == "response_format"
    with pytest.raises(RequestError, match="look like any JSON"):
        COMPILER.calls(TOOLS, SYNTAX["Llama"], required=False, parallel=True, otherwise=other)


def test_tools_that_cannot_be_followed_are_refused_by_name_and_as_many_as_are_allowed_are_not() -> None:
    refused: list[Any] = [
        ({"a": {}, "b": {"properties": {"c": {"type": "array", "uniqueItems": True}}}}, "The tool 'b' .*uniqueItems"),
        ({"a": {"type": "string"}}, "The tool 'a' .*type 'object'"),
        ({"a": {}, "b": {"properties": {"c": {"type": "strong"}}}}, "The tool 'b' "),
        ({"a": {"properties": {"c": {"pattern": "("}}}}, "The tool 'a' "),
        ({f"t{index}": {} for index in range(MAX_TOOLS + 1)}, f"more than {MAX_TOOLS}"),
        ({f"t{i}": {"properties": {f"p{j}": {} for j in range(40)}} for i in range(100)}, "subschemas together"),
        ({f"t{i}": {"enum": ["x" * 9000 + str(i)]} for i in range(40)}, "KiB of schemas together"),
    ]
    most = {f"t{index}": {"additionalProperties": False} for index in range(MAX_TOOLS)}
    for required in [False, True]:
        for tools, reason in refused:
            with pytest.raises(RequestError, match=reason) as caught:
                COMPILER.calls(tools, QWEN, required=required, parallel=True, strict=tools)
            assert (caught.value.status, caught.value.param) == (400, "tools")
        constraint = COMPILER.calls(most, QWEN, required=required, parallel=True)
        assert constraint.allowed(b'<tool_call>\n{"name": "') is not None


def test_nothing_opens_a_call_in_reasoning() -> None:
    for begun, before, is_open in (
        (False, "<think>\nI could write <tool_call>", False),
        (False, "\n<think>I could.</think>\n\n<tool_call>", True),
        (True, "I could write <tool_call>", False),
        (True, '{"name": "get_weather"', False),
        (True, 'I could.</think>\n{"name": "get_weather"', True),
        (False, '{"name": "get_weather"', True),
        (False, "<thin>\n<tool_call>", True),
    ):
        constraint = calls(thinking=ThinkingTags("<think>", "</think>"), thinks_at_once=begun)
        assert states(constraint, before.encode())[-1] == (not is_open)
