"""`oneOf`: branches that exclude each other are taken wherever they stand, and mean what JSON Schema says."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from openai.lib._pydantic import to_strict_json_schema
from pydantic import BaseModel, Field

from constraints import END, WORDS
from specserve.errors import RequestError
from specserve.grammar import schema as schema_module
from specserve.grammar import unions
from specserve.grammar.compiler import GrammarCompiler
from specserve.grammar.constraint import Constraint
from test_grammar import sample_answer

COMPILER = GrammarCompiler(WORDS)


def spellings(value: Any) -> list[Any]:
    """A value with its keys in every order."""
    return [dict(items) for items in permutations(value.items())] if isinstance(value, dict) else [value]


def accepts(constraint: Constraint, value: Any) -> bool:
    """Whether an answer could be this value, with its keys in some order."""
    masks = [constraint.allowed(json.dumps(spelled).encode()) for spelled in spellings(value)]
    return any(mask is not None and bool(mask[END]) for mask in masks)


STRING, NULL, INTEGER = {"type": "string"}, {"type": "null"}, {"type": "integer"}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": INTEGER}, "required": ["kind", "lives"]}
LAX_CAT = {"properties": CAT["properties"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]}
BLACK, WHITE = (
    {**CAT, "properties": {"kind": {"const": "cat"}, "lives": {"const": colour}}, "required": ["lives"]}
    for colour in ("black", "white")
)
EITHER = {"oneOf": [{"required": ["x"]}, {"required": ["y"]}]}
NUMBERS = {"oneOf": [{"type": "number"}, INTEGER]}
BRANCHING = {"left": {"$ref": "#/$defs/union"}, "kind": {"const": "tree"}}
TREE = {"type": "object", "properties": BRANCHING, "required": ["left", "kind"]}


def by_reference(*branches: Any, **beside: Any) -> dict[str, Any]:
    """A `oneOf` of references, itself behind a reference."""
    named = {f"branch{index}": branch for index, branch in enumerate(branches)}
    union = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in named], **beside}
    return {"$ref": "#/$defs/union", "$defs": {"union": union, **named}}


def test_exclusive_branches_are_taken() -> None:
    for schema, valid, invalid in (
        (by_reference(STRING, NULL), ["a", None], [1]),
        (by_reference(STRING, {"const": 1}, {"enum": [2.0, True]}), ["a", 1, 2, True], [3, False, None]),
        (by_reference(CAT, DOG, NULL), [{"kind": "cat", "lives": 9}, {"kind": "wolf"}, None], [{"kind": "cat"}, {}]),
        (by_reference({"oneOf": [CAT, NULL]}, {"anyOf": [DOG, STRING]}), [None, "a", {"kind": "dog"}], [{}, 1]),
        # As pydantic's unions with discriminators, which have defaults, inside others.
        (
            by_reference({"oneOf": [BLACK, WHITE]}, DOG | {"required": []}, discriminator={"propertyName": "kind"}),
            [{"kind": "cat", "lives": "white"}, {"kind": "wolf"}],
            [{"kind": "cat", "lives": "red"}, 1],
        ),
        (by_reference(DOG, TREE), [{"kind": "tree", "left": {"kind": "dog"}}], [{"kind": "tree", "left": 1}]),
        # They exclude each other by what is not there, and by what stands beside them.
        (by_reference({**CAT, "additionalProperties": False}, TREE), [{"kind": "cat", "lives": 1}], [{}, 1]),
        ({"anyOf": [{"const": 7}, {"type": "string"}], "oneOf": [INTEGER, STRING]}, [7, "a"], [8, None]),
        # Exactly one of these properties.
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}, 1]),
        (
            {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b", "c"]}, {"required": ["a", "d"]}]},
            [{"a": 1}, {"a": 1, "b": 1}, {"b": 1, "c": 1, "d": 1}],
            [{}, {"b": 1}, {"a": 1, "d": 1}, {"a": 1, "b": 1, "c": 1}],
        ),
        # Where it stands, and where a reference leads to it.
        (
            {"properties": {"a": EITHER, "b": {"$ref": "#/properties/a"}}},
            [{"a": {"x": 1}}, {"b": {"y": 1}}],
            [{"a": {"x": 1, "y": 1}}, {"b": {"x": 1, "y": 1}}],
        ),
    ):
        constraint = COMPILER.json_schema(schema)
        by_schema = jsonschema.Draft202012Validator(schema)
        for value in valid + invalid:
            assert accepts(constraint, value) == (value in valid) == by_schema.is_valid(value), (schema, value)


def test_branches_that_may_overlap_are_refused_with_their_place() -> None:
    for schema, place in (
        (NUMBERS, "branches 0 and 1 of 'oneOf' at '#'"),
        ({"properties": {"a/b": {"items": NUMBERS}}}, "at '#/properties/a~1b/items'"),
        (by_reference(STRING, DOG, STRING), "branches 0 and 2 of 'oneOf' at '#/\\$defs/union'"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{}, NUMBERS]}}}, "at '#/\\$defs/a/allOf/1'"),
        # A string satisfies both.
        (by_reference(LAX_CAT | {"required": ["kind"]}, DOG | {"type": ["object", "string"]}), "'#/\\$defs/union'"),
        (by_reference(LAX_CAT, {"properties": DOG["properties"]}), "'#/\\$defs/union'"),
        ({"oneOf": [NULL, {"$ref": "#"}]}, "branches 0 and 1 of 'oneOf' at '#'"),
    ):
        with pytest.raises(RequestError, match=place) as refused:
            COMPILER.json_schema(schema)
        assert "use 'anyOf', or require a property with a 'const' of its own in each" in refused.value.message
        assert "option" not in refused.value.message


def test_long_unions_are_taken() -> None:
    words = {"oneOf": [{"const": f"word {n}", "title": "A word"} for n in range(1500)]}
    assert accepts(COMPILER.json_schema(words), "word 1499")
    kinds = [{**DOG, "properties": {"kind": {"const": f"kind {n}"}}} for n in range(100)]
    constraint = COMPILER.json_schema(by_reference(*kinds))
    assert accepts(constraint, {"kind": "kind 99"})
    assert not accepts(constraint, {"kind": "kind 100"})


# Values, of which a schema at random takes some.
VALUES: list[Any] = [None, True, False, 0, 1, 2, 2.5, "", "a", "ab", [], [1], {}]
VALUES += [{"a": 0}, {"a": 1}, {"a": "a"}, {"b": 0}, {"a": 0, "b": 0}, {"a": 1, "b": 0}, {"a": {"a": 0}}, {"c": 0}]
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]


class Schemas:
    """Schemas at random, with many a `oneOf`."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def whole(self) -> dict[str, Any]:
        """A union, of which some branches are definitions."""
        definitions = {"d0": self._schema(2, ["d1"]), "d1": self._schema(2, [])}
        branches = [self._schema(2, ["d0", "d1"]) for _ in range(self._random.randint(2, 3))]
        return {"oneOf": branches, "$defs": definitions}

    def _schema(self, depth: int, names: list[str]) -> dict[str, Any]:
        """A schema, of which only properties refer to definitions without these names: no value has no end."""
        schema: dict[str, Any] = {}
        for _ in range(self._random.choice([1, 1, 2])):
            schema |= self._keyword(depth, names)
        return schema

    def _keyword(self, depth: int, names: list[str]) -> dict[str, Any]:
        choose, number = self._random.choice, self._random.randint
        keywords: list[Callable[[], dict[str, Any]]] = [
            lambda: {"type": choose([choose(TYPES), self._random.sample(TYPES, 2)])},
            lambda: {"const": choose(VALUES)},
            lambda: {"enum": self._random.sample(VALUES, 3)},
            lambda: {"type": "number", choose(["minimum", "exclusiveMinimum"]): number(0, 2)},
            lambda: {"type": "number", choose(["maximum", "exclusiveMaximum"]): number(0, 2)},
            lambda: {"type": "string", choose(["minLength", "maxLength"]): number(0, 2)},
            lambda: {"required": self._random.sample("abc", number(1, 2))},
            lambda: {"properties": self._properties(depth), **choose([{}, {"type": "object"}])},
            lambda: {"type": "object", "properties": self._properties(depth), "required": ["a"]},
            lambda: {"properties": self._properties(depth), "additionalProperties": False},
            lambda: {"$ref": f"#/$defs/{choose(names)}"} if names else {},
            lambda: {choose(["allOf", "anyOf", "oneOf", "oneOf"]): self._several(depth, names)},
        ]
        return choose(keywords)()

    def _properties(self, depth: int) -> dict[str, Any]:
        named = self._random.sample("ab", self._random.randint(1, 2))
        return {n: self._schema(depth - 1, ["d0", "d1"]) if depth else {"const": len(named)} for n in named}

    def _several(self, depth: int, names: list[str]) -> list[Any]:
        return [self._schema(depth - 1, names) if depth else {"type": self._random.choice(TYPES)} for _ in range(2)]


