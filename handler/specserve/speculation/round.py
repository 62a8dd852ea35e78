"""One round of speculative decoding over all running sequences: draft, verify, accept.

One round of one sequence, whose tokens are [a b c]; the target's cache holds a and b (`target_cached` 2), c is pending:

    draft   d, e                          at most gamma tokens, after c
    target  rows c, d, e                  one pass; their logits give p_0 (after c), p_1 (after d), p_2 (after e)
    verify  Verdict(1, x)                 d is accepted, e is rejected, and x is recovered in its place
    commit  tokens [a b c d x]            `target_cached` 4: e is truncated from the cache, x is the next pending token

The scheduler gives the grammar masks of a round a budget of time. Where it is spent, `process_logits` raises
`MaskDeferred`: the sequence is deferred. Nothing is decided for it, and the next round verifies the same drafts with
the same noise. New drafts would bias the output: which masks verification needs depends on what it accepts, so some
verdicts are deferred more often than others, and redrawing would make just these rarer. The rows are fed again, since
their logits are overwritten by then. The masks are kept, so it gets further; a mask that takes longer than a whole
budget fails the request.

Of a `Sequence` (sequence.py): `tokens` are the prompt and what is decided after it, `generated` is the number of tokens
after the prompt, and from the first of these on the sequence is `decoding`; `target_cached` is how many leading tokens
the target's cache holds, `target_pending` how many it has not been fed: 1 while decoding; `remaining` is how many more
may be decided. `speculation.mode` is off (no drafts), fixed (a number of them) or auto (the controller's choice).

Of a `Proposal` (drafters.py): `drafts` are a sequence's drafts of the round, each with its token, the distribution q it
was sampled from (one-hot for all drafters but the model), its drafter, and the drafter's confidence there: a model's
largest probability, else an estimate of how likely the token is right. `refused` are the first tokens of offers for the
round's first position that were turned down whole; their drafters are judged by them all the same. `deferred` proposals
come from an earlier round. `model_may_pay` is false where not even drafts that are all accepted would be worth the
draft model's time. `draft_model_seconds` are the sequence's part of that time, `long_catch_up_seconds` the part of
these in which the model read more than a few tokens that it had missed, mostly the prompt.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import numpy as np

from specserve.engine.base import Engine, Row
from specserve.errors import ConstraintError, MaskDeferred
from specserve.sampling.distribution import FloatArray, argmax, confidence, is_greedy, to_distribution
from specserve.sampling.logits import process_logits, score
from specserve.sampling.noise import Noise
from specserve.sequence import DrafterName, Sequence
from specserve.speculation.acceptance import Observation
from specserve.speculation.charges import Charge, Work, charges
from specserve.speculation.controller import Controller
from specserve.speculation.drafters import Drafters, Proposal
from specserve.speculation.rejection import RULES, Verdict, accept_equal


class Plan(NamedTuple):
    """What one sequence does in a round; valid until the round is applied to it.

    Args:
        sequence: whose plan it is.
        rows: how many of its pending tokens the target reads: all to decide new ones, fewer for a prefill chunk.
        max_drafts: the most draft tokens that are verified after them; 0 in a prefill.
    """

    sequence: Sequence
    rows: int
    max_drafts: int

    @property
    def decides(self) -> bool:
        """Whether the round is to decide tokens; none is wanted with max_tokens 0."""
        return self.rows == self.sequence.target_pending and self.sequence.remaining > 0

    @property
    def scores_rows(self) -> bool:
        """Whether the rows of this round belong to a prompt whose tokens are scored."""
        return self.sequence.scores_prompt and not self.sequence.decoding

    @property
    def rows_without_logits(self) -> int:
        """How many of its first rows need no logits; all later ones, those of the drafts included, do.

        Rows with logits: of a prefill chunk none, of the last one 1, of a decode round with 2 drafts 3, of a scored
        chunk all.
        """
        if self.scores_rows:
            return 0
        return self.rows - 1 if self.decides else self.rows


class Outcome(NamedTuple):
    """What a round did for one sequence.

    Args:
        generated_before: number of its tokens after the prompt before the round; 0 in prefill.
        cached_before: number of its tokens in the target's cache before the round.
        charge: its estimated part of the round's time (charges.py).
        is_decode_round: whether it decided tokens and its prefill was over before; False if deferred.
        drafted_by: the drafter of each verified draft.
        n_accepted: how many of them were accepted.
        error: why the sequence failed.
    """

    generated_before: int
    cached_before: int
    charge: Charge
    is_decode_round: bool = False
    drafted_by: abc.Sequence[DrafterName] = ()
    n_accepted: int = 0
    error: Exception | None = None


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
    """Draft for the plans, run the target once over all rows, and decide tokens.

    Decided tokens are appended to the sequences, both KV caches are truncated to them, and the controller learns from
    what was accepted. Statistics and the caches of sequences that failed are left to the caller.

    Args:
        target: the target's engine; its slots hold what the sequences say.
        drafters: all drafters, with their controller.
        plans: one for each sequence of the round, in the order in which they are verified.
        clock: seconds.
        awaiting_first_token: number of sequences in prefill or about to be; they make time more valuable.

    Raises:
        EngineError: the target failed. Its caches are as before; the caller truncates those of the draft model.
    """
    started = clock()
    # The deferred ones, or empty ones.
    proposals = [drafters.begin(plan.sequence, plan.max_drafts, _noise(plan.sequence)) for plan in plans]
    # Tokens of the target's cache that attention reads for a row: of the longest of these sequences with our kernels,
    # of all slots with llama.cpp's.
    kv_len = target.kv_len([plan.sequence.slot for plan in plans])
    # First what a lookup, the client's prediction and the grammar offer, then tokens of the draft model, one at a time,
    # with the others asked again after each; as long as that is worth its time (controller.py).
    drafters.propose(proposals, sum(plan.rows for plan in plans), kv_len, awaiting_first_token)
    drafted = clock()
    logits = target.forward(_batch(plans, proposals))
    passed = clock()
    cost = drafters.controller.target_cost
    works = [_work(plan, proposal) for plan, proposal in zip(plans, proposals, strict=True)]
    # Before the loop: applying a plan changes its properties.
    no_masks_or_scores = all(_no_masks_or_scores(plan) for plan in plans)
    outcomes, first = {}, 0
    for plan, proposal, charge in zip(plans, proposals, charges(works, cost, kv_len), strict=True):
        end = first + plan.rows - plan.rows_without_logits + len(proposal.drafts)
        outcomes[plan.sequence] = _apply(target, drafters, plan, proposal, logits[first:end], charge=charge)
        first = end
    done = clock()
    # Computing distributions and verifying take time for every row, so they belong to the cost of a pass; the grammar
    # masks and log-probabilities of some sequences do not.
    measured = done if no_masks_or_scores else passed
    cost.observe(sum(work.rows + work.drafts for work in works), kv_len, measured - drafted)
    return Report(drafted - started, passed - drafted, outcomes)


def _noise(sequence: Sequence) -> Noise:
    # Uniform numbers are keyed by `round_number`: a rejected position is never sampled with its old ones again. It
    # counts rounds that have decided tokens, so a deferred round is repeated with the same. Races are keyed by
    # the position alone, `generated` + index.
    return Noise(sequence.seed, sequence.choice, sequence.round_number, sequence.generated)


def _batch(plans: list[Plan], proposals: list[Proposal]) -> list[Row]:
    """Each sequence's pending tokens and then its draft tokens."""
    rows = []
    for plan, proposal in zip(plans, proposals, strict=True):
        sequence = plan.sequence
        first = sequence.target_cached
        tokens = sequence.tokens[first : first + plan.rows] + proposal.tokens
        rows += [Row(token, sequence.slot, first + i, i >= plan.rows_without_logits) for i, token in enumerate(tokens)]
    return rows


