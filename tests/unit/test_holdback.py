"""The live figure of what speculation brings, and how much of it is chance."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specserve.observability.holdback import Holdback


def filled(speedup: float, texts: int, seed: int, spread: float = 0.5) -> Holdback:
    """Texts whose paces differ by factors, those with speculation `speedup` times as fast in the middle."""
    holdback = Holdback(0.5)
    generator = np.random.default_rng(seed)
    for pace in np.exp(generator.normal(math.log(0.1), spread, texts)):
        holdback.learn(float(pace), plain=True)
    for pace in np.exp(generator.normal(math.log(0.1 / speedup), spread, texts)):
        holdback.learn(float(pace), plain=False)
    return holdback


def test_few_texts_say_nothing() -> None:
    assert filled(2.0, 29, seed=1).speedup() is None
    assert filled(2.0, 30, seed=1).speedup() is not None


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """95 %: of 400 samples at most 32 may miss, and at least 6 must; each fails by chance once in 500 runs or less."""
    misses = 0
    for seed in range(400):
        speedup = filled(1.5, 40, seed).speedup()
        assert speedup is not None
        misses += not speedup.low <= 1.5 <= speedup.high
    assert 6 <= misses <= 32


def test_more_texts_make_a_narrower_interval() -> None:
    few, many = (filled(1.5, texts, seed=3).speedup() for texts in (40, 4000))
    assert few
    assert many
    assert math.log(many.high / many.low) < 0.2 * math.log(few.high / few.low)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5])
def test_the_configured_share_is_held_back(share: float) -> None:
    """Of 20,000; five standard deviations either way, which chance exceeds once in a million runs."""
    holdback = Holdback(share, seed=7)
    held = sum(holdback.chooses() for _ in range(20_000))
    assert abs(held - 20_000 * share) <= 5 * math.sqrt(20_000 * share * (1 - share))
