"""Rounds and the scheduler on the fake engine, which refuses every row that does not continue its cache."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import replace
from itertools import count
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from constraints import Alternating, Shared, Slow
from costs import flat, proportional
from fake_engine import FakeEngine, FakeVocabulary
from specserve.observability.records import EndRecord, Observer, RequestInfo, RoundRecord
from specserve.sampling.distribution import FloatArray, draw, to_distribution
from specserve.sampling.logits import penalise
from specserve.sampling.noise import Noise, Purpose
from specserve.sequence import DrafterName, SamplingParams, Sequence, SpeculationMode, SpeculationParams, Verification
from specserve.serving.generation import Generation
from specserve.serving.scheduler import Scheduler, max_wait
from specserve.speculation import drafters
from specserve.speculation.controller import Controller
from specserve.speculation.cost import Cost
from specserve.speculation.draft_model import DraftModel, DraftText, worth_waiting
from specserve.speculation.drafters import Draft, Drafters, GrammarProposer, Proposal
from specserve.speculation.lookup import FreeTokens, LookupProposer
from specserve.speculation.prediction import PredictionProposer
from specserve.speculation.rejection import RULES, NoiseSource
from specserve.speculation.round import Plan, Report, _seconds, run_round

VOCABULARY = 24
SLOTS = 3


class Bench:
    """A scheduler over a fake target and a fake draft."""

    def __init__(
        self,
        *,
        blend: float = 0.3,
        prefill_rows: int = 8,
        draft_rows: int = 8,
        draft_width: int = VOCABULARY,
        idle_tokens: int = 4096,
        max_wait_seconds: float = math.inf,
        begin_masks: Callable[[float], None] | None = None,
        window: int = 4096,
        costs: tuple[Cost, Cost] | None = None,
    ) -> None:
        self.target = FakeEngine(vocabulary=VOCABULARY, n_slots=SLOTS)
        self.draft = FakeEngine(vocabulary=draft_width, n_slots=SLOTS, blend=blend)
        target_cost, draft_cost = costs or (proportional(), proportional())
        model = DraftModel(
            self.draft, draft_cost, window=window, max_rows=draft_rows, vocabulary=VOCABULARY, context_length=8192
        )
        self.controller = Controller(target_cost, draft_cost)
        self.scheduler = Scheduler(
            self.target,
            Drafters(self.controller, PredictionProposer(), model=model, vocabulary=VOCABULARY),
            prefill_rows=prefill_rows,
            idle_tokens=idle_tokens,
            max_wait_seconds=max_wait_seconds,
            begin_masks=begin_masks,
        )
        self.submitted: list[Generation] = []

    def submit(
        self,
        prompt: list[int],
        *,
        gamma: int = 3,
        max_tokens: int = 20,
        stops: list[str] | None = None,
        sampling: SamplingParams | None = None,
        verification: Verification = "block",
        request: str = "",
        **more: Any,
    ) -> Generation:
        generation = Generation(
            prompt,
            sampling or SamplingParams(temperature=0),
            SpeculationParams(gamma, verification),
            FakeVocabulary(VOCABULARY),
            stops or [],
            info=RequestInfo(request),
            max_tokens=max_tokens,
            **more,
        )
        self.scheduler.submit(generation)
        self.submitted.append(generation)
        return generation

    def run(self) -> None:
        for _ in range(10_000):
            if not self.scheduler.busy:
                return
            self.scheduler.step()
            self.check_caches()
        raise AssertionError("The scheduler does not come to an end.")

    def check_caches(self) -> None:
        """Both caches hold exactly the leading tokens that each sequence says they hold."""
        for slot in self.scheduler._cache.slots:
            sequence = slot.sequence
            if sequence is not None:
                assert self.target.cache[slot.index] == sequence.tokens[: sequence.target_cached]
                assert self.draft.cache[slot.index] == sequence.tokens[sequence.draft_start : sequence.draft_cached]


def greedy_generation(prompt: list[int], speculation: SpeculationParams, **options: Any) -> Generation:
    """A greedy sequence without stop strings."""
    return Generation(prompt, SamplingParams(temperature=0), speculation, FakeVocabulary(VOCABULARY), **options)


def answer(generation: Generation) -> list[int]:
    """The tokens after the prompt."""
    return generation.tokens[generation.prompt_length :]


def plain_greedy(prompt: list[int], max_tokens: int) -> list[int]:
    """The target's own greedy text, without any cache, up to its end token."""
    target = FakeEngine(vocabulary=VOCABULARY, n_slots=1)
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        token = int(np.argmax(target.logits(tokens)))
        if FakeVocabulary(VOCABULARY).is_end_token(token):
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def test_what_an_answer_has_waited_before_it_was_queued_is_counted() -> None:
    bench = Bench()
    generation = greedy_generation([1, 2], SpeculationParams(mode="off"), max_tokens=2)
    bench.scheduler.submit(generation, 100.0)
    bench.scheduler.step()
    record = generation.end_record(perf_counter())
    assert record.waited == pytest.approx(100.0, abs=30)
    assert record.ttft == pytest.approx(100.0, abs=30)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_the_scheduler_says_whether_the_next_round_reads_of_a_prompt(lengths: list[int]) -> None:
    bench = Bench()
    for length in lengths:
        bench.submit([1] * length, max_tokens=5)
    while bench.scheduler.busy:
        said = bench.scheduler.prefilling
        before = [(generation, generation.target_cached) for generation in bench.submitted]
        unread = [(generation, cached) for generation, cached in before if not generation.generated]
        bench.scheduler.step()
        assert said == any(generation.target_cached > cached for generation, cached in unread)


prompts = st.lists(st.integers(0, VOCABULARY - 2), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(st.tuples(prompts, st.integers(0, 6), st.integers(1, 30)), min_size=1, max_size=6),
    blend=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    prefill_rows=st.integers(1, 40),
    draft_rows=st.integers(4, 40),
)
def test_greedy_speculative_text_is_the_targets_greedy_text_whatever_runs_beside_it(
    jobs: list[tuple[list[int], int, int]], blend: float, prefill_rows: int, draft_rows: int
) -> None:
    bench = Bench(blend=blend, prefill_rows=prefill_rows, draft_rows=draft_rows)
    generations = [bench.submit(prompt, gamma=gamma, max_tokens=most) for prompt, gamma, most in jobs]
    bench.run()
    for generation, (prompt, _, most) in zip(generations, jobs, strict=True):
        assert answer(generation) == plain_greedy(prompt, most)
        assert generation.finish_reason == ("length" if len(answer(generation)) == most else "stop")


