"""What the controller drafts: how many tokens, against brute force on random costs, and what it learns from rounds."""

import math
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costs import FixedCost, flat, proportional, stairs, table
from specserve.sequence import SamplingParams, Sequence, SpeculationMode, SpeculationParams
from specserve.speculation.costs import CostTable
from specserve.speculation.policy import Balance, Candidate, Controller, Prices, choose_for_model
from specserve.speculation.step import Draft, SequenceStep

MAX_DRAFTS = 9
STAIRS = [0.0] + [1.0] + [1.7] * 3 + [3.4] * 40
probabilities = st.floats(0.01, 0.99)
# Prices in tokens, by rows, that do not fall with their number.
curves = st.lists(st.floats(0.01, 10.0), min_size=50, max_size=50).map(sorted)


def prices_of(target: list[float], draft: list[float], rows: int = 1, block_length: int = 1) -> Prices:
    return Prices(lambda rows: target[rows], lambda rows: draft[rows] if rows else 0.0, rows, block_length)


def sequence(mode: SpeculationMode = "auto", *, max_tokens: int = 100, generated: int = 0, gamma: int = 8) -> Sequence:
    made = Sequence([1], SamplingParams(temperature=0), SpeculationParams(gamma, mode=mode), max_tokens=max_tokens)
    made.tokens += [4] * generated
    return made


def controller() -> Controller:
    return Controller(stairs(), proportional(0.01))


def gain_of(drafts: list[tuple[Candidate, int]], rows: int, prices: Prices, *, in_one_pass: bool) -> float:
    """Expected tokens minus the price of their time, directly from the definition."""
    tokens = 0.0
    for c, gamma in drafts:
        following = c.masked_acceptance if in_one_pass else c.acceptance
        tokens += sum(c.p_all_accepted * c.acceptance * following ** (n - 1) for n in range(1, gamma + 1))
    price = sum(candidate.draft_prefill for candidate, gamma in drafts if gamma)
    first = sum(candidate.pending for candidate, _ in drafts)
    if in_one_pass:
        price += prices.draft(first + sum(gamma - 1 for _, gamma in drafts))
    else:
        price += prices.draft(first)
        price += sum(prices.draft(sum(gamma >= n for _, gamma in drafts)) for n in range(2, MAX_DRAFTS + 1))
    return tokens - price - prices.target(rows + sum(gamma for _, gamma in drafts)) + prices.target(rows)


@given(
    reached=st.lists(probabilities, min_size=1, max_size=4),
    acceptances=st.tuples(probabilities, probabilities),
    most_and_pending=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    draft_prefill=st.floats(0, 2),
    prices=st.builds(prices_of, curves, curves, block_length=st.integers(1, 3)),
)
def test_the_best_choice_of_sequences_is_found(
    reached: list[float],
    acceptances: tuple[float, float],
    most_and_pending: tuple[int, int],
    draft_prefill: float,
    prices: Prices,
) -> None:
    """Brute force over every subset and every common number of further drafts, one by one and in one pass."""
    acceptance, masked = acceptances
    most, pending = most_and_pending
    candidates = [
        Candidate(probability, acceptance, most, draft_prefill, pending=pending, masked_acceptance=masked)
        for probability in reached
    ]
    best = max(
        gain_of([(candidate, gamma) for candidate in chosen], len(candidates), prices, in_one_pass=in_one_pass)
        for count in range(1, len(candidates) + 1)
        for chosen in combinations(candidates, count)
        for in_one_pass in (False, True)
        for gamma in range(1, 1 + (min(most, prices.block_length) if in_one_pass else most))
    )
    chosen, gain = choose_for_model(candidates, replace(prices, rows=len(candidates)))
    assert all(masks < min(most, prices.block_length) for masks in chosen.values())
    assert gain == pytest.approx(max(0.0, best), abs=1e-9)
    assert bool(chosen) == (best > 0) or abs(best) < 1e-9


def test_a_draft_prefill_that_cannot_pay_keeps_no_other_sequence_from_drafting() -> None:
    prices = Prices(lambda rows: 2 + 0.06 * rows, lambda rows: 0.26 + 0.016 * rows if rows else 0.0, rows=2)
    short_answer, long_answer = Candidate(1.0, 0.65, MAX_DRAFTS, 2.7), Candidate(1.0, 0.64, MAX_DRAFTS, 0.1)
    assert choose_for_model([short_answer, long_answer], prices)[0] == {1: 0}
    assert choose_for_model([short_answer], prices)[0] == {}
    full = Candidate(1.0, 0.99, 0)
    assert choose_for_model([full, long_answer], prices)[0] == {1: 0}


