"""The controller's books, and what it makes of reading up."""

from __future__ import annotations

import pytest

from costs import flat, proportional, stairs
from specserve.sequence import SamplingParams, Sequence, SpeculationParams
from specserve.speculation.controller import Burden, Controller, Lesson

GREEDY, SAMPLED = SamplingParams(temperature=0), SamplingParams(temperature=1)


def sequence(sampling: SamplingParams = GREEDY, max_tokens: int = 100) -> Sequence:
    return Sequence([1, 2, 3], sampling, SpeculationParams(8, adaptive=True), max_tokens=max_tokens)


def test_a_second_is_worth_what_plain_decoding_makes_of_it_and_more_where_drafts_do() -> None:
    controller = Controller(stairs(), flat(0.1))
    one, other = sequence(), sequence()
    assert controller.prices([one], [1], (0, 0)).rate == pytest.approx(1.0)
    assert controller.prices([one, other], [1, 1], (0, 0)).rate == pytest.approx(2 / 1.7)
    for _ in range(20):
        controller.count_round(one, 4, Burden(1.0, 1.0))
    assert controller.prices([one], [1], (0, 0)).rate == pytest.approx(2.0)


def test_whoever_waits_to_begin_makes_every_second_dearer() -> None:
    controller = Controller(stairs(), flat(0.1))
    alone = controller.prices([sequence()], [1, 8], (0, 0), waiting=0)
    beside_three = controller.prices([sequence()], [1, 8], (0, 0), waiting=3)
    assert beside_three.rate == pytest.approx(4 * alone.rate)


def test_greedy_and_sampled_texts_teach_the_controller_apart() -> None:
    controller = Controller(stairs(), flat(0.1))
    before = controller.chance(sequence(SAMPLED), "model", 0.9)
    for _ in range(100):
        controller.learn(sequence(), [Lesson("model", 0.9, 0.0, 0.9)], 0.9)
    assert controller.chance(sequence(), "model", 0.9) < 0.2
    assert controller.chance(sequence(SAMPLED), "model", 0.9) == before


def test_what_one_text_shows_is_believed_of_the_next() -> None:
    controller = Controller(stairs(), flat(0.1))
    for _ in range(100):
        controller.learn(sequence(), [Lesson("prediction", 0.5, 1.0, 0.9)], 0.9)
    assert controller.chance(sequence(), "prediction", 0.5) > 0.9


def test_a_target_that_becomes_sure_raises_the_hope_without_any_draft() -> None:
    controller = Controller(stairs(), flat(0.1))
    text = sequence()
    for confidence, low, high in ((0.2, 0.0, 0.4), (0.999, 0.9, 1.0)):
        for _ in range(30):
            controller.learn(text, [], confidence)
        assert low < controller.hope(text) < high


def test_a_long_arrear_is_shared_by_the_rounds_to_come_and_a_short_one_is_this_rounds() -> None:
    controller = Controller(stairs(), proportional(0.01))
    text = sequence()
    prices = controller.prices([text], [1], (0, 0))
    assert controller.arrears(text, 2, prices) == (2, 0.0)
    rows, seconds = controller.arrears(text, 100, prices)
    assert rows == 1
    assert 0 < seconds < prices.draft(100) / 5
    ending = sequence(max_tokens=6)
    assert controller.arrears(ending, 100, prices)[1] > seconds


def test_reading_only_the_end_of_a_text_has_to_promise_more_than_reading_all_that_is_new() -> None:
    controller = Controller(stairs(), proportional(0.01))
    whole, cut = (
        Sequence([1] * 300, SamplingParams(), SpeculationParams(8, adaptive=True), max_tokens=90) for _ in "ab"
    )
    whole.draft_cached = 200
    prices = controller.prices([whole, cut], [1, 1], (0, 0))
    assert controller.arrears(cut, 100, prices)[1] > controller.arrears(whole, 100, prices)[1]


def test_reading_up_again_has_to_promise_more_every_time() -> None:
    controller = Controller(stairs(), proportional(0.01))
    text = sequence()
    prices = controller.prices([text], [1], (0, 0))
    charges = []
    for _ in range(3):
        charges.append(controller.arrears(text, 100, prices)[1])
        controller.invest(text, 100, prices)
        assert controller.arrears(text, 50, prices) == (4, 0.0), "what was begun is not charged again"
        controller.invest(text, 1, prices)
    assert charges == sorted(charges)
    assert charges[2] > charges[0]


def test_guesses_that_cost_nothing_are_read_up_as_a_matter_of_course() -> None:
    """Lookup and model take turns: that is no text that was given up and is taken up again."""
    controller = Controller(stairs(), proportional(0.01))
    text = sequence()
    prices = controller.prices([text], [1], (0, 0))
    charged = controller.arrears(text, 10, prices)[1]
    for _ in range(20):
        assert controller.invest(text, 10, prices) == 0
        assert controller.arrears(text, 10, prices)[1] == pytest.approx(charged, rel=0.01)


def test_only_the_first_reading_of_a_text_is_no_loss() -> None:
    controller = Controller(stairs(), proportional(0.01))
    text = sequence()
    prices = controller.prices([text], [1], (0, 0))
    spared = []
    for _ in range(2):
        spared.append(controller.invest(text, 100, prices))
        controller.invest(text, 1, prices)
    assert spared == [pytest.approx(0.99), 0]


def test_nothing_is_read_up_while_a_prompt_is_read_even_if_it_was_begun() -> None:
    controller = Controller(stairs(), proportional(0.01))
    text = sequence()
    alone, beside = (controller.prices([text], [1], (0, 0), waiting) for waiting in (0, 1))
    charged = controller.arrears(text, 100, alone)[1]
    for _ in range(2):
        assert controller.may_draft(text, 100, alone)
        assert not controller.may_draft(text, 100, beside)
        assert controller.may_draft(text, 2, beside)
        assert controller.arrears(text, 100, alone)[1] >= charged, "what is taken up again is weighed anew"
        controller.invest(text, 100, alone)


def test_a_text_on_which_drafts_only_lose_is_left_alone_after_a_few_and_tried_again_at_a_bounded_cost() -> None:
    """Drafts that always fail although everything speaks for them: an adversary."""
    controller = Controller(stairs(), flat(0.2))
    text = sequence(max_tokens=10**6)
    prices = controller.prices([text], [1], (0, 0))
    lost = 0.0
    for _ in range(5000):
        drafts = controller.may_draft(text, 1, prices)
        seconds = 2.3 if drafts else 1.0
        lost += seconds - 1.0
        controller.count_round(text, 1, Burden(1.0, seconds - 1.0))
        text.tokens.append(7)
    assert lost / 5000 < 0.011
    assert lost > 10
