"""Which sequences live in which slots, and what each of them does in the next round."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from time import perf_counter

from specserve.engine.base import Engine
from specserve.errors import DraftError, EngineError, RequestError
from specserve.sequence import Sequence
from specserve.serving.generation import Generation
from specserve.speculation.drafters import Drafter, NoDrafter
from specserve.speculation.round import Plan, Report, Times, run_round

logger = logging.getLogger(__name__)

_READ_PER_TOKEN = 2


@dataclass
class Slot:
    """A place in both caches: who writes in it, and whose tokens it still holds."""

    last: Sequence | None = None
    live: Generation | None = None
    released: int = 0

    @property
    def held(self) -> int:
        """How many tokens of `last` the target's cache holds."""
        return self.last.target_cached if self.last else 0

    def common_prefix(self, prompt: list[int]) -> int:
        """How many leading tokens of `prompt` the target's cache already holds."""
        if self.last is None:
            return 0
        # The last token of a prompt is always fed: its logits are the first to be sampled.
        most = min(self.last.target_cached, len(prompt) - 1)
        return next((i for i in range(most) if self.last.tokens[i] != prompt[i]), most)


class Scheduler:
    """Continuous batching: every step is one round over all live sequences.

    There are no threads and no clocks but the one that fills the accounts: a step is a function of what was
    submitted, in order.
    """

    def __init__(self, target: Engine, drafter: Drafter, *, prefill_rows: int, idle_tokens: int) -> None:
        self._target = target
        self._drafter = drafter
        self._prefill_rows = prefill_rows
        self._idle_tokens = idle_tokens
        self._releases = 0
        self._slots = [Slot() for _ in range(target.n_slots)]
        self._waiting: deque[Generation] = deque()
        self._live: list[Generation] = []

    @property
    def busy(self) -> bool:
        """Whether any answer is unfinished."""
        return bool(self._waiting or self._live)

    @property
    def live(self) -> int:
        """Number of sequences in slots."""
        return len(self._live)

    def submit(self, generation: Generation) -> None:
        """Queue an answer; it starts in the first step that has a free slot."""
        self._waiting.append(generation)

    def cancel(self, generation: Generation) -> None:
        """Forget an answer; its slot is free for the next step."""
        if generation in self._waiting:
            self._waiting.remove(generation)
        elif generation in self._live:
            self._release(generation)

    def step(self) -> None:
        """Admit what fits, run one round, and end what is complete.

        A failed forward pass ends every answer of the round with an error; the scheduler goes on.
        """
        self._admit()
        if not self._live:
            return
        started = perf_counter()
        plans = self._plan()
        prefilling = {id(plan.sequence) for plan in plans if plan.sequence.generated == 0}
        try:
            times, failed = self._run(plans)
        except EngineError as error:
            self._fail([plan.sequence for plan in plans], str(error))
            return
        if failed:
            self._fail(failed, "the target's logits are not finite")
        for generation in list(self._live):
            generation.read_new_tokens()
            if generation.done:
                self._release(generation)
        other = perf_counter() - started - times.draft - times.target
        for plan in plans:
            _charge(plan.sequence, times._replace(other=other), prefill=id(plan.sequence) in prefilling)
            plan.sequence.account.shared |= len(plans) > 1

    def _run(self, plans: list[Plan]) -> Report:
        """Run a round; if the draft model fails in it, go on without one from here on."""
        try:
            return run_round(self._target, self._drafter, plans)
        except DraftError as error:
            logger.error("specserve: %s Decoding goes on without speculation.", error)
            self._drafter = NoDrafter()
            return run_round(self._target, self._drafter, plans)

    def _admit(self) -> None:
        """Give waiting answers a free slot each."""
        while self._waiting and len(self._live) < len(self._slots):
            generation = self._waiting.popleft()
            sequence = generation.sequence
            slot = self._slot_for(sequence.tokens)
            shared = slot.common_prefix(sequence.tokens)
            sequence.slot = self._slots.index(slot)
            sequence.target_cached = sequence.reused = shared
            sequence.draft_cached = min(shared, slot.last.draft_cached) if slot.last else 0
            self._cut(sequence)
            slot.live = generation
            slot.last = sequence
            self._live.append(generation)

    def _slot_for(self, prompt: list[int]) -> Slot:
        """The free slot that shares most with a prompt; a slight likeness does not cost another text its cache."""
        free = [slot for slot in self._slots if slot.live is None]
        best = max(free, key=lambda slot: slot.common_prefix(prompt))
        if best.common_prefix(prompt) * 2 >= min(best.held, len(prompt)) > 0:
            return best
        return min(free, key=lambda slot: (slot.held > 0, slot.released))

    def _forget_oldest(self) -> None:
        """Keep what finished answers hold below the limit: every forward pass walks over it."""
        idle = sorted((slot for slot in self._slots if slot.live is None), key=lambda slot: slot.released)
        held = sum(slot.held for slot in idle)
        for slot in idle:
            if held <= self._idle_tokens:
                return
            held -= slot.held
            if slot.last:
                slot.last.target_cached = slot.last.draft_cached = 0
                self._cut(slot.last)

    def _plan(self) -> list[Plan]:
        """All that decode, with their drafts, and beside them the oldest prompts as far as rows are left.

        The round that ends a prompt has no drafts, however little of it was left to feed: its first token comes
        sooner.
        """
        decoding = [g.sequence for g in self._live if g.sequence.generated]
        # Every live sequence may want one row of logits, and those that decode one more a draft.
        most_drafts = (self._target.max_logits - len(self._live)) // max(1, len(decoding))
        plans = [Plan(s, 1, min(_gamma(s), most_drafts)) for s in decoding]
        left = min(self._prefill_rows, self._target.max_rows - sum(1 + plan.gamma for plan in plans))
        for generation in self._live:
            sequence = generation.sequence
            if left > 0 and not sequence.generated:
                rows = min(left, sequence.target_pending)
                plans.append(Plan(sequence, rows, 0))
                left -= rows
        return plans

    def _release(self, generation: Generation) -> None:
        """Free a slot; its caches keep what was decided, for the next prompt that begins alike."""
        sequence = generation.sequence
        self._live.remove(generation)
        self._releases += 1
        self._slots[sequence.slot].live = None
        self._slots[sequence.slot].released = self._releases
        self._cut(sequence)
        self._forget_oldest()

    def _cut(self, sequence: Sequence) -> None:
        """Make both caches hold what the sequence says they hold."""
        self._target.cut(sequence.slot, sequence.target_cached)
        self._drafter.keep(sequence, sequence.draft_cached)

    def _fail(self, sequences: list[Sequence], reason: str) -> None:
        logger.error("specserve: %d sequences of a round failed: %s", len(sequences), reason)
        failed = {id(sequence) for sequence in sequences}
        for generation in list(self._live):
            if id(generation.sequence) in failed:
                generation.error = RequestError(
                    "The model failed while it wrote this answer; please send the request again.",
                    status=500,
                    kind="server_error",
                )
                generation.sequence.target_cached = generation.sequence.draft_cached = 0
                self._release(generation)


def _gamma(sequence: Sequence) -> int:
    """How many drafts a round may have: none that the answer has no room for, none that cost more than they save."""
    # The draft model must first read what is new to it; a row of that takes about half of what a draft saves.
    if sequence.draft_pending > _READ_PER_TOKEN * sequence.remaining:
        return 0
    return min(sequence.speculation.gamma, sequence.remaining - 1)


def _charge(sequence: Sequence, times: Times, *, prefill: bool) -> None:
    account = sequence.account
    if prefill:
        account.prefill_seconds += sum(times)
    else:
        account.draft_seconds += times.draft
        account.target_seconds += times.target
        account.other_seconds += times.other
