"""One round of speculative decoding over all running sequences: draft, verify, accept.

One round of one sequence, whose tokens are [a b c]; the target's cache holds a and b (`target_cached` 2), c is pending:

    draft   d, e                          at most gamma tokens, after c
    target  rows c, d, e                  one pass; their logits give p_0 (after c), p_1 (after d), p_2 (after e)
    verify  Verdict(1, x)                 d is accepted, e is rejected, and x is recovered in its place
    commit  tokens [a b c d x]            `target_cached` 4: e is truncated from the cache, x is the next pending token
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator
from itertools import accumulate
from time import perf_counter
from typing import NamedTuple

import numpy as np

from specserve.engine.base import Engine, Row
from specserve.errors import ConstraintError, MaskDeferred
from specserve.sampling.distribution import FloatArray, argmax, confidence, is_greedy, to_distribution
from specserve.sampling.logits import process_logits, score
from specserve.sampling.noise import Noise
from specserve.sequence import DrafterName, Sequence
from specserve.speculation.controller import Observation
from specserve.speculation.cost import Cost
from specserve.speculation.drafters import Drafters, Proposal
from specserve.speculation.rejection import RULES, Verdict, verify_greedy


class Plan(NamedTuple):
    """What one sequence does in a round: feed `rows` of its pending tokens, and verify up to `gamma` draft tokens.

    Only a plan that feeds all pending tokens decides new ones (none with max_tokens 0); fewer rows are a prefill chunk.
    The properties are those before the round is applied to the sequence.
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
        """Whether the rows of this round belong to a prompt whose tokens are scored."""
        return self.sequence.scores_prompt and not self.sequence.decoding

    @property
    def first_logits(self) -> int:
        """The index of the first row whose logits are needed; those of all later rows are too."""
        if self.scores_prompt:
            return 0
        return self.rows - 1 if self.decides else self.rows


class Outcome(NamedTuple):
    """What a round did for one plan.

    Args:
        position: number of tokens after the prompt before the round.
        target_cached: number of the sequence's tokens in the target's cache before the round.
        draft_share: the sequence's share of the time of drafting, by the cost model.
        target_share: its share of the rest of the round's time.
        drafters: the drafter of each verified draft.
        n_accepted: how many of them were accepted.
        plain_seconds: this sequence's share of the pass, had no sequence drafted; None unless a decode round has
            decided tokens.
        error: why the sequence failed.
    """

    position: int
    target_cached: int
    draft_share: float
    target_share: float
    drafters: abc.Sequence[DrafterName] = ()
    n_accepted: int = 0
    plain_seconds: float | None = None
    error: Exception | None = None

    @property
    def prefill(self) -> bool:
        """Whether the sequence was in prefill, the round that ends it included."""
        return self.position == 0


class Report(NamedTuple):
    """Seconds of a round's drafting and of its target pass, and what the round did for each sequence."""

    draft_seconds: float
    target_seconds: float
    outcomes: dict[Sequence, Outcome]


class TargetDistributions:
    """The target's distributions after 0, 1, 2, ... draft tokens, each computed when a rule first asks for it.

    A softmax over a large vocabulary takes time. Token, coupled and greedy verification never ask for rows after a
    rejection; block verification asks for those of all drafts, up to a draft of probability 0.

    Args:
        logits: the target's rows, from that of the last decided token on; overwritten by its next pass.
        sequence: the decided tokens.
        drafts: the draft tokens after them.
    """

    def __init__(self, logits: FloatArray, sequence: Sequence, drafts: list[int]) -> None:
        self.logits = logits
        self._sequence = sequence
        self._drafts = drafts
        self._shaped: dict[int, FloatArray] = {}
        self._distributions: dict[int, FloatArray] = {}

    def __getitem__(self, index: int, /) -> FloatArray:
        """The distribution at `index`, shape (vocabulary,)."""
        if index not in self._distributions:
            self._distributions[index] = to_distribution(self._shaped_at(index), self._sequence.sampling)
        return self._distributions[index]

    def argmax(self, index: int) -> int:
        """The most probable token at `index`."""
        return argmax(self._shaped_at(index))

    def confidence(self, index: int) -> float:
        """The probability of the most probable token at `index`, at temperature 1."""
        return confidence(self._shaped_at(index))

    def _shaped_at(self, index: int) -> FloatArray:
        if index not in self._shaped:
            self._shaped[index] = process_logits(self.logits[index], self._sequence, self._drafts[:index])
        return self._shaped[index]