def proposal_length(
    probabilities: list[float], prices: Prices, by_model: Candidate | None = None, reached: float = 1.0
) -> int:
    step = SequenceStep(sequence(), 0, 1, 8)
    step.drafts.append(Draft(1, None, "model", reached, reached))
    return controller().proposal_length(step, probabilities, by_model, prices)


@given(accepted=st.lists(probabilities, max_size=MAX_DRAFTS), reached=probabilities, target=curves)
def test_a_proposal_is_drafted_as_far_as_rows_pay(accepted: list[float], reached: float, target: list[float]) -> None:
    def gain(length: int) -> float:
        prefixes = [reached * math.prod(accepted[: n + 1]) for n in range(length)]
        return sum(prefixes) - (target[1 + length] - target[1])

    length = proposal_length(accepted, prices_of(target, [9.0] * 50), reached=reached)
    assert gain(length) == pytest.approx(max(gain(n) for n in range(len(accepted) + 1)))


def test_an_unlikely_offer_yields_to_the_draft_model_and_a_likely_one_does_not() -> None:
    prices, by_model = prices_of(STAIRS, [0.1 + 0.01 * rows for rows in range(50)]), Candidate(1.0, 0.95, MAX_DRAFTS)
    assert proposal_length([0.9, 0.2, 0.01, 0.01], prices) == 3, "rows that cost nothing are filled"
    assert proposal_length([0.3] * 3, prices, by_model) == 0
    assert proposal_length([0.99] * 3, prices, by_model) == 3
    # After 1 row 2 to 4 cost .7 more; three likely drafts bring 2.71 tokens, one brings less than .7.
    lengths = [proposal_length([0.95] * 3, prices_of([value * n for n in STAIRS], STAIRS)) for value in (3.8, 3.9)]
    assert lengths == [3, 0]
    # The target costs .92 tokens and .08 a row, the draft model .3.
    prices = Prices(lambda rows: 0.92 + 0.08 * rows, lambda rows: 0.3 * (rows > 0))
    assert proposal_length([0.9, *[0.05] * 14], prices, Candidate(1.0, 0.8, MAX_DRAFTS)) == 1


def test_in_mode_fixed_an_offer_is_drafted_up_to_what_the_model_is_likelier_to_get_right() -> None:
    step, prices = SequenceStep(sequence("fixed"), 0, 1, 8), prices_of([float(rows) for rows in range(50)], STAIRS)
    assert controller().proposal_length(step, [0.9, 0.7, 0.3], Candidate(1.0, 0.6, 8), prices) == 2
    assert controller().proposal_length(step, [0.9, 0.7, 0.3], None, prices) == 3


def test_where_no_likely_drafts_pay_only_fixed_sequences_are_asked() -> None:
    dear, cheap = prices_of([float(rows) for rows in range(50)], STAIRS, 3), prices_of([1.0] * 50, [0.0] * 50, 3)
    model_dear = prices_of([1.0] * 50, [9.0 * rows for rows in range(50)], 3)
    modes: list[tuple[SpeculationMode, int]] = [("auto", 4), ("fixed", 4), ("off", 0)]
    for prices, asked, by_model in ((dear, [1], [1]), (cheap, [0, 1], [0, 1]), (model_dear, [0, 1], [1])):
        steps = [SequenceStep(sequence(mode), 0, 1, gamma) for mode, gamma in modes]
        found = controller().steps_to_draft(steps, prices)
        assert found == [steps[index] for index in asked]
        assert [index for index in (0, 1) if not steps[index].model_ended] == by_model


def test_each_request_drafts_as_far_as_there_is_room_and_others_can_wait() -> None:
    """A row of the target takes .2 s and a pass of the draft model .1; the second has tokens enough, the first 6."""
    own = Controller(FixedCost(table(lambda rows: 1.0 + 0.2 * rows)), flat(0.1))
    sequences = [sequence(max_tokens=6), sequence(), sequence("off")]
    for max_wait, expected in {math.inf: [5, 8, 0], 2.01: [4, 4, 0], 0.51: [1, 1, 0], 0.0: [0, 0, 0]}.items():
        found = own.draft_limits(sequences, max_rows=17, max_wait_seconds=max_wait, kv_len=0, draft_kv_len=0)
        assert found == expected
        # They have outgrown what they were promised.
        assert own.draft_limits(sequences, max_rows=-6, max_wait_seconds=max_wait, kv_len=0, draft_kv_len=0) == [0] * 3


