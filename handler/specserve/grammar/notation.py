"""Arguments of tool calls that are no JSON object: how they are written and read."""

import ast
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from specserve.grammar.keywords import branches, type_of, types_within

# What stands in a form for an argument's key, its value, and optional whitespace.
KEY, VALUE, SPACE = "KEY", "VALUE", "~"
# Characters of a key; what may be a longer one is read no further.
_MAX_KEY = 256
PYTHON_WORDS = {"true": "True", "false": "False", "null": "None"}
_WORDS = {"True": True, "False": False, "None": None}
# Around the lists and objects that each kind of notation spells value by value; others are JSON.
BRACKETS = {
    "raw": {},
    "python": {"array": ("[", "]")},
    "quoted": {"array": ("[", "]"), "object": ("{", "}")},
}
# Tried only where a word begins, and never again with less of it: else a long word takes the time of its square.
_BARE_KEY = re.compile(r"(?<![^\s{}\[\],:\"])([^\s{}\[\],:\"]++)(\s*+:)")


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
        value = self._value(text[head.end() : end[0]], types_within(_argument(schema, head[1]), schema))
        return end[1], quoted(head[1]), value

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
            return quoted(text)
        written = (self._unquoted(text) if self.kind == "quoted" else text).strip()
        value: Any = text
        for parse in (json.loads, _WORDS.__getitem__, *[_python] * (self.kind == "python")):
            with suppress(ValueError, LookupError, SyntaxError, TypeError, MemoryError, RecursionError):
                value = parse(written)
                break
        if self.kind == "raw" and type_of(value) not in types:
            value = text
        with suppress(ValueError, TypeError):
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        return quoted(text)

    def _unquoted(self, text: str) -> str:
        parts = text.split(self.quote)
        for index, part in enumerate(parts):
            bare = _BARE_KEY.sub(r'"\1"\2', part)
            bare = re.sub(r"\bNone\b", "null", bare)
            parts[index] = quoted(part) if index % 2 else bare
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
        if brackets := BRACKETS[self.kind].get(type_of(value)):
            inside = self.write(value) if isinstance(value, dict) else self.between.join(map(self.written, value))
            return inside.join(brackets)
        if self.kind == "python":
            return PYTHON_WORDS.get(text, text)
        return self.quote + value + self.quote if isinstance(value, str) else text


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _python(text: str) -> Any:
    """Return a literal's value; some templates break lines in strings."""
    return ast.literal_eval(text.replace("\n", "\\n"))


def _argument(schema: Mapping[str, Any], key: str) -> Any:
    """Return the schema of an argument."""
    for branch in branches(schema, schema):
        properties = branch.get("properties")
        if isinstance(properties, dict) and key in properties:
            return properties[key]
        if isinstance(others := branch.get("additionalProperties"), dict):
            return others
    return None


def _pattern(form: str) -> str:
    """Return a regular expression for a form without places."""
    return r"\s*".join(map(re.escape, form.split(SPACE)))
