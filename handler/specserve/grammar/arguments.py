"""Arguments of tool calls that are no JSON object: their notation, from which reader, writer and grammar are made."""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal
from urllib.parse import unquote

from specserve.grammar.keywords import TYPES, along, types_of

# What stands in a form for an argument's key, its value, and optional whitespace.
KEY, VALUE, SPACE = "KEY", "VALUE", "~"
# Deeper values are empty lists and objects; no more references are followed in a row.
_MAX_DEPTH = 8
# Characters of a key; what may be a longer one is read no further.
_MAX_KEY = 256
_PYTHON_WORDS = {"true": "True", "false": "False", "null": "None"}
_WORDS = {"True": True, "False": False, "None": None}
_SHARED = {"$defs", "x-guidance"}
# Around the lists and objects that each kind of notation spells value by value; others are JSON.
_BRACKETS = {
    "raw": {},
    "python": {"array": ("[", "]")},
    "quoted": {"array": ("[", "]"), "object": ("{", "}")},
}
# Tried only where a word begins, and never again with less of it: else a long word takes the time of its square.
_BARE_KEY = re.compile(r"(?<![^\s{}\[\],:\"])([^\s{}\[\],:\"]++)(\s*+:)")

Schema = Mapping[str, Any]


@dataclass
class Scan:
    """How far an incomplete argument has been read."""

    position: int = 0
    depth: int = 0  # of the brackets that are open
    quote: str = ""  # of the string that is open


@dataclass(frozen=True)
class Notation:
    """How an argument is written, by its KEY and VALUE, and what stands between two.

    Values are `raw` (strings as they are, others as JSON), `python` literals, or `quoted` (JSON with bare keys in the
    order of their names, and with strings between two `quote`).
    """

    item: str
    between: str
    kind: Literal["raw", "python", "quoted"] = "raw"
    quote: str = ""

    @cached_property
    def parts(self) -> tuple[str, str, str]:
        """What stands before the key, up to the value, and after the value."""
        head, _, end = self.item.partition(VALUE)
        before, _, middle = head.partition(KEY)
        return before, middle, end

    @cached_property
    def _head(self) -> re.Pattern[str]:
        before, middle, _ = map(_pattern, self.parts)
        between = rf"(?:{_pattern(self.between.strip())}\s*)?"
        return re.compile(rf"\s*{between}{before}(.{{1,{_MAX_KEY}}}?){middle}", re.DOTALL)

    @cached_property
    def _marks(self) -> dict[str, re.Pattern[str]]:
        """What to look for in a value: outside strings, and within one by the quote that it began with."""
        if self.kind == "python":
            within = {quote: re.compile(rf"\\.|{quote}", re.DOTALL) for quote in "\"'"}
            return {"": re.compile(r"""[][{}(),"']"""), **within}
        quote = re.escape(self.quote)
        return {"": re.compile(rf"{quote}|[][{{}},]"), self.quote: re.compile(quote)}

    def take(self, text: str, schema: Any, scan: Scan) -> tuple[int, str, str] | None:
        """Read the first argument of a text: its end, its key and its value in JSON; None if it is incomplete.

        `schema` is that of all arguments. The same text and more is read with the same `scan`.
        """
        head = self._head.match(text)
        end = head and self._end(text, head.end(), scan)
        if not head or not end:
            return None
        value = self._value(text[head.end() : end[0]], _types(_argument(schema, head[1]), schema))
        return end[1], _quoted(head[1]), value

    def _end(self, text: str, begin: int, scan: Scan) -> tuple[int, int] | None:
        """Return the end of the value that begins there, and that of its argument."""
        if self.kind == "raw":
            end = re.compile(_pattern(self.parts[2])).search(text, begin)
            return end and end.span()
        scan.position = max(scan.position, begin)
        while found := self._marks[scan.quote].search(text, scan.position):
            mark = found[0]
            if scan.quote:
                scan.quote = "" if mark == scan.quote else scan.quote
            elif mark in self._marks:
                scan.quote = mark
            elif not scan.depth and mark in {"]", "}", ")", ","}:
                return found.start(), found.start()
            else:
                scan.depth += (mark in {"[", "{", "("}) - (mark in {"]", "}", ")"})
            scan.position = found.end()
        # The text may end within a mark.
        scan.position = max(scan.position, len(text) - max(map(len, self._marks)))
        return None

    def _value(self, text: str, types: frozenset[str]) -> str:
        """Return a value in JSON; what has none of the types is a string."""
        if self.kind == "raw" and types == {"string"}:
            return _quoted(text)
        written = (self._unquoted(text) if self.kind == "quoted" else text).strip()
        value: Any = text
        for parse in (json.loads, _WORDS.__getitem__, *[_python] * (self.kind == "python")):
            with suppress(ValueError, LookupError, SyntaxError, TypeError, MemoryError, RecursionError):
                value = parse(written)
                break
        if self.kind == "raw" and _type(value) not in types:
            value = text
        with suppress(ValueError, TypeError):
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        return _quoted(text)

    def _unquoted(self, text: str) -> str:
        parts = text.split(self.quote)
        for index, part in enumerate(parts):
            bare = _BARE_KEY.sub(r'"\1"\2', part)
            bare = re.sub(r"\bNone\b", "null", bare)
            parts[index] = _quoted(part) if index % 2 else bare
        return "".join(parts)

    def write(self, arguments: Mapping[str, Any]) -> str:
        before, middle, end = (part.replace(SPACE, "") for part in self.parts)
        items = (f"{before}{key}{middle}{self.written(value)}{end}" for key, value in self.ordered(arguments))
        return self.between.replace(SPACE, "").join(items)

    def ordered(self, items: Mapping[str, Any]) -> list[tuple[str, Any]]:
        return sorted(items.items(), key=lambda item: item[0].lower()) if self.kind == "quoted" else [*items.items()]

    def written(self, value: Any) -> str:
        """Write a value."""
        text = json.dumps(value, ensure_ascii=False)
        if brackets := _BRACKETS[self.kind].get(_type(value)):
            inside = self.write(value) if isinstance(value, dict) else self.between.join(map(self.written, value))
            return inside.join(brackets)
        if self.kind == "python":
            return _PYTHON_WORDS.get(text, text)
        return self.quote + value + self.quote if isinstance(value, str) else text


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
        self.body = self._items(_resolved(schema, schema))

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
            item = self._item(_quoted(key), part)
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
        target = _resolved(schema, self._root)
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
            types = _types(schema, self._root)
            if self._notation.kind == "raw" and types == {*TYPES.values()}:
                types = frozenset({"string"})
            self._depth += 1
            for name in sorted(types - ({"integer"} if "number" in types else set())):
                yield from self._of_type(name, schema)
            self._depth -= 1

    def _literal(self, value: Any) -> str:
        notation = self._notation
        if notation.kind == "quoted" and isinstance(value, str):
            return f"{self._fixed(notation.quote)} {_quoted(value)} {self._fixed(notation.quote)}"
        if notation.kind == "python" and isinstance(value, str):
            return f"({_quoted(notation.written(value))} | {_quoted(repr(value))})"
        return self._ended(_quoted(notation.written(value)))

    def _of_type(self, name: str, schema: Schema) -> Iterator[str]:
        notation, kind = self._notation, self._notation.kind
        if name in {"boolean", "null"}:
            words = ["true", "false"] if name == "boolean" else ["null"]
            python = [_PYTHON_WORDS[word] for word in words]
            # Templates print raw values as JSON, or as Python does.
            words = python if kind == "python" else words + python * (kind == "raw" or name == "null")
            yield from (self._ended(_quoted(word)) for word in words)
        elif name == "string" and kind != "python":
            yield f"{self._fixed(notation.quote)} {self._text(schema, notation.quote or notation.parts[2])}"
        elif (brackets := _BRACKETS[kind].get(name)) is None:
            yield self._ended(self._json({**schema, "type": name}))
            if name == "string" and schema.keys() <= {"type"}:
                yield self._rule(r"/'([^'\\]|\\[nrt\\'\"])*'/")
        else:
            before, after = map(_quoted, brackets)
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
            return self._rule(f"/{text}/", f"[suffix={_quoted(end)}]")
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


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _python(text: str) -> Any:
    """Return a literal's value; some templates break lines in strings."""
    return ast.literal_eval(text.replace("\n", "\\n"))


