"""What a forward pass costs on this machine: a staircase over its rows, measured once, that rises with the context."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# One pass moves what is expected of it by at most this share: a pass that the machine held up says little.
_STEP = 0.02
_FURTHEST = 0.25
# Costs are remembered by this many kv_len of context.
_GRAIN = 64


@dataclass(frozen=True)
class CostTable:
    """Seconds of forward passes, as measured.

    Args:
        rows: the numbers of rows that were tried, ascending, 1 first.
        kv_len: two lengths of the context that the rows stood behind, ascending.
        seconds: by length of context, then by number of rows.
    """

    rows: tuple[int, ...]
    kv_len: tuple[int, int]
    seconds: tuple[tuple[float, ...], tuple[float, ...]]

    def at(self, kv_len: int) -> list[float]:
        """Seconds for each measured number of rows behind `kv_len` tokens, on the line through both measurements."""
        (near, far), (short, long) = self.kv_len, self.seconds
        share = max(0.0, (kv_len - near) / (far - near))
        # Attention never gets cheaper with the context; a line that falls is noise.
        return [low + share * max(0.0, high - low) for low, high in zip(short, long, strict=True)]


class Work(NamedTuple):
    """Seconds of a pass, as measured: what one row takes, which is mostly reading the weights, and what others add."""

    reading: float
    computing: float


@dataclass
class Speed:
    """How long passes take of late, in units of what was measured.

    Memory and cores are shared with strangers, each to its own degree, so the stairs become steeper and flatter.
    """

    reading: float = 1.0
    computing: float = 1.0

    def seconds(self, work: Work) -> float:
        """What work takes now."""
        return self.reading * work.reading + self.computing * work.computing

    def follow(self, work: Work, seconds: float) -> None:
        """Some work took so long; each factor answers for its share, and one held-up pass moves them like any other."""
        expected = self.seconds(work)
        share = self.computing * work.computing / expected
        surprise = math.log(seconds / expected)
        step = _step(surprise) / (share**2 + (1 - share) ** 2)
        self.reading *= math.exp(step * (1 - share))
        self.computing *= math.exp(step * share)


@dataclass
class Beside:
    """The same of a second model: as the machine is, which the first one's passes tell, times a factor of its own.

    So a model that is not run becomes slower and faster with the machine. The factor is for what was different when
    the two were measured, one after the other, and for what a pass costs beside its engine.
    """

    machine: Speed
    factor: float = 1.0

    def seconds(self, work: Work) -> float:
        """What work takes now."""
        return self.factor * self.machine.seconds(work)

    def follow(self, work: Work, seconds: float) -> None:
        """Some work took so long."""
        self.factor *= math.exp(_step(math.log(seconds / self.seconds(work))))


def _step(surprise: float) -> float:
    return _STEP * min(1.0, max(-1.0, surprise / _FURTHEST))


class Cost:
    """Seconds of one model's forward pass, and how many rows it should have.

    Of one text only numbers of rows that were measured are run, up to `most`: a pass between two stairs is padded up to
    the cheapest one above it, which may cost less than what was asked for (with llama.cpp's own kernels, which take
    rows by fours, four rows are cheaper than three).

    Args:
        table: the measurement.
        most: the most rows of a pass that is padded.
        speed: of its passes of late.
    """

    def __init__(self, table: CostTable, *, most: int, speed: Speed | Beside | None = None) -> None:
        self.table = table
        self._most = most
        self._speed = speed or Speed()
        self._known: dict[int, tuple[list[Work], list[int]]] = {}

    def seconds(self, rows: int, kv_len: int) -> float:
        """What a pass of at least `rows` rows takes, behind `kv_len` tokens in all slots; nothing for no rows."""
        return self._speed.seconds(self._work(rows, kv_len))

    def together(self, counts: Many[int], kv_len: int) -> float:
        """What the rows of several sequences take in one pass, so many of each; `kv_len` as in `seconds`."""
        return self.seconds(sum(counts), kv_len)

    def exactly(self, rows: int, kv_len: int) -> float:
        """What a pass of just so many rows takes, cheaper or dearer than one of more."""
        measured = self.table.at(kv_len)
        beyond = max(1.0, rows / self.table.rows[-1])
        price = beyond * float(np.interp(rows, self.table.rows, measured))
        return self._speed.seconds(_split(price, measured[0]))

    def padded(self, rows: int, kv_len: int) -> int:
        """The number of rows, `rows` or more, whose pass is the cheapest."""
        _, counts = self._priced(kv_len)
        return counts[rows] if 0 < rows < len(counts) else rows

    def observe(self, counts: Many[int], kv_len: int, seconds: float) -> None:
        """Let the machine's speed follow what a live pass took; one that is wider than any measured says nothing."""
        if sum(counts) <= self.table.rows[-1]:
            self._speed.follow(self._work(sum(counts), kv_len), seconds)

    def _work(self, rows: int, kv_len: int) -> Work:
        """What a pass of at least `rows` rows is made of."""
        works, _ = self._priced(kv_len)
        last = len(works) - 1
        if rows <= last:
            return works[rows]
        one = works[1].reading
        return _split((works[last].reading + works[last].computing) * rows / last, one)

    def _priced(self, kv_len: int) -> tuple[list[Work], list[int]]:
        """By number of rows, from 0: what a pass of at least so many is made of, and the number that is run."""
        bucket = kv_len // _GRAIN
        if bucket not in self._known:
            self._known[bucket] = self._envelope(bucket * _GRAIN)
        return self._known[bucket]

    def _envelope(self, kv_len: int) -> tuple[list[Work], list[int]]:
        measured = [pair for pair in zip(self.table.rows, self.table.at(kv_len), strict=True) if pair[0] <= self._most]
        prices, counts = [0.0], [0]
        for rows in range(1, measured[-1][0] + 1):
            price, count = min((seconds, count) for count, seconds in measured if count >= rows)
            prices.append(price)
            counts.append(count)
        return [_split(price, prices[1]) for price in prices], counts


def _split(price: float, one: float) -> Work:
    return Work(min(price, one), max(0.0, price - one))


def edges(most: int) -> tuple[int, ...]:
    """The numbers of rows worth measuring up to `most`: every one of the first block, then a stair's edges."""
    tried = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
    return tuple(rows for rows in tried if rows <= most)


def typical(seconds: list[float]) -> float:
    """The typical one of repeated measurements: the median of the faster half, since nothing makes a pass too fast."""
    return float(np.median(faster_half(seconds)))


def faster_half(seconds: list[float]) -> list[float]:
    """The shorter half of repeated measurements, ascending, the middle one included."""
    return sorted(seconds)[: (len(seconds) + 1) // 2]
