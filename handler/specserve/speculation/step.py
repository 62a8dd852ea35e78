"""One sequence's part of a round: what the scheduler plans, what is drafted and committed, and its part of the time.

The scheduler makes a `Step`, the round fills it in (round.py), and statistics, metrics and traces read it.
"""

from __future__ import annotations

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
    """A token that may be recovered where a draft is the first to be rejected (alternatives.py).

    Args:
        draft_index: the index of the draft that it would replace.
        token: the draft model's next choice after the draft and the alternatives before it.
        share: its share of the probability that these leave.
        gain: the estimated probability that it is recovered; the round then commits one more token.
    """

    draft_index: int
    token: int
    share: float
    gain: float


class Draft(NamedTuple):
    """A draft token.

    Args:
        token: the token.
        q: the distribution that it was sampled from, shape (vocabulary,); None where the request is greedy, whose
            verification needs none.
        drafter: who drafted it.
        confidence: a model's largest probability at temperature 1; other drafters estimate how likely the token is
            right.
        acceptance: the estimated probability that it is accepted if all drafts before it are.
        alternatives: to it, which the target may read or not.
    """

    token: int
    q: FloatArray | None
    drafter: DrafterName
    confidence: float
    acceptance: float = 1.0
    alternatives: tuple[Alternative, ...] = ()


@dataclass
class TimeShare:
    """One step's part of the seconds of a round, which sequences share (costs.py).

    Args:
        draft: of drafting.
        target: of the target's pass.
        other: of all else.
        draft_model: of the draft model's passes, by the cost table.
        plain: what the target's pass would have taken of its time, had no sequence drafted, by the cost table.
        target_drafts: what its drafts add to the target's pass, by the cost table.
        of_target: the share of the target's pass, and of what follows it.
    """

    draft: float = 0.0
    target: float = 0.0
    other: float = 0.0
    draft_model: float = 0.0
    plain: float = 0.0
    target_drafts: float = 0.0
    of_target: float = 0.0


@dataclass(eq=False)
class Step:
    """What one sequence does in one round.

    The scheduler plans:

    Args:
        sequence: whose step it is.
        cached: how many of its tokens the target's cache holds before the round.
        rows: how many of its pending tokens the target reads; fewer than all in a prefill chunk but the last.
        max_drafts: the most rows for draft tokens and alternatives after them; 0 in a prefill.
        running: number of sequences that are running.

    The round adds:

        drafts: in order.
        refused: the first token of each proposal for the round's first position of which nothing was drafted; p_0 shows
            all the same if it was right, so its drafter learns.
        alternatives: those to the drafts that the target reads.
        model_ended: whether the draft model drafts no more in this round.
        n_accepted: how many drafts were accepted.
        n_committed: how many tokens the round committed: these, the rule's own, and one after an adopted alternative.
        adopted: whether an alternative was recovered, and the round committed one more token after it.
        error: why the sequence failed.
        seconds: its part of the round's time.
    """

    sequence: Sequence
    cached: int
    rows: int
    max_drafts: int = 0
    running: int = 1
    drafts: list[Draft] = field(default_factory=list)
    refused: list[Draft] = field(default_factory=list)
    alternatives: list[Alternative] = field(default_factory=list)
    model_ended: bool = False
    n_accepted: int = 0
    n_committed: int = 0
    adopted: bool = False
    error: Exception | None = None
    seconds: TimeShare = field(default_factory=TimeShare)
    # What holds before the round: the length of the answer; whether the step is a prefill, of the prompt or of what a
    # preempted sequence had before; whether it is to commit tokens (with `max_tokens` 0 none is wanted).
    position: int = field(init=False)
    in_prefill: bool = field(init=False)
    commits: bool = field(init=False)
    noise: Noise = field(init=False)
    # The grammar's mask after so many drafts, shape (vocabulary,); None allows all tokens.
    _mask: NDArray[np.bool_] | None = None
    _mask_after: int = -1

    def __post_init__(self) -> None:
        sequence = self.sequence
        self.position = sequence.generated
        self.in_prefill = not sequence.generated or self.cached + 1 < len(sequence.tokens)
        self.commits = self.cached + self.rows == len(sequence.tokens) and sequence.remaining > 0
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
        """The draft tokens, in order."""
        return [draft.token for draft in self.drafts]

    @property
    def drafted_by(self) -> list[DrafterName]:
        """The drafters of the drafts, in order."""
        return [draft.drafter for draft in self.drafts]

    @property
    def p_all_accepted(self) -> float:
        """The estimated probability that all drafts are accepted."""
        return prod(draft.acceptance for draft in self.drafts)

    @property
    def length(self) -> int:
        """Number of tokens of the sequence, draft tokens included."""
        return len(self.sequence.tokens) + len(self.drafts)

    def tokens_from(self, first: int) -> list[int]:
        """The tokens of the sequence from a position on, draft tokens included."""
        return [*self.sequence.tokens[first:], *self.draft_tokens[max(0, first - len(self.sequence.tokens)) :]]

    @property
    def draft_rows(self) -> int:
        """How many rows of the target's pass are drafts and alternatives."""
        return len(self.drafts) + len(self.alternatives)

    @property
    def rows_left(self) -> int:
        """How many more tokens may be drafted, or read as alternatives."""
        return self.max_drafts - self.draft_rows

    def add(self, draft: Draft) -> None:
        """Draft one more token; it stays in the round whatever it is."""
        self.drafts.append(draft)

    def contained(self) -> Contained:
        """Keep what is raised within from the other steps of the round: it becomes this one's `error`."""
        return Contained(self.sequence.info.request, self._fail)

    def _fail(self, error: Exception) -> None:
        self.error = error

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
        """Whether nothing can follow the drafts: the last is an end token, or the grammar allows no other token.

        Args:
            end_tokens: those that end an answer.
        """
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
        sequence, after = self.sequence, self.cached + self.rows
        tokens = sequence.tokens[self.cached : after] + self.draft_tokens
        without_logits = self.rows - self.rows_with_logits
        rows = [
            Row(token, sequence.slot, self.cached + number, number >= without_logits)
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
    def accepted(self) -> int:
        """How many drafts were accepted and emitted; of drafts after the end of the text none counts."""
        return min(self.n_accepted, len(self.emitted))

    def count(self, now: float) -> None:
        """Add the round to the statistics of its sequence; the round that ends a prefill is no decode round.

        Args:
            now: when the round ended, in seconds.
        """
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
        stats.accepted_by.update(self.drafted_by[: self.accepted])
        stats.alternatives += len(self.alternatives)
        stats.adopted += self.adopted
        stats.plain_seconds += committed * seconds.plain
