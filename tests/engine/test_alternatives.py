"""Alternatives to drafts: which are considered, which are read, and what a round gains by one that is recovered."""

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any, get_args
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from constraints import Alternating, Slow
from costs import flat
from fake_pair import ENDLESS, GREEDY, VOCABULARY, FakePair
from specserve.sampling.distribution import FloatArray, to_distribution
from specserve.sequence import SamplingParams, Sequence, SpeculationParams, Verification
from specserve.speculation.acceptance import Acceptance
from specserve.speculation.alternatives import alternatives_to, choose_alternatives
from specserve.speculation.policy import Prices
from specserve.speculation.rejection import RULES, sample_coupled
from specserve.speculation.step import Alternative, Draft, SequenceStep

WIDTH = 40
# Alternatives pay at these costs, with a draft model that differs so much.
COSTLY: dict[str, Any] = {"costs": (flat(), flat(0.2)), "blend": 0.45}


def step_of(sampling: SamplingParams, verification: Verification = "block", max_drafts: int = 8) -> SequenceStep:
    sampling = replace(sampling, seed=7)
    sequence = Sequence([1], sampling, SpeculationParams(16, verification, mode="auto"), max_tokens=100)
    return SequenceStep(sequence, 0, 1, max_drafts)


def possible_after(step: SequenceStep, logits: FloatArray, acceptance: float = 0.2) -> list[Alternative]:
    """The alternatives to the draft that is chosen by these logits, which are unchanged afterwards."""
    sampling, before = step.sequence.sampling, logits.copy()
    q = to_distribution(logits, sampling) if sampling.temperature else None
    rule = RULES[step.sequence.speculation.verification]
    token = int(np.argmax(logits)) if q is None else rule.sample(q, 0, step.noise)
    found = alternatives_to(Draft(token, q, "model", 0.4, acceptance), step, logits, Acceptance())
    assert np.array_equal(logits, before)
    assert q is None or np.array_equal(q, to_distribution(logits, sampling))
    assert token not in [alternative.token for alternative in found]
    return list(found)


@pytest.fixture
def logits() -> FloatArray:
    return np.random.default_rng(3).normal(size=WIDTH).astype(np.float32)


def test_a_greedy_drafts_alternatives_are_the_next_most_probable_tokens(logits: FloatArray) -> None:
    found = possible_after(step_of(GREEDY), logits)
    assert [alternative.token for alternative in found] == np.argsort(-logits)[1:5].tolist()
    gains = [alternative.gain for alternative in found]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] > 0


def test_coupled_alternatives_are_what_the_race_gives_without_the_tokens_before(logits: FloatArray) -> None:
    step = step_of(SamplingParams(temperature=1), "coupled")
    found = possible_after(step, logits)
    q = to_distribution(logits, step.sequence.sampling)
    expected = []
    for _ in range(5):
        expected.append(sample_coupled(q, 0, step.noise))
        q[expected[-1]] = 0
    assert [alternative.token for alternative in found] == expected[1:]


def test_a_draft_that_is_nearly_certain_or_the_only_token_has_no_alternatives(logits: FloatArray) -> None:
    assert possible_after(step_of(GREEDY), logits, acceptance=0.999) == []
    only = np.full(WIDTH, -np.inf, np.float32)
    only[5] = 1.0
    for sampling in (GREEDY, SamplingParams(temperature=1)):
        assert possible_after(step_of(sampling), only) == []


def test_there_are_no_more_alternatives_than_tokens_that_can_be_sampled() -> None:
    """With `top_k` 3 the draft leaves two; rounding may leave some of their probability when both are taken."""
    for seed, verification in product(range(20), get_args(Verification)):
        logits = np.random.default_rng(seed).normal(size=WIDTH).astype(np.float32)
        step = step_of(SamplingParams(temperature=1, top_k=3), verification)
        found = possible_after(step, logits, acceptance=0.0)
        likeliest = set(np.argsort(-logits)[:3].tolist())
        assert {alternative.token for alternative in found} < likeliest


def prices_of(target: list[float], rate: float) -> Prices:
    return Prices(lambda rows: rate * target[rows], lambda _rows: 0.0)


