"""Tools as MCP servers' generators write them: what no grammar can hold is relaxed and named, with `strict` refused."""

import json
import re
from collections.abc import Iterable
from typing import Any

import jsonschema
import pytest
from jsonschema.validators import extend

from specserve.errors import RequestError
from specserve.grammar.compiler import GrammarCompiler
from specserve.grammar.constraint import Constraint
from test_tool_calls import QWEN, TAGGED, sample
from test_unions import CAT, INTEGER, NULL, STRING, VALUES, Schemas, spellings

TAGS = QWEN.tags(TAGGED)
COMPILER = GrammarCompiler(TAGGED)


def calls(tools: dict[str, Any], strict: Iterable[str] = ()) -> Constraint:
    constraint = COMPILER.calls(tools, QWEN, required=True, parallel=False, strict=frozenset(strict))
    assert isinstance(constraint, Constraint)
    return constraint


def accepts(constraint: Constraint, name: str, arguments: Any) -> bool:
    """Whether an answer could be this call."""
    text = f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    tokens = TAGGED.encode(text, special=True)
    return constraint.follows(tokens) and constraint.complete(tokens)


def validator(schema: dict[str, Any], relaxed: Iterable[str]) -> Any:
    """A validator that knows all keywords but the relaxed ones; an overlapping `oneOf` is an `anyOf`."""
    base: Any = jsonschema.Draft202012Validator
    others = {key: None for key in relaxed if key in base.VALIDATORS}
    others |= {key: base.VALIDATORS["anyOf"] for key in others if key == "oneOf"}
    relaxing: Any = extend
    return relaxing(base, {key: check or (lambda *_: iter(())) for key, check in others.items()})(schema)


def closed(properties: dict[str, Any], *required: str, **others: Any) -> dict[str, Any]:
    """A schema of objects with these properties and no other ones."""
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False} | others


DOG = {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]}
PETS = [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]
KINDS = {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07"}
TREE = {"properties": {"left": {"$ref": "#/definitions/tree", "type": "object"}}}
TREES = {"tree": {"$ref": "#/definitions/tree"}, "n": INTEGER}
IDS = {"type": "array", "items": INTEGER, "uniqueItems": True, "minItems": 1}
NAME = {"type": "string", "pattern": r"^(?!-)[a-z-]{1,9}(?<!-)$", "maxLength": 9}
NAMES = {"name": NAME, "word": STRING | {"pattern": r"\bword\b"}}
NEVER = {"never": {"not": {}}, "value": {"not": NULL}, "n": INTEGER}
COUNTED = {"type": "object", "properties": {"set": STRING, "n": INTEGER}, "minProperties": 1, "maxProperties": 2}
UNION = {"oneOf": [INTEGER, {"type": "number", "minimum": 0}]}
HOME = closed({"HOME": STRING}, patternProperties={"^(?!X_)[A-Z_]+$": STRING})
OFFSET = {"type": "integer", "format": "int64", "minimum": 0, "maximum": 2**63 - 1}
WHERE = {"type": ["string", "null"], "format": "uri-reference", "nullable": True}
TABLE = {"schema": {"$ref": "http://json-schema.org/draft-07/schema#"}, "table": STRING | {"contains": {}}}
MEETING = {f"p{n}": {"type": "string", "maxLength": 9, "allOf": [{"pattern": f"a{n}"}]} for n in range(20)}

# A tool's schema, as the libraries named write it, the keywords that are relaxed, arguments that it takes, and some
# that it does not take even so.
GENERATED: list[tuple[dict[str, Any], list[str], list[Any], list[Any]]] = [
    # zod: sets; never and anything but null; look-around.
    (
        closed({"ids": IDS, "url": STRING | {"format": "uri"}}, "ids", **DRAFT_7),
        ["uniqueItems"],
        [{"ids": [1, 1]}, {"ids": [1], "url": "http://a.b/c"}],
        [{"ids": []}, {"ids": ["a"]}, {"ids": [1], "url": "no address"}, {"ids": [1], "id": 1}],
    ),
    (closed(NEVER), ["not"], [{"value": None}, {"value": "a", "n": 1}], [{"never": 1}, {"n": "a"}]),
    (
        closed(NAMES, "name"),
        ["pattern"],
        [{"name": "-a"}, {"name": "a", "word": "swords"}],
        [{"name": 1}, {"name": "a" * 10}, {}],
    ),
    (
        closed({"env": HOME}),
        ["patternProperties", "additionalProperties"],
        [{"env": {"PATH": "a"}}],
        [{"env": {"HOME": 1}}, {"e": {}}],
    ),
    # typebox: at least one of optional properties; a union that overlaps.
    (COUNTED, ["maxProperties", "minProperties"], [{}, {"set": "a", "n": 1, "other": 2}], [{"n": "a"}, []]),
    (closed({"id": UNION}, "id"), ["oneOf"], [{"id": -1}, {"id": 2.5}, {"id": 3}], [{"id": -2.5}, {"id": "a"}, {}]),
    # ajv: a recursive reference beside keywords.
    (closed(TREES, definitions={"tree": TREE}), ["$ref"], [{"tree": {}, "n": 1}], [{"n": "a"}, {"m": 1}]),
    # FastMCP: a union with a discriminator.
    (
        closed({"pet": {"discriminator": KINDS, "oneOf": PETS}}, "pet", **{"$defs": {"Cat": CAT, "Dog": DOG}}),
        [],
        [{"pet": {"kind": "cat", "lives": 9}}, {"pet": {"kind": "dog"}}],
        [{"pet": {"kind": "cat"}}, {"pet": {"kind": "cow"}}],
    ),
    # schemars: bounds of 64 bits.
    (
        closed({"offset": OFFSET, "where": WHERE}),
        ["maximum", "format"],
        [{"offset": 5}, {"where": None}, {"where": "../a"}],
        [{"offset": -1}, {"where": 1}],
    ),
    # OpenAPI: a reference to elsewhere.
    (
        closed(TABLE, dependentSchemas={"schema": {"required": ["table"]}}),
        ["contains", "dependentSchemas", "$ref"],
        [{"schema": {"type": "null"}}, {"table": "a"}],
        [{"table": 1}, {"schema": {}, "other": 1}],
    ),
    # Many patterns that meet; a pattern of another dialect; no value at all.
    (closed(MEETING, "p0"), ["pattern"], [{"p0": "b"}], [{"p0": 1}, {}]),
    (closed({"t": STRING | {"pattern": "^{{.*}}$"}}), ["pattern"], [{"t": "a"}], [{"n": "a"}, {"t": 1}]),
    (closed({"n": INTEGER | {"minimum": 5, "maximum": 4}}, "n"), ["parameters"], [{}, {"a": [1]}], [1, [], "a"]),
]


def test_a_tool_is_taken_without_strict_and_what_it_does_not_hold_is_named() -> None:
    for schema, relaxed, *_ in GENERATED:
        constraint = calls({"tool": schema})
        assert constraint.relaxed == tuple(f"tools.tool.{keyword}" for keyword in relaxed)
        held = validator({} if relaxed == ["parameters"] else schema, relaxed)
        for seed in range(5):
            text = sample(constraint.fork(), TAGGED, seed, TAGS)
            found = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text, re.DOTALL)
            assert found
            call = json.loads(found[1])
            assert call["name"] == "tool"
            if "$ref" not in relaxed:
                held.validate(call["arguments"])


