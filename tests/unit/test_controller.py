"""The controller: how many tokens to draft, against brute force on random costs, and what it learns from rounds."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costs import flat, proportional, stairs
from specserve.sequence import SamplingParams, Sequence, SpeculationParams
from specserve.speculation.controller import (
    Candidate,
    Controller,
    Observation,
    RoundCosts,
    best_length,
    model_steps,
    proposal_length,
)

MOST = 9
GREEDY, SAMPLED = SamplingParams(temperature=0), SamplingParams(temperature=1)
STAIRS = [0.0] + [1.0] + [1.7] * 3 + [3.4] * 40
probabilities = st.floats(0.01, 0.99)
# Any costs that do not fall with the number of rows: where more rows are cheaper, `Cost.seconds` pads to them.
curves = st.lists(st.floats(0.1, 10.0), min_size=50, max_size=50).map(sorted)


def costs_of(target: list[float], draft: list[float], rate: float) -> RoundCosts:
    return RoundCosts(lambda rows: target[rows], lambda rows: draft[rows], rate)


def gain_of(drafts: list[tuple[Candidate, int]], rows: int, costs: RoundCosts) -> float:
    """Expected tokens minus what their time is worth, written down as the definition says."""
    tokens = sum(one.prefix * one.acceptance**n for one, gamma in drafts for n in range(1, gamma + 1))
    seconds = sum(one.catch_up for one, gamma in drafts if gamma)
    for n in range(1, MOST + 1):
        drafting = [one for one, gamma in drafts if gamma >= n]
        if drafting:
            seconds += costs.draft(sum(one.pending for one in drafting) if n == 1 else len(drafting))
    seconds += costs.target(rows + sum(gamma for _, gamma in drafts)) - costs.target(rows)
    return tokens - costs.rate * seconds


@given(
    candidate=st.builds(
        Candidate, probabilities, probabilities, st.integers(1, 4), st.integers(0, MOST), st.floats(0, 2)
    ),
    costs=st.builds(costs_of, curves, curves, st.floats(0.01, 3)),
)
def test_one_sequence_is_drafted_for_exactly_where_some_number_of_drafts_pays(
    candidate: Candidate, costs: RoundCosts
) -> None:
    chosen, gain = model_steps([candidate], 1, costs)
    best = max(gain_of([(candidate, gamma)], 1, costs) for gamma in range(candidate.remaining + 1))
    assert gain == pytest.approx(best, abs=1e-9)
    assert bool(chosen) == (best > 0)


@given(acceptance=probabilities, target=curves, draft=curves)
def test_at_the_best_rate_of_all_lengths_nothing_gains_and_just_below_it_the_best_length_does(
    acceptance: float, target: list[float], draft: list[float]
) -> None:
    """At this rate single rounds add up to the most tokens a second (renewal reward)."""
    rates = [
        sum(acceptance**i for i in range(gamma + 1)) / (gamma * draft[1] + target[gamma + 1])
        for gamma in range(MOST + 1)
    ]
    candidate = Candidate(1.0, acceptance, 1, MOST)
    for rate, pays in ((max(rates) * 0.999, True), (max(rates) * 1.001, False)):
        _, gain = model_steps([candidate], 1, costs_of(target, draft, rate))
        assert (gain + 1 - rate * target[1] > 0) is pays


@given(
    prefixes=st.lists(probabilities, min_size=1, max_size=4),
    acceptance=probabilities,
    remaining=st.integers(1, 4),
    costs=st.builds(costs_of, curves, curves, st.floats(0.01, 3)),
)
def test_no_other_choice_of_sequences_gains_more(
    prefixes: list[float], acceptance: float, remaining: int, costs: RoundCosts
) -> None:
    """Brute force over every subset and every common number of further steps."""
    candidates = [Candidate(prefix, acceptance, 1, remaining) for prefix in prefixes]
    best = max(
        gain_of([(one, gamma) for one in chosen], len(candidates), costs)
        for count in range(len(candidates) + 1)
        for chosen in combinations(candidates, count)
        for gamma in range(1, remaining + 1)
    )
    _, gain = model_steps(candidates, len(candidates), costs)
    assert gain == pytest.approx(max(0.0, best), abs=1e-9)


def test_a_sequence_without_room_is_not_drafted_for_and_adds_no_cost_to_the_others() -> None:
    full, other = Candidate(1.0, 0.99, 3, 0, 9.0), Candidate(0.9, 0.9, 1, 4)
    costs = RoundCosts(lambda rows: 1.0 + 0.01 * rows, lambda rows: 0.1 * rows, rate=1.0)
    chosen, gain = model_steps([full, other], 5, costs)
    assert chosen == [1]
    assert gain == pytest.approx(model_steps([other], 5, costs)[1])


@given(accepted=st.lists(probabilities, max_size=MOST), prefix=probabilities, target=curves, rate=st.floats(0.01, 3))
def test_a_free_proposal_is_drafted_as_far_as_its_rows_pay(
    accepted: list[float], prefix: float, target: list[float], rate: float
) -> None:
    def gain(length: int) -> float:
        tokens, reached = 0.0, prefix
        for probability in accepted[:length]:
            reached *= probability
            tokens += reached
        return tokens - rate * (target[1 + length] - target[1])

    length = proposal_length(Candidate(prefix, 0.0, 0, 0), accepted, 1, costs_of(target, [9.0] * 50, rate))
    assert gain(length) == pytest.approx(max(gain(n) for n in range(len(accepted) + 1)))


def test_rows_that_cost_nothing_are_filled_with_any_proposal() -> None:
    costs = costs_of(STAIRS, [9.0] * 50, 1.0)
    assert proposal_length(Candidate(1.0, 0.0, 0, 0), [0.9, 0.2, 0.01, 0.01], 1, costs) == 3


def test_a_weak_proposal_gives_way_to_a_model_that_is_likelier_to_be_right() -> None:
    costs = costs_of(STAIRS, [0.1 + 0.01 * rows for rows in range(50)], 1.0)
    assert proposal_length(Candidate(1.0, 0.95, 1, MOST), [0.3, 0.3, 0.3], 1, costs) == 0
    assert proposal_length(Candidate(1.0, 0.95, 1, MOST), [0.99, 0.99, 0.99], 1, costs) == 3


def test_nothing_is_drafted_where_a_row_costs_as_much_as_a_token_is_worth() -> None:
    costs = costs_of([float(rows) for rows in range(50)], [0.01 * rows for rows in range(50)], 1.0)
    assert model_steps([Candidate(1.0, 0.99, 1, MOST)], 1, costs) == ([], 0.0)


def test_the_best_length_is_none_where_all_lose() -> None:
    assert best_length([0.5, 0.9], [1.0, 2.0], 1.0) == (0, 0.0)
    assert best_length([0.5, 2.5], [1.0, 2.0], 1.0) == (2, 0.5)


def sequence(sampling: SamplingParams = GREEDY, max_tokens: int = 100) -> Sequence:
    return Sequence([1, 2, 3], sampling, SpeculationParams(8, mode="adaptive"), max_tokens=max_tokens)


def test_time_is_worth_what_plain_decoding_yields_and_more_while_drafts_yield_more() -> None:
    controller = Controller(stairs(), flat(0.1))
    one, other = sequence(), sequence()
    assert controller.costs([one], 0, 0).rate == pytest.approx(1.0)
    assert controller.costs([one, other], 0, 0).rate == pytest.approx(2 / 1.7)
    for _ in range(20):
        controller.count_round(one, 4, 1.0, 1.0)
    assert controller.costs([one], 0, 0).rate == pytest.approx(2.0)
    for _ in range(50):
        controller.count_round(one, 1, 1.0, 1.0)
    assert controller.costs([one], 0, 0).rate == pytest.approx(1.0, abs=0.01)


def test_sequences_that_wait_for_their_first_token_make_time_worth_more() -> None:
    controller = Controller(stairs(), flat(0.1))
    alone, beside_three = (controller.costs([sequence()], 0, 0, waiting) for waiting in (0, 3))
    assert beside_three.rate == pytest.approx(4 * alone.rate)


def test_greedy_and_sampled_sequences_are_learned_from_apart() -> None:
    controller = Controller(stairs(), flat(0.1))
    before = controller.acceptance(sequence(SAMPLED), "model", 0.9)
    for _ in range(100):
        controller.learn(sequence(), [Observation("model", 0.9, 0.0, 0.9)], 0.9)
    assert controller.acceptance(sequence(), "model", 0.9) < 0.2
    assert controller.acceptance(sequence(SAMPLED), "model", 0.9) == before


def test_what_one_sequence_shows_counts_for_the_next() -> None:
    controller = Controller(stairs(), flat(0.1))
    for _ in range(100):
        controller.learn(sequence(), [Observation("prediction", 0.5, 1.0, 0.9)], 0.9)
    assert controller.acceptance(sequence(), "prediction", 0.5) > 0.9


def test_the_targets_confidence_predicts_acceptance_without_any_draft() -> None:
    controller = Controller(stairs(), flat(0.1))
    one = sequence()
    for confidence, low, high in ((0.2, 0.0, 0.4), (0.999, 0.9, 1.0)):
        for _ in range(30):
            controller.learn(one, [], confidence)
        assert low < controller.next_acceptance(one) < high


def test_a_long_catch_up_is_charged_to_the_rounds_that_follow_and_a_short_one_to_this_round() -> None:
    controller = Controller(stairs(), proportional(0.01))
    costs = controller.costs([sequence()], 0, 0)
    short, long = (controller.candidate(sequence(), 1.0, pending, 8, costs) for pending in (2, 100))
    assert short
    assert (short.pending, short.catch_up) == (2, 0.0)
    assert long
    assert long.pending == 1
    assert 0 < long.catch_up < costs.draft(100) / 5
    ending = controller.candidate(sequence(max_tokens=6), 1.0, 100, 8, costs)
    assert ending
    assert ending.catch_up > long.catch_up


def test_a_long_catch_up_needs_more_evidence_than_a_draft_does() -> None:
    controller = Controller(stairs(), proportional(0.01))
    one = sequence()
    for confidence in [0.2] * 60 + [0.999] * 12:
        controller.learn(one, [], confidence)
    costs = controller.costs([one], 0, 0)
    short, long = (controller.candidate(one, 1.0, pending, 8, costs) for pending in (1, 100))
    assert short
    assert long
    assert long.acceptance < 0.5 < short.acceptance


def test_no_long_catch_up_is_made_while_a_prompt_is_read() -> None:
    controller = Controller(stairs(), proportional(0.01))
    one = sequence()
    beside = controller.costs([one], 0, 0, awaiting_first_token=1)
    assert controller.candidate(one, 1.0, 100, 8, controller.costs([one], 0, 0))
    assert controller.candidate(one, 1.0, 100, 8, beside) is None
    assert controller.candidate(one, 1.0, 2, 8, beside)


def test_drafts_that_only_lose_are_stopped_after_a_few_and_probed_again_at_a_bounded_cost() -> None:
    """Drafts that are always rejected although every estimate speaks for them: an adversary."""
    controller = Controller(stairs(), flat(0.2))
    one = sequence(max_tokens=10**6)
    costs = controller.costs([one], 0, 0)
    lost = 0.0
    for _ in range(5000):
        drafts = 1.3 if controller.candidate(one, 1.0, 1, 8, costs) else 0.0
        lost += drafts
        controller.count_round(one, 1, 1.0, drafts)
    assert lost / 5000 < 0.011
    assert lost > 10
