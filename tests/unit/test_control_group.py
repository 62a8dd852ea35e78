"""The speed-up against the control group, and its confidence interval."""

import math

import numpy as np
import pytest

from specserve.observability import control_group
from specserve.observability.control_group import Holdback


def holdback_with(speedup: float, sequences: int, seed: int, spread: float = 0.5) -> Holdback:
    """A holdback with `sequences` log-normal TPOTs in each group; speculation has `speedup` times the median speed."""
    estimator = Holdback(0.5)
    generator = np.random.default_rng(seed)
    for plain, median in ((True, 0.1), (False, 0.1 / speedup)):
        for tpot in np.exp(generator.normal(math.log(median), spread, sequences)):
            estimator.observe(float(tpot), plain=plain)
    return estimator


def test_speedup_needs_30_sequences_in_each_group_and_a_reset_forgets_them() -> None:
    assert holdback_with(2.0, 29, seed=1).speedup() is None
    holdback = holdback_with(2.0, 30, seed=1)
    assert holdback.speedup() is not None
    holdback.reset()
    assert holdback.speedup() is None


def test_interval_covers_the_true_speedup_at_its_confidence_level() -> None:
    """95 %: of 400 samples 6 to 32 may miss; the false-alarm rate of either bound is 1 in 500 at most.

    Intervals that are a quarter narrower miss in 14 % of the samples, and those a quarter wider in 1 %.
    """
    errors = []
    for seed in range(400):
        speedup = holdback_with(1.5, 40, seed).speedup()
        assert speedup is not None
        errors.append(abs(math.log(speedup.value / 1.5)) / math.log(speedup.high / speedup.value))
    misses = [sum(error > width for error in errors) for width in (1.0, 0.75, 1.25)]
    assert 6 <= misses[0] <= 32 < misses[1]
    assert misses[2] < 6


def test_configured_share_is_held_back() -> None:
    """Within five standard deviations of 20,000 draws: a false-alarm rate of one in a million."""
    for share in (0.0, 0.02, 0.5):
        holdback = Holdback(share, seed=7)
        drawn = sum(holdback.draw() for _ in range(20_000))
        assert abs(drawn - 20_000 * share) <= 5 * math.sqrt(20_000 * share * (1 - share))


def test_speedup_is_of_the_last_sequences() -> None:
    """The speed-up changes from 3 to 1.5; the window holds exactly the sequences since then."""
    estimator = holdback_with(3.0, 4000, seed=1)
    for plain, tpot in ((True, 0.1), (False, 0.1 / 1.5)) * (control_group._WINDOW // 2):
        estimator.observe(tpot, plain=plain)
    speedup = estimator.speedup()
    assert speedup is not None
    assert speedup.value == pytest.approx(1.5)
