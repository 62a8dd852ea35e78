"""Which sequences live in which slots, and what each of them does in the next round."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from operator import itemgetter
from time import perf_counter

from specserve.engine.base import Engine
from specserve.errors import EngineError
from specserve.observability.holdback import PlainRounds
from specserve.observability.records import Observer
from specserve.sequence import Account, Sequence
from specserve.serving.generation import Generation
from specserve.serving.watching import Watch
from specserve.speculation.cost import Cost
from specserve.speculation.drafters import Drafters
from specserve.speculation.model import worth_waiting
from specserve.speculation.round import Plan, Times, run_round

logger = logging.getLogger(__name__)

# The fewest rows of a prompt: fewer cost as much on most machines.
_LEAST_CHUNK = 4
# What prompts may make others wait, unless told: so many seconds, or passes of one row on a slow machine, where the
# chunks that fit would be so small that every prompt takes much longer.
_WAIT_SECONDS, _WAIT_PASSES = 0.25, 10
# Chunks whose rows take as long as the cheapest, but for what a measurement cannot tell.
_AS_GOOD = 1.03


@dataclass(eq=False)
class Slot:
    """A place in both caches: who writes in it, and whose tokens it still holds."""

    last: Sequence | None = None
    live: Generation | None = None
    released: int = 0

    @property
    def held(self) -> int:
        """How many tokens of `last` the target's cache holds."""
        return self.last.target_cached if self.last else 0

    def common_prefix(self, sequence: Sequence) -> int:
        """How many leading tokens of a new sequence the target's cache already holds for it."""
        if self.last is None or sequence.scores_prompt:
            return 0
        # The last token of a prompt is always fed: its logits are the first to be sampled.
        return self.last.common_prefix(sequence.tokens, min(self.last.target_cached, len(sequence.tokens) - 1))


