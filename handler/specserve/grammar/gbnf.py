"""Translates GBNF, llama.cpp's grammar format, to llguidance's Lark.

llguidance's lexer takes the longest match, which rejects texts such as "ab" by `[a-z]+ "b"`. So a grammar without
recursion is translated to one regular expression, and any other one to rules over single characters: slower with a
large vocabulary, but exact.
"""

from __future__ import annotations

import re
from graphlib import CycleError, TopologicalSorter

# Bytes of UTF-8.
MAX_TEXT = 32 * 1024
MAX_DEPTH = 50
MAX_RULES = 500
MAX_REPEATS = 2000

_TOKEN = re.compile(
    r"""(?:[ \t]|\#[^\r\n]*)*+(?:
    (?P<newline>\r?\n|\r)|(?P<name>[A-Za-z][A-Za-z0-9_-]*)(?P<defines>[ \t]*::=)?|(?P<literal>"(?:[^"\\\r\n]|\\.)*")|
    (?P<characters>\[(?:[^\]\\\r\n]|\\.)*\])|(?P<repeat>[*+?]|\{[ ]*\d{1,9}[ ]*(?:,[ ]*(?:\d{1,9})?[ ]*)?\})|
    (?P<mark>[()|.]))""",
    re.VERBOSE,
)
_CHARACTER = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([\"\\\[\]\-^nrt]))|([^\\])", re.DOTALL
)
_SHORT = {"n": "\n", "r": "\r", "t": "\t"}


class UnusableGrammar(ValueError):
    """The grammar cannot be used; the message completes "cannot be used: "."""


def gbnf_to_lark(text: str) -> str:
    """Return the grammar in llguidance's Lark, with `start` for `root`.

    Raises:
        UnusableGrammar: it is not GBNF, or too large.
    """
    if len(text) > MAX_TEXT or len(text.encode()) > MAX_TEXT:
        raise UnusableGrammar(f"it is longer than {MAX_TEXT // 1024} KiB")
    rules = _read(text)
    if "root" not in rules:
        raise UnusableGrammar("it has no rule 'root'")
    if len(rules) > MAX_RULES:
        raise UnusableGrammar(f"it has more than {MAX_RULES} rules")
    used = ["root"]
    for name in used:
        if name not in rules:
            raise UnusableGrammar(f"the rule {name[:100]!r} is not defined")
        used += sorted(rules[name].uses.difference(used))
    try:
        TopologicalSorter({name: rules[name].uses for name in used}).prepare()
        kind = "RULE"
    except CycleError:
        kind = "rule"
    # In Lark, names of lexemes are upper case, names of rules lower case.
    names = {name: f"{kind}_{index}" for index, name in enumerate(used)}
    lines = [f"start: {names['root']}"]
    for name in used:
        body = re.sub(r"<([^<>]*)>", lambda match: names[match[1]], rules[name].lark())
        lines.append(f"{names[name]}: {body}")
    return "\n".join(lines) + "\n"


class _Rule:
    """Translates a rule token by token; names of other rules stand between `<` and `>`."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.uses: set[str] = set()
        self.depth = 0

    @property
    def at_begin(self) -> bool:
        """Whether an alternative begins here."""
        return self.parts[-1:] in ([], ["("], ["|"])

    def add(self, kind: str, value: str, line: int) -> None:
        """Translate a token."""
        if kind == "repeat":
            if self.at_begin or self.parts[-1][0] in "*+?{":
                raise UnusableGrammar(f"line {line} repeats nothing")
            self.parts.append(_repeat(value, line))
        elif kind == "name":
            self.uses.add(value)
            self.parts.append(f"<{value}>")
        elif kind == "literal":
            characters = [_class([(ord(c), ord(c))]) for c, _ in _escapes(value[1:-1], line)]
            self.parts.append(f"({' '.join(characters)})" if characters else '("")')
        elif kind == "characters":
            self.parts.append(_ranges(value[1:-1], line))
        elif value == ".":
            self.parts.append(_class([(0, 0x10FFFF)]))
        else:
            self.depth += {"(": 1, "|": 0, ")": -1}[value]
            if self.depth < 0:
                raise UnusableGrammar(f"line {line} closes a parenthesis that is not open")
            if self.depth > MAX_DEPTH:
                raise UnusableGrammar("it is too deeply nested")
            self.parts.append(value)

    def lark(self) -> str:
        """Return the whole rule's Lark."""
        if self.depth:
            raise UnusableGrammar("a parenthesis is not closed")
        return " ".join(self.parts)


def _read(text: str) -> dict[str, _Rule]:
    """Return the rules that a text defines, by name."""
    rules: dict[str, _Rule] = {}
    rule: _Rule | None = None
    text += "\n"
    position, line = 0, 1
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise UnusableGrammar(f"line {line} cannot be read")
        kind, position = str(match.lastgroup), match.end()
        if kind == "newline":
            line += 1
            if rule and not rule.depth and not rule.at_begin:
                rule = None
        elif kind == "defines":
            if rule or match["name"] in rules:
                raise UnusableGrammar(f"line {line} begins no new rule")
            rule = rules[match["name"]] = _Rule()
        elif rule is None:
            raise UnusableGrammar(f"line {line} begins no new rule")
        else:
            rule.add(kind, match[kind], line)
    return rules


def _repeat(text: str, line: int) -> str:
    if any(int(number) > MAX_REPEATS for number in re.findall(r"\d+", text)):
        raise UnusableGrammar(f"line {line} repeats something more than {MAX_REPEATS} times")
    return re.sub(r"\{(\d+)\}", r"{\1,\1}", text.replace(" ", ""))


def _escapes(text: str, line: int) -> list[tuple[str, bool]]:
    """Return each character, and whether it was written with a backslash."""
    characters = []
    position = 0
    while position < len(text):
        match = _CHARACTER.match(text, position)
        code = int(match[1] or match[2] or match[3] or "0", 16) if match else -1
        if match is None or code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise UnusableGrammar(f"line {line} has an escape that is not GBNF's")
        plain = match[4] or match[5]
        characters.append((_SHORT.get(plain, plain) if match[4] else plain or chr(code), match[5] is None))
        position = match.end()
    return characters


def _ranges(text: str, line: int) -> str:
    """Translate a set of characters such as [^a-z]."""
    characters = _escapes(text, line)
    negated = characters[:1] == [("^", False)]
    rest = characters[negated:]
    ranges = []
    while rest:
        first = last = ord(rest[0][0])
        width = 1
        if len(rest) > 2 and rest[1] == ("-", False):
            last, width = ord(rest[2][0]), 3
        if last < first:
            raise UnusableGrammar(f"line {line} has a range of characters that ends before it begins")
        ranges.append((first, last))
        rest = rest[width:]
    if not ranges and not negated:
        raise UnusableGrammar(f"line {line} has an empty set of characters")
    return _class(ranges or [(0, 0x10FFFF)], negated=negated and bool(ranges))


def _class(ranges: list[tuple[int, int]], *, negated: bool = False) -> str:
    """Return a regular expression for a set of characters, all of them escaped."""
    spans = "".join(rf"\u{{{first:X}}}-\u{{{last:X}}}" for first, last in ranges)
    return f"/[{'^' * negated}{spans}]/"
