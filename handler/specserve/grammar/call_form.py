"""The forms in which models write tool calls, from which both their reader and their grammar are made."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from specserve.grammar.notation import SPACE, Notation

# What stands in a call's form, beside SPACE, for a tool's name, its arguments, and an id that the model gives the call.
NAME, ARGUMENTS, ID = "NAME", "ARGUMENTS", "#"
# Names of tools: OpenAI's characters, and Anthropic's length.
NAME_PATTERN = "[a-zA-Z0-9_-]{1,128}"
# Whitespace characters in a row that SPACE takes: small models tend to generate them without end.
MAX_SPACE = 40
WHITESPACE = " \t\r\n"
# What may stand between calls, beside whitespace.
BETWEEN = WHITESPACE + ";"
ID_PATTERN = "[a-zA-Z0-9]{1,9}"
_PATTERNS = {NAME: re.compile(NAME_PATTERN), ID: re.compile(ID_PATTERN)}


@dataclass(frozen=True)
class CallForm:
    """A form of calls: a block of them is `begin`, a call, further ones after `separator`, and `end`."""

    begin: str
    call: str  # with NAME and ARGUMENTS once each, SPACE and ID
    end: str = ""
    separator: str | None = None  # None if a block has one call
    tag: str = ""  # how `begin` begins, where that alone opens a call; else the name of a tool does, in its place
    only_first: bool = False  # whether no text may stand before it, other than calls
    notation: Notation | None = None  # of the arguments; None if they are a JSON object

    @property
    def text(self) -> str:
        notation = self.notation.item + self.notation.quote if self.notation else ""
        return self.begin + self.call + (self.separator or "") + self.end + notation

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Write calls with their `name` and `arguments`; arguments that are no object are written as JSON."""
        begin, form, end = (part.replace(SPACE, "").replace(ID, "0") for part in (self.begin, self.call, self.end))
        before, _, after = form.partition(ARGUMENTS)
        written = []
        for call in calls:
            given, notation = call["arguments"], self.notation
            arguments = notation.write(given) if notation and isinstance(given, dict) else json.dumps(given)
            written.append(before.replace(NAME, call["name"]) + arguments + after)
        if self.separator is None:
            return "\n".join(begin + call + end for call in written)
        return begin + self.separator.replace(SPACE, "").join(written) + end if written else ""

    def in_bytes(self) -> CallForm:
        """Return the form with a character for each byte."""
        texts: Any = {name: as_bytes(text) for name, text in vars(self).items() if isinstance(text, str)}
        return replace(self, **texts)

    @cached_property
    def parts(self) -> tuple[str, str, str]:
        """A call up to its name, from there to its arguments, and from there on."""
        before, _, rest = self.call.partition(NAME)
        middle, _, after = rest.partition(ARGUMENTS)
        return before, middle, after

    @cached_property
    def trigger(self) -> list[str]:
        """The elements of a block after which it is a call: the tag, or all to the name."""
        return [self.tag] if self.tag else _elements(self.begin + self.parts[0] + NAME)

    @cached_property
    def opening(self) -> list[str]:
        """The elements of a block after which its call is certain, whatever tokens have overshot the trigger."""
        before, middle, _ = self.parts
        return _elements(self.begin + before + NAME + ("" if self.tag else middle + "{"))

    @cached_property
    def rest(self) -> list[str]:
        """The elements from the opening to the arguments."""
        return _elements(self.parts[1]) if self.tag else []

    @cached_property
    def after(self) -> list[str]:
        return _elements(self.parts[2])

    @cached_property
    def next_opening(self) -> list[str]:
        """The elements from the arguments of a call to the name of the next one in its block; empty if it has none."""
        before, _, after = self.parts
        return [] if self.separator is None else _elements(after + self.separator + before + NAME)

    @cached_property
    def closing(self) -> list[str]:
        return _elements(self.parts[2] + self.end)


class ThinkingTags(NamedTuple):
    """What a model writes before and after its reasoning."""

    begin: str
    end: str
    # What may stand before reasoning and text and belongs to neither; an answer without reasoning begins with the last.
    headers: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.begin, self.end, *self.headers)

    def opening(self, text: str) -> int | None:
        """Return where the reasoning at the beginning of a text begins, -1 if there is none, None if more may tell."""
        rest = text.lstrip(WHITESPACE)
        while header := next(filter(rest.startswith, self.headers), None):
            rest = rest[len(header) :].lstrip(WHITESPACE)
        if rest.startswith(self.begin):
            return len(text) - len(rest) + len(self.begin)
        return None if any(mark.startswith(rest) for mark in (self.begin, *self.headers)) else -1


def as_bytes(text: str) -> str:
    return text.encode().decode("latin-1")


def _elements(form: str) -> list[str]:
    """Return each SPACE, ID and NAME of a form, and the texts between them."""
    return [part for part in re.split(f"({SPACE}|{ID}|{NAME})", form) if part]


def take(parts: Sequence[str], text: str, begin: int, names: Container[str]) -> tuple[int, str] | bool:
    """Match elements with a text from `begin` on: its end, and the tool's name; else whether more may complete them."""
    position, name = begin, ""
    for part in parts:
        if part == SPACE:
            last = min(len(text), position + MAX_SPACE)
            while position < last and text[position] in WHITESPACE:
                position += 1
        elif part in _PATTERNS:
            found = _PATTERNS[part].match(text, position)
            position = found.end() if found else position
            if position == len(text):
                return True
            if not found or (part == NAME and found[0] not in names):
                return False
            name = found[0] if part == NAME else name
        else:
            there = text[position : position + len(part)]
            if not part.startswith(there):
                return False
            if len(there) < len(part):
                return True
            position += len(part)
    return position, name


def unfinished(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark that is not complete."""
    return next(count for count in range(len(mark) - 1, -1, -1) if text.endswith(mark[:count]))


class Found(NamedTuple):
    """The first place in a text where a call begins or may, and its form and match if it does."""

    position: int
    form: CallForm | None = None
    match: tuple[int, str] | None = None


def find(
    forms: Sequence[CallForm], text: str, names: Container[str], *, start: int = 0, first: bool, triggers: bool
) -> Found:
    """Find the first call in a text outside calls: by the forms' triggers or else by their openings.

    It is searched from `start` on; `first` says whether it follows only calls, or nothing.
    """
    begins = re.compile("[" + re.escape("".join({(form.begin or form.call)[0] for form in forms})) + "]")
    begin_of_text = len(text) - len(text.lstrip(BETWEEN)) if first else -1
    for position in (found.start() for found in begins.finditer(text, start)):
        may_begin = False
        for form in forms:
            if form.only_first and position != begin_of_text:
                continue
            found = take(form.trigger if triggers else form.opening, text, position, names)
            if isinstance(found, tuple):
                return Found(position, form, found)
            may_begin |= found
        if may_begin:
            return Found(position)
    return Found(len(text))
