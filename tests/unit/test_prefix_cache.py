"""The prefix cache: which slot a sequence gets, which prefix it reuses, and which sequences are evicted."""

import pytest

from costs import flat
from fake_engine import FakeEngine
from specserve.core import prefix_cache
from specserve.core.prefix_cache import PrefixCache
from specserve.engine.base import Row
from specserve.engine.kv_cache import KVCache
from specserve.sequence import SamplingParams, Sequence, SpeculationParams
from specserve.speculation.drafters import Drafters
from specserve.speculation.policy import Controller

SYSTEM = [7, 3, 9, 1] * 5


class Bench:
    """A prefix cache over a fake target without a draft model."""

    def __init__(self, *, n_slots: int = 2, n_cells: int = 1000) -> None:
        self.target = FakeEngine(vocabulary=24, n_slots=n_slots, n_cells=n_cells)
        self.held = KVCache(self.target)
        drafters = Drafters(Controller(flat(0.01), None), end_tokens=())
        self.cache = PrefixCache(self.held, drafters)

    def start(self, prompt: list[int], *, prefill: bool = True) -> Sequence:
        """A sequence with a slot, after its prefill."""
        sequence = Sequence(prompt, SamplingParams(temperature=0), SpeculationParams(mode="off"), max_tokens=9)
        self.cache.assign(sequence, self.cache.find(sequence))
        positions = range(self.held.num_computed_tokens(sequence.slot), len(prompt))
        if prefill and positions:
            self.held.forward([Row(prompt[n], sequence.slot, n, wants_logits=False) for n in positions])
        return sequence

    def finish(self, prompt: list[int]) -> Sequence:
        sequence = self.start(prompt)
        self.cache.release(sequence)
        return sequence

    def lengths(self, *sequences: Sequence) -> list[int]:
        held = [self.held.num_computed_tokens(slot) for slot in range(self.held.n_slots)]
        assert list(map(len, self.target.cache)) == held
        return [held[sequence.slot] for sequence in sequences]


def test_a_prompt_that_continues_a_finished_sequence_gets_its_slot_and_its_last_token_is_never_reused() -> None:
    for more, reused in (([2, 4], len(SYSTEM)), ([], len(SYSTEM) - 1)):
        bench = Bench()
        first = bench.finish(SYSTEM)
        second = bench.start([*SYSTEM, *more], prefill=False)
        pending = bench.cache.pending(second)
        assert (second.slot, second.cached_tokens, pending) == (first.slot, reused, max(1, len(more)))
        assert bench.target.cache[second.slot] == SYSTEM[:reused]


def test_short_common_prefix_is_copied_and_the_longer_one_stays_cached() -> None:
    for later in ([], [[2] * 20]):
        bench = Bench()
        first = bench.finish(SYSTEM)
        for prompt in later:
            bench.finish(prompt)
        assert bench.start([*SYSTEM[:4], *[2] * 30], prefill=False).cached_tokens == 4
        assert bench.target.cache[first.slot] == SYSTEM


def test_sequences_that_finished_first_make_room_first() -> None:
    for wanted, cached in [(40, [20, 20, 20]), (41, [0, 20, 20]), (61, [0, 0, 20]), (100, [0, 0, 0])]:
        bench = Bench(n_slots=3, n_cells=100)
        sequences = [bench.finish([token] * 20) for token in range(3)]
        bench.cache.make_room(wanted)
        assert bench.lengths(*sequences) == cached


def test_a_slot_loses_its_end_and_keeps_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "_LEAST_LOSS", 4)
    bench = Bench(n_cells=25)
    sequence = bench.finish([7] * 20)
    for wanted, left in ((10, 15), (12, 11)):
        bench.cache.make_room(wanted)
        assert bench.lengths(sequence) == [left]


def test_a_prefix_that_others_copy_counts_as_used() -> None:
    bench = Bench(n_slots=3, n_cells=100)
    system, other = bench.finish([*SYSTEM, 1]), bench.finish([9] * 20)
    bench.finish([*SYSTEM[:4], *[2] * 20])
    bench.cache.make_room(50)
    assert bench.lengths(system, other) == [21, 0]


def test_running_sequences_keep_their_tokens_and_what_they_share() -> None:
    bench = Bench(n_slots=3, n_cells=100)
    running = bench.start([*SYSTEM, 1])
    finished = bench.finish([*SYSTEM, *[2] * 20])
    assert bench.cache.room == 79
    bench.cache.make_room(79)
    assert bench.held.free_cells == 79
    assert bench.lengths(running, finished) == [21, 0]


def test_a_slot_stays_free_if_its_engine_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.start([*SYSTEM, 2])
    with monkeypatch.context() as patch:
        patch.setattr(bench.target, "copy", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            bench.start([*SYSTEM, 4], prefill=False)
    assert len(bench.cache.free_slots) == 1
    assert bench.start([*SYSTEM, 4], prefill=False).cached_tokens == len(SYSTEM)
