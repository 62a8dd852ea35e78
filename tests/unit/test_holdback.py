"""The live figure of what speculation brings, and how much of it is chance."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specserve.observability import control_group as holdback
from specserve.observability.control_group import Holdback, PlainRounds


def filled(speedup: float, texts: int, seed: int, spread: float = 0.5) -> Holdback:
    """Texts whose paces differ by factors, those with speculation `speedup` times as fast in the middle."""
    found = Holdback(0.5)
    generator = np.random.default_rng(seed)
    for pace in np.exp(generator.normal(math.log(0.1), spread, texts)):
        found.learn(float(pace), plain=True)
    for pace in np.exp(generator.normal(math.log(0.1 / speedup), spread, texts)):
        found.learn(float(pace), plain=False)
    return found


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
    lot = Holdback(share, seed=7)
    held = sum(lot.chooses() for _ in range(20_000))
    assert abs(held - 20_000 * share) <= 5 * math.sqrt(20_000 * share * (1 - share))


def rounds(speedup: float, count: int, seed: int, *, share: float = 0.1) -> PlainRounds:
    """Rounds in which one text after the other is easy or hard to draft, `speedup` in the mean of all of them."""
    found = PlainRounds(share, seed)
    generator = np.random.default_rng(seed)
    easy = 0.5
    for place in range(count):
        if place % 50 == 0:
            easy = float(generator.uniform(0.3, 0.7))
        if found.chooses():
            found.learn(1, float(generator.normal(0.1, 0.005)), plain=True)
        else:
            # Twice `easy` is 1 in the mean, and so is what the tokens of a round scatter by.
            tokens = 1 + int(generator.poisson(2 * easy * 2))
            found.learn(tokens, float(generator.normal(0.3 / speedup, 0.01)), plain=False)
    return found


def test_few_plain_rounds_say_nothing() -> None:
    assert rounds(1.5, 300, seed=1).speedup() is None
    assert rounds(1.5, 3000, seed=1).speedup() is not None


def test_the_interval_of_rounds_holds_the_truth_as_often_as_it_says_though_neighbours_are_alike() -> None:
    """95 %: of 300 samples at most 28 may miss, which chance exceeds once in 1,000 runs."""
    misses = 0
    for seed in range(300):
        speedup = rounds(1.5, 1500, seed).speedup()
        assert speedup is not None
        misses += not speedup.low <= 1.5 <= speedup.high
    assert misses <= 28


def test_intervals_that_take_rounds_for_strangers_are_rejected_by_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one plain round each, whose neighbours are alike: far too narrow."""
    monkeypatch.setattr(holdback, "_PLAIN_ROUNDS", 1)
    misses = 0
    for seed in range(300):
        speedup = rounds(1.5, 1500, seed).speedup()
        assert speedup is not None
        misses += not speedup.low <= 1.5 <= speedup.high
    assert misses > 28


def test_what_is_long_ago_says_nothing_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speculation brought 3 times the speed, and then 1.5: texts and blocks are as many as are kept."""
    monkeypatch.setattr(holdback, "_MOST_TEXTS", 8000)
    monkeypatch.setattr(holdback, "_MOST_BLOCKS", 10)
    found = filled(3.0, 4000, seed=1)
    for plain, pace in ((True, 0.1), (False, 0.1 / 1.5)) * 4000:
        found.learn(pace, plain=plain)
    speedup = found.speedup()
    assert speedup is not None
    assert speedup.value == pytest.approx(1.5)
    blocks = PlainRounds(0.1)
    for tokens in (6, 3):
        for _ in range(8 * 10):
            blocks.learn(tokens, 0.2, plain=False)
            blocks.learn(1, 0.1, plain=True)
    speedup = blocks.speedup()
    assert speedup is not None
    assert (speedup.low, speedup.high) == pytest.approx((1.5, 1.5))


def test_it_can_begin_anew() -> None:
    for found in (filled(1.5, 40, seed=1), rounds(1.5, 3000, seed=1)):
        assert found.speedup() is not None
        found.forget()
        assert found.speedup() is None


def test_rounds_that_only_end_texts_are_no_trouble() -> None:
    """The token that ends a text is none of it, so that answers of one token have rounds that wrote nothing."""
    found = PlainRounds(0.1)
    for _ in range(20):
        found.learn(0, 0.1, plain=True)
    for _ in range(15):
        found.learn(3, 0.2, plain=False)
        found.learn(1, 0.1, plain=True)
    assert found.speedup() is None


def test_rounds_say_more_than_texts() -> None:
    """Of 6,000 rounds, 120 texts of 50, a tenth of either plain: the interval of the rounds is far narrower."""
    few = filled(1.5, 30, seed=2).speedup()
    many = rounds(1.5, 6000, seed=2).speedup()
    assert few
    assert many
    assert math.log(many.high / many.low) < 0.3 * math.log(few.high / few.low)