def test_a_perfect_draft_is_always_accepted_and_gamma_one_more_token_is_free() -> None:
    bench = Bench(blend=0.0)
    generation = bench.submit([1, 2, 3], gamma=3, max_tokens=17)
    bench.run()
    stats = generation.stats
    assert stats.accepted == stats.drafted == 12
    assert stats.rounds == 4  # one token ends the prefill, then four rounds of four
    assert stats.mean_acceptance_length == 4


def test_the_draft_never_reads_a_token_twice_unless_it_was_cut_away() -> None:
    bench = Bench(blend=0.0)
    bench.submit([1, 2, 3], gamma=3, max_tokens=30)
    bench.run()
    positions = [row.position for row in bench.draft.decoded]
    assert positions == sorted(set(positions))


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_inside_a_draft_ends_the_text_there(max_tokens: int) -> None:
    bench = Bench(blend=0.0)
    generation = bench.submit([1, 2, 3], gamma=5, max_tokens=max_tokens)
    bench.run()
    assert len(answer(generation)) == max_tokens
    assert generation.finish_reason == "length"


def test_the_end_token_inside_a_draft_ends_the_text_and_is_not_part_of_it() -> None:
    prompt = next([a, b] for a in range(23) for b in range(23) if 2 <= len(plain_greedy([a, b], 50)) < 12)
    bench = Bench(blend=0.0)
    generation = bench.submit(prompt, gamma=10, max_tokens=50)
    bench.run()
    assert generation.finish_reason == "stop"
    assert answer(generation) == plain_greedy(prompt, 50)


def test_a_stop_string_inside_a_draft_ends_the_text_before_it() -> None:
    text = bytes(97 + token for token in plain_greedy([1, 2, 3], 12)).decode()
    stop = text[4:6]
    bench = Bench(blend=0.0)
    generation = bench.submit([1, 2, 3], gamma=8, max_tokens=50, stops=[stop])
    bench.run()
    assert generation.finish_reason == "stop"
    assert generation.take_text() == text[: text.index(stop)]


def test_an_end_inside_a_draft_leaves_caches_that_the_next_request_can_continue() -> None:
    bench = Bench(blend=0.0)
    first = bench.submit([1, 2, 3], gamma=8, max_tokens=9)
    bench.run()
    prompt = first.tokens[:10]
    second = bench.submit(prompt, max_tokens=12)
    bench.run()
    assert second.cached_tokens > 0
    assert answer(second) == plain_greedy(prompt, 12)


def test_more_requests_than_slots_all_come_to_their_end() -> None:
    bench = Bench()
    generations = [bench.submit([n, n + 1], max_tokens=15) for n in range(3 * SLOTS)]
    bench.run()
    assert all(g.done for g in generations)


@pytest.mark.parametrize("steps", range(6))
def test_a_cancelled_request_frees_its_slot_at_once(steps: int) -> None:
    bench = Bench()
    cancelled = [bench.submit([n] * 20, max_tokens=1000) for n in range(2 * SLOTS)]
    for _ in range(steps):
        bench.scheduler.step()
    for generation in cancelled:
        bench.scheduler.cancel(generation)
    assert not bench.scheduler.busy
    after = [bench.submit([n, 5], max_tokens=10) for n in range(SLOTS)]
    bench.scheduler.step()
    assert bench.scheduler.running == sum(not g.done for g in after)
    bench.run()
    for generation in after:
        assert answer(generation) == plain_greedy(generation.tokens[:2], 10)


def test_cancelling_twice_or_after_the_end_changes_nothing() -> None:
    bench = Bench()
    generation = bench.submit([1, 2], max_tokens=3)
    bench.run()
    bench.scheduler.cancel(generation)
    bench.scheduler.cancel(generation)
    assert not bench.scheduler.busy


def test_a_guess_that_the_draft_has_never_heard_of_is_not_read_by_it() -> None:
    """Its engine would refuse the row, and speculation by the model would be over for everyone."""
    prompt = [1, 2, 3]
    text = plain_greedy(prompt, 20)
    unknown = max(text)
    bench = Bench(draft_width=unknown)
    generation = bench.submit(prompt, gamma=6, max_tokens=20, prediction=text)
    bench.run()
    assert answer(generation) == text
    assert all(row.token < unknown for row in bench.draft.decoded)
    other = bench.submit([1], gamma=3, max_tokens=20)
    bench.run()
    assert other.stats.drafters["model"].drafted > 0


@pytest.mark.parametrize("draft_width", [VOCABULARY - 5, VOCABULARY + 5])
def test_a_draft_with_a_narrower_or_wider_vocabulary_drafts_what_both_know(draft_width: int) -> None:
    bench = Bench(draft_width=draft_width, blend=0.5)
    prompt = [1, 2, VOCABULARY - 2]  # its last token is unknown to the narrower one
    greedy = bench.submit(prompt, max_tokens=20)
    sampled = bench.submit([1, 2], max_tokens=40, sampling=SamplingParams(temperature=1.5, seed=3))
    bench.run()
    assert answer(greedy) == plain_greedy(prompt, 20)
    assert sampled.stats.drafted > 0
    assert max(row.token for row in bench.draft.decoded) < draft_width


def test_logits_that_are_not_finite_end_the_answer_with_an_error() -> None:
    bench = Bench()
    failed = bench.submit([1, 2, 3], max_tokens=10)
    bench.target.poison_after = 0
    bench.scheduler.step()
    assert failed.error is not None
    after = bench.submit([1, 2, 3], max_tokens=10)
    bench.run()
    assert answer(after) == plain_greedy([1, 2, 3], 10)


def test_a_failing_target_ends_the_answers_of_that_round_and_the_next_ones_are_served() -> None:
    bench = Bench()
    failed = bench.submit([1, 2, 3], max_tokens=10)
    bench.scheduler.step()
    bench.target.fail_after = 0
    bench.scheduler.step()
    assert failed.error is not None
    assert failed.error.status == 500
    after = bench.submit([1, 2, 3], max_tokens=10)
    bench.run()
    assert answer(after) == plain_greedy([1, 2, 3], 10)


