"""Continuous batching: admits sequences, plans a round over all that run, runs it, and ends what is complete.

All sequences share the cells of the target's KV cache. Admission promises a sequence some of them
(admission.py). When the running sequences need more cells than there are, a sequence of the client with the most cells
is preempted: it loses its slot, and waits ahead of its client's other sequences until its tokens fit again. Tokens that
are no longer cached by then are prefilled again, generated ones included.

Prefills share a round's rows: half go to the oldest prefill, the others to the prefills with the fewest tokens left. So
no short prompt waits for a long one, and a long one takes at most twice as long, however many short ones arrive.
"""

import logging
import math
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass
from time import perf_counter

from specserve.core.admission import Waiting
from specserve.core.prefix_cache import PrefixCache
from specserve.core.prefix_store import PrefixStore
from specserve.core.text_sequence import TextSequence
from specserve.engine.kv_cache import KVCache
from specserve.errors import Contained, EngineError
from specserve.observability.records import Observer, Recorder
from specserve.sequence import Sequence
from specserve.speculation.costs import PassCosts
from specserve.speculation.drafters import Drafters
from specserve.speculation.round import run_round
from specserve.speculation.step import SequenceStep

logger = logging.getLogger(__name__)

# How much longer the chunks of others may make the pass that gives a prompt its first token.
_FIRST_TOKEN_PASS = 2.0
# The smallest chunk of a prefill, in tokens: a smaller one takes nearly as long (benchmarks/cost_curve.py).
_MIN_CHUNK = 4
# The default of `max_wait_ms`, in seconds; or, on a slow machine, in forward passes of one token, since the chunks that
# fit into 0.25 s would be so small that every prompt takes much longer (benchmarks/decisions/tried.md).
_WAIT_SECONDS, _WAIT_PASSES = 0.25, 7


def max_wait(milliseconds: float | None, cost: PassCosts) -> float:
    """The seconds that prefill may add to a round that decodes: as configured, or by the machine's speed."""
    if milliseconds is not None:
        return milliseconds / 1000
    return max(_WAIT_SECONDS, _WAIT_PASSES * cost.seconds(1, 0))


def prefill_chunk(cost: PassCosts, kv_len: int, *, rows: int, max_rows: int, max_wait_seconds: float) -> int:
    """The longest prefill chunk, of 4 to `max_rows` tokens, that adds at most `max_wait_seconds` to a pass."""
    max_rows = max(0, max_rows)
    return max(min(_MIN_CHUNK, max_rows), cost.rows_within(max_wait_seconds, rows, max_rows, kv_len))


