"""Refuses or relaxes JSON Schemas that llguidance would ignore in part, misread or compile too slowly."""

import json
from decimal import Decimal
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple
from urllib.parse import unquote

from specserve.errors import Unusable
from specserve.grammar import keywords
from specserve.grammar.unions import Exclusion, exactly_one_present

# A subschema takes the compiler up to 0.15 ms (0.26 s for 1,600 nested objects), and a level of its stack.
MAX_SUBSCHEMAS = 4000
# Bytes of the schema as ASCII, without annotations.
MAX_TEXT = 256 * 1024
_TOO_LONG = f"it is longer than {MAX_TEXT // 1024} KiB, without its annotations"
# Characters of a JSON pointer; each subschema keeps its own until the schema is compiled.
_MAX_POINTER = 4096
# Compilation time grows at least quadratically with each of these, and no limit of the compiler bounds it: 64
# `patternProperties` take 0.03 s, 64 properties with `minProperties` 0.07 s; 12 patterns that one string has to match
# take 0.01 s, 16 take 0.1 s and 32 take minutes.
MAX_PATTERN_PROPERTIES = 64
MAX_JOINED_PATTERNS = 8
MAX_COUNTED_PROPERTIES = 64
MAX_MULTIPLE = 10_000
# Each doubles the alternatives of an object.
MAX_DEPENDENCIES = 4


class ReadSchema(NamedTuple):
    """A schema as the compiler takes it."""

    text: str  # its JSON, without annotations
    size: int = 1  # the number of its subschemas
    relaxed: tuple[str, ...] = ()  # the keywords that it does not assert everywhere


def read_schema(schema: dict[str, Any], *, relaxes: bool = False, without: frozenset[str] = frozenset()) -> ReadSchema:
    """Return the schema as the compiler takes it, `without` some keywords.

    If it `relaxes` the schema, what cannot be asserted is left out, too, so that more values are valid.

    Raises:
        Unusable: the compiler would ignore or misread a part of it, or take too long.
    """
    reader = _Reader(schema, relaxes=relaxes, without=without)
    try:
        read = reader.read(schema, "")
        reader.resolve()
        reader.check_cost()
        reader.check_unions()
        definitions = {reference.removeprefix("#/$defs/"): target for reference, target in reader.targets.items()}
        # Last, always: the compiler removes its options and moves the last keyword to their place, the first.
        text = json.dumps({**read, "$defs": definitions}, allow_nan=False)
    except RecursionError:
        raise Unusable("it is too deeply nested") from None
    except ValueError:
        raise Unusable("it holds a number that JSON cannot spell") from None
    if len(text) > MAX_TEXT:
        raise Unusable(_TOO_LONG)
    return ReadSchema(text, len(reader.copies), tuple(reader.relaxed))


