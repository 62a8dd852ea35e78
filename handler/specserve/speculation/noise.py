"""Counter-based noise: every number is a pure function of its key, so no order of work can change or reuse it."""

from __future__ import annotations

import hashlib
import struct
from enum import IntEnum


class Purpose(IntEnum):
    """What a number is drawn for; two purposes never share one."""

    DRAFT = 0
    ACCEPT = 1
    RECOVER = 2
    BONUS = 3


class Noise:
    """The uniform numbers of one round of one sequence.

    Keyed by (seed, choice, round, purpose, index). The round is part of the key, not the position in the text:
    after a rejection a position is visited again, and must not see its old numbers.
    """

    def __init__(self, seed: int, choice: int, round_number: int) -> None:
        self._key = struct.pack("<QQQ", seed & 0xFFFF_FFFF_FFFF_FFFF, choice, round_number)

    def uniform(self, purpose: Purpose, index: int) -> float:
        """A float64 in [0, 1) with 53 random bits."""
        message = self._key + struct.pack("<II", purpose, index)
        bits = int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little")
        return (bits >> 11) * 2.0**-53
