"""How a text may go on, because what it ends with stood in it before: prompt lookup.

A suffix automaton (Blumer et al. 1985) knows every run of tokens of the text. Runs that end at the same places share
one of its states; it grows by at most two states, and on average by constant work, for every token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Tokens
from typing import ClassVar, NamedTuple
from weakref import WeakKeyDictionary

from specserve.sequence import DrafterName, Sequence

Kind = tuple[str, int]

# On code, prose, JSON and edits a prior of six guesses and a memory of about thirty of a kind had nearly the least
# log-loss, and the least is flat. Forgetting serves texts that change their ways where the answer begins.
_PRIOR_WEIGHT = 6.0
_MEMORY = 0.97


class FreeTokens(NamedTuple):
    """Tokens that may come next, and for each the probability that it is right if all before it are."""

    tokens: list[int]
    confidence: list[float]


class HitRates:
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


# What stood behind a single token came again in 7 % (prose) to 30 % (code) of cases, behind two about twice as often.
_SHORTEST = 2
# Longer ends are told apart no further. It bounds the work for a token of periodic text, where ends of every length
# have occurred, and among places that agree this far the newest is as good as the one that agrees for longer.
_LONGEST = 32

# How often the newest follower came again, by what is known of the context: it was followed by several tokens, it
# occurred once, or it was always followed by this one; and by its length: 2 to 3, 4 to 7, 8 to 15, 16 to 31, 32.
_RATES = {
    "split": (0.25, 0.25, 0.25, 0.25, 0.25),
    "once": (0.45, 0.68, 0.82, 0.91, 0.96),
    "repeated": (0.70, 0.82, 0.91, 0.94, 0.98),
}
_PRIORS = {
    (evidence, bits): rate
    for evidence, rates in _RATES.items()
    for bits, rate in enumerate(rates, _SHORTEST.bit_length())
}


class _Place(NamedTuple):
    """The longest end of a text that occurs in the automaton's: its state there, and its length."""

    state: int
    length: int


class _Automaton:
    """Every run of tokens of a growing text; state 0 is that of the empty run.

    Of a state: `followers` leads to the state of its runs with one more token; `parent` is that of their longest end
    which also occurs elsewhere, and `length` is the longest run's own. `newest` is where its runs last ended, and
    `seen` how often they occurred: both are kept for states with a run of up to _LONGEST tokens.
    """

    def __init__(self) -> None:
        self.followers: list[dict[int, int]] = [{}]
        self.newest = [0]
        self.seen = [0]
        self._parent = [-1]
        self._length = [0]
        self._whole = 0
        self.size = 0

    def step(self, place: _Place, token: int) -> _Place:
        """The place of the longest end, at most _LONGEST tokens, of what stands at `place` with this token behind."""
        state, length = place
        while state and token not in self.followers[state]:
            state = self._parent[state]
            length = self._length[state]
        following = self.followers[state].get(token)
        if following is None:
            return _Place(0, 0)
        length = min(length + 1, _LONGEST)
        return _Place(self._holder(following, length), length)

    def append(self, token: int, end: _Place) -> _Place:
        """Let the text grow.

        Args:
            token: what comes.
            end: the place that `step` gave for the text's new end.

        Returns:
            The same end's place in the automaton of the longer text.
        """
        self.size += 1
        self._grow(token)
        end = _Place(self._holder(end.state, end.length), end.length)
        state = end.state
        while state:
            self.newest[state] = self.size
            self.seen[state] += 1
            state = self._parent[state]
        return end

    def _holder(self, state: int, length: int) -> int:
        """Of a state and its parents the one that has the run of this length."""
        while state and self._length[self._parent[state]] >= length:
            state = self._parent[state]
        return state

    def _grow(self, token: int) -> None:
        """One step of the construction: a state for the whole text, and where its longest known end branches off."""
        before = self._whole
        self._whole = self._add({}, length=self.size, parent=0, seen=1)
        while before >= 0 and token not in self.followers[before]:
            self.followers[before][token] = self._whole
            before = self._parent[before]
        if before < 0:
            return
        known = self.followers[before][token]
        if self._length[known] > self._length[before] + 1:
            # Only the shorter runs of this state end here too, so they part from the longer ones.
            shorter = self._add(
                self.followers[known].copy(),
                length=self._length[before] + 1,
                parent=self._parent[known],
                seen=self.seen[known],
            )
            self._parent[known] = shorter
            while before >= 0 and self.followers[before].get(token) == known:
                self.followers[before][token] = shorter
                before = self._parent[before]
            known = shorter
        self._parent[self._whole] = known

    def _add(self, followers: dict[int, int], *, length: int, parent: int, seen: int) -> int:
        """A new state; its runs end where the text does."""
        self.followers.append(followers)
        self._length.append(length)
        self._parent.append(parent)
        self.newest.append(self.size)
        self.seen.append(seen)
        return len(self.followers) - 1


