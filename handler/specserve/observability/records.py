"""What the scheduler reports to metrics and traces: a record per sequence and round, and one when a sequence ends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Group = Literal["auto", "fixed", "off", "holdback"]
_FAMILY = re.compile(r"[a-z0-9_-]{1,32}")


def family_label(name: str) -> str:
    """A client's `prompt_family`, fit for a label and a file: `other` where it is not a short plain word."""
    return name if not name or _FAMILY.fullmatch(name) else "other"


@dataclass(frozen=True)
class RequestInfo:
    """The labels that all sequences of a request share.

    Args:
        request: TorchServe's request id.
        family: the client's `prompt_family`; empty without one.
        group: the speculation mode; `holdback` is `auto` without drafts, for the control group.
        randomised: whether the group was drawn between `auto` and `holdback`; only such requests may be compared.
    """

    request: str = ""
    family: str = ""
    group: Group = "auto"
    randomised: bool = False


class RoundRecord(NamedTuple):
    """What one round did for one sequence; the seconds are its share of a round that it had with others.

    Args:
        info: the request's labels.
        choice: the index of the sequence in its request.
        position: number of output tokens before the round; 0 while the prompt is prefilled.
        kv_len: number of tokens in the target's cache before the round.
        drafts: the drafter of each draft.
        accepted: number of accepted drafts.
        tokens: the tokens that were emitted.
        draft_seconds: of drafting.
        target_seconds: of the target's forward pass.
        other_seconds: of everything else.
        live: number of running sequences.
        is_decode_round: whether the round decided tokens and its prefill was over before.
        alternatives: how many tokens the target has read as alternatives to drafts.
        adopted: whether one of them was recovered and gave one more token.
    """

    info: RequestInfo
    choice: int
    position: int
    kv_len: int
    drafts: Sequence[str]
    accepted: int
    tokens: list[int]
    draft_seconds: float
    target_seconds: float
    other_seconds: float
    live: int
    is_decode_round: bool
    alternatives: int = 0
    adopted: bool = False


class EndRecord(NamedTuple):
    """A sequence that finished, failed, or was cancelled by its client.

    Args:
        info: the request's labels.
        choice: the index of the sequence in its request.
        reason: `stop`, `length`, `error` or `cancelled`.
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them that needed no prefill.
        tokens: output tokens.
        waited: seconds before it had a slot.
        ttft: seconds from arrival to the first token; None without one.
        tpot: seconds per output token after the first; None with fewer than two.
    """

    info: RequestInfo
    choice: int
    reason: str
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    waited: float
    ttft: float | None
    tpot: float | None


class Observer(Protocol):
    """Is told of every round and of every end."""

    def round(self, record: RoundRecord) -> None:
        """A sequence took part in a round."""

    def end(self, record: EndRecord) -> None:
        """A sequence ended."""
