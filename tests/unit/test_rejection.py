"""Verification rules preserve the target's distribution: by exact enumeration, and by statistical tests.

Statistical tests run on fixed seeds; their false-alarm rate is the share of seeds on which a correct rule would fail.
"""

from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from enumeration import expected_acceptance, joint_by_rounds, joint_by_sampling, random_table
from intervals import largest_error
from rules import WRONG_RULES, CoarseRace, Rule, SameAtEveryPosition, UniformRace, noise
from specserve.sampling.distribution import FloatArray, race
from specserve.sampling.noise import Noise
from specserve.speculation.rejection import RULES, accept_equal, verify_block, verify_coupled, verify_token

FALSE_ALARM = 1e-4
DRAWING_RULES = [verify_token, verify_block]


def softmax(logits: FloatArray) -> FloatArray:
    exponentials: FloatArray = np.exp(logits - logits.max(axis=-1, keepdims=True))
    normalised: FloatArray = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return normalised


@pytest.mark.parametrize("rule", DRAWING_RULES)
def test_joint_distribution_of_rounds_is_the_targets_for_any_stopping_time(rule: Rule) -> None:
    for (vocabulary, length, gamma), seed in product([(2, 2, 1), (2, 4, 3), (3, 3, 2), (4, 3, 2)], range(3)):
        rng = np.random.default_rng([seed, vocabulary, length])
        p, q = (random_table(rng, vocabulary, length + gamma) for _ in "pq")
        prefixes = (drafts for n in range(gamma) for drafts in product(range(vocabulary), repeat=n))
        stops = {drafts: bool(rng.random() < 0.2 * seed) for drafts in prefixes}
        joint = joint_by_rounds(rule, p, q, length=length, gamma=gamma, stop=stops.__getitem__)
        assert largest_error(joint, joint_by_sampling(p, vocabulary, length)) < 1e-9


@pytest.mark.parametrize("wrong", WRONG_RULES)
def test_enumeration_rejects_a_wrong_rule(wrong: str) -> None:
    rng = np.random.default_rng(8)
    tables = [(random_table(rng, 3, 5), random_table(rng, 3, 5)) for _ in range(3)]
    joints = [joint_by_rounds(WRONG_RULES[wrong], p, q, length=3, gamma=2) for p, q in tables]
    pairs = zip(joints, tables, strict=True)
    assert max(largest_error(joint, joint_by_sampling(p, 3, 3)) for joint, (p, _) in pairs) > 1e-3


def test_block_accepts_more_on_the_papers_example_and_either_rule_all_where_q_is_p() -> None:
    """Section 2 of arXiv 2403.10444: two tokens, two drafts, 10/9 accepted by token and 11/9 by block."""
    prefixes = [prefix for n in range(3) for prefix in product(range(2), repeat=n)]
    p = dict.fromkeys(prefixes, np.array([1 / 3, 2 / 3]))
    q = dict.fromkeys(prefixes, np.array([2 / 3, 1 / 3]))
    assert expected_acceptance(verify_token, p, q, 2) == pytest.approx(10 / 9)
    assert expected_acceptance(verify_block, p, q, 2) == pytest.approx(11 / 9)
    for rule in DRAWING_RULES:
        assert expected_acceptance(rule, p, p, 2) == pytest.approx(2)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.data())
def test_every_rule_equals_greedy_verification_on_one_hot_rows(choices: list[int], data: st.DataObject) -> None:
    gamma = len(choices) - 1
    drafts = data.draw(st.lists(st.integers(0, 3), min_size=gamma, max_size=gamma))
    p, q = np.eye(4)[choices], np.eye(4)[drafts]
    verdict = accept_equal(choices.__getitem__, drafts)
    assert {rule.verify(p, q, drafts, noise()) for rule in RULES.values()} == {verdict}


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


def test_coupled_tokens_are_distributed_as_p_and_independent() -> None:
    """Ten bits give enough zeros for 6,000 trials to detect; single precision gives fewer."""
    faults = [(narrow_pvalue, UniformRace), (wide_pvalue, CoarseRace), (independence_pvalue, SameAtEveryPosition)]
    for pvalue, wrong in faults:
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