def _no_masks_or_scores(plan: Plan) -> bool:
    """Whether its sequence needs no grammar mask and no log-probabilities."""
    sequence = plan.sequence
    return sequence.constraint is None and sequence.top_logprobs is None and not plan.scores_rows


def _work(plan: Plan, proposal: Proposal) -> Work:
    # The seconds of a deferred proposal were spent in an earlier round.
    seconds = 0.0 if proposal.deferred else proposal.draft_model_seconds
    return Work(plan.sequence.decoding, plan.rows, len(proposal.drafts), seconds)


def _apply(
    target: Engine, drafters: Drafters, plan: Plan, proposal: Proposal, logits: FloatArray, *, charge: Charge
) -> Outcome:
    """Decide the tokens of one sequence, or take note of its prefill chunk, and say what the round did for it.

    Afterwards the caches hold what is decided, but for its last token. An error leaves them to the caller.
    """
    sequence, was_decoding = plan.sequence, plan.sequence.decoding
    outcome = Outcome(sequence.generated, sequence.target_cached, charge)
    try:
        if plan.scores_rows:
            _score_prompt(sequence, logits[: plan.rows])
        if not plan.decides:
            sequence.target_cached += plan.rows
            return outcome
        # The last rows: those before belong to a prompt that is scored.
        n_accepted = _decide(drafters.controller, proposal, logits[-1 - len(proposal.drafts) :])
    except MaskDeferred:
        sequence.deferrals += 1
        sequence.target_cached += plan.rows - 1
        drafters.defer(proposal)
        _truncate(target, drafters, sequence)
        return outcome
    except (FloatingPointError, ConstraintError) as error:
        return outcome._replace(error=error)
    _truncate(target, drafters, sequence)
    if not was_decoding:
        return outcome
    # `plain_seconds` of its charge: its part of the target's pass, had no sequence drafted. What its drafts cost: their
    # rows of the target's pass, and its part of the draft model's passes, if deferred in an earlier round.
    extra_seconds = charge.target_drafts_seconds + proposal.draft_model_seconds - proposal.long_catch_up_seconds
    # The first long catch-up is never counted. `stats` has the drafts of earlier rounds only.
    catch_up_seconds = proposal.long_catch_up_seconds if sequence.stats.drafted_by["model"] else 0.0
    balance = drafters.controller.balance(sequence)
    balance.count_round(n_accepted + 1, charge.plain_seconds, extra_seconds, catch_up_seconds)
    return outcome._replace(is_decode_round=True, drafted_by=proposal.drafted_by, n_accepted=n_accepted)


