"""A prefill chunk is as wide as those that decode can wait for, at any context length."""

import math

from hypothesis import given
from hypothesis import strategies as st

from costs import FixedCost, proportional
from specserve.core.scheduler import max_wait, prefill_chunk
from specserve.speculation.costs import CostTable

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@given(
    st.lists(st.floats(0.01, 2.0), min_size=len(ROWS), max_size=len(ROWS)),
    st.integers(0, 20),
    st.just(-2) | st.integers(0, 300),
    st.sampled_from([0, 96, 128]),
    st.sampled_from([0.05, 0.25, math.inf]),
)
def test_the_chunk_is_the_widest_that_fits_whatever_passes_cost(
    seconds: list[float], rows: int, max_rows: int, kv_len: int, max_wait: float
) -> None:
    cost = FixedCost(CostTable(ROWS, (64, 128), (tuple(seconds), tuple(2 * n for n in seconds))))
    chosen = prefill_chunk(cost, kv_len, rows=rows, max_rows=max_rows, max_wait_seconds=max_wait)
    most = max(0, max_rows)
    curve = cost.curve(rows + most, kv_len)
    fitting = [n for n in range(most + 1) if curve[rows + n] <= curve[rows] + max_wait]
    assert chosen == max(fitting[-1], min(4, most))


def test_max_wait_is_as_configured_or_else_250_ms_or_seven_passes() -> None:
    for milliseconds, seconds in ((100.0, 0.1), (2000.0, 2.0), (None, 7.0)):
        assert max_wait(milliseconds, proportional(1.0)) == seconds
    assert max_wait(None, proportional(0.01)) == 0.25
