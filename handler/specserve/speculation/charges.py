"""What each sequence of a round is charged of its time: an estimate, since sequences share the passes."""

from __future__ import annotations

from typing import NamedTuple

from specserve.speculation.cost import Cost


class Work(NamedTuple):
    """What one sequence adds to a round.

    Args:
        decoding: whether its prefill is over.
        rows: of the target's pass, without its drafts.
        drafts: rows for its draft tokens.
        draft_model_seconds: its part of the draft model's passes.
    """

    decoding: bool
    rows: int
    drafts: int
    draft_model_seconds: float


class Charge(NamedTuple):
    """A sequence's part of a round.

    Args:
        plain_seconds: of the target's pass, had no sequence drafted.
        target_drafts_seconds: of the target's pass, for its drafts.
        target_share: of the time of the target's pass and of what follows it.
        draft_share: of the time of drafting.
    """

    plain_seconds: float
    target_drafts_seconds: float
    target_share: float
    draft_share: float


def charges(works: list[Work], cost: Cost, kv_len: int) -> list[Charge]:
    """Charge decoding equally, and prefill and drafts by their rows.

    Args:
        works: one for each sequence of the round.
        cost: of the target's passes.
        kv_len: tokens of its cache that a row attends to.
    """
    n_decoding = sum(work.decoding for work in works)
    rows = sum(work.rows for work in works)
    drafts = sum(work.drafts for work in works)
    decode, plain = cost.seconds(n_decoding, kv_len), cost.seconds(rows, kv_len)
    # By estimate a pass may be cheaper with more rows; nothing is charged less than nothing.
    draft_row = max(0.0, cost.seconds(rows + drafts, kv_len) - plain) / max(1, drafts)
    prompt_row = max(0.0, plain - decode) / max(1, rows - n_decoding)
    plain_seconds = [decode / n_decoding if work.decoding else work.rows * prompt_row for work in works]
    target_drafts_seconds = [work.drafts * draft_row for work in works]
    target_shares = _shares([sum(seconds) for seconds in zip(plain_seconds, target_drafts_seconds, strict=True)])
    draft_shares = _shares([work.draft_model_seconds for work in works])
    return [
        Charge(*charge)
        for charge in zip(plain_seconds, target_drafts_seconds, target_shares, draft_shares, strict=True)
    ]


def _shares(seconds: list[float]) -> list[float]:
    """Each one's share of the sum; equal shares of nothing."""
    total = sum(seconds)
    return [one / total if total else 1 / len(seconds) for one in seconds]
