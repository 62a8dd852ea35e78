"""The cost of a forward pass: on lines between measured ones, times a factor that follows live passes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.speculation.costs import CostTable, PassCosts

ROWS = (1, 2, 3, 4, 8)
# Four rows cost less than two, as with weights that are repacked for four rows.
SECONDS = (1.0, 1.9, 2.6, 1.7, 3.0)
TABLE = CostTable(ROWS, (100, 300), (SECONDS, tuple(2 * cost for cost in SECONDS)))
LONG = CostTable((1, 8), (64, 4096), ((1.0, 1.2), (2.0, 4.2)))


def test_costs_lie_on_lines_between_measured_ones_and_beyond() -> None:
    costs = PassCosts(TABLE)
    found = [costs.seconds(rows, 0) for rows in (0, 1, 2, 3, 4, 6, 8, 16)]
    assert found == pytest.approx([0, 1.0, 1.9, 2.6, 1.7, 2.35, 3.0, 6.0])
    by_length = {kv_len: PassCosts(LONG).seconds(1, kv_len) for kv_len in (0, 64, 2080, 4096, 8128)}
    assert [*by_length.values()] == pytest.approx([1.0, 1.0, 1.5, 2.0, 3.0], rel=0.01)


Pair = tuple[float, float]
two_rows = st.tuples(st.floats(0.1, 10), st.floats(0.1, 10))


@given(two_rows, two_rows, st.integers(0, 40_000), st.integers(0, 40_000))
def test_costs_never_fall_with_length_whatever_was_measured(near: Pair, far: Pair, shorter: int, added: int) -> None:
    costs = PassCosts(CostTable((1, 8), (64, 4096), (near, far)))
    for rows in (1, 3, 8, 20):
        assert costs.seconds(rows, shorter) <= costs.seconds(rows, shorter + added)


@given(rows=st.integers(0, 40), max_rows=st.integers(0, 40), kv_len=st.integers(0, 30_000))
def test_a_curve_has_the_cost_of_each_number_of_rows(rows: int, max_rows: int, kv_len: int) -> None:
    costs = PassCosts(LONG)
    costs.observe(1, kv_len, 7.0)
    curve = costs.curve(max_rows, kv_len)
    assert curve.shape == (max_rows + 1,)
    assert rows > max_rows or curve[rows] == pytest.approx(costs.seconds(rows, kv_len), rel=1e-12)


def observe(costs: PassCosts, factor: float, passes: int, rows: int = 1) -> None:
    for _ in range(passes):
        costs.observe(rows, 0, factor * SECONDS[ROWS.index(rows)])


def test_passes_of_one_size_show_within_nine_how_fast_all_sizes_are() -> None:
    costs = PassCosts(TABLE)
    for factor in (2.0, 4.0, 1.0, 0.7):
        observe(costs, factor, 9, rows=4)
        for rows, seconds in zip(ROWS, SECONDS, strict=True):
            assert costs.seconds(rows, 0) == pytest.approx(factor * seconds)


def test_passes_that_the_machine_held_up_do_not_change_the_costs() -> None:
    costs = PassCosts(TABLE)
    observe(costs, 1.0, 9)
    for number in range(200):
        observe(costs, 50.0 if number % 3 == 0 else 1.0, 1)
        assert costs.seconds(1, 0) == pytest.approx(1.0)
        costs.observe(9, 0, 1000.0)  # More rows than the table has.


def test_the_draft_models_costs_follow_the_targets_and_not_the_reverse() -> None:
    target = PassCosts(TABLE)
    draft = PassCosts(TABLE, target=target)
    observe(target, 0.7, 9)
    assert draft.seconds(1, 0) == target.seconds(1, 0) == pytest.approx(0.7)
    for _ in range(9):
        observe(target, 1.0, 1)
        observe(draft, 1.3, 1)
    assert draft.seconds(1, 0) == pytest.approx(1.3)
    assert target.seconds(1, 0) == pytest.approx(1.0)


def test_what_the_drafts_passes_have_shown_is_forgotten_when_the_target_is_faster_and_after_800_of_its_passes() -> None:
    """Otherwise what a busy minute has taught would keep it from drafting, and only drafting can correct it."""
    target = PassCosts(TABLE)
    draft = PassCosts(TABLE, target=target)
    observe(target, 2.0, 20)
    observe(draft, 8.0, 9)
    for factor, passes, expected in ((2.0, 20, 8.0), (1.0, 9, 1.0)):
        observe(target, factor, passes)
        assert draft.seconds(1, 0) == pytest.approx(expected)
    observe(draft, 8.0, 9)
    for passes, expected in ((800, 8.0), (1, 1.0)):
        observe(target, 1.0, passes)
        assert draft.seconds(1, 0) == pytest.approx(expected)
