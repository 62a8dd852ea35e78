"""Sources of drafts that cost no forward pass: what the text, the client or the grammar says about what comes next."""

from __future__ import annotations

from typing import ClassVar, Protocol
from weakref import WeakKeyDictionary

from specserve.errors import ConstraintError
from specserve.sequence import DrafterName, Sequence
from specserve.speculation.guess import Guess
from specserve.speculation.lookup import Lookup
from specserve.speculation.prediction import Follower

# Another split of the same characters into tokens may be the target's choice.
_FORCED = 0.9


class Guesser(Protocol):
    """A source of guesses that are a function of the text, drafts included, and of nothing that was drawn."""

    name: ClassVar[DrafterName]

    def guess(self, sequence: Sequence, drafts: list[int], most: int) -> Guess:
        """At most `most` tokens that may stand behind the text and these drafts of it; none is an answer."""


class LookupDrafter:
    """Drafts what followed the last time the text ended as it does now."""

    name: ClassVar[DrafterName] = "lookup"

    def __init__(self) -> None:
        self._indices: WeakKeyDictionary[Sequence, Lookup] = WeakKeyDictionary()

    def guess(self, sequence: Sequence, drafts: list[int], most: int) -> Guess:
        """The continuation of the longest and newest match; see `Guesser.guess`."""
        if sequence not in self._indices:
            self._indices[sequence] = Lookup()
        index = self._indices[sequence]
        index.extend(sequence.tokens[len(index) :])
        return index.guess(drafts, most)


class PredictionDrafter:
    """Drafts what the client predicted, from where the answer stands in it."""

    name: ClassVar[DrafterName] = "prediction"

    def __init__(self) -> None:
        self._followers: WeakKeyDictionary[Sequence, Follower] = WeakKeyDictionary()

    def guess(self, sequence: Sequence, drafts: list[int], most: int) -> Guess:
        """The prediction's next tokens; see `Guesser.guess`."""
        if not sequence.prediction.size:
            return Guess([], [])
        if sequence not in self._followers:
            self._followers[sequence] = Follower(sequence.prediction.tolist())
        follower = self._followers[sequence]
        follower.extend(sequence.tokens[sequence.prompt_length + len(follower) :])
        return follower.guess(drafts, most)


class GrammarDrafter:
    """Drafts the characters that the request's grammar leaves no choice about."""

    name: ClassVar[DrafterName] = "grammar"

    def guess(self, sequence: Sequence, drafts: list[int], most: int) -> Guess:
        """The forced tokens, as the tokenizer would write them; see `Guesser.guess`."""
        if sequence.constraint is None:
            return Guess([], [])
        try:
            tokens = sequence.constraint.forced([*sequence.answer, *drafts], most)
        except ConstraintError:
            # The target's row of this place meets the same grammar and says what is to be done.
            return Guess([], [])
        return Guess(tokens, [_FORCED] * len(tokens))
