"""Continuous batching: admission, turns, prefill chunks, grammar masks, cancelled requests, and records."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from constraints import Shared, Slow
from costs import FixedCost, flat, proportional
from fake_engine import FakeEngine
from fake_pair import ENDLESS, SLOTS, VOCABULARY, Everything, FakePair, plain_greedy
from specserve.sequence import SamplingParams, SpeculationParams
from specserve.serving.budget import max_wait
from specserve.serving.generation import Generation
from specserve.speculation.cost import CostTable

LONG = [n % 23 for n in range(300)]


def test_what_an_answer_has_waited_before_it_was_queued_is_counted() -> None:
    seen = Everything()
    pair = FakePair(observers=[seen])
    generation = Generation([1, 2], SamplingParams(), SpeculationParams(), pair.vocabulary, max_tokens=1)
    pair.scheduler.submit(generation, waited=100.0)
    pair.run()
    [record] = seen.ends
    assert record.waited == pytest.approx(100.0, abs=30)
    assert record.ttft == pytest.approx(100.0, abs=30)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_the_scheduler_says_whether_the_next_round_prefills_a_prompt(lengths: list[int]) -> None:
    pair = FakePair()
    generations = [pair.submit([1] * length, max_tokens=5) for length in lengths]
    while pair.scheduler.busy:
        said = pair.scheduler.prefilling
        before = [(generation, generation.target_cached) for generation in generations if not generation.generated]
        pair.step()
        assert said == any(generation.target_cached > cached for generation, cached in before)


def test_more_requests_than_slots_all_come_to_their_end() -> None:
    pair = FakePair()
    generations = [pair.submit([n, n + 1], max_tokens=15) for n in range(3 * SLOTS)]
    pair.run()
    assert all(generation.done for generation in generations)


@pytest.mark.parametrize("others", [1, 3])
def test_requests_get_slots_in_turn_so_that_many_answers_to_one_delay_no_other(others: int) -> None:
    """One asks for nine answers, another, or three others, for one each right after it; there are three slots."""
    pair = FakePair()
    many = [pair.submit([n], request="many", max_tokens=30 + n) for n in range(9)]
    few = [pair.submit([10 + n], request=f"few {n}", max_tokens=30) for n in range(others)]
    pair.step()
    assert [generation.slot >= 0 for generation in few] == [True, True, False][:others]
    pair.run(*few)
    assert sum(generation.done for generation in many) < 6
    pair.run()
    assert all(generation.done for generation in many)


@pytest.mark.parametrize("steps", range(6))
def test_a_cancelled_request_frees_its_slot_at_once(steps: int) -> None:
    pair = FakePair()
    cancelled = [pair.submit([n] * 20, max_tokens=1000) for n in range(2 * SLOTS)]
    pair.step(steps)
    for generation in cancelled:
        pair.scheduler.cancel(generation)
    assert not pair.scheduler.busy
    after = [pair.submit([n, 5], max_tokens=10) for n in range(SLOTS)]
    pair.step()
    assert pair.scheduler.queued == 0
    pair.run()
    for generation in after:
        assert generation.answer == plain_greedy(generation.prompt, 10)


def test_cancelling_twice_or_after_the_end_changes_nothing() -> None:
    seen = Everything()
    pair = FakePair(observers=[seen])
    ended = pair.submit([1, 2], max_tokens=3)
    pair.run()
    cancelled = pair.submit([3, 4])
    pair.step()
    for generation in (ended, cancelled, cancelled):
        pair.scheduler.cancel(generation)
    assert [record.reason for record in seen.ends] == ["length", "cancelled"]


def test_a_fault_outside_of_passes_can_end_all_that_run_and_the_next_are_served() -> None:
    pair = FakePair()
    generations = [pair.submit([n], max_tokens=30) for n in range(SLOTS + 1)]
    pair.step()
    pair.scheduler.fail_all(RuntimeError("a fault"))
    assert [bool(generation.error) for generation in generations] == [True] * SLOTS + [False]
    pair.run()
    assert generations[-1].answer == plain_greedy([SLOTS], 30)


def decoded_by(engine: FakeEngine, prompt: list[int]) -> int:
    """How many rows of this prompt, but for its last token, an engine was fed."""
    return sum(row.position < len(prompt) - 1 for row in engine.decoded)


@pytest.mark.parametrize("count", [2, SLOTS, 2 * SLOTS])
def test_several_answers_to_one_prompt_prefill_it_once_in_both_models(count: int) -> None:
    pair = FakePair(prefill_rows=16, draft_rows=16)
    prompt = [n % 7 for n in range(40)]
    generations = [
        pair.submit(prompt, max_tokens=30, sampling=SamplingParams(seed=1), verification="coupled", choice=choice)
        for choice in range(count)
    ]
    pair.run()
    assert len({tuple(generation.answer) for generation in generations}) == count
    assert decoded_by(pair.target, prompt) == len(prompt) - 1
    assert decoded_by(pair.draft, prompt) == len(prompt) - 1
    assert all(generation.stats.accepted > 0 for generation in generations)


def test_a_prompt_that_begins_as_a_running_one_continues_from_its_cache() -> None:
    pair = FakePair(prefill_rows=64)
    system = [n % 5 for n in range(50)]
    pair.submit([*system, 8, 9], max_tokens=60, sampling=SamplingParams(seed=1))
    pair.step(3)
    second = pair.submit([*system, 10, 11, 12])
    pair.run()
    assert second.cached_tokens == 50
    assert second.answer == plain_greedy(second.prompt, 20)


@pytest.mark.parametrize("gamma", [0, 3])
def test_a_prompt_is_prefilled_in_chunks_that_delay_others_no_longer_than_configured(gamma: int) -> None:
    """Every row takes a second, and those of the decoding sequence itself are no wait."""
    pair = FakePair(prefill_rows=64, max_wait_seconds=20.0)
    short = pair.submit([1, 2, 3], max_tokens=200, gamma=gamma)
    pair.step()
    long = pair.submit(LONG, max_tokens=5)
    widest = 0
    while not long.generated and len(pair.target.decoded) < 2_000:
        before = len(pair.target.decoded)
        pair.step()
        widest = max(widest, len(pair.target.decoded) - before)
    assert widest == 1 + gamma + 20
    assert not short.done


@pytest.mark.parametrize(("requests", "gamma"), [(["a", "b"], 2), (["a", "a"], 6)])
def test_drafts_delay_other_requests_no_longer_than_configured(requests: list[str], gamma: int) -> None:
    """Every row takes a second in both models, so a draft for each of two sequences takes four."""
    pair = FakePair(max_wait_seconds=9.0)
    generations = [pair.submit([n], gamma=6, max_tokens=40, request=one) for n, one in enumerate(requests)]
    pair.run(generations[0])
    assert max(generations[0].stats.gammas) == gamma


def test_a_request_without_drafts_leaves_the_time_for_drafts_to_the_others() -> None:
    """A draft takes two seconds, one in each model; a request in mode off adds nothing to either."""
    pair = FakePair(max_wait_seconds=9.0)
    pair.submit([1], gamma=6, mode="off", max_tokens=40, request="off")
    drafted = pair.submit([2], gamma=6, max_tokens=40, request="drafted")
    pair.run(drafted)
    assert max(drafted.stats.gammas) == 4


def test_the_time_of_drafts_is_that_of_the_draft_models_own_cache() -> None:
    """A row of its takes 1 s after the 16 tokens of its window, and 43 s after the whole prompt."""
    rows = tuple(range(1, 33))
    dearer = FixedCost(CostTable(rows, (64, 512), (tuple(map(float, rows)), tuple(100.0 * n for n in rows))))
    pair = FakePair(max_wait_seconds=9.0, prefill_rows=64, window=16, costs=(proportional(), dearer))
    generations = [pair.submit([*LONG, n], gamma=6, sampling=ENDLESS, max_tokens=40, request=str(n)) for n in range(2)]
    pair.step(15)
    assert [max(generation.stats.gammas) for generation in generations] == [2, 2]


def test_a_prompt_that_delays_nobody_is_prefilled_as_fast_as_can_be() -> None:
    pair = FakePair(prefill_rows=64, max_wait_seconds=20.0)
    pair.submit(LONG, max_tokens=5)
    pair.step()
    assert len(pair.target.decoded) == 64


@pytest.mark.parametrize(
    ("milliseconds", "pass_seconds", "seconds"),
    [(100.0, 1.0, 0.1), (2000.0, 1.0, 2.0), (None, 1.0, 10.0), (None, 0.01, 0.25)],
)
def test_the_longest_wait_is_as_configured_or_else_a_quarter_of_a_second_or_ten_passes(
    milliseconds: float | None, pass_seconds: float, seconds: float
) -> None:
    assert max_wait(milliseconds, proportional(pass_seconds)) == seconds


def test_many_prompts_are_scored_at_once_within_the_engines_limit_of_logits() -> None:
    pair = FakePair(prefill_rows=100)
    pair.target.max_logits = 7
    generations = [pair.submit([n] * 20, max_tokens=0, top_logprobs=0, scores_prompt=True) for n in range(5)]
    pair.submit([1, 2], gamma=6, max_tokens=60)
    pair.run()
    assert all(len(one.prompt_scores) == 19 and one.finish_reason == "length" for one in generations)


def drafted_beside(running: int, *arriving: list[int]) -> int:
    """How many tokens are drafted for adaptive sequences in the six rounds after these prompts arrive."""
    pair = FakePair(blend=0.0, costs=(flat(), flat(0.25)), prefill_rows=4)
    stats = [pair.submit([n, 1, 2], gamma=8, mode="adaptive", max_tokens=200).stats for n in range(running)]
    pair.step(8)
    before = sum(one.drafted for one in stats)
    for prompt in arriving:
        pair.submit(prompt, gamma=0)
    pair.step(6)
    return sum(one.drafted for one in stats) - before


def test_a_prefill_shortens_the_drafts_of_others_and_a_request_that_waits_for_a_slot_does_not() -> None:
    """Short rounds give first tokens sooner; those that wait for a slot are helped by what ends sequences early."""
    assert 0 < drafted_beside(SLOTS - 1, LONG) < drafted_beside(SLOTS - 1)
    assert drafted_beside(SLOTS, LONG) == drafted_beside(SLOTS) > 0


def test_observers_are_told_of_all_the_time_of_a_sequence_its_prefill_too() -> None:
    seen = Everything()
    pair = FakePair(observers=[seen])
    stats = pair.submit([n % 23 for n in range(50)]).stats
    pair.run()
    prefill, decode = (
        [record.draft + record.target + record.other for record in seen.rounds if (record.position > 0) is decodes]
        for decodes in (False, True)
    )
    assert len(prefill) == 7
    assert sum(prefill) == pytest.approx(stats.prefill_seconds)
    assert sum(decode) == pytest.approx(stats.decode_seconds)


def test_observers_are_told_of_no_draft_twice_when_a_round_is_deferred() -> None:
    shared, seen = Shared(4), Everything()
    pair = FakePair(blend=0.6, begin_masks=shared.begin_round, observers=[seen])
    stats = [pair.submit([n, 2], max_tokens=15, constraint=Slow(VOCABULARY, shared)).stats for n in range(2)]
    pair.run()
    assert shared.deferred
    assert sum(len(record.drafts) for record in seen.rounds) == sum(one.drafted for one in stats)
    assert sum(record.accepted for record in seen.rounds) == sum(one.accepted for one in stats) > 0


@pytest.mark.parametrize("gamma", [0, 3])
def test_masks_that_a_round_has_no_time_for_wait_and_change_no_output(gamma: int) -> None:
    def answers(masks: int) -> tuple[list[list[int]], int]:
        shared = Shared(masks)
        pair = FakePair(blend=0.6, begin_masks=shared.begin_round)
        generations = [
            pair.submit(
                [1, 2, seed],
                gamma=gamma,
                sampling=SamplingParams(seed=seed),
                verification="coupled",
                constraint=Slow(VOCABULARY, shared),
            )
            for seed in range(3)
        ]
        pair.run()
        return [generation.answer for generation in generations], shared.deferred

    undisturbed, deferred = answers(10**6)
    assert deferred == 0
    for masks in (1, 2, 5):
        delayed, deferred = answers(masks)
        assert delayed == undisturbed
        assert deferred > 0 or masks > 1


def test_a_sequence_whose_mask_has_waited_comes_first_in_the_next_round() -> None:
    """Each round has time for one mask; in the order of slots the first would always have it."""
    shared = Shared(1)
    pair = FakePair(begin_masks=shared.begin_round)
    generations = [
        pair.submit([1, 2, n], gamma=0, max_tokens=100, sampling=ENDLESS, constraint=Slow(VOCABULARY, shared))
        for n in range(3)
    ]
    pair.step(60)
    assert [generation.generated for generation in generations] == pytest.approx([20] * 3, abs=1)


def test_a_sequence_without_a_grammar_never_waits_for_the_masks_of_others() -> None:
    shared = Shared(1)
    pair = FakePair(begin_masks=shared.begin_round)
    for n in range(2):
        pair.submit([1, 2, n], gamma=0, max_tokens=40, sampling=ENDLESS, constraint=Slow(VOCABULARY, shared))
    plain = pair.submit([3, 4], gamma=0)
    pair.step(21)
    assert plain.generated == 20


@pytest.mark.parametrize(("mask_seconds", "gamma"), [(0.0, 6), (0.01, 6), (0.025, 3), (0.5, 0)])
def test_as_many_tokens_are_drafted_as_their_masks_have_time_for(mask_seconds: float, gamma: int) -> None:
    pair = FakePair(blend=1.0, max_wait_seconds=0.2, costs=(flat(0.01), flat(0.001)))
    constraint = Slow(VOCABULARY, Shared(10**6), mask_seconds=mask_seconds)
    generation = pair.submit([1, 2], gamma=6, max_tokens=30, constraint=constraint)
    pair.run()
    assert max(generation.stats.gammas) == gamma
