"""One round of one sequence: planned by the scheduler, drafted for, verified, and charged with its part of the time.

A `Step` is all that is known of it. The scheduler makes it, the round fills it in (round.py), and statistics, metrics
and traces read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specserve.engine.base import FloatArray, Row
from specserve.errors import ConstraintError, Contained, MaskDeferred
from specserve.sampling.noise import Noise
from specserve.sequence import DrafterName, Sequence


class Draft(NamedTuple):
    """A draft token, the distribution q it was sampled from, its drafter, and the drafter's confidence there.

    q is None where the request is greedy: its verification needs none, and 150,000 numbers take 0.14 ms a draft.
    Confidence is a model's largest probability at temperature 1; other drafters estimate how likely the token is right.
    """

    token: int
    q: FloatArray | None
    drafter: DrafterName
    confidence: float


class Refused(NamedTuple):
    """The first token of an offer for a round's first position, nothing of which was drafted.

    p_0 shows all the same if it was right, so its drafter learns.
    """

    token: int
    drafter: DrafterName
    confidence: float


class Alternative(NamedTuple):
    """A token that may be recovered where the draft at `draft_index` is the first to be rejected.

    The target reads it beside the drafts (round.py). Each is the draft model's next choice after the draft itself.

    Args:
        draft_index: the index of the draft that it would replace.
        token: the alternative token.
        confidence: its probability among all tokens but the draft's and the alternatives before it.
        gain: the estimated probability that it is recovered; the round then gives one token more.
    """

    draft_index: int
    token: int
    confidence: float
    gain: float


@dataclass(eq=False)
class Step:
    """What one sequence does in one round.

    The scheduler plans it:

    Args:
        sequence: whose step it is.
        cached: how many of its tokens the target's cache holds before the round.
        rows: how many of its pending tokens the target reads; fewer than all in a prefill chunk but the last.
        max_drafts: the most rows for draft tokens and alternatives after them; 0 in a prefill.
        running: number of sequences that are running.

    Drafting adds:

        drafts: in order.
        refused: one for each drafter whose offer was refused.
        possible: alternatives that the target could read.
        alternatives: those of them that it reads.
        p_all_accepted: the estimated probability that all drafts are accepted.
        model_ended: whether the draft model drafts no more in this round.
        draft_model_seconds: the part of the draft model's passes, by the cost model.

    Verification adds:

        n_accepted: how many drafts were accepted.
        n_decided: how many tokens the round decided: these, the rule's own, and one after an adopted alternative.
        adopted: whether an alternative was recovered, and the round decided one more token after it.
        is_decode_round: whether it decided tokens, and was no prefill.
        error: why the sequence failed.

    The time shares (costs.py) are:

        plain_seconds: what the target's pass would have taken of its time, had no sequence drafted.
        target_drafts_seconds: of the target's pass, for the drafts.
        target_share: of the time of the target's pass, and of what follows it.
        draft_seconds, target_seconds: the part of the round's time for drafting, and for the target's pass.

    The recorder adds `other_seconds`, the part of all else.
    """

    sequence: Sequence
    cached: int
    rows: int
    max_drafts: int = 0
    running: int = 1
    drafts: list[Draft] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    possible: list[Alternative] = field(default_factory=list)
    alternatives: list[Alternative] = field(default_factory=list)
    p_all_accepted: float = 1.0
    model_ended: bool = False
    draft_model_seconds: float = 0.0
    n_accepted: int = 0
    n_decided: int = 0
    adopted: bool = False
    is_decode_round: bool = False
    error: Exception | None = None
    plain_seconds: float = 0.0
    target_drafts_seconds: float = 0.0
    target_share: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    other_seconds: float = 0.0
    # What holds before the round: whether it is a prefill, of the prompt or of what a preempted sequence had before;
    # whether it is to decide tokens (none is wanted with `max_tokens` 0), whether its rows belong to a prompt that is
    # scored, and the length of the answer.
    in_prefill: bool = field(init=False)
    decides: bool = field(init=False)
    scores_rows: bool = field(init=False)
    position: int = field(init=False)
    noise: Noise = field(init=False)
    # The grammar's mask after so many drafts, shape (vocabulary,); None allows all tokens.
    _mask: NDArray[np.bool_] | None = None
    _mask_after: int = -1

    def __post_init__(self) -> None:
        sequence = self.sequence
        self.in_prefill = not sequence.generated or self.cached + 1 < len(sequence.tokens)
        self.decides = self.cached + self.rows == len(sequence.tokens) and sequence.remaining > 0
        self.scores_rows = sequence.scores_prompt and not sequence.generated
        self.position = sequence.generated
        # A position that is drafted again gets new uniform numbers, by `round_number`, but the same race, by
        # `generated` + index.
        self.noise = Noise(
            secret=sequence.secret,
            round_number=sequence.round_number,
            seed=sequence.seed,
            choice=sequence.choice,
            position=sequence.generated,
        )

    # ---- drafts ----

    @property
    def draft_tokens(self) -> list[int]:
        """The draft tokens, in order."""
        return [draft.token for draft in self.drafts]

    @property
    def q(self) -> list[FloatArray]:
        """The distributions that the drafts were sampled from, in order; none where the request is greedy."""
        return [draft.q for draft in self.drafts if draft.q is not None]

    @property
    def drafted_by(self) -> list[DrafterName]:
        """The drafters of the drafts, in order."""
        return [draft.drafter for draft in self.drafts]

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

    def add(self, draft: Draft, acceptance: float) -> None:
        """Draft one more token; it stays in the round whatever it is."""
        self.drafts.append(draft)
        self.p_all_accepted *= acceptance

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

    # ---- the target's pass ----

    @property
    def rows_with_logits(self) -> int:
        """How many of `rows` need logits: the last if it decides, all of a scored prompt."""
        return self.rows if self.scores_rows else int(self.decides)

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

    def split(self, logits: FloatArray) -> StepLogits:
        """Split the logits of this step's rows by what they are for.

        Args:
            logits: shape (`rows_with_logits` + `draft_rows`, vocabulary).
        """
        alternatives = len(logits) - len(self.alternatives)
        return StepLogits(
            prompt=logits[: self.rows if self.scores_rows else 0],
            verified=logits[alternatives - len(self.drafts) - 1 : alternatives] if self.decides else logits[:0],
            alternatives=logits[alternatives:],
        )

    # ---- what the round has brought ----

    @property
    def emitted(self) -> list[int]:
        """The tokens that the round has decided, without what follows the end of the answer."""
        first = self.sequence.prompt_length + self.position
        return self.sequence.tokens[first : first + self.n_decided]

    @property
    def accepted(self) -> int:
        """How many drafts were accepted and emitted; of drafts after the end of the text none counts."""
        return min(self.n_accepted, len(self.emitted))

    def count(self, now: float) -> None:
        """Add the round to the statistics of its sequence; the round that ends a prefill is no decode round.

        Args:
            now: when the round ended, in seconds.
        """
        sequence, stats, times = self.sequence, self.sequence.stats, self.sequence.timestamps
        if self.emitted:
            times.last_token = now
            times.first_token = now if times.first_token is None else times.first_token
        if self.in_prefill:
            stats.prefill_seconds += self.draft_seconds + self.target_seconds + self.other_seconds
        else:
            stats.draft_seconds += self.draft_seconds
            stats.target_seconds += self.target_seconds
            stats.other_seconds += self.other_seconds
        if not self.is_decode_round:
            return
        # Plain decoding takes a step for the EOS token as well.
        decided = len(self.emitted) + sequence.ended_by_eos
        stats.rounds += 1
        stats.decided += decided
        stats.gammas[len(self.drafts)] += 1
        stats.drafted_by.update(self.drafted_by)
        stats.accepted_by.update(self.drafted_by[: self.accepted])
        stats.alternatives += len(self.alternatives)
        stats.adopted += self.adopted
        stats.plain_seconds += decided * self.plain_seconds


class StepLogits(NamedTuple):
    """The target's logits of one step, each of shape (rows, vocabulary).

    Args:
        prompt: after each token of a prompt that is scored.
        verified: after the last pending token and after each draft; none if the step decides nothing.
        alternatives: after each alternative.
    """

    prompt: FloatArray
    verified: FloatArray
    alternatives: FloatArray
