"""Noise is a function of its keys, and independent between purposes; races are tested in test_rejection.py."""

import itertools

import numpy as np
import pytest
from scipy import stats

from rules import noise
from specserve.sampling.noise import Noise, Purpose


def test_different_keys_give_different_numbers() -> None:
    keys = itertools.product((0, 1, 2**64 - 1), (0, 1, 99), Purpose, (0, 1, 16))
    numbers = [noise(secret=secret, round_number=n).uniform(purpose, index) for secret, n, purpose, index in keys]
    assert len(set(numbers)) == len(numbers)
    # Of the secret and not of the seed, or two sequences would share them.
    assert noise(seed=6, choice=1, position=7).uniform(Purpose.DRAFT, 0) == noise().uniform(Purpose.DRAFT, 0)


def test_numbers_are_uniform_and_independent_between_purposes() -> None:
    """Kolmogorov-Smirnov and a rank correlation on 5,000 numbers, false-alarm rate 1e-4 each."""
    drafts = [noise(secret=secret).uniform(Purpose.DRAFT, 0) for secret in range(5000)]
    shared = [0.9 * number + 0.05 for number in drafts]
    assert stats.spearmanr(drafts, shared).pvalue < 1e-4, "the test must detect shared numbers"
    assert stats.kstest(np.square(drafts), "uniform").pvalue < 1e-4, "the test must detect another distribution"
    accepts = [noise(secret=secret).uniform(Purpose.ACCEPT, 0) for secret in range(5000)]
    assert stats.kstest(drafts, "uniform").pvalue > 1e-4
    assert stats.spearmanr(drafts, accepts).pvalue > 1e-4
    assert 0 <= np.min(drafts) < np.max(drafts) < 1


def test_exponentials_are_keyed_by_seed_choice_and_position_alone() -> None:
    def numbers(index: int = 3, part: int = 0, **keys: int) -> tuple[float, ...]:
        return tuple(noise(Noise, **{"seed": 5, "choice": 1, "position": 10} | keys).exponentials(index, part, 50))

    assert numbers() == numbers(0, position=13) == numbers(secret=1, round_number=9)
    others = [numbers(part=1), numbers(position=11), numbers(choice=0), numbers(seed=-5)]
    assert len({numbers(), *others}) == 5


def test_the_numbers_of_a_seed_stay_what_they_are() -> None:
    """Or the output that a client gets for a seed changes with an update."""
    numbers = noise(seed=-5, choice=3, position=10).exponentials(2, 4, 3)
    assert numbers.tolist() == pytest.approx([0.4819058969785625, 0.20687810415396488, 0.8903153425204609])
