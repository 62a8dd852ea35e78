"""What each sequence of a round is charged of its time, and the balance of what its drafts brought and cost.

All times are estimates, since sequences share the passes.
"""

from __future__ import annotations

from typing import NamedTuple

from specserve.speculation.cost import Cost
from specserve.speculation.proposal import Proposal

# A long catch-up after the first is counted as lost little by little (`Balance`): in each round this share of what is
# not counted yet. The first is never counted. Either, counted at once, would stop the drafts that are to earn it
# (benchmarks/RESULTS.md, decisions).
_CATCH_UP_SHARE = 1 / 16
# What drafts may cost a sequence, net of what they brought, before the draft model pauses: a share of its plain
# decoding time plus 4 plain steps. It bounds what an adversary can cost, but for the first catch-up and for drafts of
# other drafters, which cost only their rows (tests/engine/test_simulation.py).
_LOSS_SHARE, _LOSS_STEPS = 0.01, 4.0
# Share of a sequence's recent tokens and time that is left after another round.
_SPEEDUP_FADE = 0.85
# The most that it counts for: where a long copy ends the old speed is no longer to be had, and would keep the draft
# model out of what follows (benchmarks/RESULTS.md, decisions).
_MOST_SPEEDUP = 2.0


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
    # Drafts that took no pass have taken time for grammar masks at most.
    passes = [work.draft_model_seconds for work in works]
    draft_shares = _shares(passes if any(passes) else [float(work.drafts) for work in works])
    return [
        Charge(*charge)
        for charge in zip(plain_seconds, target_drafts_seconds, target_shares, draft_shares, strict=True)
    ]


def _shares(seconds: list[float]) -> list[float]:
    """Each one's share of the sum; equal shares of nothing."""
    total = sum(seconds)
    return [one / total if total else 1 / len(seconds) for one in seconds]


class Balance:
    """Two accounts of one sequence's drafts: its recent speed-up, and its loss since the beginning.

    The loss bounds what drafts of the model cost where every estimate is wrong.
    """

    def __init__(self) -> None:
        self._tokens = 0
        # What these would have taken without drafts.
        self._total_plain_seconds = 0.0
        # How much longer than that it took; negative if drafts have gained.
        self._total_loss_seconds = 0.0
        self._model_drafted = False
        # Of long catch-ups, not counted yet.
        self._outstanding_seconds = 0.0
        self._recent_tokens = 0.0
        # The time that these took, in units of a plain step.
        self._recent_steps = 0.0

    @property
    def speedup(self) -> float:
        """The recent speed-up over plain decoding, at least 1 and at most 2."""
        recent = self._recent_tokens / self._recent_steps if self._recent_steps else 1.0
        return min(_MOST_SPEEDUP, max(1.0, recent))

    @property
    def is_over_budget(self) -> bool:
        """Whether its drafts have cost more, net of what they brought, than they may; that grows with the text."""
        step_seconds = self._total_plain_seconds / max(1, self._tokens)
        return self._total_loss_seconds > _LOSS_SHARE * self._total_plain_seconds + _LOSS_STEPS * step_seconds

    def count_round(self, tokens: int, charge: Charge, proposal: Proposal) -> None:
        """Account for a decoding round that gave so many tokens; plain decoding would have given one."""
        plain_seconds = charge.plain_seconds
        extra_seconds = charge.target_drafts_seconds + proposal.draft_model_seconds - proposal.long_catch_up_seconds
        if self._model_drafted:
            # The first long catch-up, which may take several rounds, is over.
            self._outstanding_seconds += proposal.long_catch_up_seconds
        self._model_drafted |= "model" in proposal.drafted_by
        counted = _CATCH_UP_SHARE * self._outstanding_seconds
        self._outstanding_seconds -= counted
        self._tokens += tokens
        self._total_plain_seconds += tokens * plain_seconds
        self._total_loss_seconds += extra_seconds + counted - (tokens - 1) * plain_seconds
        self._recent_tokens = _SPEEDUP_FADE * self._recent_tokens + tokens
        self._recent_steps = _SPEEDUP_FADE * self._recent_steps + 1 + extra_seconds / plain_seconds