@pytest.mark.parametrize("failing_pass", range(8))
@pytest.mark.parametrize("how", ["fail_after", "poison_after"])
def test_a_failing_draft_costs_the_speculation_and_nothing_else(how: str, failing_pass: int) -> None:
    """The pass may be one that reads the prompt, or any depth of a round."""
    bench = Bench()
    generation = bench.submit(list(range(12)), max_tokens=20)
    plain = bench.submit([4, 5], gamma=0, max_tokens=20)
    setattr(bench.draft, how, failing_pass)
    while bench.scheduler.busy:
        bench.scheduler.step()
    assert getattr(bench.draft, how) is None, "the draft never came to fail"
    passes = len(bench.draft.decoded)
    assert answer(generation) == plain_greedy(list(range(12)), 20)
    assert answer(plain) == plain_greedy([4, 5], 20)
    later = bench.submit([1, 2], max_tokens=20)
    while not later.done:
        bench.scheduler.step()
    assert len(bench.draft.decoded) == passes, "a broken draft is asked no more"


def test_the_statistics_count_what_the_client_gets() -> None:
    text = bytes(97 + token for token in plain_greedy([1, 2, 3], 12)).decode()
    bench = Bench(blend=0.0)
    generation = bench.submit([1, 2, 3], gamma=10, max_tokens=50, stops=[text[3:5]])
    bench.run()
    stats = generation.stats
    assert generation.generated == 5
    # The first token ends the prefill; the others were drafted, all but what stands behind the stop string.
    assert stats.rounds + stats.accepted == pytest.approx(5, abs=1)
    assert stats.accepted <= 4


def test_two_conversations_that_take_turns_keep_a_slot_each() -> None:
    bench = Bench()
    first = bench.submit(list(range(10)), max_tokens=5)
    bench.run()
    second = bench.submit(list(range(12, 22)), max_tokens=5)
    bench.run()
    assert second.slot != first.slot
    for earlier in (first, second):
        prompt = [*earlier.tokens, 3, 4]
        later = bench.submit(prompt, max_tokens=5)
        bench.run()
        assert later.slot == earlier.slot
        assert later.cached_tokens == len(prompt) - 3


def test_finished_answers_are_forgotten_oldest_first_beyond_the_limit() -> None:
    bench = Bench(idle_tokens=30)
    for n in range(SLOTS):
        bench.submit([n] * 10, max_tokens=5)
        bench.run()
    held = [len(tokens) for tokens in bench.target.cache]
    assert held[0] == 0
    assert all(held[1:])


def test_who_asks_for_a_number_of_drafts_gets_it_for_a_short_answer_to_a_long_prompt_too() -> None:
    bench = Bench()
    short = bench.submit([7, 3, 5] * 20, max_tokens=20)
    bench.run()
    assert short.stats.drafted


def test_a_long_prompt_does_not_cost_its_neighbours_their_drafts() -> None:
    bench = Bench(blend=0.0)
    long = bench.submit([n % 23 for n in range(120)], max_tokens=100)
    short = bench.submit([1, 2, 3], max_tokens=20)
    while not short.done:
        bench.scheduler.step()
    assert long.draft_cached < len(long.tokens) - 1
    assert short.stats.mean_acceptance_length > 3


def test_a_prompt_that_is_read_beside_a_text_is_no_reason_to_verify_what_would_not_pay_alone() -> None:
    """Every row costs alike: a draft costs what the token costs that it might spare, in a round of any length."""
    bench = Bench()
    guessed = SpeculationParams(4, mode="adaptive", drafter="prediction")
    truth = tuple(plain_greedy([1, 2, 3], 60))
    sequence = greedy_generation([1, 2, 3], guessed, max_tokens=60, prediction=truth)
    bench.scheduler.submit(sequence)
    bench.scheduler.step()
    long = bench.submit([n % 23 for n in range(120)])
    while not long.generated:
        bench.scheduler.step()
    assert sequence.stats.rounds > 10
    assert sequence.stats.drafted == 0


def decoding(*tokens: int) -> Sequence:
    """A text that has been given its first token."""
    sequence = Sequence([1, 2, 3], SamplingParams(temperature=0), SpeculationParams(4), max_tokens=50)
    sequence.tokens += tokens
    return sequence


def empty_proposals(plans: list[Plan]) -> list[Proposal]:
    return [Proposal(plan.sequence, plan.gamma, Noise(1, 0, 0, 0)) for plan in plans]


def test_a_round_is_charged_to_the_sequences_that_lengthen_it() -> None:
    """Every row costs a second: two sequences decode, one has three drafts, and five rows are of a prompt."""
    reading = Sequence([1] * 20, SamplingParams(temperature=0), SpeculationParams(4), max_tokens=50)
    plans = [Plan(decoding(7), 1, 4), Plan(decoding(7), 1, 4), Plan(reading, 5, 0)]
    proposals = empty_proposals(plans)
    proposals[1].seconds = 0.5
    for _ in range(3):
        proposals[1].add(Draft(5, np.empty(0), "model", 0.9), 0.9)
    assert _seconds(plans, proposals, proportional(), 0) == [(1, 0), (1, 3.5), (5, 0)]


def test_nothing_is_charged_for_rows_that_make_a_pass_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = proportional()
    monkeypatch.setattr(cost, "seconds", lambda rows, _kv_len: 10.0 - rows)
    reading = Sequence([1] * 20, SamplingParams(temperature=0), SpeculationParams(4), max_tokens=50)
    plans = [Plan(decoding(7), 1, 4), Plan(decoding(7), 1, 4), Plan(reading, 5, 0)]
    assert _seconds(plans, empty_proposals(plans), cost, 0) == [(4, 0), (4, 0), (0, 0)]


def test_a_sequence_is_not_charged_for_its_neighbours_drafts() -> None:
    bench = Bench(blend=1.0)
    drafted = bench.submit([1, 2, 3], max_tokens=100, gamma=3)
    beside = greedy_generation([4, 5], SpeculationParams(16, mode="adaptive"), max_tokens=100)
    bench.scheduler.submit(beside)
    while not drafted.done and beside.generated < 90:
        bench.scheduler.step()
    assert drafted.stats.drafted > 20
    assert beside.stats.drafted == 0
    assert bench.controller._state(beside).loss_seconds == pytest.approx(0, abs=1e-9)


