"""Verification rules preserve the target's distribution: by exact enumeration, and by statistical tests.

Statistical tests run on fixed seeds; their false-alarm rate is the share of seeds on which a correct rule would fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from enumeration import Rule, distance, expected_acceptance, joint_by_rounds, joint_by_sampling, random_table
from rules import WRONG_RULES, CoarseRace, SameAtEveryPosition, UniformRace, noise
from specserve.sampling.distribution import FloatArray, draw, race
from specserve.sampling.noise import Noise, Purpose
from specserve.speculation.rejection import (
    RULES,
    Verdict,
    accept_equal,
    residual,
    verify_block,
    verify_coupled,
    verify_token,
)

FALSE_ALARM = 1e-4
DRAWING_RULES = [verify_token, verify_block]


def softmax(logits: FloatArray) -> FloatArray:
    """Rows of probabilities along the last axis."""
    exponentials: FloatArray = np.exp(logits - logits.max(axis=-1, keepdims=True))
    normalised: FloatArray = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return normalised


# Exact


@pytest.mark.parametrize("rule", DRAWING_RULES)
def test_joint_distribution_of_a_round_is_the_targets(rule: Rule) -> None:
    for seed, (vocabulary, gamma) in product(range(2), [(2, 1), (2, 3), (3, 2), (4, 2), (3, 3)]):
        rng = np.random.default_rng([seed, vocabulary, gamma])
        p, q = (random_table(rng, vocabulary, gamma + 1) for _ in "pq")
        joint = joint_by_rounds(rule, p, q, length=gamma + 1, gamma=gamma, rounds=1)
        assert distance(joint, joint_by_sampling(p, vocabulary, gamma + 1)) < 1e-12


@pytest.mark.parametrize("rule", DRAWING_RULES)
def test_joint_distribution_of_rounds_is_the_targets_for_any_stopping_time(rule: Rule) -> None:
    for (vocabulary, length, gamma), seed in product([(2, 4, 3), (3, 3, 2)], range(3)):
        rng = np.random.default_rng([seed, vocabulary, length])
        p, q = (random_table(rng, vocabulary, length + gamma) for _ in "pq")
        prefixes = (drafts for n in range(gamma) for drafts in itertools.product(range(vocabulary), repeat=n))
        stops = {drafts: bool(rng.random() < 0.4) for drafts in prefixes}
        joint = joint_by_rounds(rule, p, q, length=length, gamma=gamma, stop=stops.__getitem__)
        assert distance(joint, joint_by_sampling(p, vocabulary, length)) < 1e-12


@pytest.mark.parametrize("wrong", WRONG_RULES)
def test_enumeration_rejects_a_wrong_rule(wrong: str) -> None:
    rng = np.random.default_rng(7)
    tables = [(random_table(rng, 4, 3), random_table(rng, 4, 3)) for _ in range(3)]
    joints = [joint_by_rounds(WRONG_RULES[wrong], p, q, length=3, gamma=2, rounds=1) for p, q in tables]
    pairs = zip(joints, tables, strict=True)
    assert max(distance(joint, joint_by_sampling(p, 4, 3)) for joint, (p, _) in pairs) > 1e-3


def test_block_accepts_at_least_as_much_as_token() -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        p, q = (random_table(rng, 3, 4) for _ in "pq")
        token, block = (expected_acceptance(rule, p, q, 3) for rule in DRAWING_RULES)
        assert block > token - 1e-12


def test_block_accepts_more_on_the_papers_example() -> None:
    """Section 2 of arXiv 2403.10444: two tokens, two drafts, 10/9 accepted by token and 11/9 by block."""
    prefixes = [prefix for n in range(3) for prefix in itertools.product(range(2), repeat=n)]
    p = dict.fromkeys(prefixes, np.array([1 / 3, 2 / 3]))
    q = dict.fromkeys(prefixes, np.array([2 / 3, 1 / 3]))
    assert expected_acceptance(verify_token, p, q, 2) == pytest.approx(10 / 9)
    assert expected_acceptance(verify_block, p, q, 2) == pytest.approx(11 / 9)


def test_discarding_a_draft_for_its_own_low_probability_is_wrong() -> None:
    """To stop because of the token that was sampled is no stopping time; to stop at that position regardless is one."""
    p, q = np.array([0.5, 0.5]), np.array([0.75, 0.25])
    uniform = np.full(2, 0.5)
    tables = ({(): p, (0,): uniform, (1,): uniform}, {(): q, (0,): uniform, (1,): uniform})
    without_stop = joint_by_rounds(verify_token, *tables, length=1, gamma=1)
    with_stop = joint_by_rounds(verify_token, *tables, length=1, gamma=1, stop=lambda drafts: not drafts)
    # Token 1 is discarded for its low q, and its position is sampled from p again.
    accepted = min(1, p[0] / q[0])
    with_discard = np.array([q[0] * accepted, q[0] * (1 - accepted)]) + q[1] * p
    assert distance(without_stop, {(0,): 0.5, (1,): 0.5}) < 1e-12
    assert distance(with_stop, {(0,): 0.5, (1,): 0.5}) < 1e-12
    assert abs(with_discard[0] - 0.5) > 0.1


def test_choosing_a_drafter_by_its_sampled_token_is_wrong() -> None:
    """Two drafters sample, and one that sampled token 0 is preferred: its token is no longer distributed as q."""
    p, q = np.array([0.5, 0.5]), np.array([0.4, 0.6])
    output = np.zeros(2)
    for first, second in itertools.product(range(2), repeat=2):
        taken = 0 if 0 in (first, second) else 1
        accepted = min(1, p[taken] / q[taken])
        rest = residual(p, q)
        output[taken] += q[first] * q[second] * accepted
        output += q[first] * q[second] * (1 - accepted) * rest / rest.sum()
    assert output.sum() == pytest.approx(1)
    assert abs(output[0] - 0.5) > 0.1


@pytest.mark.parametrize("rule", [rule.verify for rule in RULES.values()], ids=list(RULES))
def test_one_hot_draft_is_accepted_iff_it_is_the_targets_argmax(rule: Rule) -> None:
    p = np.eye(4)[[2, 1, 3]]
    assert rule(p, np.eye(4)[[2, 0]], [2, 0], noise()) == Verdict(1, 1)
    assert rule(p, np.eye(4)[[2, 1]], [2, 1], noise()) == Verdict(2, 3)
    assert rule(p, [], [], noise()) == Verdict(0, 2)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.data())
def test_every_rule_equals_greedy_verification_on_one_hot_rows(choices: list[int], data: st.DataObject) -> None:
    gamma = len(choices) - 1
    drafts = data.draw(st.lists(st.integers(0, 3), min_size=gamma, max_size=gamma))
    p, q = np.eye(4)[choices], np.eye(4)[drafts]
    verdict = accept_equal(choices.__getitem__, drafts)
    assert {rule.verify(p, q, drafts, noise()) for rule in RULES.values()} == {verdict}


@pytest.mark.parametrize("rule", DRAWING_RULES)
def test_draft_is_always_accepted_when_q_equals_p(rule: Rule) -> None:
    rows = softmax(np.random.default_rng(0).normal(size=(4, 30)))
    for seed in range(200):
        numbers = noise(secret=seed)
        drafts = [draw(rows[i], numbers.uniform(Purpose.DRAFT, i)) for i in range(3)]
        assert rule(rows, rows[:3], drafts, numbers).n_accepted == 3


# Coupled verification


def coupled_token(row: FloatArray, seed: int, position: int = 0, kind: type[Noise] = Noise) -> int:
    """The target's own choice at a position."""
    return verify_coupled([row], [], [], noise(kind, seed=seed, position=position)).next_token


