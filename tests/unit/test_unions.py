"""`oneOf`: branches that exclude each other are taken wherever they stand, and mean what JSON Schema says."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import permutations
from typing import Annotated, Any, Literal

import jsonschema
import numpy as np
import pytest
from openai.lib._pydantic import to_strict_json_schema
from pydantic import BaseModel, Field

from fake_engine import FakeVocabulary
from specserve.errors import RequestError
from specserve.grammar import schema as schema_module
from specserve.grammar import unions
from specserve.grammar.compiler import GrammarCompiler
from specserve.grammar.constraint import Constraint

# Tokens are bytes; the last one is the end token.
END = 256


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(FakeVocabulary(END + 1))


def accepts(constraint: Constraint, value: Any) -> bool:
    """Whether an answer could be this value, with its keys in some order."""
    orders = [dict(items) for items in permutations(value.items())] if isinstance(value, dict) else [value]
    masks = [constraint.allowed(list(json.dumps(spelled).encode())) for spelled in orders]
    return any(mask is not None and bool(mask[END]) for mask in masks)


STRING, NULL, INTEGER = {"type": "string"}, {"type": "null"}, {"type": "integer"}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": INTEGER}, "required": ["kind", "lives"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]}
TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#/$defs/union"}, "kind": {"const": "tree"}},
    "required": ["left", "kind"],
}


def by_reference(*branches: Any, **beside: Any) -> dict[str, Any]:
    """A `oneOf` of references, itself behind a reference."""
    named = {f"branch{index}": branch for index, branch in enumerate(branches)}
    union = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in named], **beside}
    return {"$ref": "#/$defs/union", "$defs": {"union": union, **named}}


TAKEN: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    (by_reference(STRING, NULL), ["a", None], [1]),
    (by_reference(STRING, {"const": 1}, {"enum": [2.0, True]}), ["a", 1, 2, True], [3, False, None]),
    (by_reference({"const": {"a": [1]}}, {"const": {"a": [2]}}), [{"a": [1]}, {"a": [2]}], [{"a": [3]}, {}]),
    (by_reference(CAT, DOG, NULL), [{"kind": "cat", "lives": 9}, {"kind": "wolf"}, None], [{"kind": "cat"}, {}]),
    (by_reference({"allOf": [CAT, {"type": "object"}]}, DOG), [{"kind": "dog"}], [{"kind": "cow"}, 1]),
    (by_reference({"oneOf": [CAT, NULL]}, {"anyOf": [DOG, STRING]}), [None, "a", {"kind": "dog"}], [{}, 1]),
    (by_reference(DOG, TREE), [{"kind": "tree", "left": {"kind": "dog"}}], [{"kind": "tree", "left": 1}]),
    # They exclude each other by what is not there, and by what stands beside them.
    (by_reference({**CAT, "additionalProperties": False}, TREE), [{"kind": "cat", "lives": 1}], [{}, 1]),
    ({"anyOf": [{"const": 7}, {"type": "string"}], "oneOf": [INTEGER, STRING]}, [7, "a"], [8, None]),
    # Where the context of a reference keeps branches apart, the compiler sees it.
    (
        {
            "items": {"allOf": [{"type": "object", "required": ["op"]}, {"$ref": "#/$defs/union"}]},
            "type": "array",
            "$defs": {"union": {"oneOf": [{"properties": {"op": {"const": op}}} for op in ("add", "test")]}},
        },
        [[], [{"op": "add"}, {"op": "test"}]],
        [[{"op": "move"}], [{}], [1]],
    ),
    # Exactly one of these properties.
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}, 1]),
    (
        {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b", "c"]}, {"required": ["a", "d"]}]},
        [{"a": 1}, {"a": 1, "b": 1}, {"b": 1, "c": 1, "d": 1}],
        [{}, {"b": 1}, {"a": 1, "d": 1}, {"a": 1, "b": 1, "c": 1}],
    ),
]


def test_exclusive_branches_are_taken(compiler: GrammarCompiler) -> None:
    for schema, valid, invalid in TAKEN:
        constraint = compiler.json_schema(schema)
        by_schema = jsonschema.Draft202012Validator(schema)
        for value in valid + invalid:
            assert accepts(constraint, value) == (value in valid) == by_schema.is_valid(value), (schema, value)


NUMBERS = {"oneOf": [{"type": "number"}, INTEGER]}


OVERLAPPING: list[tuple[dict[str, Any], str]] = [
    (NUMBERS, "branches 0 and 1 of 'oneOf' at '#'"),
    ({"properties": {"a/b": {"items": NUMBERS}}}, "at '#/properties/a~1b/items'"),
    (by_reference(STRING, DOG, STRING), "branches 0 and 2 of 'oneOf' at '#/\\$defs/union'"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{}, NUMBERS]}}}, "at '#/\\$defs/a/allOf/1'"),
    # A string satisfies both.
    (
        by_reference({"properties": CAT["properties"], "required": ["kind"]}, DOG | {"type": ["object", "string"]}),
        "'#/\\$defs/union'",
    ),
    (by_reference({"properties": CAT["properties"]}, {"properties": DOG["properties"]}), "'#/\\$defs/union'"),
    ({"oneOf": [NULL, {"$ref": "#"}]}, "branches 0 and 1 of 'oneOf' at '#'"),
]


def test_branches_that_may_overlap_are_refused_with_their_place(compiler: GrammarCompiler) -> None:
    for schema, place in OVERLAPPING:
        with pytest.raises(RequestError, match=place) as refused:
            compiler.json_schema(schema)
        assert "use 'anyOf', or require a property with a 'const' of its own in each" in refused.value.message
        assert "option" not in refused.value.message


def test_long_unions_are_taken(compiler: GrammarCompiler) -> None:
    words = {"oneOf": [{"const": f"word {n}", "title": "A word"} for n in range(1500)]}
    assert accepts(compiler.json_schema(words), "word 1499")
    kinds = [{**DOG, "properties": {"kind": {"const": f"kind {n}"}}} for n in range(100)]
    constraint = compiler.json_schema(by_reference(*kinds))
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


def differences(compiler: GrammarCompiler, count: int) -> Iterator[tuple[dict[str, Any], Any]]:
    """Values that an accepted schema at random takes, but an answer could not be, or the other way round."""
    accepted = 0
    for seed in range(count):
        schema = Schemas(seed).whole()
        try:
            constraint = compiler.json_schema(schema)
        except RequestError:
            continue
        accepted += 1
        validator = jsonschema.Draft202012Validator(schema)
        yield from ((schema, value) for value in VALUES if accepts(constraint, value) != validator.is_valid(value))
    assert accepted > count / 10


@pytest.mark.slow
def test_an_accepted_union_means_exactly_what_json_schema_says(compiler: GrammarCompiler) -> None:
    assert list(differences(compiler, 1000)) == []


def take_all_as_exclusive(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(unions.Exclusion, "overlap", lambda *_arguments: None)


def take_a_schema_without_type_for_one_of_objects(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(unions, "_TYPES", frozenset({"object"}))


def forget_what_is_no_object(patch: pytest.MonkeyPatch) -> None:
    right = unions.exactly_one_present
    patch.setattr(
        schema_module, "exactly_one_present", lambda branches: [{**b, "type": TYPES} for b in right(branches)]
    )


def test_a_planted_fault_changes_what_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for fault in (take_all_as_exclusive, take_a_schema_without_type_for_one_of_objects, forget_what_is_no_object):
        with monkeypatch.context() as patch:
            fault(patch)
            assert next(differences(GrammarCompiler(FakeVocabulary(END + 1)), 1500), None), fault.__name__


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog", "wolf"]


class Owner(BaseModel):
    """Its pet is a union with a discriminator, which pydantic writes as `oneOf` of references."""

    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Operator(StrEnum):
    ADD = "add"
    NUMBER = "number"


class Number(BaseModel):
    operator: Literal[Operator.NUMBER] = Operator.NUMBER
    value: int


class Sum(BaseModel):
    """A recursive union, whose discriminator has a default: the schema does not require it, but pydantic does."""

    operator: Literal[Operator.ADD] = Operator.ADD
    terms: list[Annotated[Sum | Number, Field(discriminator="operator")]]
    last: Annotated[Sum | Number, Field(discriminator="operator")] | None = None


class BlackCat(BaseModel):
    kind: Literal["cat"] = "cat"
    colour: Literal["black"] = "black"


class WhiteCat(BaseModel):
    kind: Literal["cat"] = "cat"
    colour: Literal["white"] = "white"


class Nested(BaseModel):
    """A union, one of whose branches is a union by another discriminator."""

    pets: list[
        Annotated[Annotated[BlackCat | WhiteCat, Field(discriminator="colour")] | Dog, Field(discriminator="kind")]
    ]


def answers(constraint: Constraint, count: int) -> Iterator[bytes]:
    """Whole answers at random, which end soon."""
    for seed in range(count):
        generator = random.Random(seed)
        written: list[int] = []
        while len(written) < 2000:
            mask = constraint.allowed(written)
            assert mask is not None
            options = np.flatnonzero(mask).tolist()
            if options == [END]:
                yield bytes(written)
                break
            printable = [token for token in options if 32 < token < 127] or options
            closing = [token for token in options if token in b'"}]0'] if generator.random() < 0.8 else []
            written.append(generator.choice(closing or printable))


@pytest.mark.parametrize("model", [Owner, Sum, Nested])
def test_answers_by_a_union_of_pydantic_are_what_it_takes(model: type[BaseModel], compiler: GrammarCompiler) -> None:
    """By pydantic's own schema, which instructor sends, and by what `parse()` of OpenAI's client makes of it."""
    for schema in (model.model_json_schema(), to_strict_json_schema(model)):
        assert "oneOf" in json.dumps(schema)
        found = list(answers(compiler.json_schema(schema), 30))
        assert len(set(found)) > 2
        for answer in found:
            model.model_validate_json(answer)
            jsonschema.validate(json.loads(answer), schema)
