"""One round: draft, verify, accept. The engine calls of speculative decoding, and nothing of serving."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

from specserve.engine.base import Engine, FloatArray, Row
from specserve.errors import ConstraintError
from specserve.sequence import Sequence
from specserve.speculation.drafters import Drafters, Proposal, Wish
from specserve.speculation.noise import Noise
from specserve.speculation.rejection import RULES
from specserve.speculation.scores import score
from specserve.speculation.shaping import distribution_behind


class Plan(NamedTuple):
    """What one sequence does in a round: feed `rows` of its pending tokens, and verify up to `gamma` drafts.

    Only a plan that feeds all pending tokens decides new ones; fewer rows are a chunk of a prompt.
    """

    sequence: Sequence
    rows: int
    gamma: int

    @property
    def decides(self) -> bool:
        """Whether this round gives the sequence at least one new token."""
        return self.rows == self.sequence.target_pending and self.sequence.remaining > 0

    @property
    def scores_prompt(self) -> bool:
        """Whether the rows of this round are a part of a prompt whose tokens are scored."""
        return self.sequence.scores_prompt and not self.sequence.generated

    @property
    def first_logits(self) -> int:
        """The first of the rows whose logits are wanted; from it on all are."""
        if self.scores_prompt:
            return 0
        return self.rows - 1 if self.decides else self.rows


class Times(NamedTuple):
    """Seconds a round spent in the drafter, in the target's forward pass, and on the rest."""

    draft: float
    target: float
    other: float


class Report(NamedTuple):
    """What a round took, and which sequences cannot go on, with the reason."""

    times: Times
    failed: list[tuple[Sequence, Exception]]


class TargetRows:
    """The target's distributions by place, each computed when a rule first asks for it.

    Places behind a rejection are never asked for, and over a wide vocabulary a softmax is worth sparing.
    """

    def __init__(self, logits: FloatArray, sequence: Sequence, drafts: list[int]) -> None:
        self._logits = logits
        self._sequence = sequence
        self._drafts = drafts
        self._known: dict[int, FloatArray] = {}

    def __getitem__(self, place: int, /) -> FloatArray:
        """The distribution at `place`, shape (vocabulary,)."""
        if place not in self._known:
            self._known[place] = distribution_behind(self._logits[place], self._sequence, self._drafts[:place])
        return self._known[place]


def run_round(target: Engine, drafters: Drafters, plans: list[Plan]) -> Report:
    """Draft for every plan that wants it, run the target once over all rows, and decide tokens.

    Decided tokens are appended to the plans' sequences, and both caches are cut back to what was decided.

    Raises:
        EngineError: the target failed; no text has changed.
    """
    started = perf_counter()
    wishes = [Wish(plan.sequence, plan.gamma, _noise(plan.sequence)) for plan in plans]
    proposals = drafters.propose(wishes)
    drafted = perf_counter()
    logits = target.forward(_target_rows(plans, proposals))
    verified = perf_counter()
    first = 0
    failed: list[tuple[Sequence, Exception]] = []
    for plan, proposal, wish in zip(plans, proposals, wishes, strict=True):
        sequence = plan.sequence
        mine = logits[first : first + plan.rows - plan.first_logits + len(proposal.tokens)]
        first += len(mine)
        try:
            if plan.scores_prompt:
                _score_prompt(sequence, mine[: plan.rows])
            if plan.decides:
                _accept(target, sequence, mine[-1 - len(proposal.tokens) :], proposal, wish.noise)
                drafters.keep(sequence, sequence.target_cached)
            else:
                sequence.target_cached += plan.rows
        except (FloatingPointError, ConstraintError) as error:
            failed.append((sequence, error))
    return Report(Times(drafted - started, verified - drafted, perf_counter() - verified), failed)


def _noise(sequence: Sequence) -> Noise:
    return Noise(sequence.seed, sequence.choice, sequence.rounds, sequence.generated)


def _target_rows(plans: list[Plan], proposals: list[Proposal]) -> list[Row]:
    """Each sequence's pending tokens and then its drafts; logits from the last pending token on."""
    rows = []
    for plan, proposal in zip(plans, proposals, strict=True):
        sequence = plan.sequence
        first = sequence.target_cached
        tokens = sequence.tokens[first : first + plan.rows] + proposal.tokens
        rows += [Row(token, sequence.slot, first + i, i >= plan.first_logits) for i, token in enumerate(tokens)]
    return rows


def _score_prompt(sequence: Sequence, logits: FloatArray) -> None:
    """Score the tokens of the prompt that stand behind these rows."""
    behind = sequence.tokens[sequence.target_cached + 1 : sequence.prompt_length]
    top = sequence.top_logprobs or 0
    sequence.prompt_scores += [score(row, token, top) for row, token in zip(logits, behind, strict=False)]


def _accept(target: Engine, sequence: Sequence, logits: FloatArray, proposal: Proposal, noise: Noise) -> None:
    """Let the verification rule decide, append its tokens, and cut the target's cache back to them."""
    p = TargetRows(logits, sequence, proposal.tokens)
    verify = RULES[sequence.speculation.verification].verify
    n_accepted, next_token = verify(p, proposal.q, proposal.tokens, noise)
    kept = len(sequence.tokens) + n_accepted
    if sequence.generated:  # the round that ends a prefill is none of speculation's
        sequence.account.add_round(proposal.drafter, len(proposal.tokens), n_accepted)
    sequence.rounds += 1
    decided = [*proposal.tokens[:n_accepted], next_token]
    if sequence.top_logprobs is not None:
        top = sequence.top_logprobs
        sequence.scores += [score(row, token, top) for row, token in zip(logits, decided, strict=False)]
    sequence.tokens += decided
    sequence.target_cached = kept
    if n_accepted < len(proposal.tokens):
        target.cut(sequence.slot, kept)