def narrow_pvalue(kind: type[Noise] = Noise) -> float:
    """The chi-square p-value of coupled tokens over a vocabulary of sixteen."""
    p = softmax(np.random.default_rng(3).normal(size=16))
    counts = np.bincount([coupled_token(p, seed, kind=kind) for seed in range(10_000)], minlength=16)
    return float(stats.chisquare(counts, p * 10_000).pvalue)


def wide_pvalue(kind: type[Noise] = Noise) -> float:
    """The chi-square p-value where 60,000 rare tokens, which zeros in the noise favour, have half the probability."""
    trials, row = 6_000, np.full(60_016, 0.5 / 60_000)
    row[:16] = 0.5 / 16
    tokens = np.array([coupled_token(row.astype(np.float32), seed, kind=kind) for seed in range(trials)])
    counts = np.append(np.bincount(tokens[tokens < 16], minlength=16), np.count_nonzero(tokens >= 16))
    return float(stats.chisquare(counts, np.append(np.full(16, 0.5 / 16), 0.5) * trials).pvalue)


def independence_pvalue(kind: type[Noise] = Noise) -> float:
    """The p-value of a contingency table of the tokens at two positions."""
    p = softmax(np.random.default_rng(1).normal(size=4))
    table = np.zeros((4, 4))
    for seed in range(5_000):
        table[coupled_token(p, seed, 0, kind), coupled_token(p, seed, 1, kind)] += 1
    return float(stats.chi2_contingency(table).pvalue)


@pytest.mark.parametrize(
    ("pvalue", "wrong"),
    # Ten bits give enough zeros for 6,000 trials to detect; single precision gives fewer.
    [(narrow_pvalue, UniformRace), (wide_pvalue, CoarseRace), (independence_pvalue, SameAtEveryPosition)],
)
def test_coupled_tokens_are_distributed_as_p_and_independent(
    pvalue: Callable[[type[Noise]], float], wrong: type[Noise]
) -> None:
    assert pvalue(Noise) > FALSE_ALARM
    assert pvalue(wrong) < FALSE_ALARM


@given(st.integers(0, 2**32), st.lists(st.integers(0, 7), max_size=6))
def test_coupled_output_does_not_depend_on_the_drafts(seed: int, drafts: list[int]) -> None:
    p = softmax(2 * np.random.default_rng(2).normal(size=(9, 8)))
    alone = [coupled_token(p[i], seed, i) for i in range(len(drafts) + 1)]
    n_accepted, token = verify_coupled(p, [], drafts, noise(seed=seed, round_number=3))
    assert [*drafts[:n_accepted], token] == alone[: n_accepted + 1]


def test_coupled_draft_agrees_with_the_target_nearly_as_often_as_possible() -> None:
    """The optimum is sum min(p, q), here of wide and similar rows; independent samples would agree far less often."""
    rng = np.random.default_rng(4)
    logits = 3 * rng.normal(size=20_000)
    p, q = softmax(logits), softmax(logits + 0.5 * rng.normal(size=20_000))
    races = [partial(noise(seed=seed).exponentials, 0) for seed in range(2_000)]
    same = sum(race(p, numbers) == race(q, numbers) for numbers in races)
    overlap = float(np.minimum(p, q).sum())
    assert 0.8 * overlap < same / 2_000 < overlap + 0.05
