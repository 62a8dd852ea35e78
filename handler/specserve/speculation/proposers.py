"""Proposers: sources of draft tokens that cost no forward pass."""

from __future__ import annotations

from collections.abc import Container
from itertools import accumulate
from operator import mul
from typing import ClassVar, NamedTuple, Protocol

from specserve.errors import ConstraintError, MaskDeferred
from specserve.sequence import DrafterName, Sequence


class Proposal(NamedTuple):
    """Tokens that may follow, and the probability of each if all before it are right."""

    tokens: list[int]
    confidence: list[float]

    @property
    def expected(self) -> float:
        """How many of the tokens are right, by these probabilities."""
        return float(sum(accumulate(self.confidence, mul)))

    def until(self, end_tokens: Container[int]) -> Proposal:
        """Without what follows the first of these tokens."""
        length = next((n for n, token in enumerate(self.tokens, 1) if token in end_tokens), len(self.tokens))
        return Proposal(self.tokens[:length], self.confidence[:length])


class Proposer(Protocol):
    """A source of draft tokens that are a function of the sequence, its drafts included, and of nothing drawn."""

    name: ClassVar[DrafterName]

    def propose(self, sequence: Sequence, drafts: list[int], max_tokens: int) -> Proposal:
        """At most `max_tokens` tokens that may follow the sequence and these drafts of it; none is an answer."""

    def forget(self, sequence: Sequence) -> None:
        """Drop what is known of a sequence that has ended; most proposers know nothing."""
        del sequence


class GrammarProposer(Proposer):
    """Proposes the characters that the request's grammar leaves no choice about, as the tokenizer would write them."""

    name: ClassVar[DrafterName] = "grammar"

    def propose(self, sequence: Sequence, drafts: list[int], max_tokens: int) -> Proposal:
        if sequence.constraint is None:
            return Proposal([], [])
        try:
            tokens = sequence.constraint.forced([*sequence.answer, *drafts], max_tokens + 1)
        except (ConstraintError, MaskDeferred):
            # Verification asks the grammar about the same position.
            return Proposal([], [])
        # The same characters could be split into other tokens, and instead of the last the model may choose a longer
        # one. The two numbers lie in different bins of the calibration, which learns how often each kind is right.
        confidence = [*[0.9] * (len(tokens) - 1), 0.6]
        return Proposal(tokens[:max_tokens], confidence[: min(len(tokens), max_tokens)])
