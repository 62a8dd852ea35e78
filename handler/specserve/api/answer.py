"""What an answer consists of: text, reasoning and calls of tools, read from the generated text as it comes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specserve.grammar.call_form import BETWEEN, WHITESPACE, CallForm, Match, find, take


class Text(NamedTuple):
    """More of the answer's text."""

    text: str


class Reasoning(NamedTuple):
    """More of the model's reasoning, which some models write before their answer."""

    text: str


@dataclass(frozen=True)
class Call:
    """The beginning of a tool call: the how manieth of its answer it is, its id, and the tool's name."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Text | Reasoning | Call | Arguments


class AnswerReader:
    """Reads the parts of an answer from its text; `calls` is how many have begun.

    Text is held back while it may be the beginning of a call, and whitespace while a call may follow: what stands
    between text and calls is left out.

    Args:
        forms: in which calls are written; without any, everything is text.
        names: of the tools.
    """

    def __init__(self, forms: Sequence[CallForm] = (), names: Container[str] = ()) -> None:
        self.calls = 0
        self._forms = forms
        self._names = names
        self._held = ""
        self._done = False
        # Reads one thing of what is held; None if more text is needed for that.
        self._read: Callable[[], list[Part] | None] = self._read_text
        # Whether there is text since the last call, and before it.
        self._first, self._has_text = True, False
        # Of the last call: its form, and how many brackets its arguments have open, and whether these end in a string.
        self._form = CallForm("", "")
        self._depth, self._in_string, self._escaped = 0, False, False

    @property
    def is_within_call(self) -> bool:
        """Whether the arguments of the last call are not complete by now."""
        return self._read in (self._read_before, self._read_arguments)

    def read(self, text: str, *, done: bool) -> list[Part]:
        """Return what is new.

        Args:
            text: what was generated since the last call.
            done: whether it is the last of the answer, so that nothing may be held back.
        """
        if not self._forms:
            return [Text(text)] if text else []
        self._held += text
        self._done = done
        parts: list[Part] = []
        while (more := self._read()) is not None:
            parts += more
        return _joined(parts)

    def _read_text(self) -> list[Part] | None:
        """Read text up to a call, or to what may become one."""
        found = find(self._forms, self._held, self._names, first=self._first, triggers=False)
        text, rest = self._held[: found.position], self._held[found.position :]
        if found.form and found.match:
            parts = self._text("" if self._first and not text.strip(BETWEEN) else text.rstrip(WHITESPACE))
            return [*parts, self._call(found.form, found.match)]
        if self._done:
            self._held = ""
            # What is cut after a trigger was a call.
            cut = find(self._forms, rest, self._names, first=self._first, triggers=True)
            text = text.rstrip(WHITESPACE) if cut.match and cut.position == 0 else text + rest
            return self._text("" if self._first and self.calls and not text.strip(BETWEEN) else text) or None
        kept = 0 if self._first and not text.strip(BETWEEN) else len(text.rstrip(WHITESPACE))
        self._held = self._held[kept:]
        return self._text(text[:kept]) or None

    def _text(self, text: str) -> list[Part]:
        if not text:
            return []
        if self._first and self.calls and not self._has_text:
            text = text.lstrip(BETWEEN)
        self._first, self._has_text = False, True
        return [Text(text)]

    def _call(self, form: CallForm, match: Match) -> Part:
        """Begin the call whose opening is matched; an opening that ends with the arguments' bracket leaves that."""
        self._held = self._held[match.end - (not form.tag) :]
        self._form, self._read = form, self._read_before
        self.calls += 1
        return Call(self.calls - 1, f"call_{secrets.token_hex(12)}", match.name)

    def _read_before(self) -> list[Part] | None:
        """Read what stands between a call's name and its arguments."""
        found = take(self._form.rest, self._held, 0, self._names)
        if isinstance(found, Match):
            self._held, self._read = self._held[found.end :], self._read_arguments
            return []
        return None if found else self._end_call(0)

    def _read_arguments(self) -> list[Part] | None:
        """Read a JSON object, or as much as there is of it."""
        if not self._depth:
            self._held = self._held.lstrip(WHITESPACE)
        for position, character in enumerate(self._held):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = not self._escaped and character == "\\"
                continue
            self._in_string = character == '"'
            self._depth += (character in "{[") - (character in "}]")
            if not self._depth:
                self._read = self._read_after
                return self._arguments(position + 1)
        return self._arguments(len(self._held)) or None

    def _arguments(self, count: int) -> list[Part]:
        text, self._held = self._held[:count], self._held[count:]
        return [Arguments(self.calls - 1, text)] if text else []

    def _read_after(self) -> list[Part] | None:
        """Read the end of a call, and the beginning of the next one in its block."""
        form = self._form
        following = bool(form.next_opening) and take(form.next_opening, self._held, 0, self._names)
        if isinstance(following, Match):
            return [self._call(form, following)]
        closing = take(form.closing, self._held, 0, self._names)
        if isinstance(closing, Match):
            return self._end_call(closing.end)
        return None if following or closing else self._end_call(0)

    def _end_call(self, count: int) -> list[Part]:
        self._held, self._read, self._first = self._held[count:], self._read_text, True
        return []


def _joined(parts: list[Part]) -> list[Part]:
    """Join adjacent pieces of one thing."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Text) and isinstance(last, Text):
            joined[-1] = Text(last.text + part.text)
        elif isinstance(part, Arguments) and isinstance(last, Arguments) and last.index == part.index:
            joined[-1] = Arguments(part.index, last.text + part.text)
        else:
            joined.append(part)
    return joined
