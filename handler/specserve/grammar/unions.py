"""Proves that no value satisfies two branches of a `oneOf`, which means the same as `anyOf` then."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from specserve.grammar import keywords

# Schemas that all proofs of one request examine: about 0.2 s.
_MAX_EXAMINED = 100_000
# Alternatives within alternatives, and properties within properties, that a proof looks into.
_MAX_DEPTH = 8
# Branches within branches that may name the property of a discriminator.
_MAX_BRANCHES = 1000
# Properties that "exactly one of these is present" may name.
_MAX_NAMES = 12
_KINDS = keywords.TYPES | {int: "number"}
_TYPES = frozenset(_KINDS.values())


class Exclusion:
    """Proves that no value satisfies two branches, by types, listed values and required properties."""

    def __init__(self, targets: Mapping[str, Any]) -> None:
        # The subschemas that each `$ref` leads to.
        self._targets = targets
        self._left = _MAX_EXAMINED

    def overlap(self, schema: dict[str, Any], required: Sequence[str]) -> tuple[int, int] | None:
        """Return two branches of `anyOf` that may take the same value, of those that have the required properties."""
        # Of labelled values, each in a branch, there may be too many for pairs.
        nothing = frozenset[tuple[str, Hashable]]()
        values = [next(_listed(branch), nothing) if isinstance(branch, dict) else nothing for branch in schema["anyOf"]]
        if all(values) and len(nothing.union(*values)) == sum(map(len, values)):
            return None
        beside = [{key: value for key, value in schema.items() if key != "anyOf"}, {"required": required}]
        pairs = combinations(enumerate(schema["anyOf"]), 2)
        return next(((i, j) for (i, a), (j, b) in pairs if not self._is_empty([*beside, a, b], _MAX_DEPTH)), None)

    def naming(self, tag: str, branches: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the subschemas in which branches name a property; none if one of them does not."""
        found: list[dict[str, Any]] = []
        queue = list(branches)
        for schema in queue:
            if not isinstance(schema, dict) or len(queue) > _MAX_BRANCHES:
                return []
            if tag in schema.get("properties", {}):
                found.append(schema)
            elif "$ref" in schema:
                queue.append(self._targets[schema["$ref"]])
            elif alternatives := schema.get("anyOf"):
                queue += alternatives
            else:
                return []
        return found

    def _is_empty(self, schemas: Sequence[Any], depth: int) -> bool:
        """Whether provably no value satisfies all schemas."""
        facts: list[dict[str, Any]] = []
        choices: list[list[Any]] = []
        queue = list(schemas)
        for schema in queue:
            self._left -= 1
            if schema is False:
                return True
            if self._left < 0 or depth < 0:
                return False
            if isinstance(schema, dict) and not any(schema is fact for fact in facts):
                facts.append(schema)
                queue += schema.get("allOf", [])
                queue += [self._targets[schema["$ref"]]] if "$ref" in schema else []
                choices += [schema["anyOf"]] if "anyOf" in schema else []
        types = _TYPES.intersection(*map(_types, facts))
        if listed := [values for fact in facts for values in _listed(fact)]:
            types &= {kind for kind, _ in listed[0].intersection(*listed[1:])}
        if not types:
            return True
        if types == {"object"}:
            required = {name for fact in facts for name in fact.get("required", [])}
            if any(self._is_empty(list(_of_property(facts, name)), depth - 1) for name in sorted(required)):
                return True
        alone = [{key: value for key, value in fact.items() if key != "anyOf"} for fact in facts]
        rest = [*alone, *({"anyOf": choice} for choice in choices[1:])]
        return bool(choices) and all(self._is_empty([branch, *rest], depth - 1) for branch in choices[0])


def _types(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types that a schema allows; integers are numbers."""
    return frozenset("number" if name == "integer" else name for name in keywords.types_of(schema))


def _listed(schema: dict[str, Any]) -> Iterator[frozenset[tuple[str, Hashable]]]:
    """Yield the values that `const` and `enum` list."""
    if "const" in schema:
        yield frozenset([_canonical(schema["const"])])
    if "enum" in schema:
        yield frozenset(map(_canonical, schema["enum"]))


def _of_property(facts: Sequence[dict[str, Any]], name: str) -> Iterator[Any]:
    """Yield what schemas say of a property, other than by patterns."""
    for fact in facts:
        if name in fact.get("properties", {}):
            yield fact["properties"][name]
        elif not fact.get("patternProperties"):
            yield fact.get("additionalProperties", True)


def _canonical(value: Any) -> tuple[str, Hashable]:
    """Return the type and value of a JSON value, which equal ones share: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, dict):
        return "object", frozenset((name, _canonical(held)) for name, held in value.items())
    return _KINDS[type(value)], tuple(map(_canonical, value)) if isinstance(value, list) else value


def exactly_one_present(branches: Sequence[Any]) -> list[dict[str, Any]]:
    """Return exclusive alternatives for branches that only require properties; none for others.

    Each has all properties of one branch, and lacks one of every other. What is no object satisfies all branches.
    """
    names = [branch["required"] for branch in branches if isinstance(branch, dict) and branch.keys() == {"required"}]
    if len(names) != len(branches) or len(names) < 2 or sum(map(len, names)) > _MAX_NAMES:
        return []
    absent = [[[{"properties": {n: False}} for n in other if n not in own] for other in names] for own in names]
    return [
        {"type": "object", "required": own, "allOf": [{"anyOf": a} for j, a in enumerate(lacks) if j != i]}
        for i, (own, lacks) in enumerate(zip(names, absent, strict=True))
    ]
