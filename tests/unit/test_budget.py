"""A prefill chunk is as wide as those that decode can wait for, at any context length."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costs import FixedCost, proportional
from specserve.core.scheduler import max_wait, prefill_chunk
from specserve.speculation.costs import CostTable, PassCosts

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def machine(far: float = 1.0) -> PassCosts:
    """A pass takes 30 ms and 3 ms a row, and attention of a row a microsecond for each token; `far` times that late."""
    near, late = (tuple(0.03 + rows * (0.003 + 1e-6 * length) for rows in ROWS) for length in (64, 16_384))
    return FixedCost(CostTable(ROWS, (64, 16_384), (near, tuple(far * n for n in late))))


def chunk(cost: PassCosts, kv_len: int, *, max_rows: int = 512, max_wait_seconds: float = 0.25) -> int:
    """The chunk beside one sequence that decodes."""
    return prefill_chunk(cost, kv_len, rows=1, max_rows=max_rows, max_wait_seconds=max_wait_seconds)


def test_late_chunks_are_narrower_than_early_ones_which_add_what_others_can_wait_for() -> None:
    """A row takes 3 ms at the beginning, and 19 after 16,384 tokens; twice as much, where that was measured."""
    assert [chunk(machine(), kv_len) for kv_len in (0, 4096, 16_384)] == [81, 35, 12]
    assert chunk(machine(far=2.0), 16_384) == 6
    assert chunk(machine(), 16_384, max_wait_seconds=0.01) == 4, "less would take nearly as long"
    assert chunk(machine(), 16_384, max_wait_seconds=math.inf) == 512
    assert chunk(machine(), 0, max_rows=-2) == 0, "sequences have outgrown what they were promised"


@given(
    st.lists(st.floats(0.01, 2.0), min_size=len(ROWS), max_size=len(ROWS)),
    st.integers(0, 20),
    st.integers(1, 300),
    st.sampled_from([0.05, 0.25, math.inf]),
)
def test_the_chunk_is_the_widest_that_fits_whatever_passes_cost(
    seconds: list[float], rows: int, max_rows: int, max_wait: float
) -> None:
    cost = FixedCost(CostTable(ROWS, (64, 128), (tuple(seconds), tuple(seconds))))
    chosen = prefill_chunk(cost, 0, rows=rows, max_rows=max_rows, max_wait_seconds=max_wait)
    curve = cost.curve(rows + max_rows, 0)
    fitting = [n for n in range(max_rows + 1) if curve[rows + n] <= curve[rows] + max_wait]
    assert chosen == max(fitting[-1], min(4, max_rows))


@pytest.mark.parametrize(
    ("milliseconds", "pass_seconds", "seconds"),
    [(100.0, 1.0, 0.1), (2000.0, 1.0, 2.0), (None, 1.0, 7.0), (None, 0.01, 0.25)],
)
def test_max_wait_is_as_configured_or_else_250_ms_or_seven_passes(
    milliseconds: float | None, pass_seconds: float, seconds: float
) -> None:
    assert max_wait(milliseconds, proportional(pass_seconds)) == seconds
