"""One sequence's part of a round: what the scheduler plans, what is drafted and committed, and its part of the time.

The scheduler makes a `SequenceStep`, the round fills it in (round.py), and statistics, metrics and traces read it.
"""

from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specserve.engine.base import FloatArray, Row
from specserve.errors import ConstraintError, Contained, MaskDeferred
from specserve.sampling.noise import Noise
from specserve.sequence import DrafterName, Sequence


class Alternative(NamedTuple):
    """A token that may be recovered where a draft is the first to be rejected (alternatives.py)."""

    draft_index: int  # of the draft that it would replace
    token: int  # the draft model's next choice after the draft and the alternatives before it
    share: float  # the token's part of the probability that the draft and the alternatives before it leave
    gain: float  # the estimated probability that it is recovered; the round then commits one more token


class Draft(NamedTuple):
    token: int
    # The distribution that it was sampled from, shape (vocabulary,); None for one-hot: the request is greedy, or a
    # proposer drafted it.
    q: FloatArray | None
    drafter: DrafterName
    # A model's largest probability at temperature 1; other drafters estimate how likely the token is right.
    confidence: float
    acceptance: float = 1.0  # the estimated probability that it is accepted if all drafts before it are
    alternatives: tuple[Alternative, ...] = ()  # to it, which the target may read or not
    behind_mask: bool = False  # whether the draft model read a mask token in place of the draft before it

    @property
    def calibration(self) -> str:
        """What its confidence is calibrated with (acceptance.py)."""
        return "masked" if self.behind_mask else self.drafter


@dataclass
class TimeShare:
    """One step's part of the seconds of a round, which sequences share (round.py)."""

    draft: float = 0.0
    target: float = 0.0
    other: float = 0.0
    # Estimates by the cost table.
    draft_model: float = 0.0  # the step's part of the draft model's passes
    plain: float = 0.0  # the step's part of the target's pass if no sequence had drafted
    target_drafts: float = 0.0  # what the step's drafts add to the target's pass

    @property
    def target_pass(self) -> float:
        return self.plain + self.target_drafts