def run_round(
    target: Engine,
    drafters: Drafters,
    plans: list[Plan],
    clock: Callable[[], float] = perf_counter,
    *,
    awaiting_first_token: int = 0,
) -> Report:
    """Draft for the plans with a gamma, run the target once over all rows, and decide tokens.

    Decided tokens are appended to the sequences, both KV caches are truncated to them, and the controller learns from
    what was accepted. Statistics and the caches of sequences that failed are left to the caller.

    Args:
        target: the target's engine; its slots hold what the sequences say.
        drafters: all drafters, with their controller.
        plans: one for each sequence of the round.
        clock: seconds.
        awaiting_first_token: number of sequences in prefill or about to be.

    Raises:
        EngineError: the target failed. Its caches are as before; the caller truncates those of the draft model.
    """
    started = clock()
    target_cost = drafters.controller.target_cost
    proposals = [drafters.begin(plan.sequence, plan.gamma, _noise(plan.sequence)) for plan in plans]
    # What attention reads for a row: its own sequence with our kernels, so the longest counts; all with llama.cpp's.
    kv_len = target.kv_len([plan.sequence.slot for plan in plans])
    drafters.propose(proposals, sum(plan.rows for plan in plans), kv_len, awaiting_first_token)
    drafted = clock()
    logits = target.forward(_batch(plans, proposals))
    passed = clock()
    costs = _plan_costs(plans, proposals, target_cost, kv_len)
    target_shares = _shares([cost.plain_seconds + cost.rows_seconds for cost in costs])
    by_model = [cost.model_seconds for cost in costs]
    draft_shares = _shares(by_model if any(by_model) else [float(plan.gamma > 0) for plan in plans])
    outcomes = {}
    for index, own_logits in _longest_deferred_first(plans, proposals, logits):
        sequence = plans[index].sequence
        before = Outcome(sequence.generated, sequence.target_cached, draft_shares[index], target_shares[index])
        outcomes[sequence] = _apply(
            target, drafters, plans[index], proposals[index], own_logits, cost=costs[index], before=before
        )
    done = clock()
    # Computing distributions and verifying take time for every row, so they belong to the cost of a pass.
    rows = sum(plan.rows + len(proposal.drafts) for plan, proposal in zip(plans, proposals, strict=True))
    target_cost.observe(rows, kv_len, done - drafted)
    return Report(drafted - started, passed - drafted, outcomes)


class PlanCost(NamedTuple):
    """Seconds that one plan adds to a round by the cost model.

    Args:
        plain_seconds: in the target's pass, without its drafts.
        rows_seconds: in the target's pass, for its drafts.
        model_seconds: in the draft model's passes of this round.
    """

    plain_seconds: float
    rows_seconds: float
    model_seconds: float


def _plan_costs(plans: list[Plan], proposals: list[Proposal], target_cost: Cost, kv_len: int) -> list[PlanCost]:
    """What each plan adds: decoding is shared equally, prefill and drafts are charged by their rows."""
    n_decoding = sum(plan.sequence.decoding for plan in plans)
    plain_rows = sum(plan.rows for plan in plans)
    draft_rows = sum(len(proposal.drafts) for proposal in proposals)
    decode = target_cost.seconds(n_decoding, kv_len)
    plain = target_cost.seconds(plain_rows, kv_len)
    # An estimate may fall with more rows; no plan is charged less than nothing.
    draft_row = max(0.0, target_cost.seconds(plain_rows + draft_rows, kv_len) - plain) / max(1, draft_rows)
    prompt_row = max(0.0, plain - decode) / max(1, plain_rows - n_decoding)
    return [
        PlanCost(
            decode / n_decoding if plan.sequence.decoding else plan.rows * prompt_row,
            len(proposal.drafts) * draft_row,
            0.0 if proposal.deferred else proposal.seconds,
        )
        for plan, proposal in zip(plans, proposals, strict=True)
    ]


def _shares(seconds: list[float]) -> list[float]:
    """Each one's share of the sum; equal shares of nothing."""
    total = sum(seconds)
    return [one / total if total else 1 / len(seconds) for one in seconds]


def _longest_deferred_first(
    plans: list[Plan], proposals: list[Proposal], logits: FloatArray
) -> Iterator[tuple[int, FloatArray]]:
    """Indices of the plans with their rows of logits, those first that were deferred most often in succession."""
    # Rows of logits of each plan, and where they begin.
    counts = [plan.rows - plan.first_logits + len(p.drafts) for plan, p in zip(plans, proposals, strict=True)]
    starts = [0, *accumulate(counts)]
    for index in sorted(range(len(plans)), key=lambda index: -plans[index].sequence.deferrals):
        yield index, logits[starts[index] : starts[index + 1]]


