"""Noise is a function of its key, uniform, and independent between purposes."""

from __future__ import annotations

import itertools

import numpy as np
from scipy import stats

from specserve.sampling.noise import Noise, Purpose


def test_same_key_gives_the_same_number() -> None:
    assert Noise(5, 1, 2, 0).uniform(Purpose.ACCEPT, 3) == Noise(5, 1, 2, 0).uniform(Purpose.ACCEPT, 3)


def test_different_keys_give_different_numbers() -> None:
    keys = itertools.product((0, 1, 2**64 - 1), (0, 1), (0, 1, 99), Purpose, (0, 1, 16))
    numbers = [Noise(seed, choice, rnd, 0).uniform(purpose, index) for seed, choice, rnd, purpose, index in keys]
    assert len(set(numbers)) == len(numbers)


def test_negative_seed_differs_from_the_positive_one() -> None:
    assert Noise(-1, 0, 0, 0).uniform(Purpose.DRAFT, 0) != Noise(1, 0, 0, 0).uniform(Purpose.DRAFT, 0)


def test_numbers_are_uniform_and_independent_between_purposes() -> None:
    """Kolmogorov-Smirnov and a rank correlation on 5,000 numbers, false-alarm rate 1e-4 each."""
    drafts = [Noise(seed, 0, 0, 0).uniform(Purpose.DRAFT, 0) for seed in range(5000)]
    assert stats.spearmanr(drafts, [0.9 * number + 0.05 for number in drafts]).pvalue < 1e-4, (
        "the test must detect shared numbers"
    )
    assert stats.kstest(np.square(drafts), "uniform").pvalue < 1e-4, "the test must detect another distribution"
    accepts = [Noise(seed, 0, 0, 0).uniform(Purpose.ACCEPT, 0) for seed in range(5000)]
    assert stats.kstest(drafts, "uniform").pvalue > 1e-4
    assert stats.spearmanr(drafts, accepts).pvalue > 1e-4
    assert 0 <= np.min(drafts) < np.max(drafts) < 1


def test_exponentials_are_keyed_by_position_and_not_by_round() -> None:
    first = Noise(5, 1, round_number=2, position=10).exponentials(3, 0, 50)
    assert (first == Noise(5, 1, round_number=9, position=13).exponentials(0, 0, 50)).all()
    assert (first != Noise(5, 1, round_number=2, position=10).exponentials(3, 1, 50)).all()
    assert (first != Noise(5, 1, round_number=2, position=11).exponentials(3, 0, 50)).all()
    assert (first != Noise(5, 0, round_number=2, position=10).exponentials(3, 0, 50)).all()


def test_exponentials_are_exponentially_distributed_and_never_0() -> None:
    """Kolmogorov-Smirnov on a million numbers, false-alarm rate 1e-4; float32 would hold zeros."""
    numbers = Noise(1, 0, 0, 0).exponentials(0, 0, 1_000_000)
    assert stats.kstest(numbers, "expon").pvalue > 1e-4
    assert stats.kstest(1.01 * numbers, "expon").pvalue < 1e-4, "the test must detect another rate"
    assert numbers.min() > 0