@dataclass(eq=False)
class Scheduler:
    """Runs rounds over all running sequences; has no threads of its own."""

    target: KVCache
    drafters: Drafters
    _: KW_ONLY
    prefill_rows: int  # the most prompt tokens of a round; the engine has room for these and `max_logits` rows
    # The most that each of these may add to a round: prefill, grammar masks, and drafts if several requests run.
    max_wait_seconds: float = math.inf
    # Is told the seconds that the grammar masks of a round may take; the others have to wait.
    limit_masks: Callable[[float], None] = lambda _: None
    clock: Callable[[], float] = perf_counter
    observers: InitVar[abc.Sequence[Observer]] = ()
    store: InitVar[PrefixStore | None] = None  # keeps the target's prefixes when they leave its cache

    def __post_init__(self, observers: abc.Sequence[Observer], store: PrefixStore | None) -> None:
        self._recorder = Recorder(observers)
        self._cache = PrefixCache(self.target, self.drafters, store)
        # In the order of admission: the oldest first.
        self._running: list[TextSequence] = []
        self._waiting = Waiting(self._running, self.target, self._cache, self._recorder, self.clock)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def awaiting_first_token(self) -> int:
        """Number of sequences in prefill or about to be; others in the queue wait for an answer to end."""
        prefilling = sum(not self._cache.decodes(sequence) for sequence in self._running)
        return prefilling + self._waiting.about_to_start

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    def submit(self, sequence: TextSequence, waited: float = 0.0) -> None:
        """Queue a sequence that arrived `waited` seconds ago; it waits for a slot."""
        sequence.timestamps.arrival = self.clock() - waited
        self._waiting.add(sequence)

    def cancel(self, sequence: TextSequence) -> None:
        """Drop a sequence; its slot is free in the next round, with its tokens. One that has ended stays as it is."""
        if self._waiting.discard(sequence):
            self._recorder.record_end(sequence.end_record(self.clock()))
        elif sequence in self._running:
            self._end([sequence])

    def fail_all(self, reason: Exception) -> None:
        """End every running sequence with an error, where a round has raised; queued ones stay."""
        self._fail(dict.fromkeys(self._running, reason))

    def run_round(self) -> None:
        """Run a round over what is scheduled, if anything is.

        A failed forward pass ends every sequence of the round with an error; the scheduler goes on.
        """
        steps = self._schedule()
        if not steps:
            return
        started = self.clock()
        # Grammar masks may delay other sequences as long as prefill may.
        self.limit_masks(self.max_wait_seconds)
        try:
            run_round(self.target, self.drafters, steps, self.clock)
        except EngineError as error:
            self._fail({step.sequence: error for step in steps})
        else:
            self._postprocess(steps, started)

    def check_caches(self) -> None:
        """Compare the records of both KV caches with what the engines hold; for idle times."""
        self.target.check()
        if self.drafters.model:
            self.drafters.model.cache.check()

    def store_prefixes(self) -> bool:
        """Copy some of what ended sequences have left in the target's cache to the store; returns if there is more."""
        return self._cache.store()

    def _schedule(self) -> list[SequenceStep]:
        """Admit what fits, and plan the round: all sequences that decode, and prefill chunks of others.

        A sequence in prefill has no drafts, so that its first token comes sooner.
        """
        self._waiting.admit()
        self._cache.restore()
        # What comes back takes room, too.
        self._preempt_until_the_rest_fits()
        decoding = [sequence for sequence in self._running if self._cache.decodes(sequence)]
        steps = self._decode_steps(decoding) if decoding else []
        if len(steps) < len(self._running):
            steps += self._prefill_steps(steps)
        self._cache.make_room(sum(step.rows + step.max_drafts for step in steps))
        # A fixed order (llama.cpp's kernels add by the order of the batch); one that was deferred gets its mask first.
        return sorted(steps, key=lambda step: (-step.sequence.deferrals, step.sequence.slot))

    def _preempt_until_the_rest_fits(self) -> None:
        """Preempt sequences until there is a cell for each that decodes and for one prefill."""
        while len(self._running) > 1:
            decoding = sum(map(self._cache.decodes, self._running))
            if decoding + (decoding < len(self._running)) <= self._cache.room:
                return
            self._waiting.preempt_one()

    def _decode_steps(self, decoding: list[TextSequence]) -> list[SequenceStep]:
        """A step for each sequence that decodes, with the most drafts that it may have."""
        # No other request is in a slot if all are of one; queued ones mostly wait for an answer to end.
        is_shared = len({sequence.info.request for sequence in self._running}) > 1
        max_drafts = self.drafters.controller.draft_limits(
            decoding,
            # Every running sequence may need the logits of one row beside those of its drafts.
            max_rows=min(self.target.engine.max_logits, self._cache.room) - len(self._running),
            max_wait_seconds=self.max_wait_seconds if is_shared else math.inf,
            kv_len=self._kv_len(),
            draft_kv_len=self.drafters.draft_kv_len(decoding),
        )
        rollback = self.target.engine.rollback
        if rollback is not None:
            # More that were rejected would cost the whole sequence, and only sequences without drafts share a pass.
            max_drafts = [min(gamma, rollback) for gamma in max_drafts] if len(decoding) == 1 else [0] * len(decoding)
        return [self._step(sequence, 1, gamma) for sequence, gamma in zip(decoding, max_drafts, strict=True)]

    def _prefill_steps(self, decode_steps: list[SequenceStep]) -> list[SequenceStep]:
        """Prefill chunks beside these steps: half of the rows for the oldest, the others for those with least left."""
        prefilling = [one for one in self._running if not (self._cache.decodes(one) or self._cache.is_restoring(one))]
        decoding = {step.sequence.slot for step in decode_steps}
        draft_rows = sum(step.max_drafts for step in decode_steps)
        logits_left = self.target.engine.max_logits - len(decode_steps) - draft_rows
        cost = self.drafters.controller.target_cost
        rows_left = prefill_chunk(
            cost,
            self.target.kv_len({sequence.slot for sequence in self._running} - decoding),
            rows=len(decode_steps),
            max_rows=min(self.prefill_rows, self._cache.room - len(decode_steps) - draft_rows),
            max_wait_seconds=self.max_wait_seconds if decode_steps else math.inf,
        )
        reserved = (rows_left + 1) // 2
        steps: list[SequenceStep] = []
        for sequence in sorted(prefilling, key=self._cache.pending):
            if sequence is prefilling[0]:
                reserved = 0
            pending = self._cache.pending(sequence)
            rows = min(rows_left - reserved, pending, logits_left if sequence.scores_prompt else pending)
            if rows <= 0 or logits_left <= 0:
                continue
            steps.append(self._step(sequence, rows, 0))
            rows_left -= rows
            logits_left -= rows if sequence.scores_prompt else 1
            if len(steps) == 1 and rows == pending:
                # This pass gives a prompt its first token.
                first, kv_len = len(decode_steps) + rows, self._kv_len()
                longer = (_FIRST_TOKEN_PASS - 1) * cost.seconds(first, kv_len)
                rows_left = cost.rows_within(longer, first, rows_left, kv_len)
                reserved = min(reserved, rows_left)
        return steps

    def _step(self, sequence: TextSequence, rows: int, max_drafts: int) -> SequenceStep:
        computed = self.target.num_computed_tokens(sequence.slot)
        return SequenceStep(sequence, computed, rows, max_drafts, running=len(self._running))

    def _kv_len(self) -> int:
        return self.target.kv_len([sequence.slot for sequence in self._running])

    def _postprocess(self, steps: list[SequenceStep], started: float) -> None:
        """Finish a round: turn new tokens into text, end what is complete, and record what each sequence got."""
        errors = {step.sequence: step.error for step in steps if step.error}
        for sequence in self._running:
            if sequence in errors:
                continue
            with Contained(sequence.info.request, sequence.fail):
                sequence.read_new_tokens()
                if sequence.max_tokens == 0 and not self._cache.pending(sequence):
                    sequence.end("length")
        self._recorder.record_round(steps, started, self.clock())
        self._fail(errors)
        self._end([sequence for sequence in self._running if sequence.done])
        self._cache.store()

    def _fail(self, errors: Mapping[Sequence, Exception]) -> None:
        """End sequences with errors; nothing of them stays cached."""
        failed = [sequence for sequence in self._running if sequence in errors]
        for sequence in failed:
            logger.error("specserve: a sequence failed: %s", errors[sequence])
            sequence.fail(errors[sequence])
            self._cache.clear(sequence)
        self._end(failed)

    def _end(self, ended: list[TextSequence]) -> None:
        """Free the slots of sequences that have ended, and record that."""
        for sequence in ended:
            self._running.remove(sequence)
            self._cache.release(sequence)
            self._waiting.slot_is_free()
            self._recorder.record_end(sequence.end_record(self.clock()))