def _apply(
    target: Engine,
    drafters: Drafters,
    plan: Plan,
    proposal: Proposal,
    logits: FloatArray,
    *,
    cost: PlanCost,
    before: Outcome,
) -> Outcome:
    """Decide the tokens of one sequence, or take note of its prefill chunk, and say what the round did for it.

    Args:
        target: its cache is truncated to the decided tokens, and so is the draft model's.
        drafters: keep a proposal that is deferred; their controller learns.
        plan: what the sequence was to do in the round.
        proposal: its drafts, which the target has read.
        logits: the target's rows that belong to the plan, from `first_logits` on.
        cost: what the plan added to the round.
        before: the outcome as far as it is known.
    """
    sequence, controller = plan.sequence, drafters.controller
    verdict: Verdict | None = None
    try:
        if plan.scores_prompt:
            _score_prompt(sequence, logits[: plan.rows])
        if not plan.decides:
            sequence.target_cached += plan.rows
            return before
        p = TargetDistributions(logits[-1 - len(proposal.drafts) :], sequence, proposal.tokens)
        verdict = _verify(p, proposal)
        if sequence.speculation.max_drafts:
            controller.learn(sequence, _observations(sequence, p, proposal, verdict), p.confidence(verdict.n_accepted))
        _commit(sequence, p, proposal, verdict)
    except MaskDeferred:
        # Nothing was decided: the next round feeds the last token again, and verifies the same drafts.
        verdict = None
        sequence.deferrals += 1
        sequence.target_cached += plan.rows - 1
        drafters.defer(proposal)
    except (FloatingPointError, ConstraintError) as error:
        return before._replace(error=error)
    target.truncate(sequence.slot, sequence.target_cached)
    drafters.truncate(sequence, sequence.target_cached)
    if verdict is None or before.prefill:  # the round that ends a prefill has no drafts
        return before
    draft_seconds = cost.rows_seconds + proposal.seconds - proposal.prefill_seconds
    controller.count_round(sequence, verdict.n_accepted + 1, cost.plain_seconds, draft_seconds)
    return before._replace(drafters=proposal.drafters, n_accepted=verdict.n_accepted, plain_seconds=cost.plain_seconds)


def _noise(sequence: Sequence) -> Noise:
    return Noise(sequence.seed, sequence.choice, sequence.round_number, sequence.generated)


def _batch(plans: list[Plan], proposals: list[Proposal]) -> list[Row]:
    """Each sequence's pending tokens and then its draft tokens."""
    rows = []
    for plan, proposal in zip(plans, proposals, strict=True):
        sequence = plan.sequence
        first = sequence.target_cached
        tokens = sequence.tokens[first : first + plan.rows] + proposal.tokens
        rows += [Row(token, sequence.slot, first + i, i >= plan.first_logits) for i, token in enumerate(tokens)]
    return rows


def _verify(p: TargetDistributions, proposal: Proposal) -> Verdict:
    """Apply the rule that the request asks for."""
    sequence = proposal.sequence
    if is_greedy(sequence.sampling):
        return verify_greedy(p.argmax, proposal.tokens)
    return RULES[sequence.speculation.verification].verify(p, proposal.q, proposal.tokens, proposal.noise)


def _score_prompt(sequence: Sequence, logits: FloatArray) -> None:
    """Score the tokens of the prompt that follow these rows."""
    following = sequence.tokens[sequence.target_cached + 1 : sequence.prompt_length]
    top = sequence.top_logprobs or 0
    sequence.prompt_scores += [score(row, token, top) for row, token in zip(logits, following, strict=False)]


def _commit(sequence: Sequence, p: TargetDistributions, proposal: Proposal, verdict: Verdict) -> None:
    """Append the accepted draft tokens and the rule's own token."""
    n_accepted, next_token = verdict
    sequence.round_number += 1
    sequence.deferrals = 0
    decided = [*proposal.tokens[:n_accepted], next_token]
    if sequence.top_logprobs is not None:
        sequence.scores += [score(p.logits[index], token, sequence.top_logprobs) for index, token in enumerate(decided)]
    if sequence.keeps_sources:
        sequence.sources += [*proposal.drafters[:n_accepted], "target"]
    sequence.target_cached = len(sequence.tokens) + n_accepted
    sequence.tokens += decided


def _observations(
    sequence: Sequence, p: TargetDistributions, proposal: Proposal, verdict: Verdict
) -> list[Observation]:
    """What verification showed of the draft tokens that it reached, up to the first rejected one.

    The first position of a round is always reached, so proposals that were not drafted are judged by it too.
    """
    n_accepted, next_token = verdict
    # Where the probability of acceptance is known, it says more than the outcome; for block verification it is a proxy.
    knows_probability = sequence.speculation.verification != "coupled" and not is_greedy(sequence.sampling)
    first = proposal.tokens[0] if n_accepted else next_token
    observations = []
    for undrafted in proposal.undrafted:
        accepted = float(p[0][undrafted.token]) if knows_probability else float(undrafted.token == first)
        observations.append(Observation(undrafted.drafter, undrafted.confidence, accepted, None))
    for index, draft in enumerate(proposal.drafts[: n_accepted + 1]):
        accepted = float(np.minimum(p[index], draft.q).sum()) if knows_probability else float(index < n_accepted)
        observations.append(Observation(draft.drafter, draft.confidence, accepted, p.confidence(index)))
    return observations
