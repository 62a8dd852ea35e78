"""The speed-up against the control group, and its confidence interval."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specserve.observability import control_group
from specserve.observability.control_group import Holdback


def filled(speedup: float, sequences: int, seed: int, spread: float = 0.5) -> Holdback:
    """Sequences whose TPOTs differ by factors, those with speculation `speedup` times as fast in the median."""
    found = Holdback(0.5)
    generator = np.random.default_rng(seed)
    for tpot in np.exp(generator.normal(math.log(0.1), spread, sequences)):
        found.observe(float(tpot), plain=True)
    for tpot in np.exp(generator.normal(math.log(0.1 / speedup), spread, sequences)):
        found.observe(float(tpot), plain=False)
    return found


def test_small_groups_give_no_estimate() -> None:
    assert filled(2.0, 29, seed=1).speedup() is None
    assert filled(2.0, 30, seed=1).speedup() is not None


def test_the_interval_covers_the_true_speedup_at_its_confidence_level() -> None:
    """95 %: of 400 samples at most 32 may miss, and at least 6 must; each fails by chance once in 500 runs or less.

    Intervals that are a quarter narrower miss in 14 %, and those that are as much wider in 1 % of the samples.
    """
    errors = []
    for seed in range(400):
        speedup = filled(1.5, 40, seed).speedup()
        assert speedup is not None
        errors.append(abs(math.log(speedup.value / 1.5)) / math.log(speedup.high / speedup.value))
    misses = [sum(error > width for error in errors) for width in (1.0, 0.75, 1.25)]
    assert 6 <= misses[0] <= 32 < misses[1]
    assert misses[2] < 6


def test_larger_groups_give_a_narrower_interval() -> None:
    few, many = (filled(1.5, sequences, seed=3).speedup() for sequences in (40, 4000))
    assert few
    assert many
    assert math.log(many.high / many.low) < 0.2 * math.log(few.high / few.low)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5])
def test_the_configured_share_is_drawn(share: float) -> None:
    """Of 20,000; five standard deviations either way, which chance exceeds once in a million runs."""
    holdback = Holdback(share, seed=7)
    drawn = sum(holdback.draw() for _ in range(20_000))
    assert abs(drawn - 20_000 * share) <= 5 * math.sqrt(20_000 * share * (1 - share))


def test_sequences_beyond_the_window_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed-up was 3 and is now 1.5; the window holds as many sequences as have come since."""
    monkeypatch.setattr(control_group, "_WINDOW", 8000)
    found = filled(3.0, 4000, seed=1)
    for plain, tpot in ((True, 0.1), (False, 0.1 / 1.5)) * 4000:
        found.observe(tpot, plain=plain)
    speedup = found.speedup()
    assert speedup is not None
    assert speedup.value == pytest.approx(1.5)


def test_reset_forgets_all_sequences() -> None:
    holdback = filled(1.5, 40, seed=1)
    assert holdback.speedup() is not None
    holdback.reset()
    assert holdback.speedup() is None