def differences(count: int) -> Iterator[tuple[dict[str, Any], Any]]:
    """Values that an accepted schema at random takes, but an answer could not be, or the other way round."""
    accepted = 0
    for seed in range(count):
        schema = Schemas(seed).whole()
        try:
            constraint = COMPILER.json_schema(schema)
        except RequestError:
            continue
        accepted += 1
        validator = jsonschema.Draft202012Validator(schema)
        yield from ((schema, value) for value in VALUES if accepts(constraint, value) != validator.is_valid(value))
    assert accepted > count / 10


@pytest.mark.slow
def test_an_accepted_union_means_exactly_what_json_schema_says() -> None:
    assert list(differences(600)) == []


def test_a_planted_fault_changes_what_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """All branches exclude each other; a schema without a type is one of objects; what is no object is forgotten."""

    def of_any_type(branches: list[Any]) -> list[dict[str, Any]]:
        return [{**branch, "type": TYPES} for branch in unions.exactly_one_present(branches)]

    faults: list[tuple[Any, str, Any]] = [
        (unions.Exclusion, "overlap", lambda *_: None),
        (unions, "_TYPES", frozenset({"object"})),
        (schema_module, "exactly_one_present", of_any_type),
    ]
    for where, name, fault in faults:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, fault)
            patch.setattr(COMPILER, "_cache", OrderedDict())
            assert next(differences(1500), None), name


class Number(BaseModel):
    operator: Literal["number"] = "number"
    value: int


class Sum(BaseModel):
    """A recursive union, whose discriminator has a default: the schema does not require it, but pydantic does."""

    operator: Literal["add"] = "add"
    terms: list[Annotated[Sum | Number, Field(discriminator="operator")]]
    last: Annotated[Sum | Number, Field(discriminator="operator")] | None = None


def test_answers_by_a_union_of_pydantic_are_what_it_takes() -> None:
    """By pydantic's own schema, which instructor sends, and by what `parse()` of OpenAI's client makes of it."""
    for schema in (Sum.model_json_schema(), to_strict_json_schema(Sum)):
        assert "oneOf" in json.dumps(schema)
        constraint = COMPILER.json_schema(schema)
        found = [sample_answer(constraint.fork(), WORDS, seed, 20) for seed in range(10)]
        assert len(set(found)) > 2
        for answer in found:
            Sum.model_validate_json(answer)
            jsonschema.validate(json.loads(answer), schema)