def test_with_strict_what_does_not_hold_is_refused_with_its_name() -> None:
    for schema, relaxed, taken, refused in GENERATED:
        if relaxed:
            with pytest.raises(RequestError, match="The tool 'tool' cannot be used") as caught:
                calls({"other": {}, "tool": schema}, strict=["tool"])
            assert (caught.value.status, caught.value.param) == (400, "tools")
            assert not re.search("option|guidance|coerce|limits", caught.value.message)
        else:
            constraint = calls({"tool": schema}, strict=["tool"])
            assert constraint.relaxed == ()
            assert [value for value in taken + refused if accepts(constraint, "tool", value)] == taken


def test_a_relaxed_tool_leaves_others_as_they_are() -> None:
    constraint = calls({f"tool{index}": schema for index, (schema, *_) in enumerate(GENERATED)})
    for index, (_, _, taken, refused) in enumerate(GENERATED):
        assert [value for value in taken + refused if accepts(constraint, f"tool{index}", value)] == taken


def test_names_are_few_whatever_the_number_of_tools() -> None:
    tools = {f"tool{index}": {"propertyNames": {"maxLength": 9}, "not": {"required": ["a"]}} for index in range(9)}
    assert len(calls(dict(list(tools.items())[:8])).relaxed) == 16
    assert calls(tools).relaxed == ("tools.not", "tools.propertyNames")


@pytest.mark.slow
def test_what_is_valid_by_a_schema_stays_so_when_it_is_relaxed() -> None:
    """Leaving out a keyword must never leave out a value."""
    # Keywords that are relaxed, to be added to schemas at random.
    added: list[dict[str, Any]] = [
        {"not": {"type": "integer"}},
        {"if": {"type": "object"}, "then": {"required": ["a"]}},
        {"propertyNames": {"maxLength": 1}, "uniqueItems": True},
        {"minProperties": 2},
        {"patternProperties": {"(?=a)": {"const": 0}}, "additionalProperties": False},
        {"dependentSchemas": {"a": {"required": ["b"]}}},
        {"prefixItems": [{"const": 1}], "items": [{"const": 2}], "additionalItems": False},
        {"pattern": "(?!a)", "maximum": 2**60},
    ]
    count = 0
    for seed in range(100):
        schema = Schemas(seed).whole()
        schema["oneOf"] = [branch | added[(seed + n) % len(added)] for n, branch in enumerate(schema["oneOf"])]
        tool = {"properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": schema, **schema["$defs"]}}
        constraint = calls({"t": tool})
        by_schema = jsonschema.Draft202012Validator(schema | {"$defs": tool["$defs"]})
        for value in VALUES:
            if by_schema.is_valid(value):
                count += 1
                assert any(accepts(constraint, "t", {"x": spelled}) for spelled in spellings(value)), (schema, value)
    assert count > 100