def count_round(balance: Balance, tokens: int, extra: float) -> None:
    """Account for a round whose plain pass takes two seconds, and its drafts so many passes more."""
    step = SequenceStep(sequence(), 0, 1, 8)
    step.seconds.plain, step.seconds.target_drafts, step.seconds.draft_model = 2.0, extra, extra
    step.n_committed = tokens
    balance.count_round(step)


def test_time_is_worth_plain_decoding_times_the_measured_speedup() -> None:
    own = controller()
    one, other = sequence(), sequence()

    def value(*sequences: Sequence) -> float:
        """Tokens that a pass of one row is worth, which takes a second."""
        return own.prices(sequences, 0, 0).target(1)

    assert value(one) == pytest.approx(1.0)
    assert value(one, other) == pytest.approx(1.18 * 2 / 1.7)
    # A long copy may have given many times that; it says little about what follows its end.
    for tokens, extra, expected in ((3, 1.0, 1.5), (4, 1.0, 2.0), (16, 1.0, 2.0), (1, 1.0, 1.0)):
        for _ in range(50):
            count_round(own.balance(one), tokens, extra)
        assert value(one) == pytest.approx(expected, abs=0.01)


def test_drafts_that_only_lose_cost_ten_passes_and_one_per_cent() -> None:
    """An adversary: drafts are always rejected although every estimate is in favour of drafting."""
    own, one = controller(), sequence(max_tokens=10**6)
    prices, lost = own.prices([one], 0, 0), 0.0
    for tokens in range(1, 5001):
        extra = 1.3 if own.candidate(SequenceStep(one, 0, 1, 8), 1, prices) else 0.0
        lost += extra
        count_round(own.balance(one), 1, extra)
        assert lost <= 10 + 0.01 * tokens + 1.3
    assert lost > 55


def tokens_that_share(own: Controller, of: Sequence, pending: int = 100) -> float:
    """Over how many tokens the price of what the draft model has to read is spread."""
    prices = own.prices([sequence()], 0, 0)
    candidate = own.candidate(SequenceStep(of, 0, 1, 8), pending, prices)
    assert candidate
    return (prices.draft(pending) - prices.draft(1)) / candidate.draft_prefill


def test_a_draft_prefill_is_spread_over_the_tokens_that_follow_in_nine_of_ten_answers() -> None:
    own = controller()
    found = [tokens_that_share(own, sequence(generated=n, max_tokens=5000)) for n in (1, 8, 100, 3000)]
    assert found == pytest.approx([3, 8, 28, 2000]), "a new server assumes lengths of 2 to 2,048"
    assert tokens_that_share(own, sequence(generated=100, max_tokens=110)) == pytest.approx(10)
    for number in range(200):
        # Of five answers one is a label, and of 25 one is a sentence; the others go on.
        length = 5 if number % 5 == 0 else 30 if number % 25 == 1 else 400
        own.forget(sequence(generated=length, max_tokens=1000))
    spread = {n: round(tokens_that_share(own, sequence(generated=n, max_tokens=1000))) for n in (1, 4, 5, 20)}
    assert spread == {1: 4, 4: 1, 5: 395, 20: 380}
    candidate = own.candidate(SequenceStep(sequence(), 0, 1, 8), 1, own.prices([sequence()], 0, 0))
    assert candidate
    assert candidate.draft_prefill == 0
    for _ in range(200):
        own.forget(sequence(generated=5, max_tokens=5))
    assert tokens_that_share(own, sequence(generated=2)) == pytest.approx(98), "those that were cut off would go on"


def test_each_pass_is_priced_at_the_length_of_its_own_cache() -> None:
    """The draft model's slot holds the end of the text only."""
    costs = FixedCost(CostTable((1, 8), (64, 16_384), ((1.0, 2.0), (3.0, 9.0))))
    own = Controller(costs, costs)
    for target_len, draft_len, expected in ((64, 64, (2, 2)), (16_384, 64, (3, 2 / 3)), (16_384, 16_384, (3, 3))):
        prices = own.prices([sequence()], target_len, draft_len)
        assert (prices.target(8), prices.draft(8)) == pytest.approx([n * prices.target(1) for n in expected])