class Lookup:
    """An index over a growing text that guesses what comes next from what came behind the same tokens before."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._automaton = _Automaton()
        self._record = HitRates(_PRIORS)
        self._end = _Place(0, 0)
        self._source = 0

    def __len__(self) -> int:
        """Number of tokens that were taken up."""
        return len(self._text)

    def extend(self, tokens: Iterable[int]) -> None:
        """Take up decided tokens, in order; each first settles what would have been guessed in its place."""
        for token in tokens:
            if self._end.length >= _SHORTEST:
                self._record.add(self._kind(self._end), right=self._text[self._source] == token)
            end = self._automaton.step(self._end, token)
            # Where the text's new end stood before: from now on the newest place is the end itself.
            self._source = self._automaton.newest[end.state]
            self._end = self._automaton.append(token, end)
            self._text.append(token)

    def propose(self, drafts: Tokens[int], most: int) -> FreeTokens:
        """What stood behind the newest earlier occurrence of the longest end of the text and these drafts.

        The earlier occurrence lies in the text; what follows it may go on into the drafts and into the guess itself,
        so that periodic text goes on without end. No end of at least two tokens, no guess.

        Args:
            drafts: what may stand behind the text; they are not taken up.
            most: the most tokens to guess.
        """
        place, source = self._end, self._source
        for token in drafts:
            place = self._automaton.step(place, token)
            source = self._automaton.newest[place.state]
        guess = FreeTokens([], [])
        if place.length < _SHORTEST:
            return guess
        # Text and drafts from the source on, as far as they are needed; what is guessed stands behind them.
        run = [*self._text[source : source + max(most, 0)], *drafts]
        length, kind = place.length, self._kind(place)
        for i in range(most):
            token = run[i]
            run.append(token)
            guess.tokens.append(token)
            guess.confidence.append(self._record.confidence(kind))
            length = min(length + 1, _LONGEST)
            if source + i < len(self._text):
                place = self._automaton.step(place, token)
                kind = self._kind(place)
            else:
                kind = kind[0], length.bit_length()
        return guess

    def _kind(self, place: _Place) -> Kind:
        """What the text says of a context, and about how long it is."""
        state, bits = place.state, place.length.bit_length()
        if len(self._automaton.followers[state]) > 1:
            return "split", bits
        # The occurrence that ends the text has no follower yet.
        followed = self._automaton.seen[state] - (self._automaton.newest[state] == len(self._text))
        return "repeated" if followed > 1 else "once", bits


class LookupProposer:
    """Proposes what followed the last time the sequence ended as it does now."""

    name: ClassVar[DrafterName] = "lookup"

    def __init__(self) -> None:
        self._indices: WeakKeyDictionary[Sequence, Lookup] = WeakKeyDictionary()

    def propose(self, sequence: Sequence, drafts: list[int], limit: int) -> FreeTokens:
        """The continuation of the longest and newest match; see `drafters.Proposer`."""
        if sequence not in self._indices:
            self._indices[sequence] = Lookup()
        index = self._indices[sequence]
        index.extend(sequence.tokens[len(index) :])
        return index.propose(drafts, limit)
