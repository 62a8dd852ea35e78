"""How models write tool calls: one notation, from which both their reader and their grammar are made."""

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

# What stands in a call's form for a tool's name, its arguments (a JSON object), and optional whitespace.
NAME, ARGUMENTS, SPACE = "NAME", "ARGUMENTS", "~"
# Names of tools: OpenAI's characters, and Anthropic's length.
NAME_PATTERN = "[a-zA-Z0-9_-]{1,128}"
# Whitespace characters in a row that SPACE takes: small models tend to generate them without end.
MAX_SPACE = 40
WHITESPACE = " \t\r\n"
# What may stand between calls, beside whitespace.
BETWEEN = WHITESPACE + ";"
_NAME = re.compile(NAME_PATTERN)


@dataclass(frozen=True)
class CallForm:
    """A form of calls: a block of them is `begin`, a call, further ones after `separator`, and `end`."""

    begin: str
    call: str  # with NAME and ARGUMENTS once each, and SPACE
    end: str = ""
    separator: str | None = None  # None if a block has one call
    tag: str = ""  # how `begin` begins, where that alone opens a call; else the name of a tool does, in its place
    only_first: bool = False  # whether no text may stand before it, other than calls

    @property
    def text(self) -> str:
        return self.begin + self.call + (self.separator or "") + self.end

    @cached_property
    def trigger(self) -> list[str]:
        """The elements of a block after which it is a call: the tag, or all to the character after the name."""
        return [self.tag] if self.tag else _to_name(self.begin + self.call)

    @cached_property
    def opening(self) -> list[str]:
        """The elements of a block after which its call is certain, whatever tokens have overshot the trigger."""
        return _to_name(self.begin + self.call) + ([] if self.tag else [*_from_name(self.call), "{"])

    @cached_property
    def rest(self) -> list[str]:
        """The elements from the opening to the arguments."""
        return _from_name(self.call) if self.tag else []

    @cached_property
    def next_opening(self) -> list[str]:
        """The elements from the arguments of a call to the name of the next one in its block; empty if it has none."""
        after = self.call.partition(ARGUMENTS)[2]
        return [] if self.separator is None else [*_elements(after + self.separator), *_to_name(self.call)]

    @cached_property
    def closing(self) -> list[str]:
        return _elements(self.call.partition(ARGUMENTS)[2] + self.end)


class ThinkingTags(NamedTuple):
    """What a model writes before and after its reasoning."""

    begin: str
    end: str

    def opening(self, text: str) -> int | None:
        """Return where the reasoning at the beginning of a text begins, -1 if there is none, None if more may tell."""
        stripped = text.lstrip(WHITESPACE)
        if stripped.startswith(self.begin):
            return len(text) - len(stripped) + len(self.begin)
        return None if self.begin.startswith(stripped) else -1


def _to_name(form: str) -> list[str]:
    """Return the elements up to the character that ends the name."""
    before, _, after = form.partition(NAME)
    return [*_elements(before), NAME, after[:1]]


def _from_name(form: str) -> list[str]:
    """Return the elements after the character that ends the name, up to the arguments."""
    return _elements(form.partition(NAME)[2].partition(ARGUMENTS)[0][1:])


def _elements(form: str) -> list[str]:
    """Return each SPACE of a form, and the texts between them."""
    return [part for part in re.split(f"({SPACE})", form) if part]


def take(parts: Sequence[str], text: str, begin: int, names: Container[str]) -> tuple[int, str] | bool:
    """Match elements with a text from `begin` on: its end, and the tool's name; else whether more may complete them."""
    position, name = begin, ""
    for part in parts:
        if part == SPACE:
            last = min(len(text), position + MAX_SPACE)
            while position < last and text[position] in WHITESPACE:
                position += 1
        elif part == NAME:
            found = _NAME.match(text, position)
            name = found[0] if found else ""
            position += len(name)
            if position < len(text) and name not in names:
                return False
        else:
            there = text[position : position + len(part)]
            if not part.startswith(there):
                return False
            if len(there) < len(part):
                return True
            position += len(part)
    return position, name


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