def _branches(schema: Any, root: Schema) -> Iterator[Schema]:
    """Yield a schema, or the alternatives of its unions, with references followed."""
    parts, seen = [schema], set[int]()
    while parts:
        part = parts.pop()
        part = _resolved(part, root) if isinstance(part, dict) else {}
        inside = part.get("anyOf", part.get("oneOf"))
        if isinstance(inside, list) and part.keys().isdisjoint({"enum", "const"}):
            parts += inside if id(part) not in seen else []
            seen.add(id(part))
        else:
            yield part


def _argument(schema: Schema, key: str) -> Any:
    """Return the schema of an argument."""
    for branch in _branches(schema, schema):
        properties = branch.get("properties")
        if isinstance(properties, dict) and key in properties:
            return properties[key]
        if isinstance(others := branch.get("additionalProperties"), dict):
            return others
    return None


def _types(schema: Any, root: Schema) -> frozenset[str]:
    """Return the JSON types that a schema allows."""
    types = set[str]()
    for part in _branches(schema, root):
        values = part.get("enum", [part["const"]] if "const" in part else None)
        types |= set(map(_type, values)) if isinstance(values, list) else types_of(part)
    return frozenset(types | {"integer"} if "number" in types else types)


def _type(value: Any) -> str:
    return TYPES.get(type(value), "")


def _pattern(form: str) -> str:
    """Return a regular expression for a form without places."""
    return r"\s*".join(map(re.escape, form.split(SPACE)))


def _resolved(schema: Schema, root: Schema) -> Schema:
    """Follow a schema's references; one that leads nowhere is any value."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(reference := schema.get("$ref"), str):
            return schema
        *_, place = along(root, unquote(reference))
        schema = place if isinstance(place, dict) else {}
    return {}
