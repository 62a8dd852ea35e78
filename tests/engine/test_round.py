"""One round: accepted tokens, the end of an answer, log-probabilities, grammars, and how its time is charged."""

import math
from itertools import count, product
from typing import Any

import numpy as np
import pytest

from constraints import Alternating
from costs import FixedCost, flat, proportional, table
from fake_engine import FakeEngine
from fake_pair import VOCABULARY, FakePair, detokenize, plain_greedy
from specserve.sampling.distribution import FloatArray
from specserve.sequence import SamplingParams
from specserve.speculation.costs import PassCosts

PROMPT = [1, 2, 3]


def test_perfect_drafts_are_all_accepted_with_a_bonus_token_up_to_max_tokens() -> None:
    """The prefill gives one token, then each round gives four, the last one what is left."""
    for max_tokens in range(1, 18):
        sequence = FakePair(blend=0.0).answer(PROMPT, gamma=3, max_tokens=max_tokens)
        stats = sequence.stats
        assert (sequence.generated, sequence.finish_reason) == (max_tokens, "length")
        assert (stats.rounds, stats.drafted) == (math.ceil((max_tokens - 1) / 4), stats.accepted)
    assert (stats.accepted, stats.mean_acceptance_length) == (12, 4)


def test_a_stop_string_in_a_draft_ends_the_answer_and_its_statistics() -> None:
    """The prefill gives the first token; without speculation each of the others would take a step of one second."""
    text = detokenize(plain_greedy(PROMPT, 20))
    for last in (3, 6, 9):
        stop = text[last - 1 : last + 1]
        sequence = FakePair(blend=0.0).answer(PROMPT, gamma=12, stops=[stop])
        stats = sequence.stats
        assert (sequence.take_text(), sequence.finish_reason) == (text[: text.index(stop)], "stop")
        assert (sequence.generated, stats.rounds, stats.accepted) == (last + 1, 1, last)
        assert stats.plain_seconds == pytest.approx(last)


def test_a_failed_target_pass_or_nan_logits_end_only_that_rounds_answers() -> None:
    for fault in ("fail_after", "poison_after"):
        pair = FakePair()
        failed = pair.submit(PROMPT, max_tokens=10)
        pair.step()
        setattr(pair.target, fault, 0)
        pair.step()
        assert failed.error
        assert failed.error.status == 500
        after = pair.answer(PROMPT, max_tokens=10)
        assert after.answer == plain_greedy(PROMPT, 10)


def test_round_time_is_charged_to_the_sequences_that_lengthen_it() -> None:
    """Decoding is shared equally, and drafts and prompts are charged by their rows.

    A target pass takes ten seconds and one for each row, a draft pass half a second a row: three accepted drafts take
    four rows of the draft model.
    """
    costs = FixedCost(table(lambda rows: 10.0 + rows)), proportional(0.5)
    pair = FakePair(blend=0.0, costs=costs, prefill_rows=5)
    pair.submit([4, 5], gamma=0, max_tokens=100, request="plain")
    pair.submit(PROMPT, gamma=3, max_tokens=100, request="drafted")
    pair.step(3)
    pair.submit([7] * 30, request="prefilled")
    pair.step()
    last = {step.sequence.info.request: step for step in pair.records.rounds[-3:]}
    target = {request: step.seconds.target for request, step in last.items()}
    expected = {"plain": 6, "drafted": 6 + 3, "prefilled": 5}
    total = sum(expected.values()) / sum(target.values())
    assert {request: total * seconds for request, seconds in target.items()} == pytest.approx(expected)
    other = {request: step.seconds.other / step.seconds.target for request, step in last.items()}
    assert other == pytest.approx(dict.fromkeys(other, other["plain"]))
    assert last["drafted"].seconds.draft > 0
    assert last["plain"].seconds.draft == last["prefilled"].seconds.draft == 0


