"""One round of speculative decoding over all running sequences: draft, verify, accept.

A draft's place may have alternatives, which the target reads as well (alternatives.py): where one of them is recovered,
its row gives one more token, as a round without drafts would.

One round of one sequence, whose tokens are [a b c]; the target's cache holds a and b (`target_cached` 2), c is pending:

    draft   d, e                          at most max_drafts tokens, after c; here gamma is 2
    target  rows c, d, e                  one pass; their logits give p_0 (after c), p_1 (after d), p_2 (after e)
    verify  Verdict(1, x)                 d is accepted, e is rejected, and x is recovered in its place
    commit  tokens [a b c d x]            `target_cached` 4: e is truncated from the cache, x is the next pending token

The main fields of a `Sequence` (sequence.py):

    tokens              the prompt and what is decided after it
    generated           how many are decided; from the first on the sequence is `decoding`
    remaining           how many more may be decided
    target_cached       how many leading tokens the target's cache holds
    target_pending      how many it has not been fed: 1 while decoding
    round_number        how many rounds have decided tokens; one that adopts an alternative counts twice
    deferrals           rounds in a row that have decided nothing: a round's time for grammar masks is limited, and a
                        sequence without its mask waits for the next round
    speculation.mode    off (no drafts), fixed (a number of them) or auto (the controller's choice)

and of a `Proposal` (proposal.py), its drafts of the round:

    drafts              in order, each with its token, drafter, and the distribution q that it was sampled from
    alternatives        of the drafts; `n_rows` counts both
    tokens, q           these of all drafts, as lists; and `drafted_by`, likewise
    noise               the random numbers of the round
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import NamedTuple

from specserve.engine.base import Engine, Row
from specserve.errors import ConstraintError, MaskDeferred
from specserve.sampling.distribution import FloatArray, is_greedy
from specserve.sampling.logits import TargetDistributions, score
from specserve.sampling.noise import Noise
from specserve.sequence import DrafterName, Sequence
from specserve.speculation.charges import Charge, Work, charges
from specserve.speculation.controller import Controller
from specserve.speculation.drafters import Drafters
from specserve.speculation.proposal import Proposal
from specserve.speculation.rejection import RULES, accept_equal


class Plan(NamedTuple):
    """What one sequence does in a round. Its properties hold until tokens are decided.

    Args:
        sequence: whose plan it is.
        rows: how many of its pending tokens the target reads; fewer than all in a prefill chunk but the last.
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
    def rows_with_logits(self) -> int:
        """How many of its last rows need logits, besides those of drafts: one if it decides, all of a scored prompt."""
        if self.scores_rows:
            return self.rows
        return int(self.decides)


class Outcome(NamedTuple):
    """What a round did for one sequence.

    Args:
        generated_before: its `generated` before the round; 0 in prefill.
        cached_before: its `target_cached` before the round.
        charge: its estimated part of the round's time (charges.py).
        is_decode_round: whether it decided tokens, and its prefill was over before.
        drafted_by: the drafter of each verified draft.
        n_accepted: how many of them were accepted.
        n_alternatives: how many alternatives the target has read beside them.
        adopted: whether one of these was recovered and the round decided one more token.
        error: why the sequence failed.
    """

    generated_before: int
    cached_before: int
    charge: Charge
    is_decode_round: bool = False
    drafted_by: abc.Sequence[DrafterName] = ()
    n_accepted: int = 0
    n_alternatives: int = 0
    adopted: bool = False
    error: Exception | None = None


