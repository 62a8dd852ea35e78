"""Turns a `oneOf` into an `anyOf`, which means the same where no value satisfies two branches."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specserve.grammar.exclusion import Exclusion

# Objects that "exactly one of these properties" may become, and names of properties in it.
_MAX_OBJECTS = 64


class _Union(NamedTuple):
    """A `oneOf` of a schema; the property `tag` has to be present, in these parts of its branches."""

    schema: dict[str, Any]
    branches: list[Any]
    tag: str
    tagged: list[dict[str, Any]]


class Unions:
    """Turns all `oneOf`s of a schema into `anyOf`s.

    OpenAPI's discriminator tells by a property which branch is meant. Where a branch does not require it, as pydantic's
    tags that have a default, answers have it all the same: pydantic takes none without, and branches may overlap.

    Args:
        copies: the subschemas by JSON pointer, which are changed.
        targets: the subschemas that a `$ref` leads to.
    """

    def __init__(self, copies: Mapping[str, Any], targets: Mapping[str, Any]) -> None:
        self._copies = copies
        self._targets = targets
        # JSON pointers, and OpenAPI's discriminator.
        self._found: list[tuple[str, Any]] = []

    def note(self, pointer: str, discriminator: Any) -> None:
        """Remember the `oneOf` of the subschema at a JSON pointer."""
        self._found.append((pointer, discriminator))

    def join(self, *, joins_all: bool, relaxed: bool) -> str:
        """Turn those whose branches exclude each other into `anyOf`s, or all; returns why one does not, or nothing.

        The compiler takes such a one where the context of a reference keeps its branches apart. Of branches that are
        `relaxed`, several may take a value that one of them took before.
        """
        exclusion = Exclusion(self._targets.__getitem__)
        apart: list[_Union] = []
        left = ""
        for pointer, discriminator in self._found:
            schema = self._copies[pointer]
            tag = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
            tagged = self._naming(tag, schema["oneOf"]) if isinstance(tag, str) else []
            beside = [*self._beside(pointer), *([{"required": [tag]}] if tagged else [])]
            if not relaxed and (alternatives := _exactly_one_present(schema["oneOf"])):
                apart.append(_Union(schema, alternatives, "", []))
            elif overlap := exclusion.overlap(schema["oneOf"], beside):
                left = left or _sentence(pointer, *overlap)
                apart += [_Union(schema, schema["oneOf"], "", [])] if joins_all else []
            else:
                apart.append(_Union(schema, schema["oneOf"], str(tag), tagged))
        # All were proven for the schema as it is. What the compiler is to prove must not see it changed.
        for union in apart:
            if joins_all or not (left and union.tagged):
                _to_any_of(union)
        return left

    def _beside(self, pointer: str) -> list[dict[str, Any]]:
        """Return what a value has to satisfy beside the `oneOf` at a pointer, also where that is inside an `allOf`."""
        inside = self._copies[pointer]
        found = [{key: value for key, value in inside.items() if key != "oneOf"}]
        while match := re.fullmatch(r"(.*)/(?:allOf|anyOf|oneOf)/\d+", pointer, re.DOTALL):
            pointer = match[1]
            outside = {key: value for key, value in self._copies[pointer].items() if key not in {"anyOf", "oneOf"}}
            if isinstance(outside.get("allOf"), list):
                outside["allOf"] = [part for part in outside["allOf"] if part is not inside]
            found.append(outside)
            inside = self._copies[pointer]
        return found

    def _naming(self, name: str, branches: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the subschemas of all branches that name a property; none if a branch does not name it."""
        found: list[dict[str, Any]] = []
        queue, seen = list(branches), set()
        for schema in queue:
            if id(schema) in seen:
                continue
            seen.add(id(schema))
            if not isinstance(schema, dict):
                return []
            if isinstance(schema.get("properties"), dict) and name in schema["properties"]:
                found.append(schema)
            elif isinstance(schema.get("$ref"), str):
                queue.append(self._targets[schema["$ref"]])
            elif isinstance(schema.get("oneOf"), list):
                queue += schema["oneOf"]
            else:
                return []
        return found


def _exactly_one_present(branches: Sequence[Any]) -> list[dict[str, Any]]:
    """Return alternatives for branches that only require properties; none if they do more, or are too many.

    Each requires those of one branch, and that of every other at least one is absent. What is no object satisfies all
    branches, and so no `oneOf` of two.
    """
    lists = [branch["required"] for branch in branches if isinstance(branch, dict) and branch.keys() == {"required"}]
    names = [required for required in lists if isinstance(required, list) and all(isinstance(n, str) for n in required)]
    if len(names) != len(branches) or len(names) < 2 or max(len(names), sum(map(len, names))) > _MAX_OBJECTS:
        return []
    absent = [[[name for name in other if name not in own] for other in names if other is not own] for own in names]
    if sum(math.prod(map(len, others)) for others in absent) > _MAX_OBJECTS:
        return []
    return [
        {
            "type": "object",
            "required": own,
            "properties": {other[0]: False for other in others if len(other) == 1},
            "allOf": [{"anyOf": [{"properties": {n: False}} for n in other]} for other in others if len(other) != 1],
        }
        for own, others in zip(names, absent, strict=True)
    ]


def _sentence(pointer: str, first: int, second: int) -> str:
    return (
        f"branches {first} and {second} of 'oneOf' at {'#' + pointer[:100]!r} might both take the same value; use "
        "'anyOf', or require a property with a 'const' of its own in each"
    )


def _to_any_of(union: _Union) -> None:
    """Put an `anyOf` in the place of `oneOf`: answers have their properties in the order of the schema."""
    schema = union.schema
    if "anyOf" in schema:
        del schema["oneOf"]
        schema["allOf"] = [*schema.get("allOf", []), {"anyOf": union.branches}]
    else:
        items = [("anyOf", union.branches) if key == "oneOf" else (key, value) for key, value in schema.items()]
        schema.clear()
        schema.update(items)
    for part in union.tagged:
        required = part.get("required", [])
        if isinstance(required, list) and union.tag not in required:
            part["required"] = [*required, union.tag]
