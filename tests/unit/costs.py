"""Costs of forward passes for tests: fixed, since the measured times of a fake engine mean nothing."""

from collections.abc import Callable

from specserve.speculation.costs import CostTable, PassCosts


class FixedCost(PassCosts):
    """A cost that ignores observed times."""

    def observe(self, rows: int, kv_len: int, seconds: float) -> None:
        """Do nothing."""


def table(cost: Callable[[int], float], *, max_rows: int = 32) -> CostTable:
    """A table with an entry for every number of rows, the same at every KV length."""
    rows = tuple(range(1, max_rows + 1))
    seconds = tuple(map(cost, rows))
    return CostTable(rows, (64, 16_384), (seconds, seconds))


def proportional(seconds: float = 1.0) -> PassCosts:
    """A pass costs as much as its rows together: a draft of the draft model can never pay."""
    return FixedCost(table(lambda rows: seconds * rows))


def flat(seconds: float = 1.0) -> PassCosts:
    """All passes cost nearly the same, as when memory bandwidth is the only limit."""
    return FixedCost(table(lambda rows: seconds + rows * 1e-6))


def stairs(seconds: float = 1.0, width: int = 4) -> PassCosts:
    """Cost in steps: as much as the next multiple of `width` rows, and less for a single row."""
    return FixedCost(table(lambda rows: seconds * (1 if rows == 1 else 1.7 * (-(-rows // width)))))
