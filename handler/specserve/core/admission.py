"""Admission: which waiting sequences get a slot, and which running sequences are preempted for them.

Clients take turns, and so do the requests of a client. Smaller sequences overtake a sequence that waits for room until
it has waited for `_AGED_SECONDS`. Then sequences that arrived after it, and sequences of clients above their share, are
preempted for it; those of other clients only once they have committed `_TURN_TOKENS` in their slot. So every sequence
finishes: any one fits alone, and one that is preempted for another client has committed tokens before.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from specserve.core.prefix_cache import Match, PrefixCache
from specserve.core.text_sequence import TextSequence
from specserve.engine.kv_cache import KVCache
from specserve.errors import Contained
from specserve.observability.records import Recorder
from specserve.sequence import Sequence, common_prefix

# Tokens of an answer that are promised at a time, so that a request which allows more is admitted before all are free:
# clients state thousands, or nothing, and get hundreds. An answer that has used them up is promised as many again;
# where there is no room, the sequence admitted last makes it (`Scheduler`). An assumption, which no command prints.
_ANSWER = 1024
# Seconds after which nobody passes a sequence that waits for room, and tokens that one commits before it is preempted
# for a younger one. Assumptions, which no command prints.
_AGED_SECONDS, _TURN_TOKENS = 10.0, 256
# More pending tokens are a long prefill. Half of the slots may have one at a time; three quarters, if another is
# shorter than all of these: the others are left to short prompts.
LONG_PREFILL = 256
# The most sequences that a round examines and gives no slot: long ones, which take 3 ms each if 30,000 of their
# tokens are cached, and sequences of one client, whose requests may have thousands of answers.
_LONG_ONES, _OTHERS = 8, 64

# What a sequence waits for: another one that prefills the same, a long prefill's end, or a slot and cells.
Obstacle = Literal["prefix", "prefill", "room"]


def promised_cells(sequence: Sequence) -> int:
    """Number of cells that a sequence may fill, its prompt and what it has generated included."""
    promises = sequence.generated // _ANSWER + 1
    return sequence.prompt_length + min(sequence.max_tokens, promises * _ANSWER)


@dataclass(eq=False)
class Waiting:
    """The sequences without a slot: those that never had one, and those that were preempted."""

    running: list[TextSequence]  # those that have one, in the order of their admission; changed here
    target: KVCache
    cache: PrefixCache
    recorder: Recorder
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._queue: deque[TextSequence] = deque()
        # How many the last round left waiting for a slot, for room, or for others' long prefills.
        self._blocked = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def about_to_start(self) -> int:
        """Number of sequences that wait for nothing but the next round; others wait for an answer to end."""
        return max(0, min(len(self._queue) - self._blocked, len(self.cache.free_slots)))

    def add(self, sequence: TextSequence) -> None:
        self._queue.append(sequence)
        sequence.timestamps.queued = self.clock()

    def discard(self, sequence: TextSequence) -> bool:
        """Forget a sequence; returns whether it was waiting."""
        if sequence not in self._queue:
            return False
        self._queue.remove(sequence)
        return True

    def preempt(self, sequence: TextSequence) -> None:
        """Take the slot of a running sequence, which goes on later."""
        self.running.remove(sequence)
        self.cache.preempt(sequence)
        self._queue.appendleft(sequence)
        sequence.timestamps.queued = self.clock()
        sequence.preemptions += 1
        self._blocked += 1

    def preempt_one(self) -> None:
        """Preempt a sequence because others outgrow the cache: the one admitted last of the client with the most cells.

        The oldest of all sequences is spared until it has had its turn, so that one sequence always makes progress.
        """
        held = self._cells()
        last = [sequence for sequence in self.running if held[sequence.info.client] == max(held.values())][-1]
        is_oldest = last is self.running[0]
        self.preempt(self.running[-1] if is_oldest and not _had_its_turn(last) else last)

    def slot_is_free(self) -> None:
        """Note that a running sequence has ended: there may be room for those that wait now."""
        self._blocked = 0

    def admit(self) -> None:
        waits_for_prefix = 0
        if self.cache.free_slots or any(map(self._is_aged, self._queue)):
            # The aged sequence for which others make way, and these.
            ahead: TextSequence | None = None
            leaving: list[TextSequence] = []
            # By client, how many got no slot; and how many long ones got none.
            blocked, blocked_long = Counter[str](), 0
            for sequence in self._turns():
                client, is_long = sequence.info.client, len(sequence.tokens) > LONG_PREFILL
                if (is_long and blocked_long == _LONG_ONES) or blocked[client] >= _OTHERS:
                    continue
                if ahead and not (self.cache.free_slots and self._fits_without(leaving, ahead, sequence)):
                    continue
                obstacle = self._start(sequence)
                if obstacle == "room" and not ahead and not blocked[client] and self._is_aged(sequence):
                    leaving = self._make_way(sequence)
                    obstacle = self._start(sequence) if leaving else obstacle
                    ahead = sequence if leaving and obstacle else None
                if obstacle:
                    blocked[client] += 1
                    blocked_long += is_long
                    waits_for_prefix += obstacle == "prefix"
        self._blocked = len(self._queue) - waits_for_prefix

    def _start(self, sequence: TextSequence) -> Obstacle | None:
        """Give a waiting sequence a slot, or say what it waits for; one that cannot be started ends with an error."""
        if not self.cache.free_slots:
            return "room"
        # It was never running, so nothing else would end it.
        with Contained(sequence.info.request, sequence.fail):
            match = self.cache.find(sequence)
            obstacle = self._obstacle(sequence, match)
            if obstacle:
                return obstacle
            self.cache.assign(sequence, match)
        self._queue.remove(sequence)
        if sequence.error:
            self.recorder.record_end(sequence.end_record(self.clock()))
            return None
        self.running.append(sequence)
        sequence.turn_start = sequence.generated
        if sequence.timestamps.start is None:
            sequence.timestamps.start = self.clock()
        return None

    def _obstacle(self, sequence: TextSequence, match: Match) -> Obstacle | None:
        """What a sequence waits for, although there is a free slot."""
        reading = [other for other in self.running if not self.cache.decodes(other)]
        # One that was preempted waits for nothing but its room, lest others come before it.
        if not sequence.preemptions and any(self._reads_the_same(other, sequence, match) for other in reading):
            return "prefix"
        pending = len(sequence.tokens) - max(match.shared, match.stored)
        long = [left for other in reading if (left := self.cache.pending(other)) > LONG_PREFILL]
        share = 0.75 if pending < min(long, default=math.inf) else 0.5
        # One sequence may always read, also where there is one slot.
        if pending > LONG_PREFILL and len(long) >= max(1, int(share * self.target.n_slots)):
            return "prefill"
        needed = promised_cells(sequence) - self.target.pinned_before(match.slot, match.shared)
        return "room" if needed + self._promised(self.running) > self.cache.room else None

    def _reads_the_same(self, other: TextSequence, sequence: TextSequence, match: Match) -> bool:
        """Whether another sequence prefills, or restores, more than a quarter of what a waiting one needs."""
        if other.info.owner != sequence.info.owner:
            return False
        # Two that restore the same prefix would share no cells.
        cached = match.shared if self.cache.is_restoring(other) else max(match.shared, match.stored)
        soon = common_prefix(other.tokens, sequence.tokens, match.max_length)
        return 4 * (soon - cached) > len(sequence.tokens) - cached

    def _promised(self, running: Iterable[TextSequence]) -> int:
        """Number of cells that running sequences are promised beside those that they use."""
        return sum(promised_cells(sequence) - self.target.num_computed_tokens(sequence.slot) for sequence in running)

    def _turns(self) -> list[TextSequence]:
        """The waiting sequences in the order in which they are admitted.

        Clients take turns, so that one with many requests delays no other, and the requests of a client, so that a
        large `n` does not. Aged sequences come first, unless their client is above its share. Within a client, aged
        sequences come first, by arrival, then preempted ones, then the others.
        """
        by_request = self._in_turns(self._queue, lambda sequence: sequence.info.request)
        by_request.sort(
            key=lambda one: (0, one.timestamps.arrival) if self._is_aged(one) else (1 if one.preemptions else 2, 0.0)
        )
        by_client = self._in_turns(by_request, lambda sequence: sequence.info.client)
        greedy = self._clients_above_their_share()
        return sorted(by_client, key=lambda one: not self._is_aged(one) or one.info.client in greedy)

    def _in_turns(self, waiting: Iterable[TextSequence], whose: Callable[[TextSequence], str]) -> list[TextSequence]:
        """Each owner's first, then each one's second, and so on; those that run count as the first ones."""
        turn = Counter(map(whose, self.running))
        turns = {}
        for sequence in waiting:
            turn[whose(sequence)] += 1
            turns[sequence] = turn[whose(sequence)]
        return sorted(turns, key=turns.__getitem__)

    def _is_aged(self, sequence: TextSequence) -> bool:
        return self.clock() - sequence.timestamps.queued >= _AGED_SECONDS

    def _make_way(self, waiting: TextSequence) -> list[TextSequence]:
        """Preempt running sequences for one that has waited long enough, those of others when they had their turn.

        Returns those that give way, now or after their turn; none if they do not make room enough, and older ones have
        to end first.
        """
        greedy, client = self._clients_above_their_share(), waiting.info.client
        others = [
            other
            for other in reversed(self.running)
            if other.info.client in greedy - {client}
            or (
                other.timestamps.arrival > waiting.timestamps.arrival
                and (other.info.client == client or client not in greedy)
            )
        ]
        if not self._fits_without(others, waiting):
            return []
        ready = [other for other in others if other.info.client == client or _had_its_turn(other)]
        if self._fits_without(ready, waiting):
            for other in ready:
                if self._fits_without([], waiting):
                    break
                self.preempt(other)
        return others

    def _clients_above_their_share(self) -> set[str]:
        """Those whose sequences have more slots or cells than an equal share among all clients."""
        n = len({sequence.info.client for sequence in (*self.running, *self._queue)})
        slots = Counter(sequence.info.client for sequence in self.running)
        n_slots, n_cells = self.target.n_slots, self.target.n_cells
        cells = self._cells()
        return {client for client in cells if n * slots[client] > n_slots or n * cells[client] > n_cells}

    def _cells(self) -> Counter[str]:
        """By client, the cells that its running sequences are promised."""
        cells = Counter[str]()
        for sequence in self.running:
            cells[sequence.info.client] += promised_cells(sequence)
        return cells

    def _fits_without(self, others: list[TextSequence], *waiting: TextSequence) -> bool:
        """Whether waiting sequences would have slots, and room for all their tokens, if these were not running."""
        rest = [sequence for sequence in self.running if sequence not in others]
        if len(rest) + len(waiting) > self.target.n_slots:
            return False
        needed = sum(map(promised_cells, waiting)) + self._promised(rest)
        return needed <= self.target.n_cells - self.target.pinned_without({other.slot for other in others})


def _had_its_turn(running: TextSequence) -> bool:
    return running.generated - running.turn_start >= _TURN_TOKENS
