"""JSON Schema as far as it can be promised: what would be ignored, misread or too costly is refused beforehand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

# The compiler recurses once a subschema: 1400 nested ones overran a stack of 8 MB, which ends the process.
MAX_SUBSCHEMAS = 500
MAX_DEPTH = 60
MAX_TEXT = 64 * 1024
# Measured: each of these grows with a square or worse, and no limit of the compiler stops it.
MAX_PATTERN_PROPERTIES = 8
MAX_JOINED_PATTERNS = 8
MAX_COUNTED_PROPERTIES = 32
MAX_MULTIPLE = 10_000
MAX_EXACT = 2**53

IN_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
IN_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
SINGLE = frozenset({"items", "additionalItems", "additionalProperties"})
JOINABLE = frozenset({"anyOf", "oneOf", "allOf", "$ref", "enum", "const"})
VALUES = frozenset(
    [
        "$ref",
        "const",
        "enum",
        "type",
        "minItems",
        "maxItems",
        "required",
        "minProperties",
        "maxProperties",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
    ]
)
ANNOTATIONS = frozenset(
    [
        "$anchor",
        "$comment",
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "contentMediaType",
        "contentEncoding",
        "discriminator",
    ]
)
AT_THE_ROOT = frozenset({"$schema", "$id", "id"})


class UnusableSchema(ValueError):
    """What is wrong, as the end of a sentence."""


def schema_text(schema: dict[str, Any]) -> str:
    """The schema as JSON, without its annotations.

    Raises:
        UnusableSchema: it holds what the compiler would ignore, misread, or work on for too long.
    """
    reader = _Reader()
    try:
        read = reader.read(schema, "", 0)
        reader.check()
        text = json.dumps(read, allow_nan=False)
    except RecursionError:
        raise UnusableSchema("it is too deeply nested") from None
    except UnusableSchema:
        raise
    except ValueError:
        raise UnusableSchema("it holds a number that JSON cannot spell") from None
    if len(text) > MAX_TEXT:
        raise UnusableSchema(f"it is longer than {MAX_TEXT // 1024} KiB")
    return text


class _Reader:
    """One walk over a schema: a copy without annotations, and counts of what can be costly."""

    def __init__(self) -> None:
        self._places: set[str] = set()
        self._references: list[str] = []
        self._patterns = 0
        self._pattern_properties = 0
        self._properties = 0
        self._multiples: set[Decimal] = set()
        self._joins = False
        self._counts_properties = False

    def read(self, schema: Any, place: str, depth: int) -> Any:
        """A copy of the schema at a place, which is a JSON pointer."""
        self._places.add(place)
        if len(self._places) > MAX_SUBSCHEMAS:
            raise UnusableSchema(f"it has more than {MAX_SUBSCHEMAS} subschemas")
        if depth > MAX_DEPTH:
            raise UnusableSchema("it is too deeply nested")
        if not isinstance(schema, dict):
            return schema
        copy: dict[str, Any] = {}
        for key, value in schema.items():
            if key in ANNOTATIONS or (key in AT_THE_ROOT and not place) or _is_vendors(key):
                continue
            where = f"{place}/{_escaped(key)}"
            if key in IN_MAPS and isinstance(value, dict):
                copy[key] = {k: self.read(v, f"{where}/{_escaped(k)}", depth + 1) for k, v in value.items()}
            elif key in (IN_LISTS | {"items"}) and isinstance(value, list):
                copy[key] = [self.read(v, f"{where}/{i}", depth + 1) for i, v in enumerate(value)]
            elif key in SINGLE:
                copy[key] = self.read(value, where, depth + 1)
            elif key in VALUES | IN_LISTS | IN_MAPS:
                copy[key] = value
            else:
                raise UnusableSchema(f"the keyword {key!r} is not supported")
        self._count(copy)
        return copy

    def _count(self, schema: dict[str, Any]) -> None:
        """Note what `check` has to know, and refuse what would be misread."""
        if "additionalItems" in schema and not isinstance(schema.get("items"), list):
            raise UnusableSchema("'additionalItems' needs a list of 'items'; use 'prefixItems' and 'items'")
        if "prefixItems" in schema and isinstance(schema.get("items"), list):
            raise UnusableSchema("'prefixItems' and a list of 'items' exclude each other")
        for key in ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
            if any(abs(number) > MAX_EXACT for number in _numbers(schema.get(key))):
                raise UnusableSchema(f"{key!r} holds a number beyond 2 to the 53rd, which would be rounded")
        self._references += [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
        self._patterns += ("pattern" in schema) + ("format" in schema)
        self._multiples.update(Decimal(str(number)) for number in _numbers(schema.get("multipleOf")) if number)
        for key in ("properties", "patternProperties"):
            size = len(schema[key]) if isinstance(schema.get(key), dict) else 0
            self._properties += size
            self._pattern_properties += size * (key == "patternProperties")
        parts = sum(len(schema[key]) if key == "allOf" else 1 for key in JOINABLE & schema.keys() if schema[key])
        others = schema.keys() - JOINABLE - {"type", "$defs", "definitions"}
        self._joins |= parts + bool(others) > 1
        self._counts_properties |= bool({"minProperties", "maxProperties"} & schema.keys())

    def check(self) -> None:
        """Refuse references that lead out of what was read, and more than can be compiled in time."""
        for reference in self._references:
            if not reference.startswith("#") or unquote(reference[1:]) not in self._places:
                raise UnusableSchema(f"the reference {reference[:100]!r} leads to no subschema of it")
        if self._pattern_properties > MAX_PATTERN_PROPERTIES:
            raise UnusableSchema(f"it has more than {MAX_PATTERN_PROPERTIES} 'patternProperties'")
        if self._joins and self._patterns > MAX_JOINED_PATTERNS:
            raise UnusableSchema(f"it combines subschemas and has more than {MAX_JOINED_PATTERNS} patterns and formats")
        if self._counts_properties and self._properties > MAX_COUNTED_PROPERTIES:
            raise UnusableSchema(
                f"it has 'minProperties' or 'maxProperties' and more than {MAX_COUNTED_PROPERTIES} properties"
            )
        product = 1
        for multiple in self._multiples:
            numerator, denominator = multiple.as_integer_ratio()
            product *= max(abs(numerator), denominator)
            if product > MAX_MULTIPLE:
                raise UnusableSchema("'multipleOf' has too many digits")


def _is_vendors(key: str) -> bool:
    """An extension that means nothing here; the compiler's own would switch off its checks."""
    return key.startswith("x-") and key != "x-guidance"


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _numbers(value: Any) -> Iterator[int | float]:
    """Every number of a JSON value."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)
