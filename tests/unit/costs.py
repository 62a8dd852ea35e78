"""Costs that tests can reason about: they do not follow what passes take, which says nothing of a fake engine."""

from __future__ import annotations

from collections.abc import Callable

from specserve.speculation.cost import Cost, CostTable


class FixedCost(Cost):
    """A cost that stays as measured."""

    def observe(self, rows: int, kv_len: int, seconds: float) -> None:
        """Learn nothing."""


def table(cost: Callable[[int], float], *, most: int = 32) -> CostTable:
    """A table that measured every number of rows, whatever the context."""
    rows = tuple(range(1, most + 1))
    seconds = tuple(map(cost, rows))
    return CostTable(rows, (64, 512), (seconds, seconds))


def proportional(seconds: float = 1.0) -> Cost:
    """Every row costs the same: no draft of a model can pay."""
    return FixedCost(table(lambda rows: seconds * rows))


def flat(seconds: float = 1.0) -> Cost:
    """All passes cost the same, as where memory alone counts: the more rows, the better."""
    return FixedCost(table(lambda rows: seconds + rows * 1e-6))


def stairs(seconds: float = 1.0, width: int = 4) -> Cost:
    """A pass costs as much as the next multiple of `width` rows, and a row more or less nothing; one alone is cheap."""
    return FixedCost(table(lambda rows: seconds * (1 if rows == 1 else 1.7 * (-(-rows // width)))))
