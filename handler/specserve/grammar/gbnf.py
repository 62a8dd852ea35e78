"""Translates GBNF, llama.cpp's grammar format, to llguidance's Lark.

llguidance's lexer takes the longest match, which rejects texts such as "ab" by `[a-z]+ "b"`. So a grammar without
recursion is translated to one regular expression, and any other one to rules over single characters: slower with a
large vocabulary, but exact.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

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


@dataclass
class _Rule:
    lark: str = ""
    uses: set[str] = field(default_factory=set)


def gbnf_to_lark(text: str) -> str:
    """Return the grammar in llguidance's Lark, with `start` for `root`.

    Raises:
        UnusableGrammar: it is not GBNF, or too large.
    """
    if len(text) > MAX_TEXT or len(text.encode()) > MAX_TEXT:
        raise UnusableGrammar(f"it is longer than {MAX_TEXT // 1024} KiB")
    rules = _Reader(text).read()
    if "root" not in rules:
        raise UnusableGrammar("it has no rule 'root'")
    if len(rules) > MAX_RULES:
        raise UnusableGrammar(f"it has more than {MAX_RULES} rules")
    order = _reachable(rules)
    recursive = _is_recursive(rules, order)
    # In Lark, names of lexemes are upper case, names of rules lower case.
    names = {name: f"{'rule' if recursive else 'RULE'}_{index}" for index, name in enumerate(order)}
    lines = [f"start: {names['root']}"]
    for name in order:
        body = re.sub(r"<([^<>]*)>", lambda match: names[match[1]], rules[name].lark)
        lines.append(f"{names[name]}: {body}")
    return "\n".join(lines) + "\n"


def _reachable(rules: dict[str, _Rule]) -> list[str]:
    """Return the rules that `root` uses, directly or indirectly."""
    order = ["root"]
    for name in order:
        for used in sorted(rules[name].uses):
            if used not in rules:
                raise UnusableGrammar(f"the rule {used[:100]!r} is not defined")
            if used not in order:
                order.append(used)
    return order


def _is_recursive(rules: dict[str, _Rule], order: list[str]) -> bool:
    """Whether any rule uses itself, directly or indirectly: these never become `settled`."""
    settled: set[str] = set()
    while ready := [name for name in order if name not in settled and rules[name].uses <= settled]:
        settled.update(ready)
    return len(settled) < len(order)


class _Reader:
    """A recursive-descent parser that translates while it parses."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str, int]] = []
        text += "\n"
        position, line = 0, 1
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise UnusableGrammar(f"line {line} cannot be read")
            kind = "rule" if match["defines"] else next(k for k, v in match.groupdict().items() if v is not None)
            self._tokens.append((kind, match["name"] if kind == "rule" else match[kind], line))
            line += kind == "newline"
            position = match.end()
        self._tokens.append(("end", "", line))
        self._next = 0
        self._rule = _Rule()

    def _peek(self, *, across_lines: bool) -> tuple[str, str, int]:
        while across_lines and self._tokens[self._next][0] == "newline":
            self._next += 1
        return self._tokens[self._next]

    def read(self) -> dict[str, _Rule]:
        """Return the rules that the text defines, by name."""
        rules: dict[str, _Rule] = {}
        while True:
            kind, name, line = self._peek(across_lines=True)
            if kind == "end":
                return rules
            if kind != "rule" or name in rules:
                raise UnusableGrammar(f"line {line} begins no new rule")
            self._next += 1
            self._rule = rules[name] = _Rule()
            self._peek(across_lines=True)
            rules[name].lark = self._alternatives(0)
            kind, _, line = self._tokens[self._next]
            if kind not in {"newline", "end"}:
                raise UnusableGrammar(f"line {line} has something unexpected")

    def _alternatives(self, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise UnusableGrammar("it is too deeply nested")
        choices = [self._sequence(depth)]
        while self._peek(across_lines=depth > 0)[1] == "|":
            self._next += 1
            self._peek(across_lines=True)
            choices.append(self._sequence(depth))
        return "(" + " | ".join(choices) + ")"

    def _sequence(self, depth: int) -> str:
        parts: list[str] = []
        while True:
            kind, value, line = self._peek(across_lines=depth > 0)
            if kind == "literal":
                part = " ".join(_class([(ord(c), ord(c))]) for c in _characters(value[1:-1], line)) or '""'
            elif kind == "characters":
                part = _ranges(value[1:-1], line)
            elif kind == "name":
                self._rule.uses.add(value)
                part = f"<{value}>"
            elif value == ".":
                part = _class([(0, 0x10FFFF)])
            elif value == "(":
                self._next += 1
                part = self._alternatives(depth + 1)
                if self._peek(across_lines=True)[1] != ")":
                    raise UnusableGrammar(f"line {line} opens a parenthesis that is not closed")
            else:
                return " ".join(parts) or '""'
            self._next += 1
            parts.append(self._repeated(part, depth))

    def _repeated(self, part: str, depth: int) -> str:
        kind, value, line = self._peek(across_lines=depth > 0)
        if kind != "repeat":
            return part
        self._next += 1
        if any(int(number) > MAX_REPEATS for number in re.findall(r"\d+", value)):
            raise UnusableGrammar(f"line {line} repeats something more than {MAX_REPEATS} times")
        if re.fullmatch(r"\{ *\d+ *\}", value):
            value = value.replace("}", f",{value[1:-1]}}}")
        return f"({part}){value.replace(' ', '')}"


def _characters(text: str, line: int) -> list[str]:
    """Return the characters of a literal, with escapes resolved."""
    return [character for character, _ in _escapes(text, line)]


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
