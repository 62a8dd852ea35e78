"""What each step of a round is charged of its time, and the balance of what a sequence's drafts brought and cost.

All times are estimates, since sequences share the passes.
"""

from __future__ import annotations

from specserve.speculation.cost import Cost
from specserve.speculation.step import Step

# A long catch-up after the first is counted as lost little by little (`Balance`): in each round this share of what is
# not counted yet. The first is never counted. Either, counted at once, would stop the drafts that are to earn it
# (benchmarks/decisions/tried.md).
_CATCH_UP_SHARE = 1 / 16
# What drafts may cost a sequence, net of what they brought, before the draft model pauses: a share of its plain
# decoding time plus 4 passes of that. It bounds what an adversary can cost, but for the first catch-up and for drafts
# of other drafters, which cost only their rows (tests/engine/test_simulation.py).
_LOSS_SHARE, _LOSS_PASSES = 0.01, 4.0
# Share of a sequence's recent tokens and time that is left after another round.
_SPEEDUP_FADE = 0.85
# The most that it counts for: where a long copy ends the old speed is no longer to be had, and would keep the draft
# model out of what follows (benchmarks/decisions/tried.md).
_MOST_SPEEDUP = 2.0


def charge(steps: list[Step], cost: Cost, kv_len: int, *, draft_seconds: float, target_seconds: float) -> None:
    """Charge each step its part of a round: decoding equally, prefill and drafts by their rows.

    Args:
        steps: of the round, before their tokens are decided.
        cost: of the target's passes.
        kv_len: tokens of its cache that a row attends to.
        draft_seconds: that the round's drafting took.
        target_seconds: that the target's pass took.
    """
    decoding = [step for step in steps if not step.in_prefill]
    rows = sum(step.rows for step in steps)
    drafts = sum(step.draft_rows for step in steps)
    decode, plain = cost.seconds(len(decoding), kv_len), cost.seconds(rows, kv_len)
    # By estimate a pass may be cheaper with more rows; nothing is charged less than nothing.
    draft_row = max(0.0, cost.seconds(rows + drafts, kv_len) - plain) / max(1, drafts)
    prompt_row = max(0.0, plain - decode) / max(1, rows - len(decoding))
    for step in steps:
        step.plain_seconds = decode / len(decoding) if not step.in_prefill else step.rows * prompt_row
        step.target_drafts_seconds = step.draft_rows * draft_row
    # Drafts that took no pass have taken time for grammar masks at most.
    passes = [step.draft_model_seconds for step in steps]
    draft_shares = _shares(passes if any(passes) else [float(step.draft_rows) for step in steps])
    target_shares = _shares([step.plain_seconds + step.target_drafts_seconds for step in steps])
    for step, draft_share, target_share in zip(steps, draft_shares, target_shares, strict=True):
        step.draft_seconds = draft_share * draft_seconds
        step.target_share = target_share
        step.target_seconds = target_share * target_seconds


def _shares(seconds: list[float]) -> list[float]:
    """Each one's share of the sum; equal shares of nothing."""
    total = sum(seconds)
    return [part / total if total else 1 / len(seconds) for part in seconds]


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
        # The time that these took, in passes of plain decoding.
        self._recent_passes = 0.0

    @property
    def speedup(self) -> float:
        """The recent speed-up over plain decoding, at least 1 and at most 2."""
        recent = self._recent_tokens / self._recent_passes if self._recent_passes else 1.0
        return min(_MOST_SPEEDUP, max(1.0, recent))

    @property
    def is_over_budget(self) -> bool:
        """Whether its drafts have cost more, net of what they brought, than they may; that grows with the text."""
        pass_seconds = self._total_plain_seconds / max(1, self._tokens)
        return self._total_loss_seconds > _LOSS_SHARE * self._total_plain_seconds + _LOSS_PASSES * pass_seconds

    def count_round(self, step: Step) -> None:
        """Account for a decode round; plain decoding would have given one token."""
        plain_seconds, tokens = step.plain_seconds, step.n_decided
        extra_seconds = step.target_drafts_seconds + step.draft_model_seconds - step.long_catch_up_seconds
        if self._model_drafted:
            # The first long catch-up, which may take several rounds, is over.
            self._outstanding_seconds += step.long_catch_up_seconds
        self._model_drafted |= "model" in step.drafted_by
        counted = _CATCH_UP_SHARE * self._outstanding_seconds
        self._outstanding_seconds -= counted
        self._tokens += tokens
        self._total_plain_seconds += tokens * plain_seconds
        self._total_loss_seconds += extra_seconds + counted - (tokens - 1) * plain_seconds
        self._recent_tokens = _SPEEDUP_FADE * self._recent_tokens + tokens
        self._recent_passes = _SPEEDUP_FADE * self._recent_passes + 1 + extra_seconds / plain_seconds