def test_verification_and_drawing_are_part_of_the_cost_of_a_pass_but_masks_and_logprobs_are_not() -> None:
    """Each call of this clock adds one second: one call is after each pass, one after its verification or drawing.

    The target's first pass has three rows.
    """
    grammar = Alternating(VOCABULARY)
    cases: list[tuple[dict[str, Any], float]] = [({}, 2.0), ({"constraint": grammar}, 1.0), ({"top_logprobs": 5}, 1.0)]
    for options, seconds in cases:
        target = PassCosts(table(lambda rows, seconds=seconds: rows * seconds / 3))  # type: ignore[misc] # the default binds
        pair = FakePair(costs=(target, flat()), clock=map(float, count()).__next__)
        pair.submit(PROMPT, gamma=0, **options)
        pair.step()
        assert target.factor == pytest.approx(1.0)
    for options, seconds in cases[:2]:
        draft = PassCosts(table(lambda _rows, seconds=seconds: seconds))  # type: ignore[misc] # the default binds
        pair = FakePair(costs=(flat(), draft), clock=map(float, count()).__next__)
        pair.submit(PROMPT, gamma=3, **options)
        pair.step(8)
        assert draft.factor == pytest.approx(1.0)


PENALISED = SamplingParams(temperature=0, frequency_penalty=1.0, logit_bias=((3, 4.0),))


def logprobs_after(context: list[int]) -> FloatArray:
    """The log-probability of every token after `context` by the fake target, float64."""
    logits = FakeEngine(vocabulary=VOCABULARY, n_slots=1).logits(context).astype(np.float64)
    return np.asarray(logits - np.log(np.exp(logits).sum()))


def test_output_logprobs_are_the_targets_with_and_without_drafts() -> None:
    for gamma, sampling in product((0, 4), (SamplingParams(temperature=0.7, top_k=3, seed=3), PENALISED)):
        sequence = FakePair().answer(PROMPT, gamma=gamma, sampling=sampling, top_logprobs=3)
        assert len(sequence.scores) == sequence.generated > 0
        for position, score in enumerate(sequence.scores, start=len(PROMPT)):
            expected = logprobs_after(sequence.tokens[:position])
            assert score.token == sequence.tokens[position]
            assert score.logprob == pytest.approx(expected[score.token], abs=1e-5)
            assert [token for token, _ in score.top] == list(np.argsort(-expected)[:3])
            assert [logprob for _, logprob in score.top] == pytest.approx(np.sort(expected)[::-1][:3], abs=1e-5)


def test_prompt_logprobs_start_at_the_second_token_whatever_is_cached() -> None:
    prompt = [n % 11 for n in range(30)]
    for max_tokens, prefill_rows in ((0, 1), (1, 5), (9, 64), (0, 64)):
        pair = FakePair(prefill_rows=prefill_rows)
        first = pair.submit(prompt, max_tokens=5)
        pair.submit([7, 7], max_tokens=60)
        pair.run(first)
        sequence = pair.answer(prompt, max_tokens=max_tokens, top_logprobs=2, scores_prompt=True)
        scores = sequence.prompt_scores
        assert [score.token for score in scores] == prompt[1:]
        for position, score in enumerate(scores, start=1):
            assert score.logprob == pytest.approx(logprobs_after(prompt[:position])[prompt[position]], abs=1e-5)
        assert sequence.answer == plain_greedy(prompt, max_tokens)
        assert len(sequence.scores) == sequence.generated


def test_a_grammar_that_becomes_too_costly_ends_only_its_own_answer() -> None:
    """The draft model stays in use."""
    for gamma in (0, 3):
        pair = FakePair()
        failing = pair.submit([1, 2], gamma=gamma, max_tokens=30, constraint=Alternating(VOCABULARY, fails_at=7))
        other = pair.submit([3, 4], max_tokens=30)
        pair.run()
        assert failing.error
        assert failing.generated == 7
        assert other.answer == plain_greedy([3, 4], 30)
        later = pair.answer([5, 6], max_tokens=30)
        assert later.stats.accepted > 0
