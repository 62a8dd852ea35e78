"""The grammar of tool calls' arguments that are no JSON object, made from their notation and the tool's schema."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from specserve.grammar.keywords import TYPES, resolved, types_within
from specserve.grammar.notation import BRACKETS, PYTHON_WORDS, Notation, quoted

# Deeper values are empty lists and objects.
_MAX_DEPTH = 8
_SHARED = {"$defs", "x-guidance"}

Schema = Mapping[str, Any]


class ArgumentsGrammar:
    """Lark for the arguments of one tool in a notation, by the tool's schema as the compiler takes it.

    `rule` names a rule by its body and attribute; `fixed` spells a form, with control tokens as such. `unasserted` has
    the keywords that arguments may break.
    """

    def __init__(
        self, notation: Notation, schema: Schema, rule: Callable[..., str], fixed: Callable[[str], str]
    ) -> None:
        self._notation, self._root, self._rule, self._fixed = notation, schema, rule, fixed
        self._depth = 0
        # The rules of values to which references lead, and of any value by its depth; none while it is being made.
        self._targets: dict[int, str | None] = {}
        self.unasserted: dict[str, None] = {}
        self.body = self._items(resolved(schema, schema))

    def _items(self, schema: Schema) -> str:
        """Return what spells properties in their order."""
        self._note(schema, "properties", "required", "additionalProperties")
        required, others = schema.get("required", []), schema.get("additionalProperties", True)
        # In the order of the schema.
        named = {**schema.get("properties", {})}
        named |= {key: {} for key in required if key not in named}
        named = {key: part for key, part in named.items() if part is not False}
        between = self._fixed(self._notation.between)
        if not named and others is not False:
            item = self._item(self._rule("/[A-Za-z0-9_.-]{1,64}/"), others)
            return f"({item} ({between} {item})*)?"
        first = more = '""'
        for key, part in reversed(self._notation.ordered(named)):
            item = self._item(quoted(key), part)
            optional = key not in required
            # As the first item, and after others.
            first = self._rule(f"{item} {more}" + f" | {first}" * optional)
            more = self._rule(f"{between} {item} {more}" + f" | {more}" * optional)
        return first

    def _item(self, key: str, schema: Any) -> str:
        before, middle, _ = map(self._fixed, self._notation.parts)
        return self._rule(f"{before} {key} {middle} {self._value(schema)}")

    def _value(self, schema: Any) -> str:
        """Return what spells a value, a raw one with what stands after it."""
        schema = schema if isinstance(schema, dict) else {}
        target = resolved(schema, self._root)
        if target is schema and target:
            return self._rule(" | ".join(dict.fromkeys(self._options(schema))))
        place = id(target) if target else -self._depth
        if place not in self._targets:
            self._targets[place] = None
            self._targets[place] = self._rule(" | ".join(dict.fromkeys(self._options(target))))
        if (known := self._targets[place]) is not None:
            return known
        # It holds itself.
        self.unasserted["$ref"] = None
        return self._value({})

    def _options(self, schema: Schema) -> Iterator[str]:
        if "enum" in schema or "const" in schema:
            self._note(schema, "enum", "const")
            yield from map(self._literal, schema["enum"] if "enum" in schema else [schema["const"]])
        elif "anyOf" in schema and schema.keys().isdisjoint({"properties", "required", "items"}):
            self._note(schema, "anyOf")
            yield from map(self._value, schema["anyOf"])
        else:
            types = types_within(schema, self._root)
            if self._notation.kind == "raw" and types == {*TYPES.values()}:
                types = frozenset({"string"})
            self._depth += 1
            for name in sorted(types - ({"integer"} if "number" in types else set())):
                yield from self._of_type(name, schema)
            self._depth -= 1

    def _literal(self, value: Any) -> str:
        notation = self._notation
        if notation.kind == "quoted" and isinstance(value, str):
            return f"{self._fixed(notation.quote)} {quoted(value)} {self._fixed(notation.quote)}"
        if notation.kind == "python" and isinstance(value, str):
            return f"({quoted(notation.written(value))} | {quoted(repr(value))})"
        return self._ended(quoted(notation.written(value)))

    def _of_type(self, name: str, schema: Schema) -> Iterator[str]:
        notation, kind = self._notation, self._notation.kind
        if name in {"boolean", "null"}:
            words = ["true", "false"] if name == "boolean" else ["null"]
            python = [PYTHON_WORDS[word] for word in words]
            # Templates print raw values as JSON, or as Python does.
            words = python if kind == "python" else words + python * (kind == "raw" or name == "null")
            yield from (self._ended(quoted(word)) for word in words)
        elif name == "string" and kind != "python":
            yield f"{self._fixed(notation.quote)} {self._text(schema, notation.quote or notation.parts[2])}"
        elif (brackets := BRACKETS[kind].get(name)) is None:
            yield self._ended(self._json({**schema, "type": name}))
            if name == "string" and schema.keys() <= {"type"}:
                yield self._rule(r"/'([^'\\]|\\[nrt\\'\"])*'/")
        else:
            before, after = map(quoted, brackets)
            inside = "" if self._depth > _MAX_DEPTH else self._list(schema) if name == "array" else self._items(schema)
            yield f"{before} {inside} {after}"

    def _list(self, schema: Schema) -> str:
        self._note(schema, "items", "minItems", "maxItems")
        items, least, most = schema.get("items"), schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return ""
        item = self._value(items)
        more = f"{self._fixed(self._notation.between)} {item}"
        return f"({item} ({more}){{{max(least - 1, 0)},{most - 1 if most else ''}}}){'?' * (not least)}"

    def _ended(self, value: str) -> str:
        """Return a value and, if it is a raw one, what stands after it."""
        return f"{value} {self._fixed(self._notation.parts[2])}" if self._notation.kind == "raw" else value

    def _text(self, schema: Schema, end: str) -> str:
        """Return a text that does not hold its end, and that end."""
        self._note(schema, "minLength", "maxLength")
        text = f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})"
        before, token, rest = self._fixed(end).partition("<[")
        if not token:
            return self._rule(f"/{text}/", f"[suffix={quoted(end)}]")
        # No text holds a control token.
        before = "".join(rf"\u{{{ord(character):X}}}" for character in json.loads(before or '""'))
        return f"{self._rule(f'/{text}{before}/')} <[{rest}"

    def _json(self, schema: Schema) -> str:
        """Return what spells JSON by a part of the schema."""
        keys = ("x-guidance", "$defs") if '"$ref"' in json.dumps(schema) else ("x-guidance",)
        shared = {key: self._root[key] for key in keys if key in self._root}
        return self._rule("%json " + json.dumps({**shared, **schema}))

    def _note(self, schema: Schema, *followed: str) -> None:
        self.unasserted |= dict.fromkeys(key for key in schema if key not in {"type", *followed, *_SHARED})