def test_whoever_waits_for_a_slot_is_no_reason_for_short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rounds help those whose prompts are read; who waits for others to end is helped by what ends them."""
    bench = Bench()
    told: list[tuple[int, int]] = []

    def watched(*arguments: Any, waiting: int) -> Report:
        told.append((waiting, sum(not plan.sequence.generated for plan in arguments[2])))
        return run_round(*arguments, waiting=waiting)

    monkeypatch.setattr("specserve.serving.scheduler.run_round", watched)
    for first in range(2 * SLOTS):
        bench.submit([first, 1, 2], max_tokens=20)
    for _ in range(5):
        bench.scheduler.step()
    assert bench.scheduler.waiting == SLOTS
    assert told[0] == (SLOTS, SLOTS)
    assert told[-1] == (0, 0)


def test_the_model_drafts_again_behind_a_guess_that_stood_behind_its_own_draft() -> None:
    sequence = decoding(7)
    sequence.draft_cached = len(sequence.tokens) + 2
    assert not worth_waiting(sequence, sequence.draft_cached, sequence.draft_cached)


class Everything(Observer):
    """Keeps all rounds."""

    def __init__(self) -> None:
        self.rounds: list[RoundRecord] = []
        self.reasons: list[str] = []

    def round(self, record: RoundRecord) -> None:
        self.rounds.append(record)

    def end(self, record: EndRecord) -> None:
        self.reasons.append(record.reason)


def test_observers_are_told_of_all_time_that_a_text_took_reading_its_prompt_too() -> None:
    bench, seen = Bench(prefill_rows=8), Everything()
    bench.scheduler._observers = [seen]
    stats = bench.submit([n % 23 for n in range(50)], sampling=SamplingParams(temperature=0)).stats
    bench.run()
    reading, writing = (
        [record.draft + record.target + record.other for record in seen.rounds if (record.position > 0) is decodes]
        for decodes in (False, True)
    )
    assert seen.reasons == ["length"]
    assert len(reading) == 7
    assert sum(reading) == pytest.approx(stats.prefill_seconds)
    assert sum(writing) == pytest.approx(stats.decode_seconds)


def test_observers_are_told_of_no_draft_twice_when_a_round_is_deferred() -> None:
    shared = Shared(4)
    bench, seen = Bench(blend=0.6, begin_masks=shared.begin_round), Everything()
    bench.scheduler._observers = [seen]
    constrained = [bench.submit([n, 2], max_tokens=15, constraint=Slow(VOCABULARY, shared)) for n in range(2)]
    bench.run()
    assert shared.deferred
    stats = [generation.stats for generation in constrained]
    assert sum(len(record.drafts) for record in seen.rounds) == sum(one.drafted for one in stats)
    assert sum(record.accepted for record in seen.rounds) == sum(one.accepted for one in stats) > 0


def test_what_is_decided_from_a_pass_belongs_to_its_price(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    monkeypatch.setattr(Cost, "observe", lambda _cost, _counts, _cells, seconds: seen.append(seconds))
    bench = Bench()
    # Every look at this clock takes a second: one behind the pass, one behind what was decided.
    bench.scheduler._clock = map(float, count()).__next__
    bench.submit([1, 2, 3], gamma=0)
    bench.scheduler.step()
    assert seen == [2.0]


@pytest.mark.parametrize("mode", [0, 3])
def test_a_prompt_is_read_in_pieces_that_let_nobody_wait_longer_than_was_said(
    mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The fake engine takes no time at all, which the costs would follow.
    monkeypatch.setattr(Cost, "observe", lambda *_: None)
    bench = Bench(prefill_rows=64, max_wait_seconds=20.0)
    short = bench.submit([1, 2, 3], max_tokens=200, gamma=mode)
    bench.scheduler.step()
    long = bench.submit([n % 23 for n in range(300)], max_tokens=5)
    widest = 0
    while not long.generated:
        before = len(bench.target.decoded)
        bench.scheduler.step()
        widest = max(widest, len(bench.target.decoded) - before)
    # Every row takes a second, and those of the stream itself are no wait.
    assert widest == 1 + mode + 20
    assert not short.done


@pytest.mark.parametrize(("milliseconds", "seconds"), [(100.0, 0.1), (2000.0, 2.0), (None, 10.0)])
def test_a_wait_is_as_configured_or_else_ten_passes_on_a_slow_machine(
    milliseconds: float | None, seconds: float
) -> None:
    assert max_wait(milliseconds, proportional(1.0)) == seconds


def test_a_prompt_may_make_a_pass_cheaper_by_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """With some kernels four rows cost less than three."""
    bench = Bench(prefill_rows=8)
    for gamma in (1, 7):
        bench.submit([gamma] * 3, gamma=gamma, max_tokens=60)
    while not all(generation.generated for generation in bench.submitted):
        bench.scheduler.step()
    cost = bench.controller.target
    monkeypatch.setattr(cost, "seconds", lambda rows, _kv_len: 0.1 / rows)
    reading = bench.submit([9] * 30)
    bench.scheduler.step()
    assert reading.target_cached == 8


def test_a_wait_is_a_quarter_of_a_second_unless_told_or_slow() -> None:
    assert max_wait(None, proportional(0.01)) == 0.25


def test_a_prompt_that_nobody_waits_behind_is_read_as_fast_as_can_be() -> None:
    bench = Bench(prefill_rows=64, max_wait_seconds=20.0)
    bench.submit([n % 23 for n in range(300)], max_tokens=5)
    bench.scheduler.step()
    assert len(bench.target.decoded) == 64


def law_of_three_tokens(sampling: SamplingParams, constraint: Alternating | None) -> dict[tuple[int, ...], float]:
    """The exact law of the target's first three tokens behind the prompt [1, 2]."""
    target = FakeEngine(vocabulary=6, n_slots=1)

    def law_behind(text: tuple[int, ...]) -> FloatArray:
        logits = penalise(target.logits([1, 2, *text]), sampling, [1, 2], text)
        if constraint is not None:
            logits = np.where(constraint.allowed(text), logits, -np.inf)
        return to_distribution(logits, sampling)

    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        law = {
            (*text, token): probability * float(p)
            for text, probability in law.items()
            for token, p in enumerate(law_behind(text))
        }
    return law


