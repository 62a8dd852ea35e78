"""The cost of a forward pass: measured by rows and KV length, then adjusted to the passes that are observed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from measured_engine import MeasuredEngine
from specserve.engine.base import FloatArray, Row
from specserve.errors import EngineError
from specserve.speculation.cost import Cost, CostTable
from specserve.speculation.measure import Interrupted, kv_lengths, measure, row_counts, typical

ROWS = (1, 2, 3, 4, 8)
# Four rows cost less than two, as with weights that are repacked for four rows.
SECONDS = (1.0, 1.9, 2.6, 1.7, 3.0)
TABLE = CostTable(ROWS, (100, 300), (SECONDS, tuple(2 * cost for cost in SECONDS)))


def test_cost_is_interpolated_between_measured_numbers_of_rows() -> None:
    cost = Cost(TABLE)
    assert [cost.seconds(rows, 0) for rows in (0, 1, 2, 3, 4, 6, 8)] == [
        0,
        1.0,
        1.9,
        2.6,
        1.7,
        pytest.approx(2.35),
        3.0,
    ]


def test_cost_is_proportional_to_rows_beyond_the_table() -> None:
    assert Cost(TABLE).seconds(16, 0) == pytest.approx(6.0)


@given(kv_len=st.integers(0, 5000))
def test_cost_is_linear_in_kv_length_through_two_measurements(kv_len: int) -> None:
    rounded = kv_len // 64 * 64
    expected = 1 + max(0, rounded - 100) / 200
    assert Cost(TABLE).seconds(1, kv_len) == pytest.approx(expected)


def test_cost_does_not_fall_with_kv_length_even_if_measured_so() -> None:
    table = CostTable((1,), (100, 300), ((1.0,), (0.9,)))
    assert Cost(table).seconds(1, 4000) == 1.0


LONG = CostTable((1, 8), (64, 4096, 16_384), ((1.0, 1.2), (2.0, 4.2), (3.0, 16.2)))


@pytest.mark.parametrize(
    ("kv_len", "seconds"),
    [(0, 1.0), (64, 1.0), (64 + 2016, 1.5), (4096, 2.0), (4096 + 6144, 2.5), (16_384, 3.0), (28_672, 4.0)],
)
def test_cost_lies_on_lines_between_the_measured_lengths_and_on_the_last_beyond(kv_len: int, seconds: float) -> None:
    assert Cost(LONG).seconds(1, kv_len) == pytest.approx(seconds, rel=0.01)


rising = st.lists(st.floats(0.1, 10), min_size=2, max_size=2).map(tuple)


@given(st.lists(rising, min_size=1, max_size=4), st.lists(st.integers(0, 40_000), min_size=2, max_size=2))
def test_cost_never_falls_with_the_length_whatever_was_measured(
    seconds: list[tuple[float, ...]], lengths: list[int]
) -> None:
    cost = Cost(CostTable((1, 8), (64, 1000, 4096, 16_384)[: len(seconds)], tuple(seconds)))
    for rows in (1, 3, 8, 20):
        assert cost.seconds(rows, min(lengths)) <= cost.seconds(rows, max(lengths))


@given(rows=st.integers(0, 40), max_rows=st.integers(0, 40), kv_len=st.integers(0, 30_000))
def test_costs_of_all_numbers_of_rows_are_those_of_each(rows: int, max_rows: int, kv_len: int) -> None:
    cost = Cost(LONG)
    cost.observe(1, kv_len, 7.0)
    for _ in range(9):
        cost.observe(1, kv_len, 1.1 * cost.seconds(1, kv_len))
    curve = cost.curve(max_rows, kv_len)
    assert curve.shape == (max_rows + 1,)
    assert rows > max_rows or curve[rows] == pytest.approx(cost.seconds(rows, kv_len), rel=1e-12)


@pytest.mark.parametrize(
    ("rows", "kv_len", "seconds"),
    [
        ((1, 2), (64,), ((1.0,),)),
        ((1,), (64, 320), ((1.0,),)),
        ((1,), (64,), ((1.0,), (2.0,))),
        ((2, 1), (64,), ((1.0, 2.0),)),
        ((1,), (320, 64), ((1.0,), (2.0,))),
        ((1,), (), ()),
    ],
)
def test_a_table_that_does_not_fit_together_is_refused(
    rows: tuple[int, ...], kv_len: tuple[int, ...], seconds: tuple[tuple[float, ...], ...]
) -> None:
    with pytest.raises(ValueError, match="no seconds for each number of rows"):
        CostTable(rows, kv_len, seconds)


def test_cost_follows_a_machine_that_has_become_slower() -> None:
    cost = Cost(TABLE)
    for _ in range(200):
        for rows, measured in ((1, 1.0), (4, 1.7)):
            cost.observe(rows, 0, 1.5 * measured)
    assert cost.seconds(8, 0) == pytest.approx(1.5 * 3.0, rel=0.05)


def test_passes_of_one_size_adjust_the_cost_of_all_sizes() -> None:
    cost = Cost(TABLE)
    for _ in range(200):
        cost.observe(4, 0, 2 * 1.7)
    assert cost.seconds(4, 0) == pytest.approx(2 * 1.7, rel=0.05)
    assert cost.seconds(1, 0) == pytest.approx(2.0, rel=0.05)
    assert cost.seconds(8, 0) == pytest.approx(2 * 3.0, rel=0.05)


def test_cost_follows_memory_and_arithmetic_that_change_by_themselves() -> None:
    """As between two states of one machine (Zen 4): one factor for all would be off by .12 or more somewhere."""
    cost = Cost(TABLE)
    for _ in range(100):
        for rows, measured in ((1, 1.25), (4, 1.02 * 1.7)):
            cost.observe(rows, 0, measured)
    assert cost.seconds(1, 0) == pytest.approx(1.25, rel=0.05)
    assert cost.seconds(4, 0) == pytest.approx(1.02 * 1.7, rel=0.05)
    # Never seen.
    assert cost.seconds(8, 0) == pytest.approx(0.9 * 3.0, rel=0.05)


def test_a_neighbour_does_not_tilt_the_cost() -> None:
    cost = Cost(TABLE)
    for _ in range(8):
        cost.observe(1, 0, 4.0)
    assert cost.seconds(8, 0) == pytest.approx(4 * 3.0, rel=1e-6)


def test_one_delayed_pass_hardly_changes_the_cost() -> None:
    cost = Cost(TABLE)
    cost.observe(1, 0, 1000.0)
    assert cost.seconds(1, 0) == pytest.approx(1.0, abs=0.03)


def test_pass_with_more_rows_than_the_table_is_ignored() -> None:
    cost = Cost(TABLE)
    cost.observe(9, 0, 1000.0)
    assert cost.seconds(1, 0) == 1.0


def test_draft_cost_follows_the_targets_passes() -> None:
    target = Cost(TABLE)
    draft = Cost(TABLE, target=target)
    for _ in range(200):
        target.observe(1, 0, 0.7)
    assert draft.seconds(1, 0) == target.seconds(1, 0) == pytest.approx(0.7, rel=0.05)


def test_passes_of_the_draft_do_not_change_the_targets_cost() -> None:
    """The tables of both models are measured minutes apart, on a machine with other load."""
    target = Cost(TABLE)
    draft = Cost(TABLE, target=target)
    for _ in range(200):
        for rows in (1, 4):
            target.observe(rows, 0, Cost(TABLE).seconds(rows, 0))
        draft.observe(1, 0, 1.3)
    assert draft.seconds(1, 0) == pytest.approx(1.3, rel=0.05)
    assert target.seconds(1, 0) == pytest.approx(1.0, rel=0.05)


def test_cost_follows_a_machine_that_changes_at_once_within_eight_passes() -> None:
    cost = Cost(TABLE)
    for factor in (4.0, 1.0):
        for _ in range(8):
            cost.observe(1, 0, factor)
        assert cost.seconds(8, 0) == pytest.approx(3.0 * factor, rel=0.05)


def test_delays_of_some_passes_do_not_make_the_cost_jump() -> None:
    cost = Cost(TABLE)
    for number in range(200):
        cost.observe(1, 0, 5.0 if number % 3 == 0 else 1.0)
    assert cost.seconds(1, 0) == pytest.approx(1.0, rel=0.25)


def test_what_the_drafts_passes_have_shown_is_forgotten_while_it_makes_none() -> None:
    """Otherwise what a busy minute has taught would keep it from drafting, and only drafting can correct it."""
    target = Cost(TABLE)
    draft = Cost(TABLE, target=target)
    for _ in range(50):
        target.observe(1, 0, 2.0)
        draft.observe(1, 0, 8.0)
    assert draft.seconds(1, 0) == pytest.approx(8.0, rel=0.05)
    for _ in range(8):
        target.observe(1, 0, 2.0)
    assert draft.seconds(1, 0) == pytest.approx(8.0, rel=0.05)
    for _ in range(12):
        target.observe(1, 0, 1.0)
    assert draft.seconds(1, 0) == pytest.approx(1.0, rel=0.2)


def test_draft_that_resumes_is_judged_by_its_next_two_passes() -> None:
    target = Cost(TABLE)
    draft = Cost(TABLE, target=target)
    for now in (8.0, 1.0):
        for _ in range(20):
            target.observe(1, 0, 1.0)
        for _ in range(2):
            draft.observe(1, 0, now)
        assert draft.seconds(1, 0) == pytest.approx(now, rel=0.3)


def test_draft_that_is_not_used_is_forgotten_slowly_while_the_machine_stays_as_it_is() -> None:
    target = Cost(TABLE)
    draft = Cost(TABLE, target=target)
    for _ in range(10):
        draft.observe(1, 0, 8.0)
    for _ in range(100):
        target.observe(1, 0, 1.0)
    assert draft.seconds(1, 0) == pytest.approx(8.0, rel=0.3)
    for _ in range(5000):
        target.observe(1, 0, 1.0)
    assert draft.seconds(1, 0) == pytest.approx(1.0, rel=0.1)


def test_each_number_of_threads_has_a_table_and_a_factor_of_its_own() -> None:
    other = CostTable(ROWS, (100, 300), (tuple(1.5 * cost for cost in SECONDS),) * 2)
    cost = Cost({2: TABLE, 1: other})
    assert cost.seconds(1, 0) == 1.0
    for _ in range(20):
        cost.observe(1, 0, 2.0)
    cost.use_threads(1)
    assert cost.seconds(1, 0) == 1.5
    cost.use_threads(2)
    assert cost.seconds(1, 0) == pytest.approx(2.0, rel=0.05)


def test_the_table_of_the_nearest_number_of_threads_counts() -> None:
    half = CostTable(ROWS, (100, 300), (tuple(1.5 * cost for cost in SECONDS),) * 2)
    cost = Cost({64: TABLE, 32: half})
    for threads, expected in ((64, 1.0), (63, 1.0), (40, 1.5), (1, 1.5)):
        cost.use_threads(threads)
        assert cost.seconds(1, 0) == expected


def observe_twenty(cost: Cost, seconds: float) -> None:
    for _ in range(20):
        cost.observe(1, 0, seconds)


def test_table_is_doubted_once_passes_are_shorter_than_it_says_and_replaced() -> None:
    cost = Cost({2: TABLE, 1: TABLE})
    doubts = []
    for seconds in (1.0, 2.0, 0.5):
        observe_twenty(cost, seconds)
        doubts.append(cost.doubtful)
    assert doubts == [False, False, True], "a machine may become slower"
    assert cost.tables == {2: TABLE, 1: TABLE}
    half = CostTable(ROWS, (100, 300), (tuple(0.5 * cost for cost in SECONDS),) * 2)
    cost.replace_table(2, half)
    assert (cost.doubtful, cost.table, cost.seconds(1, 0)) == (False, half, 0.5)


def test_table_of_fewer_threads_is_not_doubted_since_they_may_have_assistants() -> None:
    cost = Cost({2: TABLE, 1: TABLE})
    cost.use_threads(1)
    observe_twenty(cost, 0.5)
    assert not cost.doubtful


def test_typical_time_is_the_median_of_the_faster_half() -> None:
    assert typical([1.0, 1.1, 9.0, 1.2, 30.0]) == 1.1
    assert typical([2.0]) == 2.0


def test_row_counts_start_at_1_and_stay_within_the_engines_maximum() -> None:
    assert row_counts(1) == (1,)
    assert row_counts(10) == (1, 2, 3, 4, 5, 6, 8)
    assert row_counts(32)[-1] == 32


def test_both_sides_of_the_edge_of_a_tile_are_measured() -> None:
    """Between 16 and 24 rows the cost jumps at 17, which a line from 16 to 24 would hide."""
    assert {16, 17} <= set(row_counts(32))


class Machine(MeasuredEngine):
    """An engine with its own clock: `true_cost` with relative noise, and a long delay in every seventh pass."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.now = 0.0
        self._noise = noise
        self._random = np.random.default_rng(1)

    def forward(self, rows: list[Row]) -> FloatArray:
        noise = 1 + self._random.uniform(-self._noise, self._noise)
        self.now += noise * true_cost(len(rows), self.kv_len([0])) + (20.0 if self.passes % 7 == 6 else 0.0)
        return super().forward(rows)


