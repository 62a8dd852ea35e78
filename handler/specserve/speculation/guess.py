"""What a free drafter answers, and how sure it may be: counts of how its guesses came true in the text so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

Kind = tuple[str, int]

# On code, prose, JSON and edits a prior of six guesses and a memory of about thirty of a kind had nearly the least
# log-loss, and the least is flat. Forgetting serves texts that change their ways where the answer begins.
_PRIOR_WEIGHT = 6.0
_MEMORY = 0.97


class Guess(NamedTuple):
    """Tokens that may come next, and for each the probability that it is right if all before it are."""

    tokens: list[int]
    confidence: list[float]


class TrackRecord:
    """How often guesses came true in one text, by kind, the recent ones above all.

    Args:
        priors: every kind there is, and how often such guesses come true in general, in (0, 1).
    """

    def __init__(self, priors: Mapping[Kind, float]) -> None:
        self._priors = priors
        self._right = dict.fromkeys(priors, 0.0)
        self._made = dict.fromkeys(priors, 0.0)

    def add(self, kind: Kind, *, right: bool) -> None:
        """Count a guess that a decided token has settled."""
        self._right[kind] = _MEMORY * self._right[kind] + right
        self._made[kind] = _MEMORY * self._made[kind] + 1

    def confidence(self, kind: Kind) -> float:
        """The probability that a guess of this kind is right; never 0 or 1, since what is forgotten is bounded."""
        return (self._right[kind] + _PRIOR_WEIGHT * self._priors[kind]) / (self._made[kind] + _PRIOR_WEIGHT)
