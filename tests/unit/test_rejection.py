"""Token verification leaves the target's distribution untouched: exactly, and as a chi-square test sees it.

Statistical tests run on fixed seeds; their false-alarm rate is the share of seeds on which a right rule would fail.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from enumeration import Rule, distance, law_of_round, law_of_text, random_table
from rules import WRONG_RULES, recovers_from_p, shares_one_number
from specserve.speculation.distribution import FloatArray, draw
from specserve.speculation.noise import Noise, Purpose
from specserve.speculation.rejection import Verdict, residual, verify_token

FALSE_ALARM = 1e-4


def weights(size: int) -> st.SearchStrategy[FloatArray]:
    """Rows of probabilities, zeros and very uneven ones included."""
    elements = st.one_of(st.just(0.0), st.floats(1e-9, 1.0))
    return arrays(np.float64, size, elements=elements).filter(np.any).map(lambda row: row / row.sum())


@settings(max_examples=500, deadline=None)
@given(st.integers(2, 50).flatmap(lambda size: st.tuples(weights(size), weights(size))))
def test_accepted_and_recovered_tokens_together_have_the_law_p(rows: tuple[FloatArray, FloatArray]) -> None:
    p, q = rows
    accepted = np.minimum(p, q)  # q(x) times min(1, p(x) / q(x))
    rest = residual(p, q)
    recovered = rest / rest.sum() if rest.any() else p
    np.testing.assert_allclose(accepted + (1 - accepted.sum()) * recovered, p, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("vocabulary", "gamma"), [(2, 1), (2, 3), (3, 2), (3, 3), (4, 1), (4, 2), (4, 3)])
def test_the_joint_law_of_a_round_is_the_targets(vocabulary: int, gamma: int) -> None:
    for seed in range(2):
        rng = np.random.default_rng([seed, vocabulary, gamma])
        p, q = (random_table(rng, vocabulary, gamma + 1) for _ in "pq")
        law = law_of_round(verify_token, p, q, vocabulary, gamma)
        assert distance(law, law_of_text(p, vocabulary, gamma + 1)) < 1e-12


@pytest.mark.parametrize("wrong", WRONG_RULES)
def test_enumeration_rejects_a_wrong_rule(wrong: Rule) -> None:
    rng = np.random.default_rng(7)
    tables = [(random_table(rng, 4, 3), random_table(rng, 4, 3)) for _ in range(3)]
    distances = [distance(law_of_round(wrong, p, q, 4, 2), law_of_text(p, 4, 3)) for p, q in tables]
    assert max(distances) > 1e-3


def test_a_greedy_draft_stays_exactly_where_it_is_the_targets_choice() -> None:
    p = np.eye(4)[[2, 1, 3]]
    q = np.eye(4)[[2, 0]]
    assert verify_token(p, q, [2, 0], Noise(1, 0, 0)) == Verdict(1, 1)
    assert verify_token(p, np.eye(4)[[2, 1]], [2, 1], Noise(1, 0, 0)) == Verdict(2, 3)


def softmax(logits: FloatArray) -> FloatArray:
    """Rows of probabilities along the last axis."""
    exponentials: FloatArray = np.exp(logits - logits.max(axis=-1, keepdims=True))
    normalised: FloatArray = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return normalised


def first_tokens(rule: Rule, p: FloatArray, q: FloatArray, trials: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """How often each token comes first in a round with one draft."""
    counts = np.zeros(len(p), np.int64)
    for trial in range(trials):
        noise = Noise(trial, 0, 0)
        draft = draw(q, noise.uniform(Purpose.DRAFT, 0))
        n_accepted, token = rule([p, p], [q], [draft], noise)
        counts[draft if n_accepted else token] += 1
    return counts


def test_the_narrow_adversarial_case() -> None:
    """Sixteen tokens, a draft that wants the opposite, 200,000 trials: shared noise shows here and nowhere wider."""
    logits = np.random.default_rng(3).normal(size=16)
    p, q = softmax(logits), softmax(-logits)
    counts = first_tokens(verify_token, p, q, 200_000)
    assert stats.chisquare(counts, p * counts.sum()).pvalue > FALSE_ALARM


@pytest.mark.parametrize("wrong", WRONG_RULES)
def test_the_narrow_adversarial_case_rejects_a_wrong_rule(wrong: Rule) -> None:
    logits = np.random.default_rng(3).normal(size=16)
    p, q = softmax(logits), softmax(-logits)
    counts = first_tokens(wrong, p, q, 20_000)
    assert stats.chisquare(counts, p * counts.sum()).pvalue < FALSE_ALARM


def chain(rule: Rule, p: FloatArray, q: FloatArray, *, length: int, gamma: int, seed: int) -> list[int]:
    """A text of a Markov chain p with drafts from a chain q, as many rounds as it takes."""
    text = [0]
    for round_number in itertools.count():
        if len(text) > length:
            return text[1 : length + 1]
        noise = Noise(seed, 0, round_number)
        drafts: list[int] = []
        for i in range(gamma):
            drafts.append(draw(q[[*text, *drafts][-1]], noise.uniform(Purpose.DRAFT, i)))
        contexts = [text[-1], *drafts]
        n_accepted, token = rule([p[c] for c in contexts], [q[c] for c in contexts[:-1]], drafts, noise)
        text += [*drafts[:n_accepted], token]
    raise AssertionError


def position_pvalues(rule: Rule, trials: int) -> list[float]:
    """The chi-square p-value of each of five positions, which lie in two to five rounds."""
    rng = np.random.default_rng(11)
    p, q = softmax(1.5 * rng.normal(size=(8, 8))), softmax(1.5 * rng.normal(size=(8, 8)))
    texts = np.array([chain(rule, p, q, length=5, gamma=2, seed=seed) for seed in range(trials)])
    law = np.eye(8)[0]
    pvalues = []
    for position in range(5):
        law = law @ p
        pvalues.append(stats.chisquare(np.bincount(texts[:, position], minlength=8), law * trials).pvalue)
    return pvalues


def test_every_position_of_a_text_over_several_rounds_has_the_targets_law() -> None:
    """Five tests at once: Bonferroni keeps the whole at the stated false-alarm rate."""
    assert min(position_pvalues(verify_token, 20_000)) > FALSE_ALARM / 5


@pytest.mark.parametrize("wrong", [recovers_from_p, shares_one_number])
def test_positions_reject_a_wrong_rule(wrong: Rule) -> None:
    assert min(position_pvalues(wrong, 5_000)) < FALSE_ALARM / 5


def test_the_acceptance_rate_is_the_overlap_of_p_and_q() -> None:
    """20,000 trials against sum min(p, q); four standard errors are a false-alarm rate of 6e-5."""
    rng = np.random.default_rng(5)
    p, q = softmax(rng.normal(size=32)), softmax(rng.normal(size=32))
    trials = 20_000
    accepted = 0
    for trial in range(trials):
        noise = Noise(trial, 0, 0)
        draft = draw(q, noise.uniform(Purpose.DRAFT, 0))
        accepted += verify_token([p, p], [q], [draft], noise).n_accepted
    overlap = float(np.minimum(p, q).sum())
    error = np.sqrt(overlap * (1 - overlap) / trials)
    assert abs(accepted / trials - overlap) < 4 * error
