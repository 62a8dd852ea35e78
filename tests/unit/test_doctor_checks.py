"""The doctor's statistical test of verification rules rejects wrong rules and passes correct ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from specserve.sampling.distribution import FloatArray, draw
from specserve.sampling.noise import Noise, Purpose
from specserve.speculation.rejection import RULES, Distributions, Rule, Verdict, sample_independent
from specserve.tools import doctor_checks
from specserve.tools.doctor_checks import binned, chi_square_deviation, deviation, is_wrong

TRIALS = 4000
Verify = Callable[[Distributions, Distributions, Sequence[int], Noise], Verdict]


def pair(seed: int, tokens: int = 60) -> tuple[list[FloatArray], list[FloatArray]]:
    """Two distributions of a target, and one of a draft that resembles the first."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 2, (2, tokens))
    near = logits[0] + generator.normal(0, 1, tokens)
    p, next_p, q = (np.exp(row) / np.exp(row).sum() for row in (*logits, near))
    return [p, next_p], [q]


@pytest.mark.parametrize("name", RULES)
def test_correct_rule_passes(name: str) -> None:
    """The false-alarm rate of each deviation is one in three million."""
    assert not any(is_wrong(deviation(name, *pair(seed), TRIALS)) for seed in range(3))


def accepts_every_draft(_p: Distributions, _q: Distributions, drafts: Sequence[int], noise: Noise) -> Verdict:
    """WRONG: accepts all drafts, which gives the draft's distribution."""
    return Verdict(len(drafts), draw(_p[len(drafts)], noise.uniform(Purpose.BONUS, len(drafts))))


def recovers_from_p(p: Distributions, q: Distributions, drafts: Sequence[int], noise: Noise) -> Verdict:
    """WRONG: after a rejection it samples from p instead of max(p - q, 0)."""
    for i, x in enumerate(drafts):
        if noise.uniform(Purpose.ACCEPT, i) * float(q[i][x]) >= float(p[i][x]):
            return Verdict(i, draw(p[i], noise.uniform(Purpose.RECOVER, i)))
    return Verdict(len(drafts), draw(p[len(drafts)], noise.uniform(Purpose.BONUS, len(drafts))))


def accepts_with_the_draft_number(p: Distributions, q: Distributions, drafts: Sequence[int], noise: Noise) -> Verdict:
    """WRONG: a draft is accepted or rejected by the number that sampled it."""
    for i, x in enumerate(drafts):
        if noise.uniform(Purpose.DRAFT, i) * float(q[i][x]) >= float(p[i][x]):
            rest = np.maximum(p[i] - q[i], 0)
            return Verdict(i, draw(rest, noise.uniform(Purpose.RECOVER, i)))
    return Verdict(len(drafts), draw(p[len(drafts)], noise.uniform(Purpose.BONUS, len(drafts))))


@pytest.mark.parametrize("verify", [accepts_every_draft, recovers_from_p, accepts_with_the_draft_number])
def test_wrong_rule_fails(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "RULES", {"wrong": Rule(sample_independent, verify)})
    assert all(is_wrong(deviation("wrong", *pair(seed), TRIALS)) for seed in range(3))


def test_deviation_of_a_correct_sampler_is_standard_normal() -> None:
    """The mean of 2,000 deviations is beyond 5 / sqrt(2000) in one of a million runs, skewness aside."""
    generator = np.random.default_rng(5)
    p, _ = pair(7)
    numbers = [chi_square_deviation(generator.multinomial(3000, p[0]).astype(float), 3000 * p[0]) for _ in range(2000)]
    assert abs(float(np.mean(numbers))) < 0.11
    assert 0.9 < float(np.std(numbers)) < 1.1


def test_token_of_probability_0_fails_the_check() -> None:
    assert is_wrong(chi_square_deviation(np.array([90.0, 0.0, 10.0]), np.array([100.0, 0.0, 0.0])))


def test_binning_keeps_the_sum_and_the_largest_probabilities() -> None:
    generator = np.random.default_rng(2)
    p, q = generator.dirichlet(np.full(5000, 0.01), 2)
    binned_p, binned_q = binned(p, q)
    assert binned_p.sum() == pytest.approx(1)
    assert binned_q.sum() == pytest.approx(1)
    assert binned_p.size == binned_q.size <= 1001
    assert binned_p.max() == pytest.approx(p.max())
    assert binned_q.max() == pytest.approx(q.max())
