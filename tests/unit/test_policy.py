"""The policies: how many tokens to draft, against brute force on random costs, and what they learn from rounds."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specserve.speculation.charges import Balance
from specserve.speculation.gain import Candidate, RoundCosts, choose_for_model, offer_length, rows_worth_adding

from constraints import Alternating
from costs import FixedCost, flat, proportional, stairs, table
from specserve.sampling.distribution import one_hot
from specserve.sequence import DrafterName, SamplingParams, Sequence, SpeculationParams
from specserve.speculation.acceptance import Observation
from specserve.speculation.policy import Controller
from specserve.speculation.step import Draft, Step

MAX_DRAFTS = 9
GREEDY, SAMPLED = SamplingParams(temperature=0), SamplingParams(temperature=1)
STAIRS = [0.0] + [1.0] + [1.7] * 3 + [3.4] * 40
probabilities = st.floats(0.01, 0.99)
# Costs that do not fall with the number of rows.
curves = st.lists(st.floats(0.1, 10.0), min_size=50, max_size=50).map(sorted)


def costs_of(target: list[float], draft: list[float], rate: float) -> RoundCosts:
    return RoundCosts(lambda rows: target[rows], lambda rows: draft[rows], rate)


def gain_of(drafts: list[tuple[Candidate, int]], rows: int, costs: RoundCosts) -> float:
    """Expected tokens minus what their time is worth, directly from the definition."""
    accepted = [
        sum(candidate.p_all_accepted * candidate.acceptance**n for n in range(1, gamma + 1))
        for candidate, gamma in drafts
    ]
    tokens = sum(accepted)
    # Every token of the round pays for a catch-up, the target's own one as well.
    paying = [(candidate, more) for (candidate, gamma), more in zip(drafts, accepted, strict=True) if gamma]
    seconds = sum(candidate.catch_up_seconds * (1 + more) for candidate, more in paying)
    for n in range(1, MAX_DRAFTS + 1):
        drafting = [candidate for candidate, gamma in drafts if gamma >= n]
        if drafting:
            seconds += costs.draft_pass(
                sum(candidate.charged_rows for candidate in drafting) if n == 1 else len(drafting)
            )
    seconds += costs.target_pass(rows + sum(gamma for _, gamma in drafts)) - costs.target_pass(rows)
    return tokens - costs.tokens_per_second * seconds


@given(
    candidate=st.builds(
        Candidate,
        probabilities,
        probabilities,
        st.integers(1, 4),
        st.integers(0, MAX_DRAFTS),
        st.floats(0, 2),
        is_certain=st.just(False),
    ),
    costs=st.builds(costs_of, curves, curves, st.floats(0.01, 3)),
)
def test_choose_for_model_drafts_for_one_sequence_iff_some_length_gains(
    candidate: Candidate, costs: RoundCosts
) -> None:
    chosen, gain = choose_for_model([candidate], 1, costs)
    best = max(gain_of([(candidate, gamma)], 1, costs) for gamma in range(candidate.max_drafts + 1))
    assert gain == pytest.approx(best, abs=1e-9)
    assert bool(chosen) == (best > 0)


@given(acceptance=probabilities, target=curves, draft=curves)
def test_choose_for_model_gains_only_below_the_break_even_rate(
    acceptance: float, target: list[float], draft: list[float]
) -> None:
    """The break-even rate is the largest tokens per second of a round, over all draft lengths (renewal reward)."""
    rates = [
        sum(acceptance**i for i in range(gamma + 1)) / (gamma * draft[1] + target[gamma + 1])
        for gamma in range(MAX_DRAFTS + 1)
    ]
    candidate = Candidate(1.0, acceptance, 1, MAX_DRAFTS)
    for rate, pays in ((max(rates) * 0.999, True), (max(rates) * 1.001, False)):
        _, gain = choose_for_model([candidate], 1, costs_of(target, draft, rate))
        assert (gain + 1 - rate * target[1] > 0) is pays


@given(
    reached=st.lists(probabilities, min_size=1, max_size=4),
    acceptance=probabilities,
    most=st.integers(1, 4),
    costs=st.builds(costs_of, curves, curves, st.floats(0.01, 3)),
)
def test_choose_for_model_finds_the_best_choice_of_sequences(
    reached: list[float], acceptance: float, most: int, costs: RoundCosts
) -> None:
    """Brute force over every subset and every common number of further drafts."""
    candidates = [Candidate(probability, acceptance, 1, most) for probability in reached]
    best = max(
        gain_of([(candidate, gamma) for candidate in chosen], len(candidates), costs)
        for count in range(len(candidates) + 1)
        for chosen in combinations(candidates, count)
        for gamma in range(1, most + 1)
    )
    _, gain = choose_for_model(candidates, len(candidates), costs)
    assert gain == pytest.approx(max(0.0, best), abs=1e-9)


def test_choose_for_model_skips_a_full_sequence_without_charging_its_costs() -> None:
    full, other = Candidate(1.0, 0.99, 3, 0, 9.0), Candidate(0.9, 0.9, 1, 4)
    costs = RoundCosts(lambda rows: 1.0 + 0.01 * rows, lambda rows: 0.1 * rows, tokens_per_second=1.0)
    chosen, gain = choose_for_model([full, other], 5, costs)
    assert chosen == [1]
    assert gain == pytest.approx(choose_for_model([other], 5, costs)[1])


@given(
    accepted=st.lists(probabilities, max_size=MAX_DRAFTS), reached=probabilities, target=curves, rate=st.floats(0.01, 3)
)
def test_an_offer_is_drafted_as_far_as_its_rows_pay(
    accepted: list[float], reached: float, target: list[float], rate: float
) -> None:
    def gain(length: int) -> float:
        tokens, prefix = 0.0, reached
        for probability in accepted[:length]:
            prefix *= probability
            tokens += prefix
        return tokens - rate * (target[1 + length] - target[1])

    length = offer_length(reached, accepted, None, 1, costs_of(target, [9.0] * 50, rate))
    assert gain(length) == pytest.approx(max(gain(n) for n in range(len(accepted) + 1)))


def test_free_proposal_fills_rows_that_cost_nothing() -> None:
    costs = costs_of(STAIRS, [9.0] * 50, 1.0)
    assert offer_length(1.0, [0.9, 0.2, 0.01, 0.01], None, 1, costs) == 3


def test_unlikely_free_proposal_yields_to_the_draft_model() -> None:
    costs = costs_of(STAIRS, [0.1 + 0.01 * rows for rows in range(50)], 1.0)
    assert offer_length(1.0, [0.3, 0.3, 0.3], Candidate(1.0, 0.95, 1, MAX_DRAFTS), 1, costs) == 0
    assert offer_length(1.0, [0.99, 0.99, 0.99], Candidate(1.0, 0.95, 1, MAX_DRAFTS), 1, costs) == 3


@pytest.mark.parametrize("unlikely", [0, 1, 5, 14])
def test_unlikely_tokens_at_the_end_of_an_offer_do_not_keep_a_likely_one_from_being_drafted(unlikely: int) -> None:
    """Times in seconds: the target .037 and .003 a row, the draft model .012; one token in .040 without drafts."""
    costs = RoundCosts(lambda rows: 0.037 + 0.003 * rows, lambda _rows: 0.012, tokens_per_second=1 / 0.04)
    by_model = Candidate(1.0, 0.8, 1, MAX_DRAFTS)
    assert offer_length(1.0, [0.9, *[0.05] * unlikely], by_model, 1, costs) == 1


def test_choose_for_model_drafts_nothing_when_a_row_costs_as_much_as_a_token() -> None:
    costs = costs_of([float(rows) for rows in range(50)], [0.01 * rows for rows in range(50)], 1.0)
    assert choose_for_model([Candidate(1.0, 0.99, 1, MAX_DRAFTS)], 1, costs) == ([], 0.0)


def sequence(sampling: SamplingParams = GREEDY, max_tokens: int = 100, generated: int = 0) -> Sequence:
    made = Sequence([1, 2, 3], sampling, SpeculationParams(8, mode="auto"), max_tokens=max_tokens)
    made.tokens += [4] * generated
    return made


def candidate_of(controller: Controller, drafted: Sequence, pending: int, costs: RoundCosts) -> Candidate | None:
    """What is known of a sequence without drafts, of which the draft model has not read so many tokens."""
    return controller.policy(drafted).candidate(Step(drafted, 0, 1, 8), pending, costs)


def count_round(
    balance: Balance,
    tokens: int,
    *,
    extra_seconds: float,
    catch_up_seconds: float = 0.0,
    drafter: DrafterName | None = "model",
) -> None:
    """Account for a round whose plain pass takes a second, and in which this drafter drafted a token."""
    step = Step(sequence(), 0, 1, 8)
    step.seconds.draft_model = step.long_catch_up_seconds = catch_up_seconds
    step.seconds.plain, step.seconds.target_drafts = 1.0, extra_seconds
    if drafter:
        step.add(Draft(1, one_hot(1, 2), drafter, 0.9), 0.9)
    step.n_decided = tokens
    balance.count_round(step)


@pytest.mark.parametrize(("rate", "pays"), [(4.0, True), (4.1, False)])
def test_rows_are_worth_adding_only_if_some_number_of_them_is(rate: float, pays: bool) -> None:
    """After 1 row 2 to 4 take .7 more, worth 2.7 likely drafts; the three of them pay up to 4.07 tokens a second."""
    costs = costs_of(STAIRS, [0.0] * 50, rate)
    assert (rows_worth_adding([0.95] * 3, 1, costs)[0] > 0) == pays
    assert rows_worth_adding([0.95], 1, costs) == (0, 0.0)


@given(
    acceptance=probabilities,
    offers=st.lists(st.lists(probabilities, min_size=1, max_size=MAX_DRAFTS), min_size=1, max_size=4),
    rows=st.integers(1, 4),
    costs=st.builds(costs_of, curves, st.just([0.0] * 50), st.floats(0.01, 3)),
)
def test_where_no_likely_drafts_pay_none_of_at_most_their_probability_is_drafted(
    acceptance: float, offers: list[list[float]], rows: int, costs: RoundCosts
) -> None:
    offers = [[min(probability, acceptance) for probability in offer] for offer in offers]
    if not rows_worth_adding([acceptance] * (MAX_DRAFTS * len(offers)), rows, costs)[0]:
        assert not any(offer_length(1.0, offer, None, rows, costs) for offer in offers)


def test_time_is_worth_plain_decoding_times_the_measured_speedup() -> None:
    controller = Controller(stairs(), flat(0.1))
    one, other = sequence(), sequence()
    assert controller.costs([one], 0, 0).tokens_per_second == pytest.approx(1.0)
    # What one drafts in vain, the other waits for as well.
    assert controller.costs([one, other], 0, 0).tokens_per_second == pytest.approx(1.12 * 2 / 1.7)
    for _ in range(20):
        count_round(controller.balance(one), 4, extra_seconds=1.0)
    assert controller.costs([one], 0, 0).tokens_per_second == pytest.approx(2.0)
    # A long copy may have given many times that; it says little about what follows its end.
    for _ in range(20):
        count_round(controller.balance(one), 16, extra_seconds=1.0)
    assert controller.costs([one], 0, 0).tokens_per_second == pytest.approx(2.0)
    for _ in range(50):
        count_round(controller.balance(one), 1, extra_seconds=1.0)
    assert controller.costs([one], 0, 0).tokens_per_second == pytest.approx(1.0, abs=0.01)


def test_time_is_worth_as_much_to_sequences_awaiting_their_first_token() -> None:
    controller = Controller(stairs(), flat(0.1))
    none_waiting, three_waiting = (controller.costs([sequence()], 0, 0, waiting) for waiting in (0, 3))
    assert three_waiting.tokens_per_second == pytest.approx(4 * none_waiting.tokens_per_second)


def test_greedy_and_sampled_sequences_are_calibrated_separately() -> None:
    controller = Controller(stairs(), flat(0.1))
    before = controller.acceptance.of_token(sequence(SAMPLED), "model", 0.9)
    for _ in range(100):
        controller.acceptance.learn(sequence(), [Observation("model", 0.9, 0.0, 0.9)], 0.9)
    assert controller.acceptance.of_token(sequence(), "model", 0.9) < 0.2
    assert controller.acceptance.of_token(sequence(SAMPLED), "model", 0.9) == before


def test_calibration_is_shared_between_sequences() -> None:
    controller = Controller(stairs(), flat(0.1))
    for _ in range(100):
        controller.acceptance.learn(sequence(), [Observation("prediction", 0.5, 1.0, 0.9)], 0.9)
    assert controller.acceptance.of_token(sequence(), "prediction", 0.5) > 0.9


def test_next_acceptance_follows_the_targets_confidence_without_drafts() -> None:
    controller = Controller(stairs(), flat(0.1))
    one = sequence()
    for confidence, low, high in ((0.2, 0.0, 0.4), (0.999, 0.9, 1.0)):
        for _ in range(30):
            controller.acceptance.learn(one, [], confidence)
        assert low < controller.acceptance.of(one).next_acceptance < high


def test_long_catch_up_is_spread_over_tokens_and_a_short_one_is_not() -> None:
    controller = Controller(stairs(), proportional(0.01))
    costs = controller.costs([sequence()], 0, 0)
    short, long = (candidate_of(controller, sequence(generated=20), pending, costs) for pending in (2, 100))
    assert short
    assert (short.charged_rows, short.catch_up_seconds) == (2, 0.0)
    assert long
    assert long.charged_rows == 1
    assert 0 < long.catch_up_seconds < costs.draft_pass(100) / 5
    for few_to_come in (sequence(max_tokens=26, generated=20), sequence(generated=1)):
        expensive = candidate_of(controller, few_to_come, 100, costs)
        assert expensive
        assert expensive.catch_up_seconds >= 2 * long.catch_up_seconds


@pytest.mark.parametrize("learned", [None, "text beside calls", "grammar"])
def test_answers_that_follow_a_grammar_have_lengths_of_their_own(learned: str | None) -> None:
    """Labels say nothing of text, which answers beside calls of tools are."""

    class BesideCalls(Alternating):
        allows_text = True

    constraints = {None: None, "text beside calls": BesideCalls(200), "grammar": Alternating(200)}
    controller = Controller(stairs(), proportional(0.01))
    for _ in range(200):
        short = sequence(generated=3, max_tokens=100)
        short.constraint = constraints[learned]
        controller.forget(short)
    costs = controller.costs([sequence()], 0, 0)
    seconds = []
    for constraint in constraints.values():
        one = sequence(generated=2)
        one.constraint = constraint
        candidate = candidate_of(controller, one, 100, costs)
        assert candidate
        seconds.append(candidate.catch_up_seconds)
    text, beside_calls, grammar = seconds
    assert text == beside_calls
    assert grammar > text if learned == "grammar" else text > grammar


def test_long_catch_up_waits_for_the_length_that_nine_of_ten_answers_reach() -> None:
    controller = Controller(stairs(), proportional(0.01))
    for number in range(200):
        # Of five answers one is a label, and of 25 one is a sentence; the others go on.
        length = 5 if number % 5 == 0 else 30 if number % 25 == 1 else 400
        controller.forget(sequence(generated=length, max_tokens=1000))
    costs = controller.costs([sequence()], 0, 0)
    spread = {}
    for generated in (1, 4, 5, 20):
        candidate = candidate_of(controller, sequence(generated=generated, max_tokens=1000), 100, costs)
        assert candidate
        spread[generated] = round((costs.draft_pass(100) - costs.draft_pass(1)) / candidate.catch_up_seconds)
    assert spread == {1: 4, 4: 1, 5: 53, 20: 68}


def test_long_catch_up_is_judged_by_the_long_run_acceptance() -> None:
    controller = Controller(stairs(), proportional(0.01))
    one = sequence()
    for confidence in [0.2] * 60 + [0.999] * 12:
        controller.acceptance.learn(one, [], confidence)
    costs = controller.costs([one], 0, 0)
    short, long = (candidate_of(controller, one, pending, costs) for pending in (1, 100))
    assert short
    assert long
    assert long.acceptance < 0.5 < short.acceptance


def test_no_long_catch_up_starts_during_a_prefill() -> None:
    controller = Controller(stairs(), proportional(0.01))
    one = sequence()
    during_prefill = controller.costs([one], 0, 0, awaiting_first_token=1)
    assert candidate_of(controller, one, 100, controller.costs([one], 0, 0))
    assert candidate_of(controller, one, 100, during_prefill) is None
    assert candidate_of(controller, one, 2, during_prefill)


def test_drafts_that_only_lose_are_stopped_and_retried_at_a_bounded_cost() -> None:
    """An adversary: drafts are always rejected although every estimate is in favour of drafting."""
    controller = Controller(stairs(), flat(0.2))
    one = sequence(max_tokens=10**6)
    costs = controller.costs([one], 0, 0)
    lost = 0.0
    for _ in range(5000):
        drafts = 1.3 if candidate_of(controller, one, 1, costs) else 0.0
        lost += drafts
        count_round(controller.balance(one), 1, extra_seconds=drafts)
    assert lost / 5000 < 0.011
    assert lost > 10


def test_a_long_catch_up_is_counted_as_lost_over_several_rounds() -> None:
    """Drafts break even, but for catch-ups of 12 steps; four steps may be lost. The first one is not counted."""
    balance = Balance()
    lost = []
    for catch_up in [12.0] * 2 + [0.0] * 40 + [12.0] + [0.0] * 40:
        count_round(balance, 2, extra_seconds=1.0, catch_up_seconds=catch_up, drafter=None if catch_up else "model")
        lost.append(balance.is_over_budget)
    assert not any(lost[:46])
    assert lost[-1]


def test_a_long_catch_up_that_cannot_pay_keeps_no_other_sequence_from_drafting() -> None:
    """Times in seconds: a pass of the target over two rows takes .060, one of the draft model .008."""
    costs = RoundCosts(
        lambda rows: 0.06 + 0.002 * (rows - 2), lambda rows: 0.008 + 0.0005 * (rows - 1), tokens_per_second=2 / 0.06
    )
    short_answer = Candidate(1.0, 0.65, 1, MAX_DRAFTS, catch_up_seconds=0.082)
    long_answer = Candidate(1.0, 0.64, 1, MAX_DRAFTS, catch_up_seconds=0.0035)
    assert choose_for_model([short_answer, long_answer], 2, costs)[0] == [1]
    assert choose_for_model([short_answer], 2, costs)[0] == []


def test_what_is_certain_is_drafted_and_others_are_weighed_by_what_they_add() -> None:
    """Times in seconds: a pass of the draft model takes 1 whatever it reads; alone, no draft is worth that."""
    costs = RoundCosts(lambda rows: 1.0 + 0.1 * rows, lambda _rows: 1.0, tokens_per_second=1.0)
    weighed, certain = Candidate(1.0, 0.6, 1, 1), Candidate(1.0, 0.1, 1, 4, is_certain=True)
    assert choose_for_model([weighed], 1, costs)[0] == []
    assert choose_for_model([weighed, certain], 2, costs)[0] == [1, 0]
    assert choose_for_model([certain], 2, costs) == ([0], 0.0)


@pytest.mark.parametrize(
    ("max_wait_seconds", "expected"), [(math.inf, [5, 8, 0]), (2.01, [4, 4, 0]), (0.51, [1, 1, 0]), (0.0, [0, 0, 0])]
)
def test_each_request_drafts_as_far_as_there_is_room_and_others_can_wait(
    max_wait_seconds: float, expected: list[int]
) -> None:
    """A row of the target takes .2 s and a pass of the draft model .1; the second has tokens enough, the first 6."""
    controller = Controller(FixedCost(table(lambda rows: 1.0 + 0.2 * rows)), flat(0.1))
    sequences = [sequence(max_tokens=6), sequence(), sequence()]
    sequences[2].speculation = SpeculationParams(8, mode="off")
    found = controller.max_drafts(sequences, max_rows=17, max_wait_seconds=max_wait_seconds, kv_len=0, draft_kv_len=0)
    assert found == expected