class Report(NamedTuple):
    """Seconds of a round's drafting and of its target pass alone, and what the round did for each sequence."""

    draft_seconds: float
    target_seconds: float
    outcomes: dict[Sequence, Outcome]


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
    what was accepted. The caller keeps statistics, and clears the caches of sequences that failed.

    Args:
        target: the target's engine; its slots hold what the sequences say.
        drafters: all drafters, with their controller.
        plans: one for each sequence of the round, in the order in which they are verified.
        clock: seconds.
        awaiting_first_token: number of sequences in prefill or about to be; they make time more valuable.

    Raises:
        EngineError: the target failed; the caller clears the caches of these sequences.
    """
    needs_masks_or_scores = any(_needs_masks_or_scores(plan) for plan in plans)
    proposals = [Proposal(plan.sequence, plan.max_drafts, _noise(plan.sequence)) for plan in plans]
    for plan, proposal in zip(plans, proposals, strict=True):
        if plan.decides:
            # The masks that are needed in any case come first. A missing one raises only in `_verify`.
            proposal.compute_mask()
    started = clock()
    # Tokens that a row attends to: the longest sequence's with our kernels, all slots' with llama.cpp's.
    kv_len = target.kv_len([plan.sequence.slot for plan in plans])
    # Adds drafts to the proposals, as long as that is worth its time (controller.py).
    drafters.propose(
        proposals,
        sum(plan.rows for plan in plans),
        kv_len,
        awaiting_first_token,
        max_alternatives=target.max_alternatives,
    )
    drafted = clock()
    logits = target.forward(_batch(plans, proposals))
    passed = clock()
    cost = drafters.controller.target_cost
    works = [
        Work(
            decoding=plan.sequence.decoding,
            rows=plan.rows,
            drafts=proposal.n_rows,
            draft_model_seconds=proposal.draft_model_seconds,
        )
        for plan, proposal in zip(plans, proposals, strict=True)
    ]
    outcomes, first = {}, 0
    for plan, proposal, charge in zip(plans, proposals, charges(works, cost, kv_len), strict=True):
        end = first + plan.rows_with_logits + proposal.n_rows
        outcomes[plan.sequence] = _apply(target, drafters, plan, proposal, logits[first:end], charge=charge)
        first = end
    done = clock()
    # Computing distributions and verifying take time for every row, so they belong to the cost of a pass; the grammar
    # masks and log-probabilities of some sequences do not (so the cost of their rounds is a little low).
    measured = passed if needs_masks_or_scores else done
    cost.observe(sum(work.rows + work.drafts for work in works), kv_len, measured - drafted)
    return Report(drafted - started, passed - drafted, outcomes)


def _noise(sequence: Sequence) -> Noise:
    # A position that is drafted again gets new uniform numbers, by `round_number`, but the same race, by `generated` +
    # index.
    return Noise(
        secret=sequence.secret,
        round_number=sequence.round_number,
        seed=sequence.seed,
        choice=sequence.choice,
        position=sequence.generated,
    )


def _batch(plans: list[Plan], proposals: list[Proposal]) -> list[Row]:
    """Each sequence's pending tokens, then its draft tokens, then their alternatives."""
    rows = []
    for plan, proposal in zip(plans, proposals, strict=True):
        sequence = plan.sequence
        first = sequence.target_cached
        tokens = sequence.tokens[first : first + plan.rows] + proposal.tokens
        without_logits = plan.rows - plan.rows_with_logits
        rows += [Row(token, sequence.slot, first + i, i >= without_logits) for i, token in enumerate(tokens)]
        after = first + plan.rows
        rows += [Row(one.token, sequence.slot, after + one.draft_index, True, True) for one in proposal.alternatives]
    return rows


def _needs_masks_or_scores(plan: Plan) -> bool:
    """Whether its sequence needs grammar masks or log-probabilities."""
    sequence = plan.sequence
    return sequence.constraint is not None or sequence.top_logprobs is not None or plan.scores_rows


