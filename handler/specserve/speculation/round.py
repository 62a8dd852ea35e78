"""One round of speculative decoding over all running sequences: draft, verify, accept.

One round of one sequence, whose tokens are [a b c]. The target's cache holds a and b (`num_computed_tokens` is 2), and
c is pending:

    draft   d, e                          at most `SequenceStep.max_drafts` tokens, after c; here gamma is 2
    target  rows c, d, e                  one pass; their logits give p_0 (after c), p_1 (after d), p_2 (after e)
    verify  n_accepted 1, x               d is accepted, e is rejected, and x is recovered in its place
    accept  tokens [a b c d x]            e is truncated from the cache, which holds a to d; x is the next pending token

The draft model's cache holds some of the same tokens. It is truncated likewise, and reads what it lacks before it
drafts again (draft_model.py).

The target may also have read alternatives to d and e (alternatives.py). If x is one, its row gives one more token, as a
round without drafts would, and `Sequence.round_number` counts two rounds.

A round's time for grammar masks is limited: a sequence without its mask commits nothing (`Sequence.deferrals`), and
waits for the next round.
"""

from collections.abc import Callable
from contextlib import suppress
from operator import mul
from time import perf_counter

from specserve.engine.kv_cache import KVCache
from specserve.errors import ConstraintError, MaskDeferred
from specserve.sampling.distribution import FloatArray, one_hot
from specserve.sampling.logits import TargetDistributions, score
from specserve.speculation.costs import PassCosts
from specserve.speculation.drafters import Drafters
from specserve.speculation.policy import Controller
from specserve.speculation.rejection import RULES, accept_equal
from specserve.speculation.step import SequenceStep


