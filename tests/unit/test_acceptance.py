"""What texts show of their drafts: the chance that a draft stays, pooled and by text."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.speculation.acceptance import Calibration, Outlook, log_odds, sigmoid

PRIOR = (0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.98, 0.99, 0.995)


@given(st.floats(0, 1))
def test_log_odds_of_any_probability_are_finite_and_lead_back(probability: float) -> None:
    assert sigmoid(log_odds(probability)) == pytest.approx(min(0.995, max(0.005, probability)))


def test_before_anything_was_seen_a_calibration_says_what_it_was_told_to_believe() -> None:
    calibration = Calibration(PRIOR)
    sure = [sigmoid(odds) for odds in (-3, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5, 5, 7)]
    assert [calibration.chance(one) for one in sure] == list(PRIOR)
    assert (calibration.chance(0.0), calibration.chance(1.0)) == (PRIOR[0], PRIOR[-1])


def test_a_source_that_is_too_sure_of_itself_is_found_out() -> None:
    calibration = Calibration(PRIOR)
    generator = random.Random(1)
    for _ in range(500):
        calibration.learn(0.97, float(generator.random() < 0.4))
    assert calibration.chance(0.97) == pytest.approx(0.4, abs=0.08)
    assert calibration.chance(0.5) == PRIOR[3]


def test_what_was_seen_long_ago_is_forgotten() -> None:
    calibration = Calibration(PRIOR)
    for label in (1.0, 0.0):
        for _ in range(3000):
            calibration.learn(0.97, label)
    assert calibration.chance(0.97) < 0.01


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=60))
def test_chances_stay_within_0_and_1_whatever_is_learned(lessons: list[tuple[float, float]]) -> None:
    calibration, outlook = Calibration(PRIOR), Outlook(0.75)
    for sure, label in lessons:
        pooled = calibration.chance(sure)
        outlook.learn("model", pooled, label)
        outlook.learn("target", pooled, label)
        outlook.expect(pooled)
        calibration.learn(sure, label)
    for chance in (outlook.hope, outlook.steady_hope, outlook.chance("model", 1.0), calibration.chance(0.9)):
        assert 0 < chance < 1


def test_a_text_whose_drafts_fail_where_others_do_not_lowers_its_own_chances_only() -> None:
    text, other = Outlook(0.75), Outlook(0.75)
    for _ in range(30):
        text.learn("model", 0.9, 0.0)
    assert text.chance("model", 0.9) < 0.5
    assert text.chance("prediction", 0.9) == other.chance("model", 0.9) == pytest.approx(0.9)


def test_a_text_is_taken_not_to_repeat_itself_until_it_does() -> None:
    text = Outlook(0.75)
    assert text.chance("lookup", 0.7) < 0.5
    for _ in range(5):
        text.learn("lookup", 0.7, 1.0)
    assert text.chance("lookup", 0.7) > 0.6


def test_hope_follows_how_sure_the_target_was_within_about_ten_tokens_and_steady_hope_takes_its_time() -> None:
    outlook = Outlook(0.75)
    for _ in range(60):
        outlook.expect(0.3)
    for _ in range(12):
        outlook.expect(0.97)
    assert outlook.hope > 0.85
    assert outlook.steady_hope < 0.5


def test_a_text_that_turns_difficult_lowers_both_hopes_alike() -> None:
    outlook = Outlook(0.75)
    for _ in range(60):
        outlook.expect(0.97)
    for _ in range(12):
        outlook.expect(0.3)
    assert outlook.steady_hope == outlook.hope < 0.5


def test_time_is_worth_more_than_plain_decoding_makes_of_it_only_while_rounds_bring_more() -> None:
    outlook = Outlook(0.75)
    assert outlook.speedup == 1
    outlook.count_round(4, 2.0, 2.0, 4.0)
    assert outlook.speedup == pytest.approx(2.0)
    for _ in range(50):
        outlook.count_round(1, 2.0, 2.0, 1.0)
    assert outlook.speedup == pytest.approx(1, abs=0.01)
