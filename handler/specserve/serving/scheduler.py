"""Continuous batching: admits sequences, plans a round over all that run, runs it, and ends what is complete."""

from __future__ import annotations

import logging
import math
from collections import Counter, abc, deque
from collections.abc import Callable, Mapping
from operator import itemgetter
from time import perf_counter

from specserve.engine.base import Engine
from specserve.errors import EngineError
from specserve.observability.records import Observer
from specserve.sequence import Sequence
from specserve.serving.budget import drafts_in_time, prefill_chunk
from specserve.serving.generation import Generation
from specserve.serving.prefix_cache import PrefixCache
from specserve.serving.recorder import Recorder
from specserve.speculation.drafters import Drafters
from specserve.speculation.round import Plan, Report, run_round

logger = logging.getLogger(__name__)


class Scheduler:
    """Runs rounds over all running sequences; has no threads of its own.

    Args:
        target: the target's engine.
        drafters: propose drafts; their controller knows what forward passes cost.
        prefill_rows: the most prompt tokens in a round; the engine has room for these and `max_logits` rows in a pass.
        idle_tokens: the most tokens of finished sequences that stay in the cache.
        max_wait_seconds: the most that each of these may add to a round: prefill, grammar masks, and drafts if several
            requests are running.
        begin_masks: told the seconds that the grammar masks of a round may take; the rest has to wait.
        clock: seconds, for statistics and costs.
        observers: told of every round and of every end.
    """

    def __init__(
        self,
        target: Engine,
        drafters: Drafters,
        *,
        prefill_rows: int,
        idle_tokens: int,
        max_wait_seconds: float = math.inf,
        begin_masks: Callable[[float], None] | None = None,
        clock: Callable[[], float] = perf_counter,
        observers: abc.Sequence[Observer] = (),
    ) -> None:
        self._target = target
        self._drafters = drafters
        self._controller = drafters.controller
        self._prefill_rows = prefill_rows
        self.max_wait_seconds = max_wait_seconds
        self._begin_masks = begin_masks
        self._clock = clock
        self._recorder = Recorder(clock, observers)
        self._cache = PrefixCache(target, drafters, idle_tokens)
        self._queue: deque[Generation] = deque()
        self._running: list[Generation] = []

    @property
    def busy(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._queue or self._running)

    @property
    def awaiting_first_token(self) -> int:
        """Number of sequences in prefill or about to be; queued ones without a free slot wait for an answer to end."""
        return sum(not g.decoding for g in self._running) + min(len(self._queue), self._cache.free_slots)

    @property
    def running(self) -> int:
        """Number of sequences in slots."""
        return len(self._running)

    @property
    def queued(self) -> int:
        """Number of sequences without a slot."""
        return len(self._queue)

    def submit(self, generation: Generation, waited: float = 0.0) -> None:
        """Queue a sequence that arrived `waited` seconds ago; it waits for a slot."""
        generation.timestamps.arrival = self._clock() - waited
        self._queue.append(generation)

    def cancel(self, generation: Generation) -> None:
        """Drop a sequence; its slot is free in the next round. One that has ended is left as it is."""
        if generation in self._queue:
            self._queue.remove(generation)
            self._recorder.record_ends([generation])
        elif generation in self._running:
            self._running.remove(generation)
            self._cache.release(generation)
            self._recorder.record_ends([generation])

    def fail_all(self, reason: Exception) -> None:
        """End every running sequence with an error; the queued ones stay. The engine loop calls it if `step` raises."""
        self._fail(dict.fromkeys(self._running, reason))
        self._recorder.record_ends(self._end_completed())

    def step(self) -> None:
        """Run a round over what is scheduled, if anything is.

        A failed forward pass ends every sequence of the round with an error; the scheduler goes on.
        """
        plans = self._schedule()
        if not plans:
            return
        started = self._clock()
        if self._begin_masks is not None:
            # Grammar masks may delay other sequences as long as prefill may.
            self._begin_masks(self.max_wait_seconds)
        try:
            report = run_round(
                self._target, self._drafters, plans, self._clock, awaiting_first_token=self.awaiting_first_token
            )
        except EngineError as error:
            self._fail({plan.sequence: error for plan in plans})
            self._recorder.record_ends(self._end_completed())
        else:
            self._postprocess(report, started)

    def _schedule(self) -> list[Plan]:
        """Admit what fits, and plan the round: all sequences that decode, and prefill chunks of the oldest others.

        A sequence in prefill has no drafts, so that its first token comes sooner.
        """
        self._admit()
        decoding = [generation for generation in self._running if generation.decoding]
        plans = self._decode_plans(decoding) if decoding else []
        if len(plans) < len(self._running):
            plans += self._prefill_plans(plans)
        # A fixed order (llama.cpp's kernels add by the order of the batch); one that was deferred gets its mask first.
        return sorted(plans, key=lambda plan: (-plan.sequence.deferrals, plan.sequence.slot))

    def _admit(self) -> None:
        """Give free slots to waiting sequences; one waits while another prefills a prefix that it can reuse."""
        if not self._cache.free_slots:
            return
        postponed: list[list[int]] = []
        for generation in self._by_request():
            if not self._cache.free_slots:
                return
            if generation.tokens in postponed and not generation.scores_prompt:
                # Saves asking again; a scored prompt reuses no prefix, so it waits for none.
                continue
            try:
                # False while another sequence prefills the same prefix.
                admitted = self._cache.assign(generation, (g for g in self._running if not g.decoding))
            except Exception as error:
                # It was never running, so nothing else would end it.
                logger.exception("specserve: a sequence cannot be started")
                self._queue.remove(generation)
                generation.fail(error)
                self._recorder.record_ends([generation])
                continue
            if admitted:
                self._queue.remove(generation)
                self._running.append(generation)
                generation.timestamps.start = self._clock()
            else:
                postponed.append(generation.tokens)

    def _by_request(self) -> list[Generation]:
        """The waiting sequences in order of admission: requests take turns, so that a large `n` delays no other."""
        turn = Counter(generation.info.request for generation in self._running)
        turns: list[tuple[int, Generation]] = []
        for generation in self._queue:
            turn[generation.info.request] += 1
            turns.append((turn[generation.info.request], generation))
        return [generation for _, generation in sorted(turns, key=itemgetter(0))]

    def _decode_plans(self, decoding: list[Generation]) -> list[Plan]:
        """The plans of the sequences that decode, with the most drafts that each may have."""
        most_each = self._most_drafts_each(decoding)
        # The round may add one token of the target's own.
        return [Plan(one, 1, max(0, min(one.speculation.max_drafts, one.remaining - 1, most_each))) for one in decoding]

    def _most_drafts_each(self, decoding: list[Generation]) -> int:
        """The most drafts of a sequence: as rows of logits allow, and `max_wait_seconds` if several requests run."""
        drafting = [generation for generation in decoding if generation.speculation.max_drafts > 0]
        # Every running sequence may need the logits of one row beside those of its drafts.
        most = (self._target.max_logits - len(self._running)) // max(1, len(drafting))
        if len({generation.info.request for generation in self._running}) == 1:
            # No other request is in a slot; queued ones mostly wait for an answer to end.
            return most
        draft_cost, draft_pass_seconds = self._controller.draft_cost, 0.0
        # The draft model may have failed since it was loaded.
        if draft_cost and self._drafters.has_model:
            draft_pass_seconds = draft_cost.seconds(len(drafting), self._drafters.draft_kv_len(drafting))
        return drafts_in_time(
            self._controller.target_cost,
            self._kv_len(),
            draft_pass_seconds,
            rows=len(decoding),
            drafting=len(drafting),
            most=most,
            max_wait=self.max_wait_seconds,
        )

    def _prefill_plans(self, decode_plans: list[Plan]) -> list[Plan]:
        """Prefill chunks beside these plans, the oldest sequence's first."""
        logits_left = self._target.max_logits - sum(1 + plan.max_drafts for plan in decode_plans)
        # Estimated rows of those that decode: in mode auto 1, since with many sequences the controller drafts little.
        likely_rows = sum(1 if plan.sequence.speculation.is_auto else 1 + plan.max_drafts for plan in decode_plans)
        # Balances the delay of those that decode against the wait of all others (budget.py).
        rows_left = prefill_chunk(
            self._controller.target_cost,
            self._kv_len(),
            rows=likely_rows,
            decoding=len(decode_plans),
            others=len(self._queue) + len(self._running) - len(decode_plans),
            most=self._prefill_rows,
            max_wait=self.max_wait_seconds,
        )
        plans = []
        for generation in self._running:
            if rows_left > 0 and logits_left > 0 and not generation.decoding:
                rows = min(rows_left, generation.target_pending)
                if generation.scores_prompt:
                    rows = min(rows, logits_left)
                plans.append(Plan(generation, rows, 0))
                rows_left -= rows
                logits_left -= rows if generation.scores_prompt else 1
        return plans

    def _kv_len(self) -> int:
        return self._target.kv_len([generation.slot for generation in self._running])

    def _postprocess(self, report: Report, started: float) -> None:
        """Finish a round: turn new tokens into text, end what is complete, and record what each sequence got."""
        self._fail({sequence: outcome.error for sequence, outcome in report.outcomes.items() if outcome.error})
        running = list(self._running)
        for generation in running:
            if not generation.done:
                generation.read_new_tokens()
        ended = self._end_completed()
        self._recorder.record_round(running, report, started)
        self._recorder.record_ends(ended)

    def _fail(self, errors: Mapping[Sequence, Exception]) -> None:
        """Mark sequences as failed; nothing of them stays cached."""
        for generation in self._running:
            if generation in errors:
                logger.error("specserve: a sequence failed: %s", errors[generation])
                generation.fail(errors[generation])
                # `_end_completed` releases it, which truncates both caches to these lengths.
                generation.target_cached = 0
                generation.truncate_draft(0)

    def _end_completed(self) -> list[Generation]:
        """Free the slots of sequences that are complete or have failed, and return these."""
        ended = [generation for generation in self._running if generation.done]
        for generation in ended:
            self._running.remove(generation)
            self._cache.release(generation)
        return ended
