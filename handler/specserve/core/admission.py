"""Who of the waiting sequences gets a slot, and who of the running ones gives theirs back.

Clients take turns, and so do the requests of a client. A sequence that waits for room is passed by smaller ones until
it has waited for `_AGED_SECONDS`. Then sequences that came after it are preempted for it, and those of a client with
more than its share; other clients' once they have decided `_TURN_TOKENS` since they were admitted. So all get to their
end: any fits alone, and one that gives way to another client has decided tokens before.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from operator import itemgetter
from weakref import WeakKeyDictionary

from specserve.core.generation import Generation
from specserve.core.prefix_cache import Admission, PrefixCache
from specserve.core.recorder import Recorder
from specserve.engine.kv_cache import KVCache
from specserve.sequence import Owner, Sequence

logger = logging.getLogger(__name__)

# Tokens of an answer that are promised at a time, so that a request which allows more is admitted before all are free:
# clients state thousands, or nothing, and get hundreds. An answer that has used them up is promised as many again;
# where there is no room, the sequence admitted last makes it (`Scheduler`). An assumption, which no command prints.
_ANSWER = 1024
# Seconds after which nobody passes a sequence that waits for room, and tokens that one decides before it is preempted
# for a younger one. Assumptions, which no command prints.
_AGED_SECONDS, _TURN_TOKENS = 10.0, 256
# Prompt tokens that are a long prefill: half of the slots may have one at a time, so that short prompts find a slot.
# And how many such sequences are looked at in a round: 3 ms each, if 30,000 tokens of each are in the store.
LONG_PREFILL, _EXAMINED = 256, 8


def promised_cells(sequence: Sequence) -> int:
    """Number of cells that a sequence may fill, its prompt and what it has generated included.

    Args:
        sequence: its prompt and `max_tokens` fit into the cache together.
    """
    promises = sequence.generated // _ANSWER + 1
    return sequence.prompt_length + min(sequence.max_tokens, promises * _ANSWER)


class Waiting:
    """The sequences that wait for a slot.

    Args:
        running: those that have one, in the order of their admission; sequences are added and removed here.
        target: the target's cache.
        cache: assigns slots.
        recorder: told of sequences that cannot be started.
        clock: seconds.
    """

    def __init__(
        self,
        running: list[Generation],
        target: KVCache,
        cache: PrefixCache,
        recorder: Recorder,
        clock: Callable[[], float],
    ) -> None:
        self._running = running
        self._target = target
        self._cache = cache
        self._recorder = recorder
        self._clock = clock
        self._queue: deque[Generation] = deque()
        # How many the last round left waiting for a slot, for room, or for others' prefills.
        self._blocked = 0
        # Since when a sequence has waited, and how many tokens it had decided when it was admitted.
        self._waiting_since: WeakKeyDictionary[Generation, float] = WeakKeyDictionary()
        self._admitted_with: WeakKeyDictionary[Generation, int] = WeakKeyDictionary()

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._queue)

    def __contains__(self, generation: Generation) -> bool:
        """Whether a sequence waits."""
        return generation in self._queue

    @property
    def about_to_start(self) -> int:
        """Number of sequences that wait for nothing but the next round; others wait for an answer to end."""
        return max(0, min(len(self._queue) - self._blocked, self._cache.free_slots))

    def add(self, generation: Generation) -> None:
        """Let a sequence wait."""
        self._queue.append(generation)
        self._waiting_since[generation] = self._clock()

    def remove(self, generation: Generation) -> None:
        """Forget a sequence that waits."""
        self._queue.remove(generation)

    def preempt(self, generation: Generation) -> None:
        """Take the slot of a running sequence, which goes on later."""
        self._running.remove(generation)
        self._cache.preempt(generation)
        self._queue.appendleft(generation)
        self._waiting_since[generation] = self._clock()
        generation.preemptions += 1
        self._blocked += 1

    def preempt_one(self) -> None:
        """Preempt for those that outgrow the cache: of the client that has most, the sequence admitted last.

        That is not the oldest of all before it has had its turn, so that there is always one that gets on.
        """
        held: Counter[str] = Counter()
        for generation in self._running:
            held[generation.info.client] += promised_cells(generation)
        last = [generation for generation in self._running if held[generation.info.client] == max(held.values())][-1]
        is_oldest = last is self._running[0]
        self.preempt(self._running[-1] if is_oldest and not self._had_its_turn(last) else last)

    def slot_is_free(self) -> None:
        """Note that a running sequence has ended: there may be room for those that wait now."""
        self._blocked = 0

    def admit(self) -> None:
        """Give slots to waiting sequences, in turns; one waits while another prefills a prefix that it can reuse."""
        self._blocked = 0
        if not self._cache.free_slots and not any(map(self._is_aged, self._queue)):
            return
        # Texts that were seen to wait, and whether for room; and for which sequence way is being made by which others.
        postponed: list[tuple[tuple[Owner, list[int]], bool]] = []
        ahead: list[Generation] = []
        leaving: list[Generation] = []
        examined = 0
        for generation in self._turns():
            is_long = len(generation.tokens) > LONG_PREFILL
            text = generation.info.owner, generation.tokens
            known = next((for_room for other, for_room in postponed if other == text), None)
            if known is not None and not generation.scores_prompt:
                # Saves asking again; a scored prompt reuses no prefix, so it waits for none.
                self._blocked += known
                continue
            may_pass = not ahead or (self._cache.free_slots and self._fits_without(leaving, *ahead, generation))
            if not may_pass or (is_long and examined == _EXAMINED):
                self._blocked += 1
                continue
            admission = self._start(generation)
            if admission is Admission.AWAITS_ROOM and self._is_aged(generation) and not ahead:
                leaving = self._make_way(generation)
                admission = self._start(generation) if leaving else admission
                ahead = [generation] if leaving and admission is Admission.AWAITS_ROOM else []
            if admission is not Admission.ADMITTED:
                waits_for_room = admission is not Admission.AWAITS_PREFIX
                postponed.append((text, waits_for_room))
                examined += is_long
                self._blocked += waits_for_room

    def _start(self, generation: Generation) -> Admission:
        """Give a waiting sequence a slot, or say what it waits for; one that cannot be started ends with an error."""
        admission = Admission.AWAITS_ROOM
        if self._cache.free_slots:
            try:
                admission = self._assign(generation)
            except Exception as error:
                # It was never running, so nothing else would end it.
                logger.exception("specserve: a sequence cannot be started")
                self._queue.remove(generation)
                generation.fail(error)
                self._recorder.record_ends([generation])
                return Admission.ADMITTED
        if admission is Admission.ADMITTED:
            self._queue.remove(generation)
            self._running.append(generation)
            self._admitted_with[generation] = generation.generated
            if generation.timestamps.start is None:
                generation.timestamps.start = self._clock()
        return admission

    def _assign(self, generation: Generation) -> Admission:
        prefilling = [other for other in self._running if not self._cache.decodes(other)]
        long = sorted(pending for other in prefilling if (pending := self._cache.pending(other)) > LONG_PREFILL)
        # Shorter prefills than half of the slots have may have more, but for a quarter, where only short ones come.
        half, most = max(1, self._target.n_slots // 2), max(1, self._target.n_slots - max(1, self._target.n_slots // 4))
        shorter = math.inf if len(long) < half else long[half - 1] - 1
        return self._cache.assign(
            generation,
            # One that was preempted waits for nothing but its room, lest others come before it.
            [] if generation.preemptions else prefilling,
            cells=promised_cells(generation),
            room=self._target.n_cells - self._target.pinned_cells - self._promised(self._running),
            max_prefill=shorter if len(long) < most else LONG_PREFILL,
        )

    def _promised(self, running: Iterable[Generation]) -> int:
        """Number of cells that running sequences are promised beside those that they use."""
        return sum(promised_cells(generation) - self._target.end(generation.slot) for generation in running)

    def _turns(self) -> list[Generation]:
        """The waiting sequences in the order in which they are admitted.

        Clients take turns, so that one with many requests delays no other, and the requests of a client, so that a
        large `n` does not. Those that have aged come first, unless their client has more than its share; of one client
        the oldest of them before its others, and then those that were preempted.
        """
        by_request = self._in_turns(self._queue, lambda generation: generation.info.request)
        by_request.sort(
            key=lambda g: (0, g.timestamps.arrival) if self._is_aged(g) else (1 if g.preemptions else 2, 0.0)
        )
        by_client = self._in_turns(by_request, lambda generation: generation.info.client)
        greedy = self._clients_above_their_share()
        return sorted(by_client, key=lambda g: not self._is_aged(g) or g.info.client in greedy)

    def _in_turns(self, waiting: Iterable[Generation], whose: Callable[[Generation], str]) -> list[Generation]:
        turn = Counter(map(whose, self._running))
        turns: list[tuple[int, Generation]] = []
        for generation in waiting:
            turn[whose(generation)] += 1
            turns.append((turn[whose(generation)], generation))
        return [generation for _, generation in sorted(turns, key=itemgetter(0))]

    def _is_aged(self, generation: Generation) -> bool:
        return self._clock() - self._waiting_since[generation] >= _AGED_SECONDS

    def _make_way(self, waiting: Generation) -> list[Generation]:
        """Preempt running sequences for one that has waited long enough, those of others when they had their turn.

        Returns:
            Those that give way, now or after their turn; none if they do not make room enough, and older ones have to
            end first.
        """
        greedy, client = self._clients_above_their_share(), waiting.info.client
        others = [
            other
            for other in reversed(self._running)
            if other.info.client in greedy - {client}
            or (
                other.timestamps.arrival > waiting.timestamps.arrival
                and (other.info.client == client or client not in greedy)
            )
        ]
        if not self._fits_without(others, waiting):
            return []
        ready = [other for other in others if other.info.client == client or self._had_its_turn(other)]
        if self._fits_without(ready, waiting):
            for other in ready:
                # What it has is stored first, a part in each round, so that it is not read again.
                if self._fits_without([], waiting) or not self._cache.store_running(other):
                    break
                self.preempt(other)
        return others

    def _had_its_turn(self, running: Generation) -> bool:
        return running.generated - self._admitted_with[running] >= _TURN_TOKENS

    def _clients_above_their_share(self) -> set[str]:
        """Those whose sequences have more slots or cells than an equal share among all clients."""
        n_clients = len({generation.info.client for generation in (*self._running, *self._queue)})
        slots, cells = Counter[str](), Counter[str]()
        for generation in self._running:
            slots[generation.info.client] += n_clients
            cells[generation.info.client] += n_clients * promised_cells(generation)
        return {
            client for client in slots if slots[client] > self._target.n_slots or cells[client] > self._target.n_cells
        }

    def _fits_without(self, others: list[Generation], *waiting: Generation) -> bool:
        """Whether waiting sequences would have slots, and room for all their tokens, if these were not running."""
        rest = [generation for generation in self._running if generation not in others]
        needed = sum(map(promised_cells, waiting)) + self._promised(rest)
        # The first lines tell mostly, and take no time.
        return (
            len(rest) + len(waiting) <= self._target.n_slots
            and needed <= self._target.n_cells
            and needed <= self._target.n_cells - self._target.pinned_without({other.slot for other in others})
        )
