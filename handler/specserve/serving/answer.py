"""What an answer consists of: text, reasoning and calls of tools, read from the generated text as it comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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
    """Reads the parts of an answer from its text; `calls` is how many have begun."""

    calls = 0

    def read(self, text: str, *, done: bool) -> list[Part]:
        """Return what is new.

        Args:
            text: what was generated since the last call.
            done: whether it is the last of the answer, so that nothing may be held back.
        """
        del done
        return [Text(text)] if text else []