@given(
    gains=st.lists(st.lists(st.floats(0.0, 0.6), max_size=4), min_size=1, max_size=3),
    target=st.lists(st.floats(0.1, 1.3), min_size=20, max_size=20).map(sorted),
    rate=st.floats(0.1, 3),
    most=st.integers(0, 6),
)
def test_the_alternatives_with_the_largest_gain_net_of_their_rows_are_read(
    gains: list[list[float]], target: list[float], rate: float, most: int
) -> None:
    """Against every number of alternatives; of that many, the likeliest are best whatever rows cost."""
    steps = []
    for several in gains:
        steps.append(step_of(GREEDY))
        alternatives = tuple(Alternative(0, n, 0.5, gain) for n, gain in enumerate(several))
        steps[-1].drafts.append(Draft(9, None, "model", 0.5, 0.5, alternatives))
    choose_alternatives(steps, most, prices_of(target, rate), end_tokens=())
    ordered = sorted((gain for several in gains for gain in several), reverse=True)[:most]

    def net(count: int) -> float:
        return sum(ordered[:count]) - 0.005 * count - rate * (target[1 + count] - target[1])

    chosen = [alternative.gain for step in steps for alternative in step.alternatives]
    assert sorted(chosen, reverse=True) == ordered[: len(chosen)]
    assert net(len(chosen)) == pytest.approx(max(map(net, range(len(ordered) + 1))))


def test_alternatives_take_no_more_rows_than_the_drafts_have_left() -> None:
    step = step_of(GREEDY, max_drafts=2)
    alternatives = tuple(Alternative(0, token, 0.5, 0.4) for token in (1, 2, 3))
    step.drafts.append(Draft(9, None, "model", 0.5, 0.5, alternatives))
    choose_alternatives([step], 8, prices_of([1.0] * 20, 1.0), end_tokens=())
    assert [alternative.token for alternative in step.alternatives] == [1]
    assert step.rows_left == 0


@pytest.mark.parametrize("samplings", [[ENDLESS], [replace(ENDLESS, temperature=1, seed=seed) for seed in range(5, 9)]])
def test_recovered_alternatives_give_the_same_text_in_fewer_rounds(samplings: list[SamplingParams]) -> None:
    """Each saves a round, but the controller then drafts less; so the rounds of four sampled texts are added up."""
    rounds = Counter[int]()
    for sampling in samplings:
        answers, adopted = [], []
        for most in (0, 8):
            pair = FakePair(**COSTLY)
            pair.target.max_alternatives = most
            options: dict[str, Any] = {"gamma": 8, "mode": "auto", "verification": "coupled", "max_tokens": 300}
            sequence = pair.answer([1, 2, 3], sampling=sampling, **options)
            stats = sequence.stats
            answers.append(sequence.answer)
            adopted.append(stats.adopted)
            rounds[most] += stats.rounds
            assert stats.committed == stats.accepted + stats.rounds + stats.adopted
        assert answers[0] == answers[1]
        assert adopted[0] == 0
        assert adopted[1] > 20
    assert rounds[8] < 0.9 * rounds[0]


def test_a_fixed_number_of_drafts_has_no_alternatives() -> None:
    stats = FakePair(**COSTLY).answer([1, 2, 3], gamma=8, sampling=ENDLESS, max_tokens=100).stats
    assert stats.drafted > 0
    assert stats.alternatives == 0


def test_log_probabilities_sources_and_records_count_the_token_after_an_alternative() -> None:
    pair = FakePair(**COSTLY)
    options: dict[str, Any] = {"max_tokens": 60, "top_logprobs": 1, "keeps_sources": True}
    sequence = pair.answer([1, 2, 3], gamma=8, mode="auto", sampling=ENDLESS, **options)
    assert [score.token for score in sequence.scores] == sequence.answer
    # Greedy: each is the most probable token by the scores at its own position.
    assert all(score.top[0][0] == score.token for score in sequence.scores)
    assert len(sequence.sources) == len(sequence.answer)
    assert sum(step.adopted for step in pair.records.rounds) == sequence.stats.adopted > 0
    for step in pair.records.rounds:
        assert len(step.emitted) == step.n_emitted_drafts + 1 + step.adopted
        assert len(step.alternatives) >= step.adopted


@pytest.mark.parametrize("masks", [3, 4])
def test_an_alternative_counts_only_if_the_mask_after_it_is_in_time(
    masks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round has time for so many masks. Where the one after an alternative is late, the next round commits."""
    answer: dict[str, Any] = {"max_tokens": 200, "sampling": ENDLESS}
    expected = FakePair().answer([1, 2], gamma=0, mode="off", constraint=Alternating(VOCABULARY), **answer)
    pair = FakePair(masks=masks, **COSTLY)
    adopt = mock.Mock(wraps=pair.target.adopt)
    monkeypatch.setattr(pair.target, "adopt", adopt)
    found = pair.answer([1, 2], gamma=8, mode="auto", constraint=Slow(VOCABULARY, pair.masks), **answer)
    assert found.answer == expected.answer
    assert 0 < found.stats.adopted < adopt.call_count
    assert found.stats.adopted == sum(step.adopted for step in pair.records.rounds)
    assert all(step.n_accepted + 2 == len(step.emitted) for step in pair.records.rounds if step.adopted)
