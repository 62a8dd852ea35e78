"""Reads the parts of an answer, which are text, reasoning and tool calls, from the generated text as it comes."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from specserve.grammar.call_form import BETWEEN, WHITESPACE, CallForm, ThinkingTags, find, take, unfinished
from specserve.grammar.notation import Scan


class Text(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    """More of the model's reasoning, which some models write before their answer."""

    text: str


@dataclass(frozen=True)
class Call:
    """The beginning of a tool call."""

    index: int  # in the answer
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the JSON text of a call's arguments."""

    index: int  # of the call
    text: str


Part = Text | Reasoning | Call | Arguments


class AnswerReader:
    """Reads the parts of an answer from its text, the same ones whatever pieces the text comes in.

    Text is held back while it may be the beginning of a call or tag, and whitespace while a call or tag may follow:
    whitespace beside calls and tags is left out.

    Calls of these tools, by name the schemas of their arguments, have one of the forms. Where the model marks its
    `thinking` by tags, an answer begins with it; `thinks_at_once` tells whether the prompt ends with the first tag.
    """

    def __init__(
        self,
        forms: Sequence[CallForm] = (),
        tools: Mapping[str, dict[str, Any]] | None = None,
        thinking: ThinkingTags | None = None,
        *,
        thinks_at_once: bool = False,
    ) -> None:
        # How many calls have begun, and the characters of the text up to the end of the reasoning.
        self.calls = self.reasoned = 0
        self._thinking = thinking or ThinkingTags("", "")
        # Whether reasoning has begun, by its first tag.
        self._thinks = thinks_at_once
        self._forms = forms
        self._names = tools or {}
        self._held = ""
        self._done = False
        # Reads one element of the held text; returns None if it needs more.
        self._read: Callable[[], list[Part] | None] = self._read_opening if thinking else self._read_text
        # Whether no text has come since the last call, and whether any has come at all.
        self._first, self._has_text = True, False
        # Of the last call: the forms that it may have, its name, and whether an argument has come, or how many brackets
        # the arguments have open, and whether these end in a string; and how far the next argument has been read.
        self._possible: list[CallForm] = []
        self._name, self._has_argument = "", False
        self._depth, self._in_string, self._escaped = 0, False, False
        self._scan = Scan()

    @property
    def is_within_call(self) -> bool:
        """Whether the arguments of the last call are incomplete."""
        return self._read in (self._read_before, self._read_arguments, self._read_items)

    def read(self, text: str, *, done: bool) -> list[Part]:
        """Return what is new with a text; nothing may be held back if the answer is `done`."""
        self._held += text
        self._done = done
        parts: list[Part] = []
        while (more := self._read()) is not None:
            parts += more
        return parts

    def _read_opening(self) -> list[Part] | None:
        begin = 0 if self._thinks else self._thinking.opening(self._held)
        if begin is None and not self._done:
            return None
        if begin is None or begin < 0:
            self._read = self._read_text
            return []
        self._thinks, self._held = True, self._held[begin:]
        stripped = self._held.lstrip(WHITESPACE)
        self.reasoned += begin + len(self._held) - len(stripped)
        self._held = stripped
        if stripped:
            self._read = self._read_reasoning
        return [] if stripped else None

    def _read_reasoning(self) -> list[Part] | None:
        """Read the reasoning up to the second tag, or to what may become it."""
        end = self._thinking.end
        reasoning, found, _ = self._held.partition(end)
        if not found and not self._done:
            reasoning = reasoning[: len(reasoning) - unfinished(reasoning, end)].rstrip(WHITESPACE)
        taken = len(reasoning) + len(found)
        self.reasoned += taken
        self._held = self._held[taken:]
        if found:
            self._read, reasoning = self._read_gap, reasoning.rstrip(WHITESPACE)
        return [Reasoning(reasoning)] if reasoning else [] if found else None

    def _read_gap(self) -> list[Part] | None:
        self._held = self._held.lstrip(WHITESPACE)
        if not self._held:
            return None
        self._thinks = False
        self._read = self._read_opening if self._thinking.headers else self._read_text
        return []

    def _read_text(self) -> list[Part] | None:
        """Read text up to a call, or to what may become one."""
        headers = self._thinking.headers
        for header in headers:
            self._held = self._held.replace(header, "")
        most = 0 if self._done else max((unfinished(self._held, header) for header in headers), default=0)
        if not self._forms:
            count = len(self._held) - most
            text, self._held = self._held[:count], self._held[count:]
            return [Text(text)] if text else None
        found = find(self._forms, self._held, self._names, first=self._first, triggers=False)
        position = found.position if found.match else min(found.position, len(self._held) - most)
        text, rest = self._held[:position], self._held[position:]
        if found.form and found.match:
            parts = self._text("" if self._first and not text.strip(BETWEEN) else text.rstrip(WHITESPACE))
            return [*parts, self._call(found.form, *found.match)]
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

    def _call(self, form: CallForm, end: int, name: str) -> Part:
        """Begin the call whose opening is matched; an opening that ends with the arguments' bracket leaves that."""
        self._held = self._held[end - (not form.tag) :]
        self._possible = [other for other in self._forms if other.opening == form.opening]
        self._name, self._has_argument, self._read = name, False, self._read_before
        self.calls += 1
        return Call(self.calls - 1, f"call_{secrets.token_hex(12)}", name)

    def _read_before(self) -> list[Part] | None:
        found = [(form, self._take(form.rest)) for form in self._possible]
        matches = [(form, match[0]) for form, match in found if isinstance(match, tuple)]
        if not matches:
            return None if any(match for _, match in found) else self._end_call(0)
        self._possible, self._held = [form for form, _ in matches], self._held[matches[0][1] :]
        self._read = self._read_items if self._possible[0].notation else self._read_arguments
        return []

    def _read_items(self) -> list[Part] | None:
        """Read an argument that is complete, or the end of the arguments."""
        form = self._possible[0]
        self._held = self._held.lstrip(WHITESPACE)
        ends = self._take(form.after)
        if isinstance(ends, tuple):
            self._read = self._read_after
            return self._arguments(0, "}" if self._has_argument else "{}")
        found = form.notation and form.notation.take(self._held, self._names.get(self._name, {}), self._scan)
        if not found:
            return None
        end, key, value = found
        begin, self._has_argument, self._scan = ", " if self._has_argument else "{", True, Scan()
        return self._arguments(end, f"{begin}{key}: {value}")

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

    def _arguments(self, count: int, text: str = "") -> list[Part]:
        text, self._held = text or self._held[:count], self._held[count:]
        return [Arguments(self.calls - 1, text)] if text else []

    def _read_after(self) -> list[Part] | None:
        """Read the end of a call, and the beginning of the next one in its block."""
        following = {form: bool(form.next_opening) and self._take(form.next_opening) for form in self._possible}
        closing = [self._take(form.closing) for form in self._possible]
        for form, match in following.items():
            if isinstance(match, tuple):
                return [self._call(form, *match)]
        if found := [match[0] for match in closing if isinstance(match, tuple)]:
            return self._end_call(max(found))
        return None if any(following.values()) or any(closing) else self._end_call(0)

    def _take(self, elements: Sequence[str]) -> tuple[int, str] | bool:
        return take(elements, self._held, 0, self._names)

    def _end_call(self, count: int) -> list[Part]:
        self._held, self._read, self._first = self._held[count:], self._read_text, True
        return []
