"""Sequences in a cache that is too small for all of them: who is admitted, who is preempted, and what none notices."""

import math
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from constraints import Alternating
from fake_pair import END_TOKEN, ENDLESS, GREEDY, SEEDED, VOCABULARY, FakePair, detokenize, plain_greedy
from specserve.core import admission, prefix_cache
from specserve.core.text_sequence import TextSequence
from specserve.sequence import SamplingParams

# The longest sequence of these tests fits alone.
LONGEST = 40
SEEDED_ENDLESS = SamplingParams(seed=3, logit_bias=((END_TOKEN, -math.inf),))


@pytest.fixture(autouse=True)
def small_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is promised four tokens at a time, so that short answers outgrow that; single tokens are evicted."""
    monkeypatch.setattr(admission, "_ANSWER", 4)
    monkeypatch.setattr(admission, "_TURN_TOKENS", 3)
    monkeypatch.setattr(prefix_cache, "_LEAST_LOSS", 1)


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[int, dict[str, Any]]]:
    """Requests, and the rounds that are run before each arrives."""
    requests = []
    for number in range(draw(st.integers(2, 9))):
        beginning = draw(st.sampled_from([[], [5, 6, 7, 8] * 3, [number, 9] * 6]))
        prompt = [*beginning, number, *draw(st.lists(st.integers(0, END_TOKEN - 1), max_size=8))]
        fields = {
            "prompt": prompt,
            "max_tokens": draw(st.integers(1, LONGEST - len(prompt))),
            "gamma": draw(st.integers(0, 5)),
            "verification": "coupled",
            "sampling": draw(st.sampled_from([GREEDY, SEEDED, ENDLESS, SEEDED_ENDLESS])),
            "top_logprobs": draw(st.sampled_from([None, 2])),
            "scores_prompt": draw(st.booleans()),
            "constraint": draw(st.sampled_from([None, Alternating(VOCABULARY)])),
            "keeps_sources": True,
            "request": draw(st.sampled_from(["", "a", "b"])),
            "client": draw(st.sampled_from("ab")),
        }
        requests.append((draw(st.integers(0, 12)), fields))
    return requests


def answer_of(sequence: TextSequence) -> tuple[object, ...]:
    """All that a client is sent, and how often each token was counted."""
    assert sequence.error is None
    counted = len(sequence.sources), sequence.round_number > 0
    return sequence.answer, sequence.finish_reason, sequence.scores, sequence.prompt_scores, counted


@settings(max_examples=40, deadline=None)
@given(
    arrivals(),
    st.integers(LONGEST, LONGEST + 30),
    st.sampled_from([2, 8]),
    st.booleans(),
    st.sampled_from([0.0, 20.0, 100.0]),
)
def test_every_answer_is_the_one_it_has_alone_however_small_the_cache_is(
    requests: list[tuple[int, dict[str, Any]]], n_cells: int, prefill_rows: int, reuses_prefix: bool, aged: float
) -> None:
    """Whoever arrives when: all are answered, so there is no deadlock, and no token is sampled or scored twice.

    Every row of the target takes a second of the time after which a sequence has aged.
    """
    alone = [answer_of(FakePair().answer(**fields)) for _, fields in requests]
    pair: FakePair = FakePair(n_cells=n_cells, prefill_rows=prefill_rows, clock=lambda: float(len(pair.target.decoded)))
    sequences = []
    with mock.patch.object(admission, "_AGED_SECONDS", aged):
        for rounds, fields in requests:
            pair.step(rounds)
            sequences.append(pair.submit(**fields, reuses_prefix=reuses_prefix))
        pair.run()
    assert [answer_of(sequence) for sequence in sequences] == alone


def outgrown() -> tuple[FakePair, list[TextSequence]]:
    """Two endless answers of which the second has just been preempted, and a request that does not fit beside it."""
    pair = FakePair(n_cells=LONGEST)
    sequences = [pair.submit([n, 2, 3], sampling=ENDLESS, max_tokens=30, request=str(n)) for n in range(2)]
    pair.run_until(lambda: pair.target_cache.pinned_cells > 24)
    sequences.append(pair.submit([4] * 15, sampling=ENDLESS, max_tokens=3, request="2"))
    pair.run_until(lambda: sequences[1].preemptions > 0)
    return pair, sequences


def test_the_sequence_admitted_last_makes_room_is_the_first_to_return_and_goes_on_where_it_was() -> None:
    pair, (oldest, preempted, waiting) = outgrown()
    assert (oldest.preemptions, preempted.preemptions) == (0, 1)
    assert (pair.scheduler.running, pair.scheduler.queued) == (1, 2)
    before, text = len(preempted.tokens), preempted.take_text()
    pair.run(oldest)
    assert (len(preempted.tokens), waiting.timestamps.start) == (before, None)
    pair.step()
    assert (preempted.slot >= 0, waiting.slot) == (True, -1)
    pair.run()
    for sequence in (oldest, preempted):
        assert sequence.answer == plain_greedy(sequence.prompt, 30, endless=True)
    # Its stream goes on where it was.
    assert text + preempted.take_text() == detokenize(preempted.answer)


def test_a_preempted_sequence_keeps_what_is_not_needed_and_reads_only_the_rest_again() -> None:
    pair, (_, preempted, _) = outgrown()
    before, start, first_token = len(preempted.tokens), preempted.timestamps.start, preempted.timestamps.first_token
    counted, prefill_seconds = preempted.stats.rounds, preempted.stats.prefill_seconds
    pair.records.rounds.clear()
    pair.run(preempted)
    steps = [step for step in pair.records.rounds if step.sequence is preempted]
    again = [step for step in steps if step.in_prefill]
    assert 0 < sum(step.rows for step in again) < before
    assert not any(step.drafts or step.is_decode_round for step in again)
    assert [len(step.emitted) for step in again] == [0] * (len(again) - 1) + [1]
    assert preempted.stats.rounds - counted == sum(step.is_decode_round for step in steps)
    assert preempted.stats.prefill_seconds - prefill_seconds == pytest.approx(
        sum(step.seconds.draft + step.seconds.target + step.seconds.other for step in again)
    )
    assert (preempted.timestamps.start, preempted.timestamps.first_token) == (start, first_token)
    (end,) = (record for record in pair.records.ends if record.tokens == 30 and record.preemptions)
    assert (end.prompt_tokens, end.cached_tokens, end.preemptions) == (3, 0, preempted.preemptions)


def test_a_client_may_leave_while_its_sequence_is_preempted() -> None:
    pair, (oldest, preempted, waiting) = outgrown()
    pair.scheduler.cancel(preempted)
    pair.run(oldest, waiting)
    assert [record.reason for record in pair.records.ends] == ["cancelled", "length", "length"]
    assert not pair.scheduler.busy


def test_requests_are_admitted_as_far_as_their_prompts_and_answers_fit() -> None:
    pair = FakePair(n_cells=LONGEST)
    for number in range(3):
        pair.submit([number] * 10, sampling=ENDLESS, max_tokens=4, request=str(number))
    pair.step()
    assert (pair.scheduler.running, pair.scheduler.queued) == (2, 1)


@pytest.mark.parametrize(("more", "running"), [(0, 2), (1, 1)])
def test_what_a_prompt_shares_with_a_running_sequence_needs_no_room(more: int, running: int) -> None:
    """Of 40 cells one has promised 24, of which the other shares 20."""
    pair = FakePair(n_cells=LONGEST)
    first = pair.submit([7] * 20, sampling=ENDLESS, max_tokens=4, gamma=0, request="first")
    pair.run_until(lambda: first.generated == 1)
    pair.submit([*[7] * 20, *[9] * (12 + more)], max_tokens=4, request="second")
    pair.step()
    assert pair.scheduler.running == running


def test_drafts_are_shortened_before_a_sequence_is_preempted() -> None:
    pair = FakePair(n_cells=24, blend=0.0)
    two = [pair.submit([n, 2], sampling=ENDLESS, max_tokens=20, gamma=5, request=str(n)) for n in range(2)]
    pair.run_until(lambda: any(sequence.preemptions for sequence in two))
    gammas = [len(step.drafts) for step in pair.records.rounds if step.is_decode_round]
    assert gammas[:2] == [5, 5]
    assert min(gammas) < 5
