"""What the scheduler tells of its work: one record a text and round, one when a text ends."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Group = Literal["auto", "fixed", "off", "holdback"]
_FAMILY = re.compile(r"[a-z0-9_-]{1,32}")


def plain_family(named: str) -> str:
    """A client's word for a kind of prompt, fit for a label and a file: `other` where it is no short plain word."""
    return named if not named or _FAMILY.fullmatch(named) else "other"


@dataclass(frozen=True)
class Origin:
    """Where a text comes from.

    Args:
        request: TorchServe's id of it.
        choice: which of the request's texts this is.
        family: the kind of prompt, in the client's own word; empty where it names none.
        group: who decides on its drafts; `holdback` would be `auto`, but was chosen to be compared with.
        drawn: whether it was left to chance which of these two it is; only such texts may be compared.
    """

    request: str = ""
    choice: int = 0
    family: str = ""
    group: Group = "auto"
    drawn: bool = False


class Round(NamedTuple):
    """What one round did for one text; the seconds are its share of those that it had with others.

    Args:
        origin: whose.
        place: how many tokens of the answer there were before.
        context: how many tokens the target's cache held then.
        drafts: where each draft came from.
        accepted: how many of them stayed.
        tokens: what was written.
        draft: seconds in which drafts were made.
        target: seconds of the target's pass.
        other: seconds of the rest.
        live: how many texts had a slot.
    """

    origin: Origin
    place: int
    context: int
    drafts: list[str]
    accepted: int
    tokens: list[int]
    draft: float
    target: float
    other: float
    live: int


class End(NamedTuple):
    """A text that ended, or that its client left.

    Args:
        origin: whose.
        reason: why: OpenAI's `stop` or `length`, `error`, or `cancelled`.
        prompt_tokens: of the prompt.
        cached_tokens: of the prompt, those that needed no reading.
        tokens: of the answer.
        waited: seconds before it had a slot.
        first: seconds from its arrival to its first token; None without one.
        pace: seconds a token behind the first; None where there are too few to tell.
    """

    origin: Origin
    reason: str
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    waited: float
    first: float | None
    pace: float | None


class Observer(Protocol):
    """Whoever wants to know."""

    def round(self, record: Round) -> None:
        """A text was given tokens."""

    def end(self, record: End) -> None:
        """A text has come to its end."""