def pvalue_of_the_shipped_path(
    verification: Verification,
    trials: int,
    *,
    constraint: Alternating | None = None,
    prediction: Tokens[int] = (),
    drafter: DrafterName | None = None,
    mode: SpeculationMode = "fixed",
    masks: int | None = None,
) -> float:
    """Chi-square of three tokens that scheduler, drafters and round have written, against the target's exact law."""
    sampling = SamplingParams(temperature=0.9, top_k=4, presence_penalty=0.8, logit_bias=((2, 0.5),))
    engines = [FakeEngine(vocabulary=6, n_slots=SLOTS, blend=blend) for blend in (0.0, 0.6)]
    costs = flat(), flat(0.06)
    model = DraftModel(engines[1], costs[1], window=32, max_rows=8, vocabulary=6, context_length=99)
    counts: Counter[tuple[int, ...]] = Counter()
    guessers = PredictionProposer(), GrammarProposer(), LookupProposer()
    controller = Controller(*costs)
    all_of_them = Drafters(controller, *guessers, model=model, vocabulary=6)
    shared = Shared(masks or 10**9)
    scheduler = Scheduler(engines[0], all_of_them, prefill_rows=8, idle_tokens=99, begin_masks=shared.begin_round)
    law = law_of_three_tokens(sampling, Alternating(6) if masks else constraint)
    for seed in range(trials):
        speculation = SpeculationParams(3, verification, drafter, mode)
        sequence = Generation(
            [1, 2],
            replace(sampling, seed=seed),
            speculation,
            NeverEnding(6),
            max_tokens=4,
            constraint=Slow(6, shared) if masks else constraint,
            prediction=prediction,
        )
        scheduler.submit(sequence)
        while scheduler.busy:
            scheduler.step()
        counts[tuple(sequence.tokens[2:5])] += 1
    likely = [text for text, probability in law.items() if probability * trials >= 5]
    observed = [counts[text] for text in likely]
    expected = [law[text] * trials for text in likely]
    rest = trials - sum(expected)
    return float(chisquare([*observed, trials - sum(observed)], [*expected, rest]).pvalue)


class NeverEnding(FakeVocabulary):
    def is_end_token(self, token: int) -> bool:
        del token
        return False


SHAPED = SamplingParams(temperature=0, frequency_penalty=1.5, presence_penalty=0.3, logit_bias=((3, 2.0), (5, -100.0)))


@pytest.mark.parametrize("gamma", [1, 4])
def test_penalties_and_biases_change_greedy_text_alike_with_and_without_speculation(gamma: int) -> None:
    bench = Bench()
    plain = bench.submit([1, 2, 3], gamma=0, max_tokens=20, sampling=SHAPED)
    bench.run()
    speculative = bench.submit([1, 2, 3], gamma=gamma, max_tokens=20, sampling=SHAPED)
    bench.run()
    assert answer(speculative) == answer(plain) != plain_greedy([1, 2, 3], 20)
    assert 5 not in answer(plain)
    assert speculative.stats.accepted > 0


@pytest.mark.parametrize("verification", RULES)
def test_what_scheduler_drafter_and_round_write_has_the_targets_law(verification: Verification) -> None:
    """4,000 texts of three tokens; false-alarm rate 1e-4."""
    assert pvalue_of_the_shipped_path(verification, 4_000) > 1e-4


@pytest.mark.parametrize("verification", RULES)
def test_a_grammar_leaves_the_law_of_the_target_within_it(verification: Verification) -> None:
    """4,000 texts of three tokens; false-alarm rate 1e-4."""
    assert pvalue_of_the_shipped_path(verification, 4_000, constraint=Alternating(6)) > 1e-4