def run_round(
    target: KVCache,
    drafters: Drafters,
    steps: list[SequenceStep],
    clock: Callable[[], float] = perf_counter,
) -> None:
    """Draft for the steps, run the target once over all their rows, and commit tokens.

    Committed tokens are appended to the sequences, both KV caches are truncated to them, and the controller learns from
    what was accepted. The caller keeps statistics, and clears the caches of steps that failed.

    `steps` is one for each sequence, in the order in which they are verified.

    Raises:
        EngineError: the target failed; the caller clears the caches of these sequences.
    """
    for step in steps:
        if step.commits:
            # The masks that are needed in any case come first. A missing one raises only in `_verify`.
            with step.contained():
                step.compute_mask()
    started = clock()
    # Tokens that a row attends to: the longest sequence's with our kernels, all slots' with llama.cpp's.
    kv_lens = [target.kv_len([step.sequence.slot]) for step in steps]
    drafters.draft(steps, max(kv_lens), max_alternatives=target.engine.max_alternatives)
    drafted = clock()
    logits = target.forward([row for step in steps for row in step.target_rows()])
    passed = clock()
    cost = drafters.controller.target_cost
    _share_time(steps, cost, max(kv_lens), draft_seconds=drafted - started, target_seconds=passed - drafted)
    row_counts = [step.rows + step.draft_rows for step in steps]
    # Distributions and verification take time for every row, so they belong to the cost of a pass; the grammar masks
    # and log-probabilities of some sequences do not.
    has_extras = any(
        step.sequence.constraint is not None or step.sequence.top_logprobs is not None or step.scores_rows
        for step in steps
    )
    first = 0
    for step in steps:
        end = first + step.rows_with_logits + step.draft_rows
        if not step.error:
            with step.contained():
                _accept(target, drafters, step, logits[first:end])
        first = end
    measured = (passed if has_extras else clock()) - drafted
    # Rows attend to different numbers of tokens, so the pass counts as one of rows with their mean KV length.
    cost.observe(sum(row_counts), sum(map(mul, row_counts, kv_lens)) // sum(row_counts), measured)


def _share_time(
    steps: list[SequenceStep], costs: PassCosts, kv_len: int, *, draft_seconds: float, target_seconds: float
) -> None:
    """Give each step its part of a round's time: decoding equally, prefill and drafts by their rows."""
    decoding = sum(not step.in_prefill for step in steps)
    rows = sum(step.rows for step in steps)
    drafts = sum(step.draft_rows for step in steps)
    decode, plain = costs.seconds(decoding, kv_len), costs.seconds(rows, kv_len)
    # By the table a pass may be cheaper with more rows.
    draft_row = max(0.0, costs.seconds(rows + drafts, kv_len) - plain) / max(1, drafts)
    prompt_row = max(0.0, plain - decode) / max(1, rows - decoding)
    for step in steps:
        step.seconds.plain = step.rows * prompt_row if step.in_prefill else decode / decoding
        step.seconds.target_drafts = step.draft_rows * draft_row
    # Drafts that took no pass have taken time for grammar masks at most.
    drafting = [step.seconds.draft_model for step in steps]
    drafting = drafting if any(drafting) else [float(step.draft_rows) for step in steps]
    passes = [step.seconds.target_pass for step in steps]
    for step, draft_part, target_part in zip(steps, drafting, passes, strict=True):
        step.seconds.draft = draft_seconds * (draft_part / sum(drafting) if any(drafting) else 1 / len(steps))
        step.seconds.target = target_seconds * target_part / sum(passes)


def _accept(target: KVCache, drafters: Drafters, step: SequenceStep, logits: FloatArray) -> None:
    """Commit the tokens of one step, if it is not a prefill chunk, and truncate both caches to them.

    The target's cache then holds all committed tokens but the last, and the draft model's holds some of the same. If
    the step fails, the caller clears both caches.

    The logits have shape (`rows_with_logits` + `draft_rows`, vocabulary): after the pending tokens that need some,
    after each draft, and after each alternative.
    """
    sequence, controller = step.sequence, drafters.controller
    if step.scores_rows:
        _score_prompt(step, logits[: step.rows])
    if not step.commits:
        return
    after_pending = logits[step.rows_with_logits - 1 :]
    step.n_committed = _commit(controller, step, after_pending[: len(step.drafts) + 1])
    if drafters.model:
        drafters.model.cache.truncate(sequence.slot, len(sequence.tokens) - 1)
    places = [(alternative.draft_index, alternative.token) for alternative in step.alternatives]
    recovered = step.n_accepted, sequence.tokens[-1]
    if recovered in places:
        # What the next round without drafts would do, whose row the target has read already.
        adopted, after_alternatives = places.index(recovered), after_pending[len(step.drafts) + 1 :]
        target.adopt(sequence.slot, adopted)
        after = SequenceStep(sequence, num_computed_tokens=len(sequence.tokens) - 1, rows=1)
        # A grammar that cannot be followed from here fails in the next round, as without alternatives.
        with suppress(ConstraintError):
            # Without the mask after it an alternative gives no further token.
            step.adopted = _commit(controller, after, after_alternatives[adopted : adopted + 1]) > 0
            step.n_committed += step.adopted
    target.truncate(sequence.slot, len(sequence.tokens) - 1)
    if step.is_decode_round:
        controller.balance(sequence).count_round(step)


def _commit(controller: Controller, step: SequenceStep, logits: FloatArray) -> int:
    """Verify the drafts, and append the accepted ones and the rule's own token, if any; returns how many tokens.

    The logits are the target's rows, from that of the sequence's last token on.
    """
    sequence = step.sequence
    p = TargetDistributions(logits, sequence, step.draft_tokens)
    step.n_accepted, next_token = _verify(p, step)
    committed = step.draft_tokens[: step.n_accepted] + ([] if next_token is None else [next_token])
    if not committed:
        sequence.deferrals += 1
        return 0
    if sequence.speculation.mode != "off":
        controller.acceptance.learn_from(step, p, committed)
    sequence.deferrals = 0
    sequence.round_number += 1
    if sequence.top_logprobs is not None:
        sequence.scores += [
            score(p.logits[index], token, sequence.top_logprobs) for index, token in enumerate(committed)
        ]
    if sequence.keeps_sources:
        sequence.sources += step.drafted_by[: step.n_accepted]
        sequence.sources += ["target"] * (len(committed) - step.n_accepted)
    # `TextSequence` cuts what follows EOS or a stop string.
    sequence.tokens += committed
    return len(committed)


def _verify(p: TargetDistributions, step: SequenceStep) -> tuple[int, int | None]:
    """The number of accepted drafts, and the rule's own token; None where the mask after all drafts is missing.

    p raises `MaskDeferred` where the round has no more time for masks, and `ConstraintError` where a grammar cannot be
    followed further. A token is drafted only when the mask at its position is known, and every rule reads the mask
    after all drafts only once it has accepted them: so only the bonus token can be missing. The next round draws it, or
    fails as it would without drafts; without drafts nothing is committed, and no random number was used.
    """
    sampling, speculation = step.sequence.sampling, step.sequence.speculation
    try:
        if sampling.is_greedy:
            return accept_equal(p.argmax, step.draft_tokens)
        q = [one_hot(draft.token, p.logits.shape[1]) if draft.q is None else draft.q for draft in step.drafts]
        return RULES[speculation.verification].verify(p, q, step.draft_tokens, step.noise)
    except ConstraintError:
        if not step.drafts or p.n_computed < len(step.drafts):
            raise
    except MaskDeferred:
        if p.n_computed < len(step.drafts):
            raise RuntimeError("a token was drafted before the mask at its position was known") from None
    return len(step.drafts), None


def _score_prompt(step: SequenceStep, logits: FloatArray) -> None:
    """Score the tokens of the prompt that follow the rows of a step; nothing follows the last."""
    sequence = step.sequence
    following = sequence.tokens[step.num_computed_tokens + 1 : sequence.prompt_length]
    # A sequence that was preempted reads again what has its scores.
    again = len(sequence.prompt_scores) - step.num_computed_tokens
    sequence.prompt_scores += [
        score(row, token, sequence.top_logprobs or 0)
        for row, token in zip(logits[again:], following[again:], strict=False)
    ]
