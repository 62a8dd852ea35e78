"""How far to guess, against brute force on random cost curves."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.speculation.gamma import Prices, Prospect, guess_length, model_steps, worth_keeping

MOST = 9
chances = st.floats(0.01, 0.99)
# Any costs at all, falling ones included: a stair may be cheaper than the one below it.
curves = st.lists(st.floats(0.1, 10.0), min_size=40, max_size=40)


def prices_of(target: list[float], draft: list[float], rate: float, uneven: float = 0.0) -> Prices:
    """Prices that rows of different numbers may raise."""
    return Prices(lambda rows: target[sum(rows)] + uneven * (max(rows) - min(rows)), lambda rows: draft[rows], rate)


def gain_of(drafts: list[tuple[Prospect, int]], rows: list[int], prices: Prices) -> float:
    """Tokens beyond the worth of their time, written down as the definition says."""
    tokens = sum(one.reach * one.hope**depth for one, gamma in drafts for depth in range(1, gamma + 1))
    seconds = sum(one.arrears for one, gamma in drafts if gamma)
    for depth in range(1, MOST + 1):
        drafting = [one for one, gamma in drafts if gamma >= depth]
        if drafting:
            seconds += prices.draft(sum(one.pending for one in drafting) if depth == 1 else len(drafting))
    longer = rows.copy()
    for one, gamma in drafts:
        longer[one.place] += gamma
    seconds += prices.target(longer) - prices.target(rows)
    return tokens - prices.rate * seconds


@given(
    prospect=st.builds(
        Prospect, st.just(0), chances, chances, st.integers(1, 4), st.integers(0, MOST), st.floats(0, 2)
    ),
    prices=st.builds(prices_of, curves, curves, st.floats(0.01, 3)),
)
def test_one_sequence_drafts_exactly_where_some_number_of_drafts_pays(prospect: Prospect, prices: Prices) -> None:
    steps = model_steps([prospect], [1], prices)
    best = max(gain_of([(prospect, gamma)], [1], prices) for gamma in range(prospect.room + 1))
    assert steps.gain == pytest.approx(best, abs=1e-9)
    assert bool(steps.chosen) == (best > 0)


@given(hope=chances, target=curves, draft=curves)
def test_at_the_best_rate_there_is_no_round_gains_and_just_below_it_the_best_round_does(
    hope: float, target: list[float], draft: list[float]
) -> None:
    """The rate is what makes single rounds add up to the most tokens a second (renewal reward)."""
    step = draft[1]
    rates = [sum(hope**i for i in range(gamma + 1)) / (gamma * step + target[gamma + 1]) for gamma in range(MOST + 1)]
    prospect = Prospect(0, 1.0, hope, 1, MOST)
    plain = 1 / target[1]
    if max(rates) > plain * 1.001:
        assert model_steps([prospect], [1], prices_of(target, draft, plain)).chosen
    beyond = prices_of(target, draft, max(rates) * 1.001)
    whole = model_steps([prospect], [1], beyond).gain + 1 - beyond.rate * target[1]
    assert whole < 1e-9


@given(
    reaches=st.lists(chances, min_size=1, max_size=4),
    hope=chances,
    room=st.integers(1, 4),
    prices=st.builds(prices_of, curves, curves, st.floats(0.01, 3), st.floats(0, 3)),
)
def test_of_several_sequences_those_draft_that_no_other_choice_beats(
    reaches: list[float], hope: float, room: int, prices: Prices
) -> None:
    """Brute force over every subset and every common number of further steps."""
    prospects = [Prospect(place, reach, hope, 1, room) for place, reach in enumerate(reaches)]
    rows = [1] * len(reaches)
    best = max(
        gain_of([(one, gamma) for one in chosen], rows, prices)
        for count in range(len(reaches) + 1)
        for chosen in combinations(prospects, count)
        for gamma in range(1, room + 1)
    )
    assert model_steps(prospects, rows, prices).gain == pytest.approx(max(0.0, best), abs=1e-9)


@given(sure=st.lists(chances, max_size=MOST), reach=chances, target=curves, rate=st.floats(0.01, 3))
def test_a_guess_is_taken_as_far_as_its_rows_pay(
    sure: list[float], reach: float, target: list[float], rate: float
) -> None:
    def gain(length: int) -> float:
        tokens, stays = 0.0, reach
        for chance in sure[:length]:
            stays *= chance
            tokens += stays
        return tokens - rate * (target[1 + length] - target[1])

    length = guess_length(Prospect(0, reach, 0.0, 0, MOST), sure, [1], prices_of(target, [9.0] * 40, rate), model=False)
    assert gain(length) == pytest.approx(max(gain(n) for n in range(len(sure) + 1)))


def test_rows_up_to_the_next_stair_are_filled_with_any_guess_since_they_cost_nothing() -> None:
    stairs = [0.0] + [1.0] + [1.7] * 3 + [3.4] * 40
    prices = prices_of(stairs, [9.0] * 40, 1.0)
    assert guess_length(Prospect(0, 1.0, 0.0, 0, MOST), [0.9, 0.2, 0.01, 0.01], [1], prices, model=False) == 3


def test_a_weak_guess_gives_way_to_a_model_that_is_likelier_to_be_right() -> None:
    stairs = [0.0] + [1.0] + [1.7] * 3 + [3.4] * 40
    prices = prices_of(stairs, [0.1 + 0.01 * rows for rows in range(40)], 1.0)
    assert guess_length(Prospect(0, 1.0, 0.95, 1, MOST), [0.3, 0.3, 0.3], [1], prices, model=True) == 0
    assert guess_length(Prospect(0, 1.0, 0.95, 1, MOST), [0.99, 0.99, 0.99], [1], prices, model=True) == 3


def test_nothing_is_drafted_where_every_row_costs_as_much_as_a_token_is_worth() -> None:
    line = [float(rows) for rows in range(40)]
    prices = prices_of(line, [0.01 * rows for rows in range(40)], 1.0)
    assert model_steps([Prospect(0, 1.0, 0.99, 1, MOST)], [1], prices).chosen == ()


def test_a_draft_whose_step_is_paid_for_is_kept_only_where_its_row_pays() -> None:
    stairs = [0.0] + [1.0] + [1.7] * 3 + [3.4] * 40
    prices = prices_of(stairs, [0.3] * 40, 1.0)
    prospect = Prospect(0, 0.9, 0.6, 1, MOST)
    assert worth_keeping(prospect, 0.2, [3], prices)
    assert not worth_keeping(prospect, 0.2, [4], prices)