def true_cost(rows: int, kv_len: int) -> float:
    """One second for every four rows begun; attention reads the context once, and computes for every row."""
    return -(-rows // 4) + kv_len / 8000 + rows * kv_len / 4000


@pytest.mark.parametrize("slot_length", [4096, 8192, 32_768])
def test_measurement_finds_a_stepwise_cost_despite_delayed_passes(slot_length: int) -> None:
    machine = Machine()
    machine.slot_length = slot_length
    cost = Cost(measure(machine, clock=lambda: machine.now))
    for rows in (1, 4, 8, 16, 32, 64):
        for kv_len in (64, 1024, 4032, slot_length):
            assert cost.seconds(rows, kv_len) == pytest.approx(true_cost(rows, kv_len), rel=0.05)
    assert machine.cached_len(0) == 0


def test_measurement_of_an_engine_that_cannot_load_prefills_a_short_context() -> None:
    machine = Machine()
    machine.token_bytes = None
    machine.slot_length = 32_768
    table = measure(machine, clock=lambda: machine.now)
    assert table.kv_len == (64, 320)
    assert Cost(table).seconds(16, 320) == pytest.approx(true_cost(16, 320), rel=0.1)


def test_measurement_finds_the_cost_of_a_short_context_despite_larger_noise() -> None:
    machine = Machine(noise=0.1)
    machine.token_bytes = None
    table = measure(machine, clock=lambda: machine.now)
    for rows, short, long in zip(table.rows, *table.seconds, strict=True):
        assert long - short == pytest.approx(rows * (320 - 64) / 4000, rel=0.6)


@pytest.mark.parametrize(
    ("slot_length", "lengths"),
    [
        (64, (16, 32)),
        (320, (64, 288)),
        (512, (64, 448)),
        (2048, (64, 1984)),
        (4096, (64, 4032)),
        (8192, (64, 4096)),
        (12_288, (64, 4096, 12_224)),
        (16_384, (64, 4096, 16_320)),
        (32_768, (64, 4096, 16_384)),
    ],
)
def test_lengths_are_measured_as_far_as_a_slot_is_long(slot_length: int, lengths: tuple[int, ...]) -> None:
    assert kv_lengths(slot_length, can_load=True) == lengths
    machine = Machine()
    machine.slot_length = slot_length
    assert measure(machine, clock=lambda: machine.now).kv_len == lengths


@pytest.mark.parametrize(
    ("slot_length", "can_load", "passes"), [(4096, False, 65), (4096, True, 61), (32_768, True, 78)]
)
def test_a_quiet_machine_is_measured_in_few_passes(slot_length: int, can_load: bool, passes: int) -> None:
    """A length more takes 17; what fills the cache takes one, or five where 320 tokens are prefilled."""
    machine = Machine()
    machine.slot_length = slot_length
    machine.token_bytes = 24 if can_load else None
    measure(machine, clock=lambda: machine.passes)
    assert machine.passes == passes


@pytest.mark.parametrize(
    ("context", "max_rows", "max_logits"), [(64, 256, 64), (40, 256, 64), (130, 320, 64), (4096, 6, 3)]
)
def test_measurement_stays_within_the_engines_limits(context: int, max_rows: int, max_logits: int) -> None:
    machine = Machine()
    machine.max_rows, machine.max_logits, machine.slot_length = max_rows, max_logits, context
    table = measure(machine, clock=lambda: machine.now)
    assert table.rows[-1] <= max_rows
    assert max(row.position for row in machine.decoded) < context


def test_measurement_needs_one_empty_slot_and_leaves_the_others_alone() -> None:
    machine = MeasuredEngine(n_slots=2)
    machine.forward([Row(7, 0, 0, wants_logits=False)])
    measure(machine)
    assert machine.cache == [[7], []]
    machine.forward([Row(7, 1, 0, wants_logits=False)])
    with pytest.raises(EngineError, match="no slot is empty"):
        measure(machine)


def test_measurement_ends_before_the_next_pass_when_it_is_interrupted() -> None:
    machine = Machine()
    with pytest.raises(Interrupted):
        measure(machine, clock=lambda: machine.now, interrupted=lambda: machine.passes >= 5)
    assert machine.passes == 5
    assert machine.cached_len(0) == 0