@pytest.fixture
def fewer_drafts_after_a_deferral(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where masks have turned out to take longer than the last ones did."""
    monkeypatch.setattr(
        Scheduler, "_drafts_with_masks", lambda _, sequence, drafts, __: 0 if sequence.deferrals else drafts
    )


@pytest.mark.usefixtures("fewer_drafts_after_a_deferral")
@pytest.mark.parametrize("verification", ["token", "block"])
def test_a_round_that_waits_for_masks_leaves_the_law_of_the_target(verification: Verification) -> None:
    """4,000 sequences of three tokens, each round with time for one mask; false alarm 1e-4."""
    assert pvalue_of_the_shipped_path(verification, 4_000, masks=1) > 1e-4


@pytest.mark.usefixtures("fewer_drafts_after_a_deferral")
def test_a_deferred_round_that_drafts_anew_is_seen_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drafters, "defer", lambda *_: None)
    assert pvalue_of_the_shipped_path("token", 4_000, masks=1) < 1e-4


@pytest.mark.parametrize("verification", RULES)
def test_a_prediction_leaves_the_law_of_the_target(verification: Verification) -> None:
    """4,000 texts of three tokens, the prediction right, wrong and right again; false-alarm rate 1e-4."""
    prediction = [0, 1, 2, 3, 4, 5, 0, 2, 4, 1]
    assert pvalue_of_the_shipped_path(verification, 4_000, prediction=prediction, drafter="prediction") > 1e-4


def test_a_prediction_that_claims_to_be_less_certain_than_it_was_is_seen_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def half_certain(token: int, size: int) -> FloatArray:
        spread = np.full(size, 0.5 / (size - 1))
        spread[token] = 0.5
        return spread

    monkeypatch.setattr(drafters, "one_hot", half_certain)
    prediction = [0, 1, 2, 3, 4, 5, 0, 2, 4, 1]
    assert pvalue_of_the_shipped_path("token", 4_000, prediction=prediction, drafter="prediction") < 1e-4


@pytest.mark.parametrize("verification", RULES)
def test_lengths_that_the_controller_chooses_leave_the_law_of_the_target(verification: Verification) -> None:
    """4,000 texts of three tokens, all drafters, costs at which it pays to look at each draft; false alarm 1e-4."""
    prediction = [0, 1, 2, 3, 4, 5, 0, 2, 4, 1]
    assert pvalue_of_the_shipped_path(verification, 4_000, prediction=prediction, mode="adaptive") > 1e-4
    assert pvalue_of_the_shipped_path(verification, 4_000, mode="adaptive") > 1e-4


def test_a_draft_that_is_thrown_away_for_its_own_low_probability_is_seen_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a controller must not do: look at the token that was drawn, and then decide whether it was drawn."""
    add_any = Proposal.add

    def add(self: Proposal, draft: Draft, acceptance: float) -> None:
        if draft.q[draft.token] > 0.3:
            add_any(self, draft, acceptance)

    monkeypatch.setattr(Proposal, "add", add)
    assert pvalue_of_the_shipped_path("token", 4_000) < 1e-4


def test_a_drafter_that_shares_its_noise_with_the_rule_is_seen_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def sample_with_shared_noise(q: FloatArray, place: int, noise: NoiseSource) -> int:
        return draw(q, noise.uniform(Purpose.ACCEPT, place))

    monkeypatch.setitem(RULES, "token", RULES["token"]._replace(sample=sample_with_shared_noise))
    assert pvalue_of_the_shipped_path("token", 4_000) < 1e-4


SEEDED = SamplingParams(seed=7)


@pytest.mark.parametrize("gamma", [0, 1, 3, 6])
def test_a_seed_gives_one_text_by_coupled_verification_whatever_the_speculation_and_the_company(gamma: int) -> None:
    """A prompt longer than the draft reads in a round, cold and warm, alone and beside others."""
    prompt = list(range(20))
    alone = Bench()
    expected = alone.submit(prompt, gamma=3, sampling=SEEDED, verification="coupled")
    alone.run()
    bench = Bench(blend=0.8, prefill_rows=5)
    endless = SamplingParams(logit_bias=((VOCABULARY - 1, -1e9),))
    neighbour = bench.submit([5, 6, 7], max_tokens=200, sampling=endless)
    met = False
    for _ in range(2):
        generation = bench.submit(prompt, gamma=gamma, sampling=SEEDED, verification="coupled")
        while not generation.done:
            bench.scheduler.step()
            met |= not neighbour.done and generation.generated > 1
        assert answer(generation) == answer(expected)
    assert generation.cached_tokens == 19
    assert met


@pytest.mark.parametrize("verification", RULES)
def test_a_seed_gives_the_same_text_again_under_the_same_conditions(verification: Verification) -> None:
    texts = []
    for _ in range(2):
        bench = Bench()
        generation = bench.submit([1, 2], max_tokens=20, sampling=SEEDED, verification=verification)
        bench.run()
        texts.append(answer(generation))
    assert texts[0] == texts[1]


def test_without_a_seed_texts_differ() -> None:
    bench = Bench()
    generations = [bench.submit([1, 2], max_tokens=20, sampling=SamplingParams()) for _ in range(4)]
    bench.run()
    assert len({tuple(answer(g)) for g in generations}) > 1


def decoded_by(engine: FakeEngine, prompt: list[int]) -> int:
    """How many rows of this prompt, but for its last token, an engine was fed."""
    return sum(row.position < len(prompt) - 1 for row in engine.decoded)


@pytest.mark.parametrize("count", [2, SLOTS, 2 * SLOTS])
def test_several_answers_to_one_prompt_read_it_once_in_both_models(count: int) -> None:
    bench = Bench(prefill_rows=16, draft_rows=16)
    prompt = [n % 7 for n in range(40)]
    generations = [
        bench.submit(prompt, max_tokens=30, sampling=SamplingParams(seed=1), verification="coupled", choice=choice)
        for choice in range(count)
    ]
    bench.run()
    assert len({tuple(answer(g)) for g in generations}) == count
    assert decoded_by(bench.target, prompt) == len(prompt) - 1
    assert decoded_by(bench.draft, prompt) == len(prompt) - 1
    assert all(g.stats.accepted > 0 for g in generations)


def test_a_choice_is_the_same_text_alone_and_among_its_siblings() -> None:
    def texts(choices: list[int]) -> list[list[int]]:
        bench = Bench()
        several = [
            bench.submit([1, 2, 3], sampling=SEEDED, verification="coupled", choice=choice) for choice in choices
        ]
        bench.run()
        return [answer(generation) for generation in several]

    assert texts([0, 1, 2]) == [texts([choice])[0] for choice in range(3)]


def test_a_prompt_that_begins_as_a_live_one_continues_from_its_cache() -> None:
    bench = Bench(prefill_rows=64)
    system = [n % 5 for n in range(50)]
    first = bench.submit([*system, 8, 9], max_tokens=60, sampling=SamplingParams(seed=1))
    for _ in range(3):
        bench.scheduler.step()
    second = bench.submit([*system, 10, 11, 12])
    bench.run()
    assert second.cached_tokens == 50
    assert answer(second) == plain_greedy([*system, 10, 11, 12], 20)
    assert first.done


def test_a_prompt_that_shares_little_with_one_being_read_does_not_wait_for_it() -> None:
    bench = Bench(prefill_rows=8)
    bench.submit([1, 2, *[5] * 100])
    bench.submit([1, 2, *[6] * 20])
    bench.scheduler.step()
    assert bench.scheduler.running == 2


def test_the_model_drafts_for_a_text_that_begins_as_one_of_which_it_has_read_the_end_only() -> None:
    """Nothing can be copied from there, so nothing is waited for."""
    bench = Bench(blend=0.0, window=32)
    shared = [7] * 20
    endless = SamplingParams(temperature=0, logit_bias=((VOCABULARY - 1, -math.inf),))
    first = bench.submit([*shared, *[5] * 60], max_tokens=200, sampling=endless)
    while not first.draft_start:
        bench.scheduler.step()
    second = bench.submit([*shared, *[6] * 10], max_tokens=20, sampling=endless)
    while not second.done:
        bench.scheduler.step()
    assert not first.done
    assert second.stats.drafters["model"].drafted > 0


@pytest.mark.parametrize("kind", [1, 3])
def test_requests_get_slots_in_turn_so_that_many_answers_to_one_delay_no_other(kind: int) -> None:
    """One asks for nine answers, another, or three others, for one each right behind it; there are three slots."""
    bench = Bench()
    many = [bench.submit([number], request="many", max_tokens=30 + number) for number in range(9)]
    few = [bench.submit([10 + number], request=f"few {number}", max_tokens=30) for number in range(kind)]
    bench.scheduler.step()
    live = {generation.info.request for generation in bench.scheduler._running}
    assert live == ({"many", "few 0"} if kind == 1 else {"many", "few 0", "few 1"})
    while not all(generation.done for generation in few):
        bench.scheduler.step()
    assert sum(generation.done for generation in many) < 6
    bench.run()
    assert all(generation.done for generation in many)


def test_what_a_text_is_charged_for_is_what_the_draft_has_read_of_it() -> None:
    engine = FakeEngine(vocabulary=VOCABULARY, n_slots=SLOTS)
    model = DraftModel(engine, proportional(), window=64, max_rows=8, vocabulary=VOCABULARY, context_length=8192)
    texts = [
        DraftText(Sequence([1] * count, SamplingParams(), SpeculationParams(3), max_tokens=9), []) for count in (3, 20)
    ]
    for slot, text in enumerate(texts):
        text.sequence.slot = slot
    assert model.read(texts).rows == [3, 5]
    assert [model.read(texts[1:]).rows for _ in range(3)] == [[8], [7], [0]]


def test_what_was_drafted_behind_the_end_of_a_text_would_not_have_taken_plain_decoding_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its estimate is of the tokens that the client gets behind the first, and of one that ends the text."""
    # A plain step takes a second, which live passes of the fake engine would make less.
    monkeypatch.setattr(Cost, "observe", lambda *_: None)
    text = bytes(97 + token for token in plain_greedy([1, 2, 3], 20)).decode()
    bench = Bench(blend=0.0)
    for stops in ([text[6:9]], [text[5:7]], [text[9]]):
        stopped = bench.submit([1, 2, 3], gamma=12, max_tokens=20, stops=stops)
        bench.run()
        stats = stopped.stats
        assert 1 < len(answer(stopped)) < 13
        assert stats.plain_seconds == pytest.approx(len(answer(stopped)) - 1)
    prompt = next([a, b] for a in range(23) for b in range(23) if 2 <= len(plain_greedy([a, b], 50)) < 12)
    ended = bench.submit(prompt, gamma=12, max_tokens=20)
    bench.run()
    stats = ended.stats
    assert ended.finish_reason == "stop"
    assert stats.plain_seconds == pytest.approx(len(answer(ended)))


PENALISED = SamplingParams(temperature=0, frequency_penalty=1.0, logit_bias=((3, 4.0),))


def logprobs_of(context: list[int]) -> FloatArray:
    """What the fake target alone gives every token behind a text, float64."""
    logits = FakeEngine(vocabulary=VOCABULARY, n_slots=1).logits(context).astype(np.float64)
    return np.asarray(logits - np.log(np.exp(logits).sum()))


@pytest.mark.parametrize("gamma", [0, 4])
@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.7, top_k=3, seed=3), PENALISED])
def test_every_token_is_scored_by_the_target_alone_speculated_or_not(gamma: int, sampling: SamplingParams) -> None:
    bench = Bench()
    sequence = bench.submit([1, 2, 3], gamma=gamma, sampling=sampling, top_logprobs=3)
    bench.run()
    assert len(sequence.scores) == sequence.generated > 0
    for place, score in enumerate(sequence.scores):
        expected = logprobs_of(sequence.tokens[: 3 + place])
        assert score.token == sequence.tokens[3 + place]
        assert score.logprob == pytest.approx(expected[score.token], abs=1e-5)
        assert [token for token, _ in score.top] == list(np.argsort(-expected)[:3])
        assert [logprob for _, logprob in score.top] == pytest.approx(np.sort(expected)[::-1][:3], abs=1e-5)


@pytest.mark.parametrize("max_tokens", [0, 1, 9])
@pytest.mark.parametrize("prefill_rows", [1, 5, 64])
def test_a_prompt_is_scored_from_its_second_token_on_whatever_is_cached(max_tokens: int, prefill_rows: int) -> None:
    bench = Bench(prefill_rows=prefill_rows)
    prompt = [n % 11 for n in range(30)]
    bench.submit(prompt, max_tokens=5)
    bench.submit([7, 7], max_tokens=60)
    while not bench.submitted[0].done:
        bench.scheduler.step()
    generation = bench.submit(prompt, max_tokens=max_tokens, top_logprobs=2, scores_prompt=True)
    bench.run()
    scores = generation.prompt_scores
    assert [score.token for score in scores] == prompt[1:]
    for place, score in enumerate(scores, start=1):
        assert score.logprob == pytest.approx(logprobs_of(prompt[:place])[prompt[place]], abs=1e-5)
    assert answer(generation) == plain_greedy(prompt, max_tokens)
    assert len(generation.scores) == len(answer(generation))


def test_many_prompts_are_scored_at_once_within_the_engines_limit_of_logits() -> None:
    bench = Bench(prefill_rows=100)
    bench.target.max_logits = 7
    generations = [bench.submit([n] * 20, max_tokens=0, top_logprobs=0, scores_prompt=True) for n in range(5)]
    bench.submit([1, 2], gamma=6, max_tokens=60)
    bench.run()
    assert all(len(g.prompt_scores) == 19 and g.finish_reason == "length" for g in generations)


@pytest.mark.parametrize("verification", RULES)
def test_an_answer_follows_its_grammar_while_speculating(verification: Verification) -> None:
    bench = Bench(blend=0.6)
    constraint = Alternating(VOCABULARY)
    for seed in range(5):
        bench.submit(
            [1, 2], sampling=SamplingParams(seed=seed), verification=verification, max_tokens=15, constraint=constraint
        )
    bench.run()
    for generation in bench.submitted:
        assert all(token % 2 == place % 2 for place, token in enumerate(answer(generation)))
        assert generation.stats.accepted > 0


def test_an_answer_ends_where_its_grammar_does() -> None:
    bench = Bench()
    generation = bench.submit([1, 2], max_tokens=15, constraint=Alternating(VOCABULARY, length=6))
    bench.run()
    assert (len(answer(generation)), generation.finish_reason) == (6, "stop")


@pytest.mark.parametrize("gamma", [0, 3])
def test_a_grammar_that_becomes_too_costly_ends_its_answer_alone_and_the_draft_model_stays(gamma: int) -> None:
    """Without drafts it is first seen when the new tokens are read, with drafts in the round."""
    bench = Bench()
    failing = bench.submit([1, 2], gamma=gamma, max_tokens=30, constraint=Alternating(VOCABULARY, fails_at=7))
    other = bench.submit([3, 4], max_tokens=30)
    bench.run()
    assert failing.error
    assert answer(other) == plain_greedy([3, 4], 30)
    later = bench.submit([5, 6], max_tokens=30)
    bench.run()
    assert later.stats.accepted > 0


@pytest.mark.parametrize("gamma", [0, 3])
def test_masks_that_a_round_has_no_time_for_wait_and_change_no_text(gamma: int) -> None:
    def answers(masks: int) -> tuple[list[list[int]], int]:
        shared = Shared(masks)
        bench = Bench(blend=0.6, begin_masks=shared.begin_round)
        for seed in range(3):
            constraint = Slow(VOCABULARY, shared)
            sampling = SamplingParams(seed=seed)
            bench.submit([1, 2, seed], gamma=gamma, sampling=sampling, verification="coupled", constraint=constraint)
        bench.run()
        return [answer(generation) for generation in bench.submitted], shared.deferred

    undisturbed, deferred = answers(10**6)
    assert deferred == 0
    for masks in (1, 2, 5):
        delayed, deferred = answers(masks)
        assert delayed == undisturbed
        assert deferred > 0 or masks > 1


def test_a_sequence_whose_mask_has_waited_comes_first_in_the_next_round() -> None:
    """Each round has time for one mask; in the order of slots the first would always have it."""
    shared = Shared(1)
    bench = Bench(begin_masks=shared.begin_round)
    generations = [
        bench.submit([1, 2, n], gamma=0, max_tokens=40, constraint=Slow(VOCABULARY, shared)) for n in range(3)
    ]
    for _ in range(40):
        bench.scheduler.step()
    assert min(len(answer(generation)) for generation in generations) >= 40 // 3 // 2


def test_a_plain_sequence_never_waits_for_the_masks_of_others() -> None:
    shared = Shared(1)
    bench = Bench(begin_masks=shared.begin_round)
    for n in range(2):
        bench.submit([1, 2, n], gamma=0, max_tokens=40, constraint=Slow(VOCABULARY, shared))
    plain = bench.submit([3, 4], gamma=0, max_tokens=20)
    for _ in range(21):
        bench.scheduler.step()
    assert len(answer(plain)) == 20


def test_as_many_drafts_are_made_as_their_masks_have_time_for() -> None:
    def drafted(mask_seconds: float) -> int:
        bench = Bench(blend=1.0, max_wait_seconds=0.2, costs=(flat(0.01), flat(0.001)))
        constraint = Slow(VOCABULARY, Shared(10**6), mask_seconds=mask_seconds)
        generation = bench.submit([1, 2], gamma=6, max_tokens=30, constraint=constraint)
        bench.run()
        return max(generation.stats.gammas)

    assert [drafted(seconds) for seconds in (0.0, 0.01, 0.025, 0.5)] == [6, 6, 3, 0]


def test_a_draft_that_has_nothing_the_grammar_allows_is_no_failure_of_the_draft() -> None:
    bench = Bench(draft_width=4)
    only_high = Alternating(VOCABULARY)
    only_high._even = np.arange(VOCABULARY) >= 5
    bench.submit([1, 2], max_tokens=2, constraint=only_high, gamma=1)
    bench.run()
    later = bench.submit([1, 2], max_tokens=30, sampling=SamplingParams(temperature=0, top_k=4))
    bench.run()
    assert later.stats.drafted > 0


def test_a_prediction_is_drafted_verified_and_taken_up_again_behind_a_change() -> None:
    truth = plain_greedy([1, 2, 3], 40)
    guess = [*truth[:15], 0, 0, *truth[17:]]
    bench = Bench()
    generation = bench.submit([1, 2, 3], gamma=4, max_tokens=40, prediction=guess)
    bench.run()
    assert answer(generation) == truth
    tally = generation.stats.drafters["prediction"]
    assert tally.accepted > 20
    assert generation.stats.rounds < 20


def test_a_wrong_prediction_leaves_the_text_and_the_model_drafts_instead() -> None:
    bench = Bench()
    generation = bench.submit([1, 2, 3], gamma=3, max_tokens=40, prediction=[22] * 50)
    bench.run()
    assert answer(generation) == plain_greedy([1, 2, 3], 40)
    assert generation.stats.drafters["model"].accepted > 0


@pytest.mark.parametrize("drafter", ["model", "prediction"])
def test_only_the_drafter_that_was_asked_for_is_used(drafter: DrafterName) -> None:
    bench = Bench()
    prompt = [1, 2, 3]
    sequence = greedy_generation(
        prompt, SpeculationParams(3, "token", drafter), max_tokens=20, prediction=plain_greedy(prompt, 20)
    )
    bench.scheduler.submit(sequence)
    bench.run()
    assert set(sequence.stats.drafters) == {drafter}


def test_a_fault_in_a_round_can_be_answered_by_failing_all_and_the_next_are_served() -> None:
    bench = Bench()
    generations = [bench.submit([n], max_tokens=30) for n in range(SLOTS + 1)]
    bench.scheduler.step()
    bench.scheduler.fail_all(RuntimeError("a fault"))
    assert [bool(g.error) for g in generations] == [True] * SLOTS + [False]
    bench.run()
    assert answer(generations[-1]) == plain_greedy([SLOTS], 30)


@pytest.mark.parametrize("right", [True, False])
def test_a_proposer_is_judged_by_its_proposals_although_nothing_was_drafted(right: bool) -> None:
    """Every row costs a whole step here, so that no guess is ever worth one."""
    text = plain_greedy([1, 2, 3], 30)

    class Oracle:
        name: ClassVar[DrafterName] = "lookup"

        def propose(self, sequence: Sequence, drafts: list[int], limit: int) -> FreeTokens:
            del drafts, limit
            token = text[sequence.generated] if sequence.generated < len(text) else 0
            return FreeTokens([token if right else (token + 1) % VOCABULARY], [0.6])

    controller = Controller(proportional(), None)
    target = FakeEngine(vocabulary=VOCABULARY, n_slots=1)
    drafters = Drafters(controller, Oracle(), vocabulary=VOCABULARY)
    scheduler = Scheduler(target, drafters, prefill_rows=8, idle_tokens=0)
    sequence = greedy_generation([1, 2, 3], SpeculationParams(4, "token", mode="adaptive"), max_tokens=len(text))
    before = controller.acceptance(sequence, "lookup", 0.6)
    scheduler.submit(sequence)
    while scheduler.busy:
        scheduler.step()
    after = controller.acceptance(sequence, "lookup", 0.6)
    assert sequence.stats.drafted == 0
    assert (after > before) == right
