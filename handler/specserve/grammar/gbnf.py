"""Translates GBNF, llama.cpp's grammar format, to llguidance's Lark.

llguidance's lexer takes the longest match, which rejects texts such as "ab" by `[a-z]+ "b"`. So a grammar without
recursion is translated to one regular expression, and any other one to rules over single characters: slower with a
large vocabulary, but exact. What is wrong with a rule's repeats, parentheses and ranges is left to llguidance to say.
"""

import re
from graphlib import CycleError, TopologicalSorter

from specserve.errors import Unusable

# Bytes of UTF-8.
MAX_TEXT = 32 * 1024
# llguidance expands rules that double each other until it refuses them: 490 take 2 s, 2,300 take 50 s.
MAX_RULES = 500

_CHARACTER = r"(?:\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[\"\\\[\]\-^nrt])|[^\\\r\n])"
_NAME = "[A-Za-z][A-Za-z0-9_-]*"
_TOKEN = re.compile(
    rf"(?P<defines>{_NAME})[ \t]*::=|(?P<name>{_NAME})"
    rf'|"(?P<literal>(?:(?!"){_CHARACTER})*)"|\[(?P<set>(?:(?!\]){_CHARACTER})+)\]'
    r"|(?P<mark>[()|.*+?]|\{ *\d* *(?:, *\d*)? *\})|(?P<space>(?:\s|#[^\r\n]*)++)"
)
_RANGE = re.compile(f"({_CHARACTER})(?:-({_CHARACTER}))?")
_SHORT = {r"\n": "\n", r"\r": "\r", r"\t": "\t"}
_ANY = r"/[\u{0}-\u{10FFFF}]/"


def gbnf_to_lark(text: str) -> str:
    """Return a grammar in llguidance's Lark, with `start` for `root`; `Unusable` if it is not GBNF, or too large."""
    if len(text.encode()) > MAX_TEXT:
        raise Unusable(f"it is longer than {MAX_TEXT // 1024} KiB")
    rules = _read(text)
    if len(rules) > MAX_RULES:
        raise Unusable(f"it has more than {MAX_RULES} rules")
    uses = {name: {part[1:-1] for part in parts if part[0] == "<"} for name, parts in rules.items()}
    for name in sorted({"root"}.union(*uses.values()) - rules.keys()):
        raise Unusable(f"the rule {name[:100]!r} is not defined")
    try:
        TopologicalSorter(uses).prepare()
        kind = "RULE"
    except CycleError:
        kind = "rule"
    # In Lark, names of lexemes are upper case, names of rules lower case.
    names = {f"<{name}>": f"{kind}_{index}" for index, name in enumerate(rules)}
    lines = [f"start: {names['<root>']}"]
    for name, parts in rules.items():
        lines.append(f"{names[f'<{name}>']}: {' '.join(names.get(part, part) for part in parts)}")
    return "\n".join(lines) + "\n"


def _read(text: str) -> dict[str, list[str]]:
    """Return the rules that a text defines, in parts, of which the names of rules stand between `<` and `>`."""
    rules: dict[str, list[str]] = {}
    parts: list[str] | None = None
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        line = text.count("\n", 0, position) + 1
        if match is None:
            raise Unusable(f"line {line} cannot be read")
        kind = str(match.lastgroup)
        value, position = match[kind], match.end()
        if kind == "defines" and value not in rules:
            parts = rules[value] = []
        elif kind != "space":
            if parts is None or kind == "defines":
                raise Unusable(f"line {line} begins no new rule")
            parts.append(_lark(kind, value))
    return rules


def _lark(kind: str, value: str) -> str:
    if kind == "name":
        return f"<{value}>"
    if kind == "literal":
        characters = [f"/{_code(found[0])}/" for found in re.finditer(_CHARACTER, value)]
        return f"({' '.join(characters)})" if characters else '("")'
    if kind == "set":
        ranges = _RANGE.sub(
            lambda found: "-".join(_code(end) for end in found.groups() if end), value.removeprefix("^")
        )
        return f"/[{'^' * (value[0] == '^')}{ranges}]/" if ranges else _ANY
    return _ANY if value == "." else value.replace(" ", "")


def _code(character: str) -> str:
    """Return a character as a regular expression that spells any."""
    number = character[2:] if character[1:2] in {"x", "u", "U"} else f"{ord(_SHORT.get(character, character[-1])):X}"
    return rf"\u{{{number}}}"