def _truncate(target: Engine, drafters: Drafters, sequence: Sequence) -> None:
    target.truncate(sequence.slot, sequence.target_cached)
    drafters.truncate(sequence, sequence.target_cached)


def _decide(controller: Controller, proposal: Proposal, logits: FloatArray) -> int:
    """Verify the drafts, and append the accepted ones and the rule's own token; returns how many were accepted.

    Args:
        controller: learns; also where nothing was drafted, since the target's confidence says if the next draft pays.
        proposal: its drafts, which the target has read.
        logits: the target's rows from that of the last decided token on.

    Raises:
        MaskDeferred: nothing was decided.
        FloatingPointError: the logits are not finite.
        ConstraintError: the request's grammar has become too costly to follow.
    """
    sequence = proposal.sequence
    p = TargetDistributions(logits, sequence, proposal.tokens)
    verdict = _verify(p, proposal)
    if sequence.speculation.mode != "off":
        observations = _observations(sequence, p, proposal, verdict)
        # The target's confidence where it decided the next token: it predicts if the draft model's next one will be
        # accepted. After a rejection the last observation has it, too. It counts twice on purpose: counted once, the
        # slowest recorded answer ran at 0.998 of plain decoding instead of 1.018.
        next_confidence = p.confidence(verdict.n_accepted) if proposal.model_may_pay else None
        controller.acceptance.learn(sequence, observations, next_confidence)
    _commit(sequence, p, proposal, verdict)
    return verdict.n_accepted


def _verify(p: TargetDistributions, proposal: Proposal) -> Verdict:
    """Apply the rule that the request asks for."""
    sequence = proposal.sequence
    if is_greedy(sequence.sampling):
        return accept_equal(p.argmax, proposal.tokens)
    return RULES[sequence.speculation.verification].verify(p, proposal.q, proposal.tokens, proposal.noise)


def _score_prompt(sequence: Sequence, logits: FloatArray) -> None:
    """Score the tokens of the prompt that follow these rows."""
    following = sequence.tokens[sequence.target_cached + 1 : sequence.prompt_length]
    top = sequence.top_logprobs or 0
    # Nothing follows the prompt's last token.
    sequence.prompt_scores += [score(row, token, top) for row, token in zip(logits, following, strict=False)]


def _commit(sequence: Sequence, p: TargetDistributions, proposal: Proposal, verdict: Verdict) -> None:
    """Append the accepted drafts and the rule's own token; `Generation` cuts what follows EOS or a stop string."""
    n_accepted, next_token = verdict
    sequence.round_number += 1
    sequence.deferrals = 0
    decided = [*proposal.tokens[:n_accepted], next_token]
    if sequence.top_logprobs is not None:
        sequence.scores += [score(p.logits[index], token, sequence.top_logprobs) for index, token in enumerate(decided)]
    if sequence.keeps_sources:
        sequence.sources += [*proposal.drafted_by[:n_accepted], "target"]
    # The tokens before this round are all fed, and so are the accepted drafts; the last decided token is pending.
    sequence.target_cached = len(sequence.tokens) + n_accepted
    sequence.tokens += decided


def _observations(
    sequence: Sequence, p: TargetDistributions, proposal: Proposal, verdict: Verdict
) -> list[Observation]:
    """What verification showed of the draft tokens that it reached, up to the first rejected one.

    The first position of a round is always reached, so refused offers are judged by it, too.
    """
    n_accepted, next_token = verdict
    # The sum of min(p, q) is the acceptance probability in token verification; block verification accepts a little
    # more. Where it is known, it says more than the outcome.
    knows_probability = sequence.speculation.verification != "coupled" and not is_greedy(sequence.sampling)
    first_decided = proposal.tokens[0] if n_accepted else next_token
    observations = []
    for refused in proposal.refused:
        accepted = float(p[0][refused.token]) if knows_probability else float(refused.token == first_decided)
        observations.append(Observation(refused.drafter, refused.confidence, accepted, target_confidence=None))
    for index, draft in enumerate(proposal.drafts[: n_accepted + 1]):
        accepted = float(np.minimum(p[index], draft.q).sum()) if knows_probability else float(index < n_accepted)
        observations.append(
            Observation(draft.drafter, draft.confidence, accepted, target_confidence=p.confidence(index))
        )
    return observations
