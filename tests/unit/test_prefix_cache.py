"""The prefix cache: which slot a sequence gets, which prefix it reuses, and which sequences are evicted."""

from __future__ import annotations

import pytest

from costs import flat
from fake_engine import FakeEngine
from specserve.engine.base import Row
from specserve.kv_cache import KVCache
from specserve.sequence import SamplingParams, Sequence, SpeculationParams
from specserve.serving.prefix_cache import PrefixCache
from specserve.speculation.drafters import Drafters
from specserve.speculation.policy import Controller

SYSTEM = [7, 3, 9, 1] * 5


class Bench:
    """A prefix cache over a fake target without a draft model."""

    def __init__(self, *, n_slots: int = 2, idle_tokens: int = 1000) -> None:
        self.target = FakeEngine(vocabulary=24, n_slots=n_slots)
        self.held = KVCache(self.target)
        self.cache = PrefixCache(
            self.held, Drafters(Controller(flat(0.01), None), vocabulary=24, end_tokens=()), idle_tokens=idle_tokens
        )

    def start(self, prompt: list[int], *, prefill: bool = True, scores_prompt: bool = False) -> Sequence:
        """A sequence with a slot, after its prefill."""
        sequence = sequence_of(prompt, scores_prompt=scores_prompt)
        assert self.cache.assign(sequence, [])
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


@pytest.mark.parametrize("later", [[], [[2] * 20]])
def test_short_common_prefix_is_copied_and_the_longer_one_stays_cached(later: list[list[int]]) -> None:
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


def test_sequence_waits_while_another_prefills_the_same_prompt() -> None:
    bench = Bench()
    prefilling = bench.start([*SYSTEM, 2], prefill=False)
    other = sequence_of([*SYSTEM, 4])
    assert not bench.cache.assign(other, [prefilling])
    assert bench.cache.free_slots == 1
    assert bench.cache.assign(sequence_of([*SYSTEM[:2], *[5] * 20]), [prefilling]), "a short common prefix"


@pytest.mark.parametrize(
    ("idle_tokens", "cached"), [(60, [20, 20, 20]), (59, [0, 20, 20]), (20, [0, 0, 20]), (0, [0] * 3)]
)
def test_sequences_that_finished_first_are_evicted_first(idle_tokens: int, cached: list[int]) -> None:
    bench = Bench(n_slots=3, idle_tokens=idle_tokens)
    sequences = [bench.start([token] * 20) for token in range(3)]
    for sequence in sequences:
        bench.cache.release(sequence)
    assert [len(bench.target.cache[sequence.slot]) for sequence in sequences] == cached
    assert [bench.held.end(sequence.slot) for sequence in sequences] == cached


def test_a_slot_stays_free_if_its_engine_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.start([*SYSTEM, 2])
    with monkeypatch.context() as patch:
        patch.setattr(bench.target, "copy", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            bench.start([*SYSTEM, 4], prefill=False)
    assert bench.cache.free_slots == 1
    assert bench.start([*SYSTEM, 4], prefill=False).cached_tokens == len(SYSTEM)
