"""Acceptance probabilities of draft tokens: calibrated over all sequences, and corrected for each."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.speculation.acceptance import Calibration, SequenceAcceptance, log_odds, sigmoid

PRIOR = (0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.98, 0.99, 0.995)


@given(st.floats(0, 1))
def test_sigmoid_inverts_log_odds_within_its_bounds(probability: float) -> None:
    assert sigmoid(log_odds(probability)) == pytest.approx(min(0.995, max(0.005, probability)))


def test_new_calibration_returns_its_prior() -> None:
    calibration = Calibration(PRIOR)
    confidences = [sigmoid(odds) for odds in (-3, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5, 5, 7)]
    assert [calibration.probability(confidence) for confidence in confidences] == list(PRIOR)
    assert (calibration.probability(0.0), calibration.probability(1.0)) == (PRIOR[0], PRIOR[-1])


def test_calibration_corrects_an_overconfident_source() -> None:
    calibration = Calibration(PRIOR)
    generator = random.Random(1)
    for _ in range(500):
        calibration.learn(0.97, float(generator.random() < 0.4))
    assert calibration.probability(0.97) == pytest.approx(0.4, abs=0.08)
    assert calibration.probability(0.5) == PRIOR[3]


def test_calibration_forgets_old_positions() -> None:
    calibration = Calibration(PRIOR)
    for label in (1.0, 0.0):
        for _ in range(3000):
            calibration.learn(0.97, label)
    assert calibration.probability(0.97) < 0.01


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=60))
def test_probabilities_stay_between_0_and_1_for_any_labels(labelled: list[tuple[float, float]]) -> None:
    calibration, own = Calibration(PRIOR), SequenceAcceptance()
    for confidence, label in labelled:
        pooled = calibration.probability(confidence)
        own.learn("model", pooled, label)
        own.learn("target", pooled, label)
        own.expect(pooled)
        calibration.learn(confidence, label)
    for probability in (
        own.next_acceptance,
        own.long_run_acceptance,
        own.probability("model", 1.0),
        calibration.probability(0.9),
    ):
        assert 0 < probability < 1


def test_rejections_lower_only_the_probabilities_of_their_sequence() -> None:
    one, other = SequenceAcceptance(), SequenceAcceptance()
    for _ in range(30):
        one.learn("model", 0.9, 0.0)
    assert one.probability("model", 0.9) < 0.5
    assert one.probability("prediction", 0.9) == other.probability("model", 0.9) == pytest.approx(0.9)


def test_lookup_acceptance_is_low_until_lookup_was_right() -> None:
    one = SequenceAcceptance()
    assert one.probability("lookup", 0.7) < 0.5
    for _ in range(5):
        one.learn("lookup", 0.7, 1.0)
    assert one.probability("lookup", 0.7) > 0.6


def test_next_token_estimate_rises_within_12_positions_and_long_run_does_not() -> None:
    own = SequenceAcceptance()
    for _ in range(60):
        own.expect(0.3)
    for _ in range(12):
        own.expect(0.97)
    assert own.next_acceptance > 0.85
    assert own.long_run_acceptance < 0.5


def test_next_token_and_long_run_estimates_fall_equally_fast() -> None:
    own = SequenceAcceptance()
    for _ in range(60):
        own.expect(0.97)
    for _ in range(12):
        own.expect(0.3)
    assert own.long_run_acceptance == own.next_acceptance < 0.5
