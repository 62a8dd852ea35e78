"""A proposal: the draft tokens of one sequence in one round, as drafters.py makes them and round.py verifies them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specserve.errors import ConstraintError, MaskDeferred
from specserve.sampling.distribution import FloatArray
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
        draft_index: of the draft.
        token: another than the draft's.
        confidence: its probability among all tokens but the draft's and the alternatives before it.
        gain: the estimated probability that it is recovered; the round then gives one token more.
    """

    draft_index: int
    token: int
    confidence: float
    gain: float


@dataclass
class Proposal:
    """The drafts of one sequence in one round.

    Args:
        sequence: that they follow.
        max_drafts: the most that it may have.
        noise: the random numbers of this round.
        drafts: in order.
        refused: one for each drafter whose offer was refused.
        possible: alternatives that the target could read.
        alternatives: those of them that it reads.
        reached: the estimated probability that all drafts are accepted.
        model_may_pay: whether tokens of the draft model would be worth their time if all were accepted; always in mode
            fixed, which does not ask.
        ended: whether the draft model has nothing more to add.
        draft_model_seconds: the sequence's part of the draft model's passes, by the cost model.
        long_catch_up_seconds: the part of these in which the model read more than a few tokens (controller.py).
    """

    sequence: Sequence
    max_drafts: int
    noise: Noise
    drafts: list[Draft] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    possible: list[Alternative] = field(default_factory=list)
    alternatives: list[Alternative] = field(default_factory=list)
    reached: float = 1.0
    model_may_pay: bool = True
    ended: bool = False
    draft_model_seconds: float = 0.0
    long_catch_up_seconds: float = 0.0
    # The grammar's mask after so many drafts, shape (vocabulary,); None allows all tokens.
    _mask: NDArray[np.bool_] | None = None
    _mask_after: int = -1

    def compute_mask(self) -> bool:
        """Compute the grammar's mask after the drafts; False if the round has no time for it."""
        constraint = self.sequence.constraint
        if constraint is not None and self._mask_after != len(self.drafts):
            try:
                self._mask = constraint.allowed([*self.sequence.answer, *self.tokens])
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

    def add(self, draft: Draft, acceptance: float) -> None:
        """Draft one more token; it stays in the round whatever it is."""
        self.drafts.append(draft)
        self.reached *= acceptance

    @property
    def remaining(self) -> int:
        """How many more tokens may be drafted, or read as alternatives."""
        return self.max_drafts - len(self.drafts) - len(self.alternatives)

    @property
    def n_rows(self) -> int:
        """How many rows of the target's pass are its drafts and alternatives."""
        return len(self.drafts) + len(self.alternatives)

    def recovered_alternative(self, n_accepted: int, token: int) -> int | None:
        """The number of the alternative that holds the token after the accepted drafts; None if no one does."""
        places = [(one.draft_index, one.token) for one in self.alternatives]
        return places.index((n_accepted, token)) if (n_accepted, token) in places else None

    @property
    def tokens(self) -> list[int]:
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
