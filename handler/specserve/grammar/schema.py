"""Refuses or relaxes JSON Schemas that llguidance would ignore in part, misread or compile too slowly."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from specserve.grammar.formats import UNSUPPORTED_FORMATS, narrow_format
from specserve.grammar.keywords import (
    ASSERTIONS,
    COUNTS,
    IN_LISTS,
    IN_MAPS,
    JOINABLE,
    NO_SCHEMAS,
    SINGLE,
    UNSPELLED,
    VALUES,
    asserts,
    looks_around,
    numbers,
    stands_alone,
    strings,
    types_of,
)
from specserve.grammar.unions import Unions

# A subschema takes the compiler up to 0.15 ms (0.26 s for 1,600 nested objects), and a level of its stack.
MAX_SUBSCHEMAS = 4000
MAX_DEPTH = 60
# Bytes of the schema as ASCII, without annotations.
MAX_TEXT = 256 * 1024
# Characters of a JSON pointer; each subschema keeps its own until the schema is compiled.
_MAX_POINTER = 4096
# Compilation time grows at least quadratically with each of these, and no limit of the compiler bounds it: 64
# `patternProperties` take 0.03 s, 64 properties with `minProperties` 0.07 s; 12 patterns that one string has to match
# take 0.01 s, 16 take 0.1 s and 32 take minutes.
MAX_PATTERN_PROPERTIES = 64
MAX_JOINED_PATTERNS = 8
MAX_COUNTED_PROPERTIES = 64
MAX_MULTIPLE = 10_000
MAX_EXACT = 2**53
# Each doubles the alternatives of an object.
MAX_DEPENDENCIES = 4


class UnusableSchema(ValueError):
    """The schema cannot be used; the message completes "cannot be used: ".

    Args:
        reason: the message.
        keywords: without which it can.
    """

    def __init__(self, reason: str, *keywords: str) -> None:
        super().__init__(reason)
        self.keywords = frozenset(keywords)


class ReadSchema(NamedTuple):
    """A schema as the compiler takes it.

    Args:
        text: its JSON, without annotations.
        left: why a `oneOf` is left in it (unions.py); empty if none is.
        size: the number of its subschemas.
        relaxed: the keywords that it does not assert everywhere.
    """

    text: str
    left: str
    size: int
    relaxed: tuple[str, ...] = ()


def read_schema(schema: dict[str, Any], *, relaxes: bool = False, without: frozenset[str] = frozenset()) -> ReadSchema:
    """Return the schema as the compiler takes it.

    Args:
        schema: to be read.
        relaxes: whether what cannot be asserted is left out, so that more values are valid.
        without: the keywords that are left out everywhere.

    Raises:
        UnusableSchema: the compiler would ignore or misread a part of it, or take too long.
    """
    reader = _Reader(schema, relaxes=relaxes, without=without)
    try:
        read = reader.read(schema, "", 0)
        reader.check()
        left = reader.join_unions()
        if reader.elsewhere:
            read["$defs"] = {**read.get("$defs", {}), **reader.elsewhere}
        text = json.dumps(read, allow_nan=False)
    except RecursionError:
        raise UnusableSchema("it is too deeply nested") from None
    except UnusableSchema as error:
        if relaxes and error.keywords - without:
            return read_schema(schema, relaxes=True, without=without | error.keywords)
        raise
    except ValueError:
        raise UnusableSchema("it holds a number that JSON cannot spell") from None
    if len(text) > MAX_TEXT:
        raise UnusableSchema(f"it is longer than {MAX_TEXT // 1024} KiB, without its annotations")
    return ReadSchema(text, left, reader.size, tuple(reader.relaxed))


class _Reader:
    """Copies the assertions of a schema, and counts what is slow to compile."""

    def __init__(self, schema: dict[str, Any], *, relaxes: bool, without: frozenset[str]) -> None:
        self._relaxes = relaxes
        self._without = without
        # Keywords that were left out, in their order.
        self.relaxed: dict[str, Any] = {}
        identity = schema.get("$id", schema.get("id"))
        self._identity = identity.rstrip("#") if isinstance(identity, str) else ""
        # Copies of the subschemas by JSON pointer, and by the `$ref` that leads to them.
        self._copies: dict[str, Any] = {}
        self._targets: dict[str, Any] = {}
        self._unions = Unions(self._copies, self._targets)
        self._anchors: dict[str, str] = {}
        self._references: list[tuple[dict[str, Any], bool]] = []
        self._patterns = 0
        self._pattern_properties = 0
        self._properties = 0
        self._multiples: set[Decimal] = set()
        self._joins = False
        self._counted_properties = 0
        self._root = schema
        # Subschemas that only references lead to, by JSON pointer.
        self.elsewhere: dict[str, Any] = {}

    @property
    def size(self) -> int:
        """The number of subschemas."""
        return len(self._copies)

    def _refuse(self, reason: str, schema: dict[str, Any], *keywords: str) -> None:
        """Refuse keywords of a subschema, or leave them out where that may be."""
        if not self._relaxes:
            raise UnusableSchema(reason)
        for key in [key for key in keywords if key in schema] or keywords[:1]:
            self.relaxed[key] = schema.pop(key, None)

    def join_unions(self) -> str:
        """Turn each `oneOf` into an `anyOf`; returns why one is left, empty if none is."""
        left = self._unions.join(joins_all=self._relaxes, relaxed=bool(self.relaxed))
        if left and self._relaxes:
            self.relaxed["oneOf"] = None
        return left

    def read(self, schema: Any, pointer: str, depth: int, *, rebased: bool = False) -> Any:
        """Copy the schema at a JSON pointer; `rebased` if it is below an `$id` other than the root's."""
        # Generators of schemas spell "nothing" so.
        is_nothing = pointer and isinstance(schema, dict) and schema.get("not", False) in (True, {})
        schema = False if is_nothing else schema
        self._copies[pointer] = schema
        self._check_size(pointer, depth)
        if not isinstance(schema, dict):
            return schema
        rebased |= bool(pointer) and self._identify(schema, pointer)

        copy: dict[str, Any] = {}
        self._copies[pointer] = copy
        reworded: list[dict[str, Any]] = []
        for key, value in schema.items():
            opened = key == "additionalProperties" and "patternProperties" in self._without & schema.keys()
            if key in self._without or opened:
                self.relaxed[key] = None
            elif key in ASSERTIONS:
                reworded += self._reworded(key, value, schema)
            elif key in VALUES | IN_LISTS | IN_MAPS | SINGLE:
                copy[key] = self._keyword(key, value, f"{pointer}/{key}", depth + 1, rebased=rebased)
        if reworded:
            # Last, since answers have the properties in the order of the schema.
            copy["allOf"] = [*copy.pop("allOf", []), *reworded]
        if not isinstance(copy.get("items"), list):
            copy.pop("additionalItems", None)
        self._references += [(copy, rebased)] if isinstance(copy.get("$ref"), str) else []
        if isinstance(copy.get("oneOf"), list):
            self._unions.note(pointer, schema.get("discriminator"))
        self._count(copy)
        return copy

    def _check_size(self, pointer: str, depth: int) -> None:
        if len(self._copies) > MAX_SUBSCHEMAS:
            raise UnusableSchema(f"it has more than {MAX_SUBSCHEMAS} subschemas")
        if depth > MAX_DEPTH:
            raise UnusableSchema("it is too deeply nested")
        if len(pointer) > _MAX_POINTER:
            raise UnusableSchema("the names of its nested properties are too long")

    def _keyword(self, key: str, value: Any, pointer: str, depth: int, *, rebased: bool) -> Any:
        """Copy the value of a keyword."""
        if key in IN_LISTS and not isinstance(value, list):
            raise UnusableSchema(f"{key!r} must be a list")
        if key in IN_MAPS and isinstance(value, dict):
            return {k: self.read(v, f"{pointer}/{_escaped(k)}", depth, rebased=rebased) for k, v in value.items()}
        if key in (IN_LISTS | {"items"}) and isinstance(value, list):
            return [self.read(part, f"{pointer}/{index}", depth, rebased=rebased) for index, part in enumerate(value)]
        if key in COUNTS and isinstance(value, float) and value.is_integer():
            return int(value)
        return self.read(value, pointer, depth, rebased=rebased) if key in SINGLE else value

    def _identify(self, schema: dict[str, Any], pointer: str) -> bool:
        """Record the anchors of a subschema; return whether references in it are relative to its own `$id`."""
        names = [schema.get("$anchor"), *(schema.get(key) for key in ("$id", "id"))]
        for name in names:
            if isinstance(name, str) and (name.startswith("#") or name == names[0]):
                self._anchors["#" + name.removeprefix("#")] = pointer
        return any(isinstance(name, str) and not name.startswith("#") for name in names[1:])

    def _reworded(self, key: str, value: Any, schema: dict[str, Any]) -> list[dict[str, Any]]:
        """Return supported schemas that together assert the same as an unsupported keyword.

        Raises:
            UnusableSchema: there are none.
        """
        if not asserts(key, value, schema):
            return []
        needed = {name: names for name, names in value.items() if names != []} if isinstance(value, dict) else {}
        listed = key in {"dependencies", "dependentRequired"} and all(isinstance(n, list) for n in needed.values())
        if not listed or len(needed) > MAX_DEPENDENCIES:
            self._refuse(f"the keyword {key!r} is not supported", {}, key)
            return []
        # Either the property is absent, or the properties that it requires are present.
        return [{"anyOf": [{"properties": {n: False}}, {"required": names}]} for n, names in needed.items()]

    def _count(self, schema: dict[str, Any]) -> None:
        """Count what `check` limits, and refuse what the compiler would misread."""
        if "prefixItems" in schema and isinstance(schema.get("items"), list):
            self._refuse("'prefixItems' and a list of 'items' exclude each other", schema, "items", "additionalItems")
        if "additionalItems" in schema and JOINABLE & schema.keys() - {"enum", "const"}:
            reason = "'additionalItems' beside other subschemas is not supported; use 'prefixItems'"
            self._refuse(reason, schema, "additionalItems")
        self._check_texts(schema)
        for key in ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
            if any(abs(number) > MAX_EXACT for number in numbers(schema.get(key))):
                self._refuse(f"{key!r} holds a number beyond 2 to the 53rd, which would be rounded", schema, key)
        self._check_format(schema)
        self._check_counted(schema)
        self._patterns += ("pattern" in schema) + ("format" in schema)
        self._multiples.update(Decimal(str(number)) for number in numbers(schema.get("multipleOf")) if number)
        for key in ("properties", "patternProperties"):
            size = len(schema[key]) if isinstance(schema.get(key), dict) else 0
            self._properties += size
            self._pattern_properties += size * (key == "patternProperties")
        joined = [(key, schema[key]) for key in JOINABLE & schema.keys() if schema[key]]
        parts = sum(len(value) if key == "allOf" and isinstance(value, list) else 1 for key, value in joined)
        others = schema.keys() - JOINABLE - {"type", "$defs", "definitions"}
        self._joins |= parts + bool(others) > 1
        if {"minProperties", "maxProperties"} & schema.keys() and isinstance(schema.get("properties"), dict):
            self._counted_properties += len(schema["properties"])

    def _check_texts(self, schema: dict[str, Any]) -> None:
        """Refuse control characters, which the compiler would drop, and patterns that look around."""
        for key in ("const", "enum"):
            if any(re.search(UNSPELLED, text) for text in strings(schema.get(key))):
                self._refuse(f"{key!r} holds a control character, which an answer cannot spell", schema, key)
        pattern, named = schema.get("pattern"), schema.get("patternProperties")
        if isinstance(pattern, str) and stands_alone(pattern):
            reason = "'pattern' holds a control character by itself, which an answer cannot spell"
            self._refuse(reason, schema, "pattern")
        if isinstance(pattern, str) and looks_around(pattern):
            self._refuse("look-arounds and back references in 'pattern' are not supported", schema, "pattern")
        if isinstance(named, dict) and any(map(looks_around, named)):
            reason = "look-arounds and back references in 'patternProperties' are not supported"
            self._refuse(reason, schema, "patternProperties", "additionalProperties")

    def _check_format(self, schema: dict[str, Any]) -> None:
        """Refuse a format that the compiler does not know, and remove one that is not of a string."""
        if "string" not in types_of(schema):
            schema.pop("format", None)
        elif isinstance(form := schema.get("format"), str) and form in UNSUPPORTED_FORMATS:
            self._refuse(f"the format {form!r} is not supported", schema, "format")
        else:
            self._patterns += narrow_format(schema)

    def _check_counted(self, schema: dict[str, Any]) -> None:
        """Refuse `minProperties` where the compiler would count repeated properties, those not named in the schema."""
        minimum, required, properties = (schema.get(key) for key in ("minProperties", "required", "properties"))
        names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        if closed or "object" not in types_of(schema):
            return
        if self._relaxes and isinstance(properties, dict) and properties.keys() - names:
            # The compiler counts no optional ones, but only it knows which others require.
            for key in sorted({"minProperties", "maxProperties"} & schema.keys()):
                self._refuse("", schema, key)
        elif isinstance(minimum, int) and minimum > len(names) + 1:
            reason = "'minProperties' is more than one beyond the required ones, and others may repeat"
            self._refuse(reason, schema, "minProperties")
            schema["minProperties"] = len(names) + 1

    def check(self) -> None:
        """Resolve references, and refuse a schema that would take too long to compile."""
        # Resolving a reference may append further ones.
        for schema, rebased in self._references:
            self._resolve(schema, rebased=rebased)
        if self._pattern_properties > MAX_PATTERN_PROPERTIES:
            reason = f"it has more than {MAX_PATTERN_PROPERTIES} 'patternProperties'"
            raise UnusableSchema(reason, "patternProperties")
        if self._joins and self._patterns > MAX_JOINED_PATTERNS:
            reason = f"it combines subschemas and has more than {MAX_JOINED_PATTERNS} patterns and formats"
            raise UnusableSchema(reason, "pattern", "format")
        if self._counted_properties and self._joins:
            self._counted_properties = self._properties
        if self._counted_properties > MAX_COUNTED_PROPERTIES:
            reason = f"it has 'minProperties' or 'maxProperties' and more than {MAX_COUNTED_PROPERTIES} properties"
            raise UnusableSchema(reason, "minProperties", "maxProperties")
        product = 1
        for multiple in self._multiples:
            numerator, denominator = multiple.as_integer_ratio()
            product *= max(abs(numerator), denominator)
            if product > MAX_MULTIPLE:
                raise UnusableSchema("'multipleOf' has too many digits", "multipleOf")

    def _resolve(self, schema: dict[str, Any], *, rebased: bool) -> None:
        """Replace a reference by a pointer from the root."""
        reference = schema["$ref"]
        local = reference.removeprefix(self._identity) if self._identity else reference
        local = self._anchors.get(local, local)
        pointer = unquote(local.removeprefix("#"))
        elsewhere = (rebased and reference.startswith("#")) or not (local + "#").startswith(("#", "/"))
        if elsewhere or (pointer not in self._copies and not self._read_elsewhere(pointer)):
            self._refuse(f"the reference {reference[:100]!r} leads to no subschema of it", schema, "$ref")
            return
        target = self._copies[pointer]
        if pointer in self.elsewhere:
            pointer = f"/$defs/{_escaped(pointer)}"
        schema["$ref"] = "#" + quote(pointer, safe="/~")
        self._targets[schema["$ref"]] = target

    def _read_elsewhere(self, pointer: str) -> bool:
        """Copy a subschema below an unknown keyword, where many schemas keep what only references lead to, if it is."""
        value: Any = self._root
        for step in pointer.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            value = value.get(name) if isinstance(value, dict) and name not in NO_SCHEMAS else None
        if isinstance(value, dict):
            self.elsewhere[pointer] = self.read(value, pointer, 1)
        return isinstance(value, dict)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
