"""How far to guess, against brute force on random cost curves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

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


def stopping_policies(one: Prospect, rows: list[int], prices: Prices) -> Iterator[tuple[float, float]]:
    """Expected tokens and seconds of all ways to draft until the model is unsure, outcome by outcome.

    A way is how many drafts are tried at most, and behind how many sure ones an unsure one is kept.
    """
    sure, unsure = max(0.95, one.hope), min(0.3, one.hope)
    share = (one.hope - unsure) / (sure - unsure)
    for most in range(1, one.room + 1):
        for keeps in product((False, True), repeat=most):
            tokens = seconds = 0.0
            for run in range(most + 1):
                chance = share**run * (1 - share if run < most else 1.0)
                tried, kept = min(run + 1, most), run + (run < most and keeps[run])
                stays = sum(one.reach * sure**depth for depth in range(1, run + 1))
                tokens += chance * (stays + (one.reach * sure**run * unsure if kept > run else 0.0))
                longer = rows.copy()
                longer[one.place] += kept
                drafting = one.arrears + prices.draft(one.pending) + (tried - 1) * prices.draft(1)
                seconds += chance * (drafting + prices.target(longer) - prices.target(rows))
            yield tokens, seconds


def stopping_gain(one: Prospect, rows: list[int], prices: Prices) -> float:
    """The best of them, in tokens beyond the worth of their time."""
    return max(
        (tokens - prices.rate * seconds for tokens, seconds in stopping_policies(one, rows, prices)), default=0.0
    )


@given(
    prospect=st.builds(
        Prospect, st.just(0), chances, chances, st.integers(1, 4), st.integers(0, MOST), st.floats(0, 2)
    ),
    prices=st.builds(prices_of, curves, curves, st.floats(0.01, 3)),
)
def test_one_sequence_drafts_exactly_where_some_number_of_drafts_pays_or_stopping_in_time(
    prospect: Prospect, prices: Prices
) -> None:
    steps = model_steps([prospect], [1], prices)
    best = max(gain_of([(prospect, gamma)], [1], prices) for gamma in range(prospect.room + 1))
    best = max(best, stopping_gain(prospect, [1], prices))
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
    for tokens, seconds in stopping_policies(prospect, [1], prices_of(target, draft, 1.0)):
        rates.append((1 + tokens) / (target[1] + seconds))
    plain = 1 / target[1]
    if max(rates) > plain * 1.001:
        assert model_steps([prospect], [1], prices_of(target, draft, plain)).chosen
    for rate, pays in ((max(rates) * 0.999, True), (max(rates) * 1.001, False)):
        prices = prices_of(target, draft, rate)
        assert (model_steps([prospect], [1], prices).gain + 1 - rate * target[1] > 0) is pays


@given(
    reaches=st.lists(chances, min_size=1, max_size=4),
    hope=chances,
    room=st.integers(1, 4),
    prices=st.builds(prices_of, curves, curves, st.floats(0.01, 3), st.floats(0, 3)),
)
def test_of_several_sequences_those_draft_that_no_other_choice_beats(
    reaches: list[float], hope: float, room: int, prices: Prices
) -> None:
    """Brute force over every subset and every common number of further steps, and one alone that stops in time."""
    prospects = [Prospect(place, reach, hope, 1, room) for place, reach in enumerate(reaches)]
    rows = [1] * len(reaches)
    best = max(
        gain_of([(one, gamma) for one in chosen], rows, prices)
        for count in range(len(reaches) + 1)
        for chosen in combinations(prospects, count)
        for gamma in range(1, room + 1)
    )
    best = max(best, *(stopping_gain(one, rows, prices) for one in prospects))
    assert model_steps(prospects, rows, prices).gain == pytest.approx(max(0.0, best), abs=1e-9)


def test_a_text_that_may_have_no_more_drafts_neither_drafts_nor_makes_its_neighbours_dearer() -> None:
    full, other = Prospect(0, 1.0, 0.99, pending=3, room=0, arrears=9.0), Prospect(1, 0.9, 0.9, pending=1, room=4)
    prices = Prices(lambda rows: 1.0 + 0.01 * sum(rows), lambda rows: 0.1 * rows, rate=1.0)
    steps = model_steps([full, other], [4, 1], prices)
    assert steps.chosen == (1,)
    assert steps.gain == pytest.approx(model_steps([other], [4, 1], prices).gain)


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

    length = guess_length(
        Prospect(0, reach, 0.0, 0, MOST), sure, [1], prices_of(target, [9.0] * 40, rate), room=MOST, model=False
    )
    assert gain(length) == pytest.approx(max(gain(n) for n in range(len(sure) + 1)))


rising = curves.map(lambda costs: [sum(costs[: rows + 1]) for rows in range(len(costs))])


@given(
    sure=st.lists(chances, max_size=MOST),
    prospect=st.builds(Prospect, st.just(0), chances, chances, st.integers(1, 4), st.integers(0, MOST)),
    target=rising,
    draft=rising,
    rate=st.floats(0.001, 0.5),
)
def test_a_guess_is_as_long_as_is_best_in_view_of_what_the_model_may_draft_behind_it(
    sure: list[float], prospect: Prospect, target: list[float], draft: list[float], rate: float
) -> None:
    prices = prices_of(target, draft, rate)
    gains = [model_steps([prospect], [1], prices).gain]
    reach, tokens = prospect.reach, 0.0
    for count, chance in enumerate(sure, 1):
        reach *= chance
        tokens += reach
        behind = prospect._replace(reach=reach, pending=prospect.pending + count, room=min(prospect.room, MOST - count))
        gain = tokens - rate * (prices.target([1 + count]) - prices.target([1]))
        gains.append(gain + model_steps([behind], [1 + count], prices).gain)
    length = guess_length(prospect, sure, [1], prices, room=MOST, model=True)
    assert gains[length] == pytest.approx(max(gains), abs=1e-9)


def test_rows_up_to_the_next_stair_are_filled_with_any_guess_since_they_cost_nothing() -> None:
    stairs = [0.0] + [1.0] + [1.7] * 3 + [3.4] * 40
    prices = prices_of(stairs, [9.0] * 40, 1.0)
    assert (
        guess_length(Prospect(0, 1.0, 0.0, 0, MOST), [0.9, 0.2, 0.01, 0.01], [1], prices, room=MOST, model=False) == 3
    )


def test_a_weak_guess_gives_way_to_a_model_that_is_likelier_to_be_right() -> None:
    stairs = [0.0] + [1.0] + [1.7] * 3 + [3.4] * 40
    prices = prices_of(stairs, [0.1 + 0.01 * rows for rows in range(40)], 1.0)
    assert guess_length(Prospect(0, 1.0, 0.95, 1, MOST), [0.3, 0.3, 0.3], [1], prices, room=MOST, model=True) == 0
    assert guess_length(Prospect(0, 1.0, 0.95, 1, MOST), [0.99, 0.99, 0.99], [1], prices, room=MOST, model=True) == 3


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


def test_a_text_of_middling_hope_is_drafted_since_the_model_says_when_to_stop() -> None:
    """By its mean it would not pay: 1.53 tokens for three drafts whose time is worth 1.56."""
    stairs = [0.0] + [1.0] + [1.58] * 3 + [3.0] * 40
    prices = prices_of(stairs, [0.0, 0.2, *[0.4] * 38], 1.32)
    prospect = Prospect(0, 1.0, 0.7, 1, 3)
    assert gain_of([(prospect, 3)], [1], prices) < 0
    assert model_steps([prospect], [1], prices).chosen
