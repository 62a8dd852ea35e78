"""Tools as MCP servers' generators write them: what no grammar can hold is relaxed and named, with `strict` refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import permutations
from typing import Any

import jsonschema
import pytest
from jsonschema.validators import extend

from specserve.errors import RequestError
from specserve.grammar.compiler import GrammarCompiler
from specserve.grammar.constraint import Constraint
from test_tool_calls import QWEN, Tagged, sample
from test_unions import VALUES, Schemas

VOCABULARY: Any = Tagged()
TAGS = QWEN.tags(VOCABULARY)
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}
CLOSED = {"type": "object", "additionalProperties": False}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(VOCABULARY)


def calls(compiler: GrammarCompiler, tools: dict[str, Any], strict: Iterable[str] = ()) -> Constraint:
    constraint = compiler.calls(tools, QWEN, required=True, parallel=False, strict=frozenset(strict))
    assert isinstance(constraint, Constraint)
    return constraint


def accepts(constraint: Constraint, name: str, arguments: Any) -> bool:
    """Whether an answer could be this call."""
    text = f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    tokens = VOCABULARY.encode(text, special=True)
    return constraint.follows(tokens) and constraint.complete(tokens)


def validator(schema: dict[str, Any], relaxed: Iterable[str]) -> Any:
    """A validator that knows all keywords but the relaxed ones; an overlapping `oneOf` is an `anyOf`."""
    base: Any = jsonschema.Draft202012Validator
    others = {key: None for key in relaxed if key in base.VALIDATORS}
    others |= {key: base.VALIDATORS["anyOf"] for key in others if key == "oneOf"}
    relaxing: Any = extend
    return relaxing(base, {key: check or (lambda *_: iter(())) for key, check in others.items()})(schema)


# By generator: a tool's schema, the keywords that are relaxed, arguments that it takes, and some that it does not take
# even so.
GENERATED: dict[str, tuple[dict[str, Any], list[str], list[Any], list[Any]]] = {
    "zod 3: a set": (
        {
            **DRAFT_7,
            "properties": {
                "ids": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 1},
                "url": {"type": "string", "format": "uri"},
            },
            "required": ["ids"],
            "additionalProperties": False,
        },
        ["uniqueItems"],
        [{"ids": [1, 1]}, {"ids": [1], "url": "http://a.b/c"}],
        [{"ids": []}, {"ids": ["a"]}, {"ids": [1], "url": "no address"}, {"ids": [1], "id": 1}],
    ),
    "zod 4: a record by an enum": (
        {
            **CLOSED,
            "properties": {
                "labels": {
                    "type": "object",
                    "propertyNames": {"type": "string", "enum": ["a", "b"]},
                    "additionalProperties": {"type": "string"},
                },
                "any": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
            },
        },
        ["propertyNames"],
        [{"labels": {"c": "d"}}, {"any": {"a": [1]}}],
        [{"labels": {"a": 1}}],
    ),
    "zod: never, and anything but null": (
        {
            **CLOSED,
            "properties": {"never": {"not": {}}, "value": {"not": {"type": "null"}}, "n": {"type": "integer"}},
        },
        ["not"],
        [{"value": None}, {"value": "a", "n": 1}],
        [{"never": 1}, {"n": "a"}],
    ),
    "json-schema-to-ts: a condition": (
        {
            **CLOSED,
            "properties": {"kind": {"enum": ["file", "text"]}, "path": {"type": "string"}},
            "required": ["kind"],
            "if": {"properties": {"kind": {"const": "file"}}},
            "then": {"required": ["path"]},
            "else": {"properties": {"path": False}},
        },
        ["if"],
        [{"kind": "file"}, {"kind": "text", "path": "a"}],
        [{"path": "a"}, {"kind": "folder"}],
    ),
    "zod: patterns with look-around": (
        {
            **CLOSED,
            "properties": {
                "name": {"type": "string", "pattern": r"^(?!-)[a-z-]{1,9}(?<!-)$", "maxLength": 9},
                "word": {"type": "string", "pattern": r"\bword\b"},
            },
            "required": ["name"],
        },
        ["pattern"],
        [{"name": "-a"}, {"name": "a", "word": "swords"}],
        [{"name": 1}, {"name": "a" * 10}, {}],
    ),
    "zod: names by patterns with look-around": (
        {
            **CLOSED,
            "properties": {
                "env": {
                    **CLOSED,
                    "properties": {"HOME": {"type": "string"}},
                    "patternProperties": {"^(?!X_)[A-Z_]+$": {"type": "string"}},
                }
            },
        },
        ["patternProperties", "additionalProperties"],
        [{"env": {"PATH": "a"}}],
        [{"env": {"HOME": 1}}, {"environment": {}}],
    ),
    "typebox: at least two properties": (
        {
            **CLOSED,
            "properties": {
                "update": {"type": "object", "minProperties": 2, "additionalProperties": {"type": "string"}}
            },
            "required": ["update"],
        },
        ["minProperties"],
        [{"update": {"a": "b"}}, {"update": {"a": "b", "c": "d"}}],
        [{"update": {}}, {"update": {"a": 1}}],
    ),
    "typebox: at least one of optional properties": (
        {
            "type": "object",
            "properties": {"set": {"type": "string"}, "n": {"type": "integer"}},
            "minProperties": 1,
            "maxProperties": 2,
        },
        ["maxProperties", "minProperties"],
        [{}, {"set": "a", "n": 1, "other": 2}],
        [{"n": "a"}, []],
    ),
    "ajv: a recursive reference beside keywords": (
        {
            **CLOSED,
            "properties": {"tree": {"$ref": "#/definitions/tree"}, "n": {"type": "integer"}},
            "definitions": {"tree": {"properties": {"left": {"$ref": "#/definitions/tree", "type": "object"}}}},
        },
        ["$ref"],
        [{"tree": {}, "n": 1}],
        [{"n": "a"}, {"m": 1}],
    ),
    "typebox: a oneOf that overlaps": (
        {
            **CLOSED,
            "properties": {"id": {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 0}]}},
            "required": ["id"],
        },
        ["oneOf"],
        [{"id": -1}, {"id": 2.5}, {"id": 3}],
        [{"id": -2.5}, {"id": "a"}, {}],
    ),
    "FastMCP: a union with a discriminator": (
        {
            **CLOSED,
            "$defs": {
                "Cat": {
                    "type": "object",
                    "title": "Cat",
                    "properties": {"kind": {"const": "cat", "title": "Kind"}, "lives": {"type": "integer"}},
                    "required": ["kind", "lives"],
                },
                "Dog": {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]},
            },
            "properties": {
                "pet": {
                    "discriminator": {
                        "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"},
                        "propertyName": "kind",
                    },
                    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
                },
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            },
            "required": ["pet"],
        },
        [],
        [{"pet": {"kind": "cat", "lives": 9}, "note": None}, {"pet": {"kind": "dog"}}],
        [{"pet": {"kind": "cat"}}, {"pet": {"kind": "cow"}}],
    ),
    "FastMCP: a set beside references": (
        {
            **CLOSED,
            "$defs": {"Tag": {"enum": ["new", "old"], "type": "string"}},
            "properties": {
                "tags": {"items": {"$ref": "#/$defs/Tag"}, "type": "array", "uniqueItems": True, "default": []}
            },
        },
        ["uniqueItems"],
        [{"tags": ["new", "new"]}, {}],
        [{"tags": ["other"]}],
    ),
    "schemars: bounds of 64 bits": (
        {
            **CLOSED,
            "properties": {
                "offset": {"type": "integer", "format": "int64", "minimum": 0, "maximum": 2**63 - 1},
                "where": {"type": ["string", "null"], "format": "uri-reference", "nullable": True},
            },
        },
        ["maximum", "format"],
        [{"offset": 5}, {"where": None}, {"where": "../a"}],
        [{"offset": -1}, {"where": 1}],
    ),
    "OpenAPI: a union of constants": (
        {
            **CLOSED,
            "properties": {
                "unit": {"anyOf": [{"const": "metre"}, {"const": "foot"}], "default": "metre"},
                "options": {"type": "object", "additionalProperties": {}},
            },
        },
        [],
        [{"unit": "foot", "options": {"a": 1}}],
        [{"unit": "mile"}],
    ),
    "OpenAPI: a reference to elsewhere": (
        {
            **CLOSED,
            "properties": {
                "schema": {"$ref": "http://json-schema.org/draft-07/schema#"},
                "table": {"type": "string", "contains": {}, "maxLength": 3},
            },
            "dependentSchemas": {"schema": {"required": ["table"]}},
        },
        ["contains", "dependentSchemas", "$ref"],
        [{"schema": {"type": "null"}}, {"table": "a"}],
        [{"table": "abcd"}, {"schema": {}, "other": 1}],
    ),
    "many patterns that meet": (
        {
            **CLOSED,
            "properties": {
                f"p{n}": {"type": "string", "maxLength": 9, "allOf": [{"pattern": f"a{n}"}]} for n in range(20)
            },
            "required": ["p0"],
        },
        ["pattern"],
        [{"p0": "b"}],
        [{"p0": 1}, {}],
    ),
    "a pattern of another dialect": (
        {**CLOSED, "properties": {"template": {"type": "string", "pattern": "^{{.*}}$"}, "n": {"type": "integer"}}},
        ["pattern"],
        [{"template": "a", "n": 1}],
        [{"n": "a"}, {"template": 1}],
    ),
    "no value at all": (
        {**CLOSED, "properties": {"n": {"type": "integer", "minimum": 5, "maximum": 4}}, "required": ["n"]},
        ["parameters"],
        [{}, {"a": [1]}],
        [1, [], "a"],
    ),
}


@pytest.mark.parametrize("name", GENERATED)
def test_a_tool_is_taken_without_strict_and_what_it_does_not_hold_is_named(
    name: str, compiler: GrammarCompiler
) -> None:
    schema, relaxed, taken, refused = GENERATED[name]
    constraint = calls(compiler, {"tool": schema})
    assert constraint.relaxed == tuple(f"tools.tool.{keyword}" for keyword in relaxed)
    assert all(accepts(constraint, "tool", arguments) for arguments in taken)
    assert not any(accepts(constraint, "tool", arguments) for arguments in refused)
    held = validator({} if relaxed == ["parameters"] else schema, relaxed)
    for seed in range(20):
        found = re.fullmatch(
            r"<tool_call>\n(.*)\n</tool_call>", sample(constraint.fork(), VOCABULARY, seed, TAGS), re.DOTALL
        )
        assert found
        call = json.loads(found[1])
        assert call["name"] == "tool"
        if "$ref" not in relaxed:
            held.validate(call["arguments"])


@pytest.mark.parametrize("name", GENERATED)
def test_with_strict_what_does_not_hold_is_refused_with_its_name(name: str, compiler: GrammarCompiler) -> None:
    schema, relaxed, taken, refused = GENERATED[name]
    if relaxed:
        with pytest.raises(RequestError, match="The tool 'tool' cannot be used") as caught:
            calls(compiler, {"other": {}, "tool": schema}, strict=["tool"])
        assert (caught.value.status, caught.value.param) == (400, "tools")
        assert not re.search("option|guidance|coerce|limits", caught.value.message)
    else:
        constraint = calls(compiler, {"tool": schema}, strict=["tool"])
        assert constraint.relaxed == ()
        assert [accepts(constraint, "tool", value) for value in taken + refused] == [
            value in taken for value in taken + refused
        ]


def test_a_relaxed_tool_leaves_others_as_they_are(compiler: GrammarCompiler) -> None:
    tools = {name: schema for name, (schema, *_) in GENERATED.items()}
    tools = {f"tool{index}": schema for index, schema in enumerate(tools.values())}
    constraint = calls(compiler, tools)
    for index, (_, _, taken, refused) in enumerate(GENERATED.values()):
        assert all(accepts(constraint, f"tool{index}", arguments) for arguments in taken)
        assert not any(accepts(constraint, f"tool{index}", arguments) for arguments in refused)


def test_names_are_few_whatever_the_number_of_tools(compiler: GrammarCompiler) -> None:
    tools = {f"tool{index}": {"propertyNames": {"maxLength": 9}, "not": {"required": ["a"]}} for index in range(9)}
    assert len(calls(compiler, dict(list(tools.items())[:8])).relaxed) == 16
    assert calls(compiler, tools).relaxed == ("tools.not", "tools.propertyNames")


# Keywords that are relaxed, to be added to schemas at random.
ADDED: list[dict[str, Any]] = [
    {"not": {"type": "integer"}},
    {"if": {"type": "object"}, "then": {"required": ["a"]}},
    {"propertyNames": {"maxLength": 1}, "uniqueItems": True},
    {"minProperties": 2},
    {"patternProperties": {"(?=a)": {"const": 0}}, "additionalProperties": False},
    {"dependentSchemas": {"a": {"required": ["b"]}}},
    {"prefixItems": [{"const": 1}], "items": [{"const": 2}], "additionalItems": False},
    {"pattern": "(?!a)", "maximum": 2**60},
]


@pytest.mark.slow
def test_what_is_valid_by_a_schema_stays_so_when_it_is_relaxed(compiler: GrammarCompiler) -> None:
    """Leaving out a keyword must never leave out a value."""
    count = 0
    for seed in range(150):
        schema = Schemas(seed).whole()
        schema["oneOf"] = [branch | ADDED[(seed + n) % len(ADDED)] for n, branch in enumerate(schema["oneOf"])]
        tool = {"properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": schema, **schema["$defs"]}}
        constraint = calls(compiler, {"t": tool})
        by_schema = jsonschema.Draft202012Validator(schema | {"$defs": tool["$defs"]})
        for value in VALUES:
            if by_schema.is_valid(value):
                count += 1
                orders = [dict(items) for items in permutations(value.items())] if isinstance(value, dict) else [value]
                assert any(accepts(constraint, "t", {"x": spelled}) for spelled in orders), (schema, value)
    assert count > 150
