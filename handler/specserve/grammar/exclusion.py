"""Proves that the branches of a `oneOf` exclude each other, so that it means the same as `anyOf`.

llguidance does so itself where no branch is a reference, and by fewer keywords.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

# Schemas and values that are examined in all proofs of one schema: at most 0.2 s (100 closed objects with 9,000 words).
_MAX_EXAMINED = 200_000
# How many alternatives in alternatives, and properties in properties, are examined; first few, since a proof is mostly
# near, and a recursive schema has no end.
_DEPTHS = (2, 4, 8, 16)
_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
# A number or length, and 0; or 1 if it has to be exceeded, -1 if it must not be reached.
_Bound = tuple[float, int]
_MINIMA = {"number": {"minimum": 0, "exclusiveMinimum": 1}, "string": {"minLength": 0}, "array": {"minItems": 0}}
_MAXIMA = {"number": {"maximum": 0, "exclusiveMaximum": -1}, "string": {"maxLength": 0}, "array": {"maxItems": 0}}
_Facts = tuple[dict[str, Any], ...]


class _All(NamedTuple):
    """What a value has to satisfy: all schemas of `facts`, and of every list of `choices` at least one."""

    facts: _Facts = ()
    choices: tuple[list[Any], ...] = ()


_NOTHING = _All()


class Exclusion:
    """Proves that no value satisfies several schemas at once: by types, values, bounds and required properties.

    Args:
        resolve: returns the subschema that a `$ref` leads to.
    """

    def __init__(self, resolve: Callable[[str], Any]) -> None:
        self._resolve = resolve
        self._left = _MAX_EXAMINED

    def overlap(self, branches: Sequence[Any], beside: Sequence[Any]) -> tuple[int, int] | None:
        """Return the indices of two branches that one value might satisfy; None if there are none.

        Args:
            branches: of a `oneOf`.
            beside: what a value has to satisfy beside it.
        """
        if self._have_values_apart(branches, beside):
            return None
        for i, j in combinations(range(len(branches)), 2):
            both = [branches[i], branches[j], *beside]
            if self._left < 0 or not any(self._excluded(both, _NOTHING, depth) for depth in _DEPTHS):
                return i, j
        return None

    def _have_values_apart(self, branches: Sequence[Any], beside: Sequence[Any]) -> bool:
        """Whether no two branches share one of the values that they list, themselves or for a property.

        For long unions: this takes a time that grows with their number, not with that of pairs.
        """
        if self._left < 0:
            return False
        for name in (None, *sorted(self._required_names([*branches[:1], *beside]))):
            seen: set[Hashable] = set()
            for branch in branches:
                values = self._values([branch, *beside], name, _NOTHING, _DEPTHS[-1])
                if values is None or not seen.isdisjoint(values):
                    break
                seen |= values
            else:
                return True
        return False

    def _required_names(self, schemas: Sequence[Any]) -> set[str]:
        """Return the properties that schemas require, or if they require none their first alternatives."""
        known = self._add(schemas, _NOTHING)
        for _ in range(_DEPTHS[-1]):
            if known and not _required(known.facts) and known.choices:
                known = self._add(known.choices[0][:1], _All(known.facts, known.choices[1:]))
        return _required(known.facts) if known else set()

    def _values(self, schemas: Sequence[Any], name: str | None, known: _All, depth: int) -> set[Hashable] | None:
        """Return all values that schemas allow, or a required property of their objects; None if they list none."""
        if self._left < 0 or depth < 0:
            return None
        every = self._add(schemas, known)
        if every is None:
            return set()
        listed: set[Hashable] | None = None
        if name is not None and name in _required(every.facts) and _types(every.facts) <= {"object"}:
            listed = self._values(self._of_property(every.facts, name), None, _NOTHING, depth - 1)
        elif name is None and (values := self._listed(every.facts)) is not None:
            listed = set(values)
        if listed is not None or not every.choices:
            return listed
        found: set[Hashable] = set()
        for branch in every.choices[0]:
            listed = self._values([branch], name, _All(every.facts, every.choices[1:]), depth - 1)
            if listed is None:
                return None
            found |= listed
        return found

    def _excluded(self, schemas: Sequence[Any], known: _All, depth: int) -> bool:
        """Whether no value satisfies these schemas and what is known; False also if that is not proven."""
        if self._left < 0 or depth < 0:
            return False
        every = self._add(schemas, known)
        if every is None or self._contradict(every.facts, depth):
            return True
        rest = _All(every.facts, every.choices[1:])
        return bool(every.choices) and all(self._excluded([branch], rest, depth - 1) for branch in every.choices[0])

    def _add(self, schemas: Sequence[Any], known: _All) -> _All | None:
        """Return what has to be satisfied in all, through references and `allOf`; None if nothing can."""
        facts, choices = list(known.facts), list(known.choices)
        seen = set(map(id, facts))
        queue = list(schemas)
        for schema in queue:
            if schema is False:
                return None
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            seen.add(id(schema))
            facts.append(schema)
            queue += _list(schema, "allOf")
            if isinstance(schema.get("$ref"), str):
                queue.append(self._resolve(schema["$ref"]))
            choices += [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
        self._left -= len(queue) + len(facts)
        return _All(tuple(facts), tuple(choices))

    def _contradict(self, facts: _Facts, depth: int) -> bool:
        """Whether no value satisfies all facts, whatever their alternatives say."""
        listed = self._listed(facts)
        if listed is not None:
            return not any(self._may_be(value, facts, depth) for value in listed.values())
        return not any(self._may_be_some(kind, facts, depth) for kind in sorted(_types(facts)))

    def _may_be_some(self, kind: str, facts: _Facts, depth: int) -> bool:
        """Whether some value of a type might satisfy all facts."""
        if kind == "object":
            properties = [self._of_property(facts, name) for name in sorted(_required(facts))]
            return not any(self._excluded(schemas, _NOTHING, depth - 1) for schemas in properties)
        minimum, maximum = _bounds(facts, kind)
        return minimum <= maximum

    def _may_be(self, value: Any, facts: _Facts, depth: int) -> bool:
        """Whether a value might satisfy all facts."""
        kind = _kind(value)
        if kind not in _types(facts):
            return False
        if isinstance(value, dict):
            properties = [[{"const": held}, *self._of_property(facts, name)] for name, held in value.items()]
            excluded = (self._excluded(schemas, _NOTHING, depth - 1) for schemas in properties)
            return _required(facts) <= value.keys() and not any(excluded)
        minimum, maximum = _bounds(facts, kind)
        size = len(value) if isinstance(value, str | list) else value if kind == "number" else 0
        return minimum <= (size, 0) <= maximum

    def _of_property(self, facts: _Facts, name: str) -> list[Any]:
        """Return what the facts say of a property, without what they say by patterns."""
        self._left -= len(facts)
        found = []
        for fact in facts:
            properties = fact.get("properties")
            if isinstance(properties, dict) and name in properties:
                found.append(properties[name])
            elif "additionalProperties" in fact and not fact.get("patternProperties"):
                found.append(fact["additionalProperties"])
        return found

    def _listed(self, facts: _Facts) -> dict[Hashable, Any] | None:
        """Return the values that all facts list; None if no fact lists any."""
        lists = [[fact["const"]] for fact in facts if "const" in fact]
        lists += [fact["enum"] for fact in facts if isinstance(fact.get("enum"), list)]
        if not lists:
            return None
        self._left -= sum(map(len, lists))
        listed = [{_canonical(value): value for value in values} for values in lists]
        return {key: value for key, value in listed[0].items() if all(key in others for others in listed[1:])}


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    """Return the list that is the value of a keyword, empty if it is none."""
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _required(facts: _Facts) -> set[str]:
    return {name for fact in facts for name in _list(fact, "required") if isinstance(name, str)}


def _types(facts: _Facts) -> frozenset[str]:
    """Return the types that all facts allow; whole numbers are numbers."""
    allowed = _TYPES
    for fact in facts:
        named = [fact["type"]] if isinstance(fact.get("type"), str) else fact.get("type")
        if isinstance(named, list):
            allowed &= {"number" if name == "integer" else name for name in named if isinstance(name, str)}
    return allowed


def _bounds(facts: _Facts, kind: str) -> tuple[_Bound, _Bound]:
    """Return the minimum and the maximum that facts set for a number or length."""
    return (
        max(_numbers(facts, _MINIMA.get(kind, {})), default=(-math.inf, 0)),
        min(_numbers(facts, _MAXIMA.get(kind, {})), default=(math.inf, 0)),
    )


def _numbers(facts: _Facts, keywords: Mapping[str, int]) -> Iterator[_Bound]:
    for fact in facts:
        for key, beyond in keywords.items():
            if isinstance(fact.get(key), int | float) and not isinstance(fact[key], bool):
                yield fact[key], beyond


def _kind(value: Any) -> str:
    """Return the type of a JSON value."""
    kinds = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def _canonical(value: Any) -> Hashable:
    """Return what equal JSON values have in common: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, dict):
        return "object", frozenset((name, _canonical(held)) for name, held in value.items())
    if isinstance(value, list):
        return "array", tuple(map(_canonical, value))
    return _kind(value), value
