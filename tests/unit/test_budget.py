"""A prefill chunk is as wide as is fastest, as far as those that decode can wait for it, at any context length."""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costs import FixedCost
from specserve.core.budget import prefill_chunk
from specserve.speculation.costs import CostTable, PassCosts
from work import lines_run

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def machine(seconds_of_a_token: float = 1e-6) -> PassCosts:
    """A pass takes 30 ms and 3 ms a row, and attention of a row a microsecond for each token of the context."""
    lengths = (64, 4096, 16_384)
    seconds = tuple(tuple(0.03 + rows * (0.003 + seconds_of_a_token * length) for rows in ROWS) for length in lengths)
    return FixedCost(CostTable(ROWS, lengths, seconds))


def chunk(cost: PassCosts, kv_len: int, *, decoding: int = 1, max_rows: int = 512) -> int:
    """The chunk beside so many sequences that decode and wait for 0.25 s."""
    return prefill_chunk(
        cost, kv_len, rows=decoding, decoding=decoding, others=1, max_rows=max_rows, max_wait_seconds=0.25
    )


@pytest.mark.parametrize("kv_len", [0, 1000, 4096, 9000, 16_384, 32_000])
def test_a_chunk_adds_what_others_can_wait_for_at_any_length(kv_len: int) -> None:
    cost = machine()
    rows = chunk(cost, kv_len)
    assert cost.seconds(1 + rows, kv_len) - cost.seconds(1, kv_len) <= 0.25
    assert cost.seconds(2 + rows, kv_len) - cost.seconds(1, kv_len) > 0.25


def test_late_chunks_are_narrower_than_early_ones() -> None:
    """A row takes 3 ms at the beginning, and 19 after 16,384 tokens."""
    assert [chunk(machine(), kv_len) for kv_len in (0, 4096, 16_384)] == [81, 35, 12]


def test_a_context_that_is_dearer_than_measured_short_ones_say_is_believed() -> None:
    """A row after 16,384 tokens takes twice what the line through shorter lengths says, by which 12 would fit."""
    steep = machine()
    far = tuple(2 * seconds for seconds in steep.table.seconds[2])
    table = CostTable(ROWS, steep.table.kv_len, (*steep.table.seconds[:2], far))
    assert chunk(FixedCost(table), 16_384) == 6
    assert chunk(FixedCost(CostTable(ROWS, (64, 4096), steep.table.seconds[:2])), 16_384) == 12


@pytest.mark.parametrize("kv_len", [0, 16_384])
def test_alone_a_chunk_is_as_wide_as_is_fastest(kv_len: int) -> None:
    """All rows share the 30 ms of a pass; what differs by less than 3 % is equal, and the widest is taken."""
    assert chunk(machine(), kv_len, decoding=0) == 512
    seconds = {rows: 0.03 + rows * (0.003 if rows <= 128 else 0.006) for rows in ROWS}
    table = CostTable(ROWS, (64,), (tuple(seconds.values()),))
    assert 128 <= chunk(FixedCost(table), kv_len, decoding=0) < 160


@given(
    st.lists(st.floats(0.01, 2.0), min_size=len(ROWS), max_size=len(ROWS)),
    st.tuples(st.integers(0, 20), st.integers(0, 9), st.integers(1, 9)),
    st.integers(1, 300),
    st.sampled_from([0.05, 0.25, math.inf]),
)
def test_the_chunk_is_the_best_of_all(
    seconds: list[float], waiting: tuple[int, int, int], max_rows: int, max_wait: float
) -> None:
    """By trying each, with costs of any shape."""
    rows, decoding, others = waiting
    cost = FixedCost(CostTable(ROWS, (64,), (tuple(seconds),)))
    chosen = prefill_chunk(
        cost, 0, rows=rows, decoding=decoding, others=others, max_rows=max_rows, max_wait_seconds=max_wait
    )
    before = cost.seconds(rows, 0)
    possible = range(min(4, max_rows), max_rows + 1)
    added = {n: max(0.0, cost.seconds(rows + n, 0) - before) for n in possible}
    fitting = [n for n in possible if added[n] <= (max_wait if decoding else math.inf)] or [possible[0]]
    waits = {n: (others * (before + added[n]) + decoding * added[n]) / n for n in fitting}
    best = min(waits.values())
    assert waits[chosen] <= 1.0300001 * best
    assert all(waits[n] > 1.0299999 * best for n in fitting if n > chosen)


def test_choosing_a_chunk_takes_as_much_work_for_many_rows_as_for_few() -> None:
    cost = machine()
    work = []
    for max_rows in (64, 512):
        chunk(cost, 9000, max_rows=max_rows)
        work.append(lines_run(partial(chunk, cost, 9000, max_rows=max_rows)))
    assert max(work) < 100