def _apply(
    target: Engine, drafters: Drafters, plan: Plan, proposal: Proposal, logits: FloatArray, *, charge: Charge
) -> Outcome:
    """Decide the tokens of one sequence, or take note of a prefill chunk; and say what the round did for it.

    Afterwards the caches hold what is decided, but for its last token. An error leaves them to the caller.
    """
    sequence, was_decoding = plan.sequence, plan.sequence.decoding
    outcome = Outcome(sequence.generated, sequence.target_cached, charge, n_alternatives=len(proposal.alternatives))
    # The first rows belong to a prompt that is scored, the last ones to alternatives.
    verified = logits[-1 - proposal.n_rows : logits.shape[0] - len(proposal.alternatives)]
    try:
        if plan.scores_rows:
            _score_prompt(sequence, logits[: plan.rows])
        if not plan.decides:
            sequence.target_cached += plan.rows
            return outcome
        n_accepted = _decide(drafters.controller, proposal, verified)
        drafters.truncate(sequence, sequence.target_cached)
        adopted = proposal.recovered_alternative(n_accepted, sequence.tokens[-1])
        if adopted is not None:
            # What the next round without drafts would do, whose row the target has read already.
            target.adopt(sequence.slot, adopted)
            row = logits.shape[0] - len(proposal.alternatives) + adopted
            # A grammar that cannot be followed from here fails in the next round, as without alternatives.
            with suppress(ConstraintError):
                _decide(drafters.controller, Proposal(sequence, 0, _noise(sequence)), logits[row : row + 1])
    except (FloatingPointError, ConstraintError) as error:
        return outcome._replace(error=error)
    target.truncate(sequence.slot, sequence.target_cached)
    n_decided = sequence.generated - outcome.generated_before
    if not was_decoding or not n_decided:
        return outcome
    drafters.controller.balance(sequence).count_round(n_decided, charge, proposal)
    return outcome._replace(
        is_decode_round=True,
        drafted_by=proposal.drafted_by,
        n_accepted=n_accepted,
        # Without the mask after it an alternative gives no further token.
        adopted=n_decided > n_accepted + 1,
    )


def _decide(controller: Controller, proposal: Proposal, logits: FloatArray) -> int:
    """Verify the drafts, and append the accepted ones and the rule's own token, if any; returns how many were accepted.

    Args:
        controller: learns, also without drafts: from the target's confidence.
        proposal: its drafts, which the target has read.
        logits: the target's rows, from that of the sequence's last token on.

    Raises:
        FloatingPointError: the logits are not finite.
        ConstraintError: the request's grammar cannot be followed further.
    """
    sequence = proposal.sequence
    p = TargetDistributions(logits, sequence, proposal.tokens)
    n_accepted, next_token = _verify(p, proposal)
    decided = proposal.tokens[:n_accepted] + ([] if next_token is None else [next_token])
    # The last token is pending; if nothing was decided, the same one again.
    sequence.target_cached = len(sequence.tokens) + len(decided) - 1
    if not decided:
        sequence.deferrals += 1
        return 0
    if sequence.speculation.mode != "off":
        controller.acceptance.learn_from(proposal, p, decided, n_accepted)
    sequence.deferrals = 0
    sequence.round_number += 1
    if sequence.top_logprobs is not None:
        sequence.scores += [score(p.logits[index], token, sequence.top_logprobs) for index, token in enumerate(decided)]
    if sequence.keeps_sources:
        sequence.sources += proposal.drafted_by[:n_accepted]
        sequence.sources += ["target"] * (len(decided) - n_accepted)
    # `Generation` cuts what follows EOS or a stop string.
    sequence.tokens += decided
    return n_accepted


def _verify(p: TargetDistributions, proposal: Proposal) -> tuple[int, int | None]:
    """The number of accepted drafts, and the rule's own token; None where the mask after all drafts is missing.

    p raises `MaskDeferred` where the round has no more time for masks, and `ConstraintError` where a grammar cannot be
    followed further. A token is drafted only when the mask at its position is known, and every rule reads the mask
    after all drafts only once it has accepted them: so only the bonus token can be missing. The next round draws it, or
    fails as it would without drafts; without drafts nothing is decided, and no random number was used.

    Raises:
        ConstraintError: the grammar cannot be followed, without any draft or at a position of one.
    """
    sampling, speculation = proposal.sequence.sampling, proposal.sequence.speculation
    try:
        if is_greedy(sampling):
            return accept_equal(p.argmax, proposal.tokens)
        return RULES[speculation.verification].verify(p, proposal.q, proposal.tokens, proposal.noise)
    except ConstraintError:
        if not proposal.drafts or p.n_computed < len(proposal.drafts):
            raise
    except MaskDeferred:
        if p.n_computed < len(proposal.drafts):
            raise RuntimeError("a token was drafted before the mask at its position was known") from None
    return len(proposal.drafts), None


def _score_prompt(sequence: Sequence, logits: FloatArray) -> None:
    """Score the tokens of the prompt that follow these rows."""
    following = sequence.tokens[sequence.target_cached + 1 : sequence.prompt_length]
    top = sequence.top_logprobs or 0
    # Nothing follows the prompt's last token.
    sequence.prompt_scores += [score(row, token, top) for row, token in zip(logits, following, strict=False)]
