"""The keywords of JSON Schema: which hold subschemas, which assert anything, and what an answer cannot spell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

# Keywords whose values are, or hold, subschemas.
IN_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
IN_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
SINGLE = frozenset({"items", "additionalItems", "additionalProperties"})
JOINABLE = frozenset({"anyOf", "oneOf", "allOf", "$ref", "enum", "const"})
# Keywords whose values are none: numbers that count something, which may be written as 2.0, and all others.
COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
VALUES = (
    COUNTS
    | {"$ref", "const", "enum", "type", "required", "pattern", "format"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
# Assertions of any JSON Schema draft that the compiler ignores. A keyword in none of these sets is an annotation.
ASSERTIONS = (
    frozenset({"if", "not", "contains", "uniqueItems", "propertyNames", "unevaluatedItems", "unevaluatedProperties"})
    | {"dependencies", "dependentRequired", "dependentSchemas", "propertyDependencies"}
    | {"$dynamicRef", "$recursiveRef", "disallow", "divisibleBy", "extends"}
)
# Keywords whose values are never subschemas.
NO_SCHEMAS = frozenset({"const", "default", "enum", "example", "examples"})
# Characters that JSON spells with "\\u" only, or DEL: llguidance leaves them out where they stand alone, and takes "ab"
# for "a\\u0001b". In a class beside others they are merely not written.
UNSPELLED = r"[\x00-\x07\x0b\x0e-\x1f\x7f]"
_UNSPELLED_IN_PATTERN = rf"(?:{UNSPELLED}|\\(?:[av]|(?:x|u00)(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])|[xu]\{{))"


def asserts(key: str, value: Any, schema: dict[str, Any]) -> bool:
    """Whether a keyword asserts anything with this value and beside these other keywords."""
    if key == "if":
        return bool({"then", "else"} & schema.keys())
    if key == "uniqueItems":
        max_items = schema.get("maxItems")
        return value is True and not (isinstance(max_items, int) and max_items <= 1) and "array" in types_of(schema)
    if key in {"dependencies", "dependentRequired", "dependentSchemas"} and isinstance(value, dict):
        return any(needs not in ([], True, {}) for needs in value.values())
    if key in {"unevaluatedItems", "unevaluatedProperties", "propertyNames"}:
        # Every name is a string.
        return value is not True and value != {} and not (key == "propertyNames" and value == {"type": "string"})
    return not (key == "not" and value is False)


def types_of(schema: dict[str, Any]) -> Sequence[Any]:
    """Return the types of a schema, all if it names none."""
    types = schema.get("type", ("string", "object", "array"))
    return types if isinstance(types, str | list | tuple) else ()


def stands_alone(pattern: str) -> bool:
    """Whether a pattern holds a character that would be left out, other than in a class beside others."""
    alone = re.search(rf"\[{_UNSPELLED_IN_PATTERN}\]", pattern)
    return bool(alone or re.search(_UNSPELLED_IN_PATTERN, _without_classes(pattern)))


def looks_around(pattern: str) -> bool:
    """Whether a pattern has a look-around, a word boundary or a back reference, which the compiler cannot follow."""
    outside = _without_classes(pattern).replace(r"\\", "")
    return re.search(r"(?<!\\)\(\?<?[=!]|\\[bBk1-9]", outside) is not None


def _without_classes(pattern: str) -> str:
    # Possessive, and a class without an end goes to that of the pattern: else each of its beginnings would be tried.
    return re.sub(r"(\\.)|\[\^?(?:[^\]\\]|\\.)*+(?:\]|\\?\Z)", r"\1", pattern, flags=re.DOTALL)


def strings(value: Any) -> Iterator[str]:
    """Yield every string of a JSON value, names apart."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


def numbers(value: Any) -> Iterator[int | float]:
    """Yield all numbers in a JSON value."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers(item)
