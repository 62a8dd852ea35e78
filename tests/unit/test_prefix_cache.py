"""The prefix cache: which slot a sequence gets, which prefix it reuses, and which sequences are evicted."""

from __future__ import annotations

import pytest

from costs import flat
from fake_engine import FakeEngine
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
        drafters = Drafters(Controller(flat(0.01), None), vocabulary=24, end_tokens=())
        self.cache = PrefixCache(self.held, drafters)

    def start(self, prompt: list[int], *, prefill: bool = True, scores_prompt: bool = False) -> Sequence:
        """A sequence with a slot, after its prefill."""
        sequence = sequence_of(prompt, scores_prompt=scores_prompt)
        self.cache.assign(sequence, self.cache.find(sequence))
        if prefill:
            positions = range(self.held.end(sequence.slot), len(prompt))
            if positions:
                self.held.forward([Row(prompt[n], sequence.slot, n, wants_logits=False) for n in positions])
        return sequence

    def finish(self, prompt: list[int]) -> Sequence:
        """A sequence that was prefilled and has finished."""
        sequence = self.start(prompt)
        self.cache.release(sequence)
        return sequence


def sequence_of(prompt: list[int], *, scores_prompt: bool = False) -> Sequence:
    params = SamplingParams(temperature=0), SpeculationParams(mode="off")
    return Sequence(prompt, *params, max_tokens=9, scores_prompt=scores_prompt)


def test_prompt_that_continues_a_finished_sequence_gets_its_slot() -> None:
    bench = Bench()
    first = bench.finish(SYSTEM)
    second = bench.start([*SYSTEM, 2, 4], prefill=False)
    assert (second.slot, second.cached_tokens, bench.cache.pending(second)) == (first.slot, len(SYSTEM), 2)
    assert bench.target.cache[second.slot] == SYSTEM


def test_last_token_of_a_prompt_is_never_reused() -> None:
    bench = Bench()
    bench.finish(SYSTEM)
    assert bench.start(SYSTEM, prefill=False).cached_tokens == len(SYSTEM) - 1


def test_prefix_of_a_running_sequence_is_copied() -> None:
    bench = Bench()
    running = bench.start([*SYSTEM, 2])
    other = bench.start([*SYSTEM, 4], prefill=False)
    assert other.slot != running.slot
    assert other.cached_tokens == len(SYSTEM)
    assert bench.target.cache[other.slot] == SYSTEM
    assert bench.target.cache[running.slot] == [*SYSTEM, 2]


def test_short_common_prefix_is_copied_and_the_longer_one_stays_cached() -> None:
    for later in ([], [[2] * 20]):
        bench = Bench()
        first = bench.finish(SYSTEM)
        for prompt in later:
            bench.finish(prompt)
        other = bench.start([*SYSTEM[:4], *[2] * 30], prefill=False)
        assert other.slot != first.slot
        assert other.cached_tokens == 4
        assert bench.target.cache[first.slot] == SYSTEM


def test_alternating_conversations_keep_a_slot_each() -> None:
    bench = Bench()
    turns = [bench.finish([token] * 10) for token in (1, 2)]
    assert turns[0].slot != turns[1].slot
    for earlier in turns:
        later = bench.start([*earlier.tokens, 3, 4])
        assert (later.slot, later.cached_tokens) == (earlier.slot, 10)


def test_prompt_whose_tokens_are_scored_reuses_nothing() -> None:
    bench = Bench()
    bench.finish(SYSTEM)
    assert bench.start([*SYSTEM, 2], prefill=False, scores_prompt=True).cached_tokens == 0


def test_sequences_that_finished_first_make_room_first() -> None:
    for wanted, cached in [(40, [20, 20, 20]), (41, [0, 20, 20]), (61, [0, 0, 20]), (100, [0, 0, 0])]:
        bench = Bench(n_slots=3, n_cells=100)
        sequences = [bench.start([token] * 20) for token in range(3)]
        for sequence in sequences:
            bench.cache.release(sequence)
        bench.cache.make_room(wanted)
        assert [len(bench.target.cache[sequence.slot]) for sequence in sequences] == cached
        assert [bench.held.end(sequence.slot) for sequence in sequences] == cached


def test_a_slot_loses_its_end_and_keeps_its_beginning() -> None:
    bench = Bench(n_cells=300)
    bench.finish([7] * 256)
    running = bench.start([9])
    bench.cache.release(running)
    bench.finish([8])
    bench.cache.make_room(50)
    assert bench.start([7] * 256, prefill=False).cached_tokens == 0


def test_a_prefix_that_others_copy_counts_as_used() -> None:
    bench = Bench(n_slots=3, n_cells=100)
    system, other = bench.finish([*SYSTEM, 1]), bench.finish([9] * 20)
    bench.finish([*SYSTEM[:4], *[2] * 20])
    bench.cache.make_room(50)
    assert [bench.held.length(sequence.slot) for sequence in (system, other)] == [21, 0]


def test_running_sequences_keep_their_tokens_and_what_they_share() -> None:
    bench = Bench(n_slots=3, n_cells=100)
    running = bench.start([*SYSTEM, 1])
    finished = bench.finish([*SYSTEM, *[2] * 20])
    assert bench.cache.room == 79
    bench.cache.make_room(79)
    assert bench.held.free_cells == 79
    assert (bench.held.length(running.slot), bench.held.length(finished.slot)) == (21, 0)


def test_a_slot_stays_free_if_its_engine_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.start([*SYSTEM, 2])
    with monkeypatch.context() as patch:
        patch.setattr(bench.target, "copy", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            bench.start([*SYSTEM, 4], prefill=False)
    assert len(bench.cache.free_slots) == 1
    assert bench.start([*SYSTEM, 4], prefill=False).cached_tokens == len(SYSTEM)
