"""Counter-based noise: every number is a pure function of its key, so no order of work can change or reuse it."""

from __future__ import annotations

import hashlib
import struct
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_UINT64 = 0xFFFF_FFFF_FFFF_FFFF


class Purpose(IntEnum):
    """What a number is drawn for; two purposes never share one."""

    DRAFT = 0
    ACCEPT = 1
    RECOVER = 2
    BONUS = 3
    RACE = 4


class Noise:
    """The random numbers of one round of one sequence.

    `uniform` is keyed by (seed, choice, round, purpose, index): by the round and not by the position in the text,
    because after a rejection a position is sampled again and must not see its old numbers. `exponentials` is keyed
    by (seed, choice, position): coupled verification shares them, on purpose, between draft, target and rounds.

    Args:
        position: how many tokens of the output are decided; `index` counts from there.
    """

    def __init__(self, seed: int, choice: int, round_number: int, position: int) -> None:
        self._seed = struct.pack("<QQ", seed & _UINT64, choice)
        self._round = round_number
        self._position = position

    def uniform(self, purpose: Purpose, index: int) -> float:
        """A float64 in [0, 1) with 53 random bits."""
        bits = int.from_bytes(self._digest(8, purpose, self._round, index), "little")
        return (bits >> 11) * 2.0**-53

    def exponentials(self, index: int, part: int, count: int) -> NDArray[np.float64]:
        """Standard exponential numbers, shape (count,), float64; `part` numbers the races of `distribution.race`.

        Single precision would give zeros, and over a wide vocabulary a zero wins whatever its token's probability.
        """
        key = self._digest(16, Purpose.RACE, self._position + index, part)
        bits = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(count)
        numbers: NDArray[np.float64] = -np.log1p((bits >> np.uint64(11)) * -(2.0**-53))
        return numbers

    def _digest(self, size: int, purpose: Purpose, major: int, minor: int) -> bytes:
        return hashlib.blake2b(self._seed + struct.pack("<IQQ", purpose, major, minor), digest_size=size).digest()
