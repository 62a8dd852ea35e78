"""What proposers offer: tokens that cost no forward pass, and how often such offers were right in a sequence."""

from __future__ import annotations

from collections import abc
from collections.abc import Container, Mapping
from itertools import accumulate
from operator import mul
from typing import NamedTuple

Kind = tuple[str, int]

# Proposals that a prior counts as, and the share of the counts that remains after each
# (benchmarks/decisions/tried.md).
_PRIOR_WEIGHT = 6.0
_MEMORY = 0.97


class Offer(NamedTuple):
    """Tokens that cost no forward pass to propose, and the probability of each if all before it are right."""

    tokens: list[int]
    confidence: list[float]

    @property
    def expected(self) -> float:
        """How many of the tokens are right, by these probabilities."""
        return float(sum(accumulate(self.confidence, mul)))

    def until(self, end_tokens: Container[int]) -> Offer:
        """The same without what follows the first of these tokens."""
        length = next((n for n, token in enumerate(self.tokens, 1) if token in end_tokens), len(self.tokens))
        return Offer(self.tokens[:length], self.confidence[:length])


class HitRates:
    """How often proposals of each kind were right in one sequence; recent ones weigh most.

    Args:
        priors: every kind there is, and how often such proposals are right in general, in (0, 1).
    """

    def __init__(self, priors: Mapping[Kind, float]) -> None:
        self._priors = priors
        self._right = dict.fromkeys(priors, 0.0)
        self._made = dict.fromkeys(priors, 0.0)

    def copy(self) -> HitRates:
        """The same counts, which go on separately."""
        other = HitRates(self._priors)
        other._right, other._made = self._right.copy(), self._made.copy()
        return other

    def add(self, kind: Kind, *, right: bool) -> None:
        """Count a proposal that a decided token has confirmed or refuted."""
        self.add_all(kind, [right])

    def add_all(self, kind: Kind, hits: abc.Sequence[bool]) -> None:
        """Count proposals in order, and whether each was right."""
        right, made = self._right[kind], self._made[kind]
        for is_right in hits:
            right = _MEMORY * right + is_right
        for _ in hits:
            before, made = made, _MEMORY * made + 1
            if made == before:
                # More do not change it.
                break
        self._right[kind], self._made[kind] = right, made

    def confidence(self, kind: Kind) -> float:
        """The probability that a proposal of this kind is right; never 0 or 1."""
        return (self._right[kind] + _PRIOR_WEIGHT * self._priors[kind]) / (self._made[kind] + _PRIOR_WEIGHT)
