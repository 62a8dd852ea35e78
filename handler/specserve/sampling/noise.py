"""Makes noise by counters: a number is a pure function of its key, so no order of work can change or reuse it."""

import hashlib
import struct
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_UINT64 = 0xFFFF_FFFF_FFFF_FFFF


class Purpose(IntEnum):
    """What a number is drawn for; two purposes never share a number."""

    DRAFT = 0
    ACCEPT = 1
    RECOVER = 2
    BONUS = 3
    RACE = 4


class Noise:
    """The random numbers that a sequence draws in a round.

    `uniform` is keyed by (secret, round, purpose, index): by the round and not by the position in the text, because
    after a rejection a position is sampled again and must not see its old numbers. And not by the request's seed: how
    much is drafted for a sequence depends on what others have drawn, in this round and before, and that must not tell
    of the numbers that it has still to draw. So no two sequences share any, and no seed repeats an output.

    `exponentials` is keyed by (seed, choice, position): coupled verification shares them, on purpose, between draft,
    target, rounds and sequences. Its output depends on no lengths of drafts, so it repeats.
    """

    def __init__(self, *, secret: int, round_number: int, seed: int, choice: int, position: int) -> None:
        self._secret = secret  # a random number that no other sequence has
        self._round = round_number
        self._seed = seed
        self._choice = choice  # the index of the sequence among the request's completions of one prompt
        self._position = position  # how many tokens of the output are committed; `index` counts from there

    def uniform(self, purpose: Purpose, index: int) -> float:
        """A float64 in [0, 1) with 53 random bits."""
        key = struct.pack("<QQIQ", self._secret, self._round, purpose, index)
        bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        return (bits >> 11) * 2.0**-53

    def exponentials(self, index: int, part: int, count: int) -> NDArray[np.float64]:
        """Standard exponential numbers, shape (count,), float64; `part` numbers the races (`distribution.race`).

        Single precision would give zeros, and over a wide vocabulary a zero wins whatever its token's probability.
        """
        position = self._position + index
        key = struct.pack("<QQIQQ", self._seed & _UINT64, self._choice, Purpose.RACE, position, part)
        digest = hashlib.blake2b(key, digest_size=16).digest()
        bits = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)
        numbers: NDArray[np.float64] = -np.log1p((bits >> np.uint64(11)) * -(2.0**-53))
        return numbers
