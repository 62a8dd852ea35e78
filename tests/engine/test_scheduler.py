"""Continuous batching: admission, prefill chunks, the time for drafts and masks, cancellation, and records."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from constraints import Alternating, Slow
from costs import FixedCost, flat, proportional
from fake_engine import FakeEngine
from fake_pair import ENDLESS, SEEDED, SLOTS, VOCABULARY, FakePair, plain_greedy
from specserve.core.text_sequence import TextSequence
from specserve.sequence import DrafterName, SequenceStats, SpeculationMode, SpeculationParams
from specserve.speculation.costs import CostTable

LONG = [n % 23 for n in range(300)]


def test_time_waited_before_submit_counts_towards_waiting_and_ttft() -> None:
    pair = FakePair()
    sequence = TextSequence([1, 2], ENDLESS, SpeculationParams(), pair.vocabulary, max_tokens=1)
    pair.scheduler.submit(sequence, waited=100.0)
    pair.run()
    [record] = pair.records.ends
    assert record.waited == pytest.approx(100.0, abs=30)
    assert record.ttft == pytest.approx(100.0, abs=30)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_the_next_round_prefills_iff_a_sequence_awaits_its_first_token(lengths: list[int]) -> None:
    pair = FakePair()
    for length in lengths:
        pair.submit([1] * length, max_tokens=5)
    while pair.scheduler.busy:
        predicted = pair.scheduler.awaiting_first_token > 0
        pair.records.rounds.clear()
        pair.step()
        assert predicted == any(step.position == 0 for step in pair.records.rounds)


def test_requests_get_slots_in_turn_if_one_has_many_choices() -> None:
    """A request with nine choices comes first, then one or three requests with one each; there are three slots."""
    for others in (1, 3):
        pair = FakePair()
        first = [pair.submit([n], request="many", max_tokens=30 + n) for n in range(9)]
        later = [pair.submit([10 + n], request=f"few {n}", max_tokens=30) for n in range(others)]
        pair.step()
        assert [sequence.slot >= 0 for sequence in later] == [True, True, False][:others]
        pair.run(*later)
        assert sum(sequence.done for sequence in first) < 6
        pair.run()
        assert all(sequence.done for sequence in first)


def test_a_cancelled_request_frees_its_slot_at_once() -> None:
    for steps in range(6):
        pair = FakePair()
        cancelled = [pair.submit([n] * 20, max_tokens=1000) for n in range(2 * SLOTS)]
        pair.step(steps)
        for sequence in cancelled:
            pair.scheduler.cancel(sequence)
        assert not pair.scheduler.busy
        after = [pair.submit([n, 5], max_tokens=10) for n in range(SLOTS)]
        pair.step()
        assert pair.scheduler.queued == 0
        pair.run()
        assert [sequence.answer for sequence in after] == [plain_greedy([n, 5], 10) for n in range(SLOTS)]


def test_cancelling_twice_or_after_the_end_changes_nothing() -> None:
    pair = FakePair()
    ended = pair.answer([1, 2], max_tokens=3)
    cancelled = pair.submit([3, 4])
    pair.step()
    for sequence in (ended, cancelled, cancelled):
        pair.scheduler.cancel(sequence)
    assert [record.reason for record in pair.records.ends] == ["length", "cancelled"]


def test_fail_all_ends_the_running_sequences_and_the_queued_are_served() -> None:
    pair = FakePair()
    sequences = [pair.submit([n], max_tokens=30) for n in range(SLOTS + 1)]
    pair.step()
    pair.scheduler.fail_all(RuntimeError("a fault"))
    assert [bool(sequence.error) for sequence in sequences] == [True] * SLOTS + [False]
    pair.run()
    assert sequences[-1].answer == plain_greedy([SLOTS], 30)


def rows_fed_for(engine: FakeEngine, prompt: list[int]) -> int:
    """The number of rows that an engine was fed for this prompt, its last token excluded."""
    return sum(row.position < len(prompt) - 1 for row in engine.decoded)


def test_choices_of_one_prompt_prefill_it_once_in_both_models() -> None:
    prompt = [n % 7 for n in range(40)]
    for count in (2, SLOTS, 2 * SLOTS):
        pair = FakePair(prefill_rows=16, draft_rows=16)
        options: dict[str, Any] = {"max_tokens": 30, "sampling": SEEDED, "verification": "coupled"}
        sequences = [pair.submit(prompt, choice=choice, **options) for choice in range(count)]
        pair.run()
        assert len({tuple(sequence.answer) for sequence in sequences}) == count
        assert rows_fed_for(pair.target, prompt) == len(prompt) - 1
        # Two that begin in one pass of the draft model may both read what the pass has room for.
        assert rows_fed_for(pair.draft, prompt) < 1.2 * len(prompt)
        assert all(sequence.stats.accepted > 0 for sequence in sequences)


def test_only_a_sequence_that_can_reuse_a_prefix_waits_for_it_and_only_while_it_is_read() -> None:
    """One that shares little does not, nor one whose prompt is scored."""
    pair = FakePair(prefill_rows=16)
    prompt = [n % 7 for n in range(40)]
    first, waiting = (pair.submit(prompt, request=request) for request in "ab")
    scored = pair.submit(prompt, max_tokens=0, top_logprobs=0, scores_prompt=True, request="c")
    shares_little = pair.submit([0, 1, *[9] * 30], request="d")
    pair.step()
    others = (waiting, scored, shares_little)
    assert [other.timestamps.start is not None for other in others] == [False, True, True]
    for other in (first, scored):
        assert waiting.timestamps.start is None
        pair.scheduler.cancel(other)
        pair.step()
    assert waiting.timestamps.start is not None


def test_prefill_chunks_delay_others_no_longer_than_configured() -> None:
    """Every row takes a second; those of the decoding sequence itself do not count as delay."""
    for gamma in (0, 3):
        pair = FakePair(prefill_rows=64, max_wait_seconds=20.0)
        short = pair.submit(LONG[:64], max_tokens=200, gamma=gamma)
        pair.step()
        assert len(pair.target.decoded) == 64, "a prompt that delays no sequence is prefilled in full chunks"
        long = pair.submit(LONG[1:], max_tokens=5)
        most_rows = 0
        while not long.generated and len(pair.target.decoded) < 2_000:
            before = len(pair.target.decoded)
            pair.step()
            most_rows = max(most_rows, len(pair.target.decoded) - before)
        assert most_rows == 1 + gamma + 20
        assert not short.done


def test_a_short_prompts_chunk_is_not_as_narrow_as_one_of_the_long_sequence_that_decodes_beside_it() -> None:
    """A row takes a second at 512 tokens, and 10 ms at the beginning."""
    rows = tuple(range(1, 65))
    by_row = tuple(0.01 * n for n in rows), tuple(float(n) for n in rows)
    cost = FixedCost(CostTable(rows, (64, 512), by_row))
    pair = FakePair(prefill_rows=40, max_wait_seconds=20.0, costs=(cost, proportional()))
    long = pair.submit([n % 7 for n in range(500)], gamma=0, max_tokens=200, request="long")
    pair.run_until(lambda: long.generated > 1)
    short = pair.submit([9] * 45, gamma=0, max_tokens=5, request="short")
    pair.step()
    assert pair.target_cache.length(short.slot) == 40


def test_a_pass_over_short_and_long_sequences_is_observed_at_the_length_of_its_average_row() -> None:
    """Otherwise the prefill of a short prompt beside a long sequence would make the machine seem faster."""
    observed: list[tuple[int, int]] = []

    class Watched(FixedCost):
        def observe(self, rows: int, kv_len: int, seconds: float) -> None:
            del seconds
            observed.append((rows, kv_len))

    pair = FakePair(prefill_rows=19, costs=(Watched(proportional().table), proportional()))
    long = pair.submit([n % 7 for n in range(500)], gamma=0, max_tokens=200, request="long")
    pair.run_until(lambda: long.generated > 1)
    pair.submit([9] * 45, gamma=0, max_tokens=5, request="short")
    held = pair.target_cache.length(long.slot)
    pair.step()
    assert observed[-2:] == [(1, held - 1), (20, held // 20)]


def test_drafts_delay_other_requests_no_longer_than_configured() -> None:
    """Every row takes a second in both models, so a draft takes two, and one for each of two sequences four.

    A request in mode off adds nothing to either, and leaves the time to the others.
    """
    cases: list[tuple[str, SpeculationMode, int]] = [("ab", "fixed", 2), ("aa", "fixed", 6), ("ab", "off", 4)]
    for requests, mode, gamma in cases:
        pair = FakePair(max_wait_seconds=9.0)
        pair.submit([0], gamma=6, mode=mode, max_tokens=40, request=requests[0])
        drafting = pair.submit([1], gamma=6, max_tokens=40, request=requests[1])
        pair.run(drafting)
        assert max(drafting.stats.gammas) == gamma, (requests, mode)


def test_the_time_of_drafts_is_estimated_at_the_draft_models_kv_length() -> None:
    """A draft row takes 1 s at the KV length of half its window, 16 tokens, and 43 s at that of the whole prompt."""
    rows = tuple(range(1, 33))
    draft_cost = FixedCost(CostTable(rows, (64, 512), (tuple(map(float, rows)), tuple(100.0 * n for n in rows))))
    pair = FakePair(max_wait_seconds=9.0, prefill_rows=64, window=32, costs=(proportional(), draft_cost))
    sequences = [pair.submit([*LONG, n], gamma=6, sampling=ENDLESS, max_tokens=40, request=str(n)) for n in range(2)]
    pair.step(15)
    assert [max(sequence.stats.gammas) for sequence in sequences] == [2, 2]


def test_a_fixed_gamma_delays_the_prefill_of_another_request_by_at_most_max_wait() -> None:
    """A row of the target takes a second, so three seconds are time for three drafts."""
    pair = FakePair(costs=(proportional(1.0), flat(0.0)), prefill_rows=1, max_wait_seconds=3.0)
    drafting = pair.submit([1, 2], gamma=8, max_tokens=200, sampling=ENDLESS)
    pair.step(4)
    alone = drafting.stats.gammas.copy()
    pair.submit([3] * 30, gamma=0, max_tokens=5, request="another")
    pair.step(10)
    assert max(alone) == 8
    assert max(drafting.stats.gammas - alone) <= 3


def test_sequences_without_drafts_leave_their_share_of_the_logits_to_those_that_draft() -> None:
    pair = FakePair()
    pair.target.max_logits = SLOTS + 6
    drafting = pair.submit([1, 2], gamma=6, max_tokens=30)
    for n in range(SLOTS - 1):
        pair.submit([3, n], gamma=0, max_tokens=60)
    pair.run()
    assert max(drafting.stats.gammas) == 6


def test_scoring_many_prompts_respects_the_engines_max_logits() -> None:
    pair = FakePair(prefill_rows=100)
    pair.target.max_logits = 7
    sequences = [pair.submit([n] * 20, max_tokens=0, top_logprobs=0, scores_prompt=True) for n in range(5)]
    pair.submit([1, 2], gamma=6, max_tokens=60)
    pair.run()
    assert all(len(sequence.prompt_scores) == 19 and sequence.finish_reason == "length" for sequence in sequences)


def test_records_add_up_to_the_prefill_and_decode_time_of_a_sequence() -> None:
    pair = FakePair()
    stats = pair.answer(LONG[:50]).stats
    prefill = [step for step in pair.records.rounds if step.position == 0]
    decode = [step for step in pair.records.rounds if step.position > 0]
    assert len(prefill) == 7
    for steps, seconds in ((prefill, stats.prefill_seconds), (decode, stats.decode_seconds)):
        times = [step.seconds for step in steps]
        assert sum(time.draft + time.target + time.other for time in times) == pytest.approx(seconds)


def test_records_count_each_draft_once_if_masks_are_missing() -> None:
    pair = FakePair(blend=0.6, masks=4)
    stats = [pair.submit([n, 2], max_tokens=15, constraint=Slow(VOCABULARY, pair.masks)).stats for n in range(2)]
    pair.run()
    assert pair.masks.deferred
    total, rounds = SequenceStats.total(stats), pair.records.rounds
    assert sum(len(step.drafts) for step in rounds) == total.drafted
    assert sum(step.n_emitted_drafts for step in rounds) == total.accepted > 0
    assert sum(step.is_decode_round for step in rounds) == total.rounds


@pytest.mark.parametrize("drafter", ["model", "prediction"])
def test_a_token_is_drafted_only_if_its_mask_is_known_and_needs_no_bonus_token(drafter: DrafterName) -> None:
    """A round has time for four masks, which are all needed to draft; the drafts are right."""
    options: dict[str, Any] = {"max_tokens": 40, "sampling": ENDLESS}
    truth = FakePair().answer([1, 2], gamma=0, constraint=Alternating(VOCABULARY), **options).answer
    pair = FakePair(blend=0.0, masks=4)
    options |= {"prediction": truth, "drafter": drafter, "constraint": Slow(VOCABULARY, pair.masks)}
    sequence = pair.submit([1, 2], gamma=6, **options)
    pair.step()
    for length in (5, 9, 13, 17, 21):
        pair.step()
        assert sequence.answer == truth[:length]
    # The draft model reads each token once, and none whose successor could not be drafted.
    assert len(pair.draft.decoded) == (len(sequence.tokens) - 1 if drafter == "model" else 0)


def test_an_offered_token_that_the_grammar_forbids_is_not_drafted() -> None:
    pair = FakePair()
    constraint = Alternating(VOCABULARY)
    truth = pair.answer([1, 2], gamma=0, constraint=constraint).answer
    twice = [truth[0], *(token for token in truth[1:] for _ in range(2))]
    stats = pair.answer([1, 2], gamma=4, prediction=twice, drafter="prediction", constraint=constraint).stats
    assert set(stats.gammas) <= {0, 1}
    assert stats.drafted > 0


def test_a_round_gives_each_sequence_its_mask_in_turn_and_drafts_what_is_left() -> None:
    """In the order of slots the first one would always get the only mask; one without a grammar needs none."""
    for masks, gammas, least in ((1, (0, 0), 19), (4, (6, 0), 31), (4, (6, 6), 31)):
        pair = FakePair(masks=masks)
        options: dict[str, Any] = {"max_tokens": 300, "sampling": ENDLESS}
        grammars = [Slow(VOCABULARY, pair.masks) for _ in gammas]
        masked = [pair.submit([1, 2, n], gamma=gammas[n], constraint=grammars[n], **options) for n in range(2)]
        plain = pair.submit([3, 4], gamma=0, **options)
        pair.step(40)
        assert min(sequence.generated for sequence in masked) >= least
        assert plain.generated == 40