@dataclass(eq=False)
class SequenceStep:
    # The scheduler plans.
    sequence: Sequence
    num_computed_tokens: int  # tokens of the sequence that the target's cache holds before the round
    rows: int  # pending tokens that the target reads in this round: all, except in a prefill chunk before the last
    max_drafts: int = 0  # rows for draft tokens and alternatives; 0 in a prefill
    running: int = 1  # sequences
    # The round adds.
    drafts: list[Draft] = field(default_factory=list)
    # The first token of each proposal from which nothing was drafted, at the round's first position. p_0 still shows
    # whether the token was right, so its drafter learns from it.
    refused: list[Draft] = field(default_factory=list)
    alternatives: list[Alternative] = field(default_factory=list)  # that the target reads
    model_ended: bool = False  # whether the draft model drafts no more
    n_accepted: int = 0  # of the drafts
    n_committed: int = 0  # these, the rule's own token, and one after an adopted alternative
    adopted: bool = False  # whether an alternative was recovered, and one more token committed after it
    error: Exception | None = None  # why the sequence failed
    seconds: TimeShare = field(default_factory=TimeShare)
    # What holds before the round.
    position: int = field(init=False)  # the length of the answer
    in_prefill: bool = field(init=False)  # whether it prefills the prompt, or what a preempted sequence had before
    commits: bool = field(init=False)  # whether it is to commit tokens; with `max_tokens` 0 none is wanted
    noise: Noise = field(init=False)
    # The grammar's mask after so many drafts, shape (vocabulary,); None allows all tokens.
    _mask: NDArray[np.bool_] | None = None
    _mask_after: int = -1

    def __post_init__(self) -> None:
        sequence = self.sequence
        self.position = sequence.generated
        self.in_prefill = not sequence.generated or self.num_computed_tokens + 1 < len(sequence.tokens)
        self.commits = self.num_computed_tokens + self.rows == len(sequence.tokens) and sequence.remaining > 0
        # A position that is drafted again gets new uniform numbers, by `round_number`, but the same race, by
        # `position` + index.
        self.noise = Noise(
            secret=sequence.secret,
            round_number=sequence.round_number,
            seed=sequence.seed,
            choice=sequence.choice,
            position=sequence.generated,
        )

    # ---- draft ----

    @property
    def draft_tokens(self) -> list[int]:
        return [draft.token for draft in self.drafts]

    @property
    def drafted_by(self) -> list[DrafterName]:
        return [draft.drafter for draft in self.drafts]

    @property
    def p_all_accepted(self) -> float:
        return prod(draft.acceptance for draft in self.drafts)

    @property
    def length(self) -> int:
        """Number of tokens of the sequence, draft tokens included."""
        return len(self.sequence.tokens) + len(self.drafts)

    def tokens_from(self, first: int) -> list[int]:
        """From a position on, draft tokens included."""
        return [*self.sequence.tokens[first:], *self.draft_tokens[max(0, first - len(self.sequence.tokens)) :]]

    @property
    def draft_rows(self) -> int:
        """How many rows of the target's pass are drafts and alternatives."""
        return len(self.drafts) + len(self.alternatives)

    @property
    def rows_left(self) -> int:
        """How many more tokens may be drafted, or read as alternatives."""
        return self.max_drafts - self.draft_rows

    def contained(self) -> Contained:
        """Keep what is raised within from the other steps of the round: it becomes this one's `error`."""
        return Contained(self.sequence.info.request, lambda error: setattr(self, "error", error))

    def compute_mask(self) -> bool:
        """Compute the grammar's mask after the drafts; False if the round has no time for it."""
        constraint = self.sequence.constraint
        if constraint is not None and self._mask_after != len(self.drafts):
            try:
                self._mask = constraint.allowed([*self.sequence.answer, *self.draft_tokens])
            except (ConstraintError, MaskDeferred):
                return False
            self._mask_after = len(self.drafts)
        return True

    def allows(self, token: int) -> bool:
        """Whether the request's grammar is known to allow a token after the drafts."""
        return self.compute_mask() and (self._mask is None or bool(self._mask[token]))

    def is_over(self, end_tokens: frozenset[int]) -> bool:
        """Whether nothing can follow the drafts: the last is an end token, or the grammar allows no other token."""
        if self.drafts and self.drafts[-1].token in end_tokens:
            return True
        mask = self._mask if self._mask_after == len(self.drafts) else None
        # `argmax` stops at the first allowed token, and few masks begin with an end token.
        return (
            mask is not None
            and int(mask.argmax()) in end_tokens
            and end_tokens.issuperset(np.flatnonzero(mask).tolist())
        )

    # ---- verify ----

    @property
    def scores_rows(self) -> bool:
        """Whether its rows belong to a prompt whose tokens are scored."""
        return self.sequence.scores_prompt and self.position == 0

    @property
    def rows_with_logits(self) -> int:
        """How many of `rows` need logits: the last if it commits, all of a scored prompt."""
        return self.rows if self.scores_rows else int(self.commits)

    def target_rows(self) -> list[Row]:
        """The rows of the target's pass: pending tokens, then draft tokens, then alternatives."""
        sequence, after = self.sequence, self.num_computed_tokens + self.rows
        tokens = sequence.tokens[self.num_computed_tokens : after] + self.draft_tokens
        without_logits = self.rows - self.rows_with_logits
        rows = [
            Row(token, sequence.slot, self.num_computed_tokens + number, number >= without_logits)
            for number, token in enumerate(tokens)
        ]
        rows += [
            Row(other.token, sequence.slot, after + other.draft_index, wants_logits=True, alternative=True)
            for other in self.alternatives
        ]
        return rows

    # ---- accept ----

    @property
    def is_decode_round(self) -> bool:
        """Whether it has committed tokens, and was no prefill."""
        return self.n_committed > 0 and not self.in_prefill and self.error is None

    @property
    def emitted(self) -> list[int]:
        """The tokens that the round has committed, without what follows the end of the answer."""
        first = self.sequence.prompt_length + self.position
        return self.sequence.tokens[first : first + self.n_committed]

    @property
    def n_emitted_drafts(self) -> int:
        """How many drafts were accepted and emitted; of drafts after the end of the text none counts."""
        return min(self.n_accepted, len(self.emitted))

    def count(self, now: float) -> None:
        """Add the round, which has ended now, to its sequence's statistics; the end of a prefill is no decode round."""
        sequence, stats, times, seconds = self.sequence, self.sequence.stats, self.sequence.timestamps, self.seconds
        if self.emitted:
            times.last_token = now
            times.first_token = now if times.first_token is None else times.first_token
        if self.in_prefill:
            stats.prefill_seconds += seconds.draft + seconds.target + seconds.other
        else:
            stats.draft_seconds += seconds.draft
            stats.target_seconds += seconds.target
            stats.other_seconds += seconds.other
        if not self.is_decode_round:
            return
        # Plain decoding takes a step for the EOS token as well.
        committed = len(self.emitted) + sequence.ended_by_eos
        stats.rounds += 1
        stats.committed += committed
        stats.gammas[len(self.drafts)] += 1
        stats.drafted_by.update(self.drafted_by)
        stats.accepted_by.update(self.drafted_by[: self.n_emitted_drafts])
        stats.alternatives += len(self.alternatives)
        stats.adopted += self.adopted
        stats.plain_seconds += committed * seconds.plain
