"""The keywords and string formats of JSON Schema, which of them are supported, and what a schema says of types."""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

# The JSON types of Python's values.
TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
TYPES[type(None)] = "null"
# Keywords whose values are, or hold, subschemas.
IN_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
IN_MAPS = frozenset({"properties", "patternProperties"})
NAMED = IN_MAPS | {"$defs", "definitions"}  # whose subschemas have names
SINGLE = frozenset({"items", "additionalItems", "additionalProperties"})
JOINABLE = frozenset({"anyOf", "oneOf", "allOf", "$ref", "enum", "const"})
# Keywords whose values hold none: numbers that count something, which may be written as 2.0, and all others.
COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
NUMBERS = frozenset({"const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
SUPPORTED = IN_LISTS | IN_MAPS | SINGLE | COUNTS | NUMBERS | {"$ref", "type", "required", "pattern", "format"}
# What the values of some keywords have to be.
_SHAPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(IN_LISTS | {"required", "enum"}, (list, "a list")),
    **dict.fromkeys(IN_MAPS, (dict, "an object")),
    **dict.fromkeys(COUNTS | {"minimum", "maximum", "multipleOf"}, ((int, float), "a number")),
    **dict.fromkeys(("$ref", "pattern"), (str, "a string")),
    "type": ((str, list), "a string or array"),
}
# Assertions of any JSON Schema draft that the compiler ignores. A keyword in none of these sets is an annotation.
ASSERTIONS = (
    frozenset({"if", "not", "contains", "uniqueItems", "propertyNames", "unevaluatedItems", "unevaluatedProperties"})
    | {"dependencies", "dependentRequired", "dependentSchemas", "propertyDependencies"}
    | {"$dynamicRef", "$recursiveRef", "disallow", "divisibleBy", "extends"}
)
# Values with which these assert nothing; every name is a string.
NOTHING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), (True, {})),
}
# Keywords whose values are never subschemas.
NO_SCHEMAS = frozenset({"const", "default", "enum", "example", "examples"})
# The compiler cannot follow look-arounds, word boundaries and back references.
LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[bBk1-9]")
# Characters that JSON spells with "\\u" only, or DEL: the compiler leaves them out, and takes "ab" for "a\\u0001b". It
# is right not to write those of a pattern's negated class.
_UNSPELLED = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_UNSPELLED_IN_PATTERN = re.compile(
    _UNSPELLED.pattern + r"|\\(?:[av]|(?:x|u00)(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])|[xu]\{)"
)
_NEGATED_CLASS = re.compile(r"(?<!\\)\[\^[^\]]*\]?")

# No more references are followed in a row.
_MAX_REFERENCES = 8

# Formats that JSON Schema defines and llguidance 1.9 does not know; others that it does not know are annotations.
UNSUPPORTED_FORMATS = {"idn-email", "idn-hostname", "iri", "iri-reference", "uri-reference", "uri-template"}
UNSUPPORTED_FORMATS |= {"json-pointer", "relative-json-pointer", "regex"}
# Those that it knows, and names of the third draft.
FORMATS = {name: name for name in ("duration", "email", "ipv4", "ipv6", "uri", "uuid")} | {"ip-address": "ipv4"}
# Those that it takes too widely: it knows no leap years, and allows a leap second at any hour (here there is none), and
# labels that only IDNA could judge ("xn--").
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_LONG, _SHORT = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])", "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DATE = f"(?:[0-9]{{4}}-(?:{_LONG}|{_SHORT}|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_END, _INNER = "[A-Za-z0-9]", "[A-Za-z0-9-]"
_LABEL = f"{_END}(?:{_INNER}?{_END}|{_INNER}{_END}{_INNER}{{0,59}}{_END}|{_INNER}-{_END}(?:{_INNER}{{0,58}}{_END})?)?"
PATTERNS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "date-time": {"pattern": f"^{_DATE}[tT]{_TIME}$"},
    "time": {"pattern": f"^{_TIME}$"},
    **{name: {"pattern": f"^{_LABEL}(?:\\.{_LABEL})*$", "maxLength": 253} for name in ("hostname", "host-name")},
}


def misshapen(key: str, value: Any) -> str:
    """Return what a keyword's value would have to be, empty if it is."""
    types, shape = _SHAPES.get(key, (object, ""))
    # `true` is no number, though an `int` in Python.
    if shape and (not isinstance(value, types) or isinstance(value, bool)):
        return shape
    return "strings" if key in {"type", "required"} and not all(isinstance(name, str) for name in value) else ""


def along(root: Any, pointer: str) -> list[Any]:
    """Return what stands along a JSON pointer, from the root on; None for what is nowhere."""
    found = [root]
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        try:
            found.append(found[-1][int(name) if isinstance(found[-1], list) else name])
        except (LookupError, TypeError, ValueError):
            found.append(None)
    return found


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema names, all if it names none; a number may be an integer."""
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else TYPES.values()
    types = frozenset(name for name in names if name in [*TYPES.values()])
    return types | {"integer"} if "number" in types else types


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow a schema's references; one that leads nowhere is any value."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(reference := schema.get("$ref"), str):
            return schema
        *_, place = along(root, unquote(reference))
        schema = place if isinstance(place, dict) else {}
    return {}


def branches(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema, or the alternatives of its unions, with references followed."""
    parts, seen = [schema], set[int]()
    while parts:
        part = parts.pop()
        part = resolved(part, root) if isinstance(part, dict) else {}
        inside = part.get("anyOf", part.get("oneOf"))
        if isinstance(inside, list) and part.keys().isdisjoint({"enum", "const"}):
            parts += inside if id(part) not in seen else []
            seen.add(id(part))
        else:
            yield part


def types_within(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema allows, its references and unions followed."""
    types = set[str]()
    for part in branches(schema, root):
        values = part.get("enum", [part["const"]] if "const" in part else None)
        types |= set(map(type_of, values)) if isinstance(values, list) else types_of(part)
    return frozenset(types | {"integer"} if "number" in types else types)


def type_of(value: Any) -> str:
    return TYPES.get(type(value), "")


def is_unspelled(key: str, value: Any) -> bool:
    """Whether a text of `const`, `enum` or `pattern` holds a character that the compiler would leave out."""
    if key == "pattern":
        return _UNSPELLED_IN_PATTERN.search(_NEGATED_CLASS.sub("", value)) is not None
    return any(_UNSPELLED.search(text) for text in _leaves(value) if isinstance(text, str))


def is_rounded(value: Any) -> bool:
    """Whether a JSON value holds a number that the compiler would round."""
    return any(isinstance(number, int | float) and abs(number) > 2**53 for number in _leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    """Yield everything in a JSON value that is no list or object, names apart."""
    if isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value
