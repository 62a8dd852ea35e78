"""Noise is a function of its keys, uniform or exponential, and independent between purposes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from rules import noise
from specserve.sampling.noise import Purpose


def test_same_keys_give_the_same_number() -> None:
    first, second = (noise(secret=5, round_number=2) for _ in range(2))
    assert first.uniform(Purpose.ACCEPT, 3) == second.uniform(Purpose.ACCEPT, 3)


def test_different_keys_give_different_numbers() -> None:
    keys = itertools.product((0, 1, 2**64 - 1), (0, 1, 99), Purpose, (0, 1, 16))
    numbers = [
        noise(secret=secret, round_number=number).uniform(purpose, index) for secret, number, purpose, index in keys
    ]
    assert len(set(numbers)) == len(numbers)


def test_uniform_numbers_follow_from_the_secret_and_not_from_the_seed() -> None:
    """Or two sequences would share them."""
    first, second = noise(secret=5), noise(secret=5, seed=6, choice=1, position=7)
    assert first.uniform(Purpose.DRAFT, 0) == second.uniform(Purpose.DRAFT, 0)


def test_numbers_are_uniform_and_independent_between_purposes() -> None:
    """Kolmogorov-Smirnov and a rank correlation on 5,000 numbers, false-alarm rate 1e-4 each."""
    drafts = [noise(secret=secret).uniform(Purpose.DRAFT, 0) for secret in range(5000)]
    assert stats.spearmanr(drafts, [0.9 * number + 0.05 for number in drafts]).pvalue < 1e-4, (
        "the test must detect shared numbers"
    )
    assert stats.kstest(np.square(drafts), "uniform").pvalue < 1e-4, "the test must detect another distribution"
    accepts = [noise(secret=secret).uniform(Purpose.ACCEPT, 0) for secret in range(5000)]
    assert stats.kstest(drafts, "uniform").pvalue > 1e-4
    assert stats.spearmanr(drafts, accepts).pvalue > 1e-4
    assert 0 <= np.min(drafts) < np.max(drafts) < 1


def test_exponentials_are_keyed_by_seed_choice_and_position_alone() -> None:
    first = noise(seed=5, choice=1, position=10).exponentials(3, 0, 50)
    assert (first == noise(seed=5, choice=1, position=13).exponentials(0, 0, 50)).all()
    assert (first == noise(seed=5, choice=1, position=10, secret=1, round_number=9).exponentials(3, 0, 50)).all()
    assert (first != noise(seed=5, choice=1, position=10).exponentials(3, 1, 50)).all()
    assert (first != noise(seed=5, choice=1, position=11).exponentials(3, 0, 50)).all()
    assert (first != noise(seed=5, choice=0, position=10).exponentials(3, 0, 50)).all()
    assert (first != noise(seed=-5, choice=1, position=10).exponentials(3, 0, 50)).all()


def test_the_numbers_of_a_seed_stay_what_they_are() -> None:
    """Or the output that a client gets for a seed changes with an update."""
    numbers = noise(seed=-5, choice=3, position=10).exponentials(2, 4, 3)
    assert numbers.tolist() == pytest.approx([0.4819058969785625, 0.20687810415396488, 0.8903153425204609])


def test_exponentials_are_exponentially_distributed_and_never_0() -> None:
    """Kolmogorov-Smirnov on a million numbers, false-alarm rate 1e-4; float32 would hold zeros."""
    numbers = noise(seed=1).exponentials(0, 0, 1_000_000)
    assert stats.kstest(numbers, "expon").pvalue > 1e-4
    assert stats.kstest(1.01 * numbers, "expon").pvalue < 1e-4, "the test must detect another rate"
    assert numbers.min() > 0