class Scheduler:
    """Continuous batching: every step is one round over all live sequences.

    There are no threads, and no clock but the one that fills the accounts and keeps the costs of passes true.
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
        observers: Many[Observer] = (),
        plain_rounds: PlainRounds | None = None,
    ) -> None:
        self._target = target
        self._drafters = drafters
        self._prefill_rows = prefill_rows
        self._idle_tokens = idle_tokens
        self._max_wait_seconds = max_wait_seconds
        self._begin_masks = begin_masks
        self._clock = clock
        self._watch = Watch(observers, clock)
        self._plain_rounds = plain_rounds or PlainRounds(0.0)
        self._releases = 0
        self._slots = [Slot() for _ in range(target.n_slots)]
        self._waiting: deque[Generation] = deque()
        self._live: list[Generation] = []

    @property
    def busy(self) -> bool:
        """Whether any answer is unfinished."""
        return bool(self._waiting or self._live)

    @property
    def reading(self) -> bool:
        """Whether the next round reads of a prompt."""
        joins = bool(self._waiting) and len(self._live) < len(self._slots)
        return joins or any(not generation.sequence.generated for generation in self._live)

    @property
    def live(self) -> int:
        """Number of sequences in slots."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Number of sequences that have no slot yet."""
        return len(self._waiting)

    def submit(self, generation: Generation, waited: float = 0.0) -> None:
        """Queue an answer that has `waited` for seconds before; it starts in the first step that has a free slot."""
        self._watch.submitted(generation, waited)
        self._waiting.append(generation)

    def fail_all(self, reason: Exception) -> None:
        """End every live answer with an error, and go on with those that wait."""
        self._fail([(generation.sequence, reason) for generation in self._live])

    def cancel(self, generation: Generation) -> None:
        """Forget an answer; its slot is free for the next step."""
        if generation in self._waiting:
            self._waiting.remove(generation)
            self._watch.ended(generation)
        elif generation in self._live:
            self._release(generation)

    def step(self) -> None:
        """Admit what fits, run one round, and end what is complete.

        A failed forward pass ends every answer of the round with an error; the scheduler goes on.
        """
        self._admit()
        if self._live:
            with self._watch.round(self._live) as shares:
                self._run(shares)

    def _run(self, shares: dict[int, Times]) -> None:
        """The round, and by the identity of a sequence its share of the time."""
        started = self._clock()
        beside = self._others_wait()
        plain = self._plain_rounds.chooses()
        plans = self._plan(plain=plain)
        if self._begin_masks is not None:
            # Grammars may make others wait for as long as prompts may.
            self._begin_masks(self._max_wait_seconds)
        before = sum(plan.sequence.generated for plan in plans)
        prefilling = {id(plan.sequence) for plan in plans if plan.sequence.generated == 0}
        reading = sum(not live.sequence.generated for live in self._live)
        # Whoever has to wait for a slot is helped by whatever ends texts sooner, not by short rounds.
        waiting = reading + min(len(self._waiting), len(self._slots) - len(self._live))
        try:
            times, parts, failed = run_round(self._target, self._drafters, plans, self._clock, waiting=waiting)
        except EngineError as error:
            self._fail([(plan.sequence, error) for plan in plans])
            return
        self._fail(failed)
        for generation in list(self._live):
            generation.read_new_tokens()
            if generation.done:
                self._release(generation)
        seconds = self._clock() - started
        if beside and not prefilling:
            self._settle_drafts(plans, seconds)
        if not prefilling and all(plan.sequence.speculation.adaptive for plan in plans):
            tokens = sum(plan.sequence.generated for plan in plans) - before
            self._plain_rounds.learn(tokens, seconds, plain=plain)
        other = seconds - times.draft - times.target
        for plan, share in zip(plans, parts, strict=True):
            mine = Times(times.draft * share, times.target * share, other * share)
            shares[id(plan.sequence)] = mine
            _charge(plan.sequence.account, mine, prefill=id(plan.sequence) in prefilling)

    def _admit(self) -> None:
        """Give waiting answers a free slot each; one whose text is just being read for another waits for that."""
        if len(self._live) == len(self._slots):
            return
        held: list[list[int]] = []
        for generation in self._in_turn():
            if len(self._live) == len(self._slots):
                return
            tokens = generation.sequence.tokens
            if tokens in held:
                continue
            try:
                if not self._begin(generation):
                    held.append(tokens)
            except Exception as error:
                # It would be among neither those that wait nor those that live, and nobody else would end it.
                logger.exception("specserve: an answer cannot begin")
                if generation in self._waiting:
                    self._waiting.remove(generation)
                generation.fail(error)
                self._watch.ended(generation)

    def _in_turn(self) -> list[Generation]:
        """Who waits, in the order of admission: requests get slots in turn, so many answers to one delay no other."""
        held = Counter(live.origin.request for live in self._live)
        turns = []
        for generation in self._waiting:
            turns.append(held[generation.origin.request])
            held[generation.origin.request] += 1
        return [generation for _, generation in sorted(zip(turns, self._waiting, strict=True), key=itemgetter(0))]

    def _begin(self, generation: Generation) -> bool:
        """Give an answer a slot; False where it is better for it to wait for what is being read for another one."""
        sequence = generation.sequence
        source, shared = self._longest_prefix(sequence)
        if worth_waiting(sequence, shared, self._being_read(sequence)):
            return False
        self._waiting.remove(generation)
        self._settle(generation, source, shared)
        return True

    def _settle(self, generation: Generation, source: Slot, shared: int) -> None:
        """Let an answer begin in a free slot, with the first `shared` tokens that `source` holds."""
        sequence = generation.sequence
        slot = self._slot_for(sequence, source, shared)
        sequence.slot = self._slots.index(slot)
        sequence.target_cached = sequence.reused = shared
        if slot is source:
            if source.last:
                sequence.inherit_draft(source.last, shared)
        elif shared:
            self._target.copy(self._slots.index(source), sequence.slot, shared)
        self._cut(sequence)
        slot.live = generation
        slot.last = sequence
        self._live.append(generation)
        self._watch.begun(generation)

    def _longest_prefix(self, sequence: Sequence) -> tuple[Slot, int]:
        """The slot whose cache holds most of a prompt, a free one if possible, and how much of it."""
        shared = [slot.common_prefix(sequence) for slot in self._slots]
        best = max(range(len(shared)), key=lambda index: (shared[index], self._slots[index].live is None))
        return self._slots[best], shared[best]

    def _being_read(self, sequence: Sequence) -> int:
        """How much of a prompt the caches will hold when those that are being read are complete."""
        reading = [live.sequence for live in self._live if not live.sequence.generated]
        most = 0 if sequence.scores_prompt else len(sequence.tokens) - 1
        return max((other.common_prefix(sequence.tokens, most) for other in reading), default=0)

    def _slot_for(self, sequence: Sequence, source: Slot, shared: int) -> Slot:
        """The free slot to write in: where the prompt begins, or an empty one; a slight likeness costs no cache."""
        free = [slot for slot in self._slots if slot.live is None]
        if source in free and shared * 2 >= min(source.held, len(sequence.tokens)) > 0:
            return source
        return min(
            free, key=lambda slot: (slot.held > 0, shared > 0 and slot is source, slot.released if slot.held else 0)
        )

    def _forget_oldest(self) -> None:
        """Keep what finished answers hold below the limit.

        With llama.cpp's own attention rows pass over the whole cache: 7,000 idle tokens lengthen a step of the draft by
        an eighth (0.5B, two cores).
        """
        idle = sorted((slot for slot in self._slots if slot.live is None), key=lambda slot: slot.released)
        held = sum(slot.held for slot in idle)
        for slot in idle:
            if held <= self._idle_tokens:
                return
            held -= slot.held
            if slot.last:
                slot.last.target_cached = 0
                slot.last.cut_draft(0)
                self._cut(slot.last)

    def _plan(self, *, plain: bool) -> list[Plan]:
        """All that decode, with their drafts, and beside them the oldest prompts as far as rows are left.

        The round that ends a prompt has no drafts, however little of it was left to feed: its first token comes
        sooner. In a plain round texts that adapt have none either.
        """
        decoding = [g.sequence for g in self._live if g.sequence.generated]
        # Every live sequence may want one row of logits, and those that decode one more a draft.
        most_drafts = (self._target.max_logits - len(self._live)) // max(1, len(decoding))
        plans = []
        constrained = sum(sequence.constraint is not None for sequence in decoding)
        beside = self._others_wait()
        for sequence in decoding:
            gamma = min(sequence.speculation.gamma, sequence.remaining - 1, most_drafts)
            if beside and not sequence.speculation.adaptive:
                gamma = min(gamma, sequence.drafts_beside)
            gamma = self._masked(sequence, gamma, constrained)
            plans.append(Plan(sequence, 1, 0 if plain and sequence.speculation.adaptive else gamma))
        verified = sum(1 + plan.gamma for plan in plans)
        reads = len(decoding) < len(self._live)
        left = min(self._chunk(plans), self._target.max_rows - verified) if reads else 0
        logits_left = self._target.max_logits - verified
        for generation in self._live:
            sequence = generation.sequence
            if left > 0 and logits_left > 0 and not sequence.generated:
                rows = min(left, sequence.target_pending, logits_left if sequence.scores_prompt else left)
                plans.append(Plan(sequence, rows, 0))
                left -= rows
                logits_left -= rows if sequence.scores_prompt else 1
        return sorted(plans, key=lambda plan: plan.sequence.slot)

    def _others_wait(self) -> bool:
        """Whether more than one request waits for the end of a round to read on, and may not wait for long."""
        decoding = {live.origin.request for live in self._live if live.sequence.generated}
        return len(decoding) > 1 and self._max_wait_seconds < math.inf

    def _settle_drafts(self, plans: list[Plan], seconds: float) -> None:
        """By what a round took beyond plain decoding, settle how many drafts texts may have that fixed their number.

        What they cost is known behind them only: models, masks, and distributions, of which a vocabulary that is
        sorted takes 25 ms. So they begin with few, and twice as many follow where those have taken a quarter of what
        prompts may take.
        """
        cells = self._target.reach([plan.sequence.slot for plan in plans])
        excess = seconds - self._drafters.controller.target.together([1] * len(plans), cells)
        for plan in plans:
            sequence = plan.sequence
            if excess > self._max_wait_seconds:
                sequence.drafts_beside = min(sequence.drafts_beside, plan.gamma) // 2
            elif excess <= self._max_wait_seconds / 4:
                # A doubled round then stays within half of it.
                sequence.drafts_beside = min(max(1, 2 * sequence.drafts_beside), max(1, sequence.speculation.gamma))

    def _masked(self, sequence: Sequence, gamma: int, constrained: int) -> int:
        """So many of `gamma` drafts that masks for all of them fit into the sequence's part of half the round's time.

        The other half is for those whose masks take longer than they last did.
        """
        seconds = 0.0 if sequence.constraint is None else sequence.constraint.mask_seconds
        part = self._max_wait_seconds / 2 / max(1, constrained)
        return gamma if (gamma + 1) * seconds <= part else max(0, int(part / seconds) - 1)

    def _chunk(self, decoding: list[Plan]) -> int:
        """How many rows of prompts a round should have: those for which all together wait the least a row.

        Whoever is being answered waits for what reading adds to the round, whoever is not for all of it. While others
        decode, no more than let nobody wait too long beyond their own round; of equals, the most.
        """
        cost = self._drafters.controller.target
        cells = self._target.reach([generation.sequence.slot for generation in self._live])
        # What the controller will choose is not known yet; mostly it is little where many are.
        rows = [1 if plan.sequence.speculation.adaptive else 1 + plan.gamma for plan in decoding]
        waiting = len(self._waiting) + len(self._live) - len(decoding)
        longest = self._max_wait_seconds if decoding else math.inf
        before = cost.together(rows, cells)
        least = min(_LEAST_CHUNK, self._prefill_rows)
        chunks = range(least, self._prefill_rows + 1)
        # By estimate a pass may be cheaper with a prompt beside; nobody waits less than not at all.
        takes = {chunk: max(0.0, cost.together([*rows, chunk], cells) - before) for chunk in chunks}
        fitting = [chunk for chunk in chunks if takes[chunk] <= longest] or [least]
        waits = {chunk: (waiting * (before + takes[chunk]) + len(decoding) * takes[chunk]) / chunk for chunk in fitting}
        return max(chunk for chunk in fitting if waits[chunk] <= _AS_GOOD * min(waits.values()))

    def _release(self, generation: Generation) -> None:
        """Free a slot; its caches keep what was decided, for the next prompt that begins alike."""
        sequence = generation.sequence
        self._live.remove(generation)
        # The slot holds on to the sequence for its tokens; a grammar's state may be megabytes.
        sequence.constraint = None
        self._releases += 1
        self._slots[sequence.slot].live = None
        self._slots[sequence.slot].released = self._releases
        self._cut(sequence)
        self._forget_oldest()
        self._watch.ended(generation)

    def _cut(self, sequence: Sequence) -> None:
        """Make both caches hold what the sequence says they hold."""
        self._target.cut(sequence.slot, sequence.target_cached)
        self._drafters.keep(sequence, sequence.draft_cached)

    def _fail(self, failures: list[tuple[Sequence, Exception]]) -> None:
        """End answers with an error; their caches are void."""
        reasons = {id(sequence): reason for sequence, reason in failures}
        for generation in list(self._live):
            reason = reasons.get(id(generation.sequence))
            if reason is not None:
                logger.error("specserve: an answer cannot go on: %s", reason)
                generation.fail(reason)
                generation.sequence.target_cached = 0
                generation.sequence.cut_draft(0)
                self._release(generation)


def longest_wait(milliseconds: float | None, cost: Cost) -> float:
    """The seconds that prompts may add to a round of those who are being answered.

    Args:
        milliseconds: as configured; None leaves it to the machine.
        cost: of the target's passes.
    """
    if milliseconds is not None:
        return milliseconds / 1000
    return max(_WAIT_SECONDS, _WAIT_PASSES * cost.seconds(1, 0))


def _charge(account: Account, times: Times, *, prefill: bool) -> None:
    if prefill:
        account.prefill_seconds += sum(times)
    else:
        account.draft_seconds += times.draft
        account.target_seconds += times.target
        account.other_seconds += times.other