class _Reader:
    """Copies the assertions of a schema, and into `$defs` what its references lead to."""

    def __init__(self, schema: dict[str, Any], *, relaxes: bool, without: frozenset[str]) -> None:
        self._root = schema
        self._relaxes = relaxes
        self._without = without
        self.copies: list[Any] = []  # of all subschemas
        # Keywords that were left out, in their order.
        self.relaxed: dict[str, None] = {}
        # By reference in the copies, what it leads to.
        self.targets: dict[str, Any] = {}
        # JSON pointers and copies of subschemas with a reference.
        self._references: list[tuple[str, dict[str, Any]]] = []
        # The same of those with `oneOf`, and OpenAPI's discriminator.
        self._unions: list[tuple[str, dict[str, Any], Any]] = []

    def _refuse(self, reason: str, schema: dict[str, Any], *names: str) -> None:
        """Refuse keywords of a subschema, or leave them out where that may be."""
        if not self._relaxes:
            raise Unusable(reason)
        for key in names:
            if schema.pop(key, self) is not self or key == names[0]:
                self.relaxed[key] = None

    def read(self, schema: Any, pointer: str) -> Any:
        # Schema generators spell "nothing" this way.
        is_nothing = pointer and isinstance(schema, dict) and schema.get("not", False) in (True, {})
        copy: Any = False if is_nothing else {} if isinstance(schema, dict) else schema
        self.copies.append(copy)
        if len(self.copies) > MAX_SUBSCHEMAS:
            raise Unusable(f"it has more than {MAX_SUBSCHEMAS} subschemas")
        if len(pointer) > _MAX_POINTER:
            raise Unusable("the names of its nested properties are too long")
        if not isinstance(copy, dict):
            return copy
        self._copy_keywords(schema, copy, pointer)
        self._check(copy)
        if "$ref" in copy:
            self._references.append((pointer, copy))
        if isinstance(schema.get("oneOf"), list):
            self._unions.append((pointer, copy, schema.get("discriminator")))
        return copy

    def _copy_keywords(self, schema: dict[str, Any], copy: dict[str, Any], pointer: str) -> None:
        reworded: list[dict[str, Any]] = []
        for key, value in schema.items():
            opened = key == "additionalProperties" and "patternProperties" in self._without & schema.keys()
            if key in self._without or opened:
                self.relaxed[key] = None
            elif key in keywords.ASSERTIONS:
                reworded += self._reworded(key, value)
            elif shape := keywords.misshapen(key, value):
                self._refuse(f"{key!r} must be {shape}", copy, key)
            elif key == "anyOf" and "oneOf" in schema:
                reworded.append({key: self._keyword(key, value, f"{pointer}/{key}")})
            elif key in keywords.SUPPORTED:
                copy["anyOf" if key == "oneOf" else key] = self._keyword(key, value, f"{pointer}/{key}")
        if reworded:
            # Last, since answers have the properties in the order of the schema.
            copy["allOf"] = [*copy.pop("allOf", []), *reworded]

    def _keyword(self, key: str, value: Any, pointer: str) -> Any:
        if key in keywords.IN_MAPS:
            steps = {name: name.replace("~", "~0").replace("/", "~1") for name in value}
            return {name: self.read(value[name], f"{pointer}/{step}") for name, step in steps.items()}
        if key in keywords.IN_LISTS or (key == "items" and isinstance(value, list)):
            return [self.read(part, f"{pointer}/{index}") for index, part in enumerate(value)]
        if key in keywords.COUNTS and isinstance(value, float) and value.is_integer():
            return int(value)
        return self.read(value, pointer) if key in keywords.SINGLE else value

    def _reworded(self, key: str, value: Any) -> list[dict[str, Any]]:
        """Return supported schemas that together assert the same as an unsupported keyword, if there are any."""
        if value in keywords.NOTHING.get(key, ()):
            return []
        needed = {name: names for name, names in value.items() if names != []} if isinstance(value, dict) else {}
        listed = key in {"dependencies", "dependentRequired"} and len(needed) <= MAX_DEPENDENCIES
        if not listed or any(keywords.misshapen("required", names) for names in needed.values()):
            self._refuse(f"the keyword {key!r} is not supported", {}, key)
            return []
        # Either the property is absent, or the properties that it requires are present.
        return [{"anyOf": [{"properties": {n: False}}, {"required": names}]} for n, names in needed.items()]

    def _check(self, schema: dict[str, Any]) -> None:
        """Refuse what the compiler would misread."""
        others = schema.pop("additionalItems", True)
        if isinstance(schema.get("items"), list):
            if "prefixItems" in schema:
                self._refuse("'prefixItems' and a list of 'items' exclude each other", schema, "items")
            elif others is not True:
                # The compiler ignores `additionalItems` beside other subschemas.
                schema |= {"prefixItems": schema["items"], "items": others}
        for key in ("const", "enum", "pattern"):
            if keywords.is_unspelled(key, schema.get(key, "")):
                self._refuse(f"{key!r} holds a control character, which an answer cannot spell", schema, key)
        for key in sorted(keywords.NUMBERS & schema.keys()):
            if keywords.is_rounded(schema[key]):
                self._refuse(f"{key!r} holds a number beyond 2 to the 53rd, which would be rounded", schema, key)
        if self._relaxes and keywords.LOOKS_AROUND.search(str(schema.get("pattern", ""))):
            self._refuse("", schema, "pattern")
        if self._relaxes and any(map(keywords.LOOKS_AROUND.search, schema.get("patternProperties", {}))):
            self._refuse("", schema, "patternProperties", "additionalProperties")
        self._check_format(schema)
        self._check_counted(schema)

    def _check_format(self, schema: dict[str, Any]) -> None:
        """Turn a format that the compiler takes too widely into a pattern, and remove one that is an annotation."""
        form = schema.pop("format", None)
        if not isinstance(form, str) or "string" not in keywords.types_of(schema):
            return
        if form in keywords.UNSUPPORTED_FORMATS:
            self._refuse(f"the format {form!r} is not supported", {}, "format")
        elif form in keywords.FORMATS:
            schema["format"] = keywords.FORMATS[form]
        elif form in keywords.PATTERNS:
            part = dict(keywords.PATTERNS[form])
            if part.keys() & schema.keys():
                self.copies.append(part)
                schema["allOf"] = [*schema.get("allOf", []), part]
            else:
                schema.update(part)

    def _check_counted(self, schema: dict[str, Any]) -> None:
        """Refuse `minProperties` where the compiler would count repeated properties, those not named in the schema."""
        minimum, names = schema.get("minProperties"), set(schema.get("required", []))
        closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        if closed or "object" not in keywords.types_of(schema):
            return
        if self._relaxes and schema.get("properties", {}).keys() - names:
            # The compiler counts no optional ones, but only it knows which others require.
            for key in sorted({"minProperties", "maxProperties"} & schema.keys()):
                self._refuse("", schema, key)
        elif isinstance(minimum, int) and minimum > len(names) + 1:
            reason = "'minProperties' is more than one beyond the required ones, and others may repeat"
            self._refuse(reason, schema, "minProperties")
            schema["minProperties"] = len(names) + 1

    def check_cost(self) -> None:
        schemas = [schema for schema in self.copies if isinstance(schema, dict)]
        joins = any(map(_joins, schemas))
        named = [len(schema.get("properties", {})) for schema in schemas]
        by_pattern = sum(len(schema.get("patternProperties", {})) for schema in schemas)
        counts = ({"minProperties", "maxProperties"} & schema.keys() for schema in schemas)
        counted = sum(n for n, keys in zip(named, counts, strict=True) if keys)
        if by_pattern > MAX_PATTERN_PROPERTIES:
            raise Unusable(f"it has more than {MAX_PATTERN_PROPERTIES} 'patternProperties'")
        if joins and sum(("pattern" in schema) + ("format" in schema) for schema in schemas) > MAX_JOINED_PATTERNS:
            raise Unusable(f"it combines subschemas and has more than {MAX_JOINED_PATTERNS} patterns and formats")
        if counted and (sum(named) + by_pattern if joins else counted) > MAX_COUNTED_PROPERTIES:
            reason = f"it has 'minProperties' or 'maxProperties' and more than {MAX_COUNTED_PROPERTIES} properties"
            raise Unusable(reason)
        multiples = {Decimal(str(schema["multipleOf"])) for schema in schemas if schema.get("multipleOf")}
        factors = (max(abs(n), d) for n, d in (multiple.as_integer_ratio() for multiple in multiples))
        if prod(min(factor, MAX_MULTIPLE + 1) for factor in factors) > MAX_MULTIPLE:
            raise Unusable("'multipleOf' has too many digits")

    def resolve(self) -> None:
        """Copy what references lead to, and replace each by one to the copy."""
        names: dict[str, str] = {}
        length = 0
        # Reading what one leads to may append further ones.
        for place, schema in self._references:
            reference = schema["$ref"]
            is_pointer = reference == "#" or reference.startswith("#/")
            pointer = unquote(reference.removeprefix("#"))
            target = self._subschema(pointer) if is_pointer and not self._has_base(place) else None
            if target is None:
                self._refuse(f"the reference {reference[:100]!r} leads to no subschema of it", schema, "$ref")
                continue
            if pointer not in names:
                names[pointer] = f"#/$defs/{len(names)}"
                self.targets[names[pointer]] = copy = self.read(target, pointer)
                # What references lead to may hold what other ones lead to, and so be copied often.
                length += len(json.dumps(copy))
                if length > MAX_TEXT:
                    raise Unusable(_TOO_LONG)
            schema["$ref"] = names[pointer]

    def _subschema(self, pointer: str) -> Any:
        """Return the subschema that a JSON pointer leads to; None if it leads to none, or into a value."""
        steps = pairwise(pointer.split("/"))
        if any(step in keywords.NO_SCHEMAS and before not in keywords.NAMED for before, step in steps):
            return None
        *_, found = keywords.along(self._root, pointer)
        return found if isinstance(found, dict | bool) else None

    def _has_base(self, place: str) -> bool:
        """Whether there is an `$id` above a subschema, from which its references start."""
        above = (schema for schema in keywords.along(self._root, place)[1:] if isinstance(schema, dict))
        identities = (schema.get("$id", schema.get("id")) for schema in above)
        return any(isinstance(identity, str) and identity[:1] != "#" for identity in identities)

    def check_unions(self) -> None:
        """Refuse each `oneOf`, by now an `anyOf`, of which a value might satisfy two branches.

        OpenAPI's discriminator tells by a property which branch is meant. Where a branch does not require it, as
        pydantic's tags with a default, answers have it all the same: pydantic takes none without, and branches may
        overlap.
        """
        exclusion = Exclusion(self.targets)
        # Of branches that are relaxed, several may take a value that one of them took before.
        is_exact = not self.relaxed
        untagged: list[tuple[dict[str, Any], str]] = []
        for pointer, schema, discriminator in self._unions:
            tag = discriminator.get("propertyName", "") if isinstance(discriminator, dict) else ""
            tagged = exclusion.naming(tag, schema["anyOf"]) if isinstance(tag, str) else []
            if is_exact and (branches := exactly_one_present(schema["anyOf"])):
                schema["anyOf"] = branches
            elif overlap := exclusion.overlap(schema, [tag] if tagged else []):
                reason = (
                    f"branches {overlap[0]} and {overlap[1]} of 'oneOf' at {'#' + pointer[:100]!r} might both take the "
                    "same value; use 'anyOf', or require a property with a 'const' of its own in each"
                )
                self._refuse(reason, {}, "oneOf")
                continue
            untagged += [(part, tag) for part in tagged]
        # Last, since all are proven as they stand.
        for part, tag in untagged:
            part["required"] = [*dict.fromkeys([*part.get("required", []), tag])]


def _joins(schema: dict[str, Any]) -> bool:
    """Whether a schema has subschemas that hold for the same value."""
    joined = [(key, schema[key]) for key in keywords.JOINABLE & schema.keys() if schema[key]]
    parts = sum(len(value) if key == "allOf" else 1 for key, value in joined)
    return parts + bool(schema.keys() - keywords.JOINABLE - {"type"}) > 1
