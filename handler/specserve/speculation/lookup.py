"""Prompt lookup: a sequence may continue as it did after the last occurrence of its present suffix.

A suffix automaton (Blumer et al. 1985) holds every run of tokens of the sequence. Runs that end at the same positions
share a state; it grows by at most two states, and on average by constant work, for every token.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable, Mapping
from typing import ClassVar, NamedTuple
from weakref import WeakKeyDictionary

from specserve.sequence import DrafterName, Sequence

Kind = tuple[str, int]

# Proposals that a prior counts as, and the share of the counts that remains after each; .94 and .985 instead, and half
# and twice the prior, change mean and slowest answer of benchmarks/simulate.py by .007 and .022 at most.
_PRIOR_WEIGHT = 6.0
_MEMORY = 0.97


class FreeTokens(NamedTuple):
    """Tokens that cost no forward pass to propose, and the probability of each if all before it are right."""

    tokens: list[int]
    confidence: list[float]


class HitRates:
    """How often proposals of each kind were right in one sequence; recent ones weigh most.

    Args:
        priors: every kind there is, and how often such proposals are right in general, in (0, 1).
    """

    def __init__(self, priors: Mapping[Kind, float]) -> None:
        self._priors = priors
        self._right = dict.fromkeys(priors, 0.0)
        self._made = dict.fromkeys(priors, 0.0)

    def add(self, kind: Kind, *, right: bool) -> None:
        """Count a proposal that a decided token has confirmed or refuted."""
        self._right[kind] = _MEMORY * self._right[kind] + right
        self._made[kind] = _MEMORY * self._made[kind] + 1

    def confidence(self, kind: Kind) -> float:
        """The probability that a proposal of this kind is right; never 0 or 1."""
        return (self._right[kind] + _PRIOR_WEIGHT * self._priors[kind]) / (self._made[kind] + _PRIOR_WEIGHT)


# Shortest matching suffix, in tokens: what followed one token followed it again in 7 % (prose) to 30 % (code) of
# cases, what followed two about twice as often (no command prints that).
_SHORTEST = 2
# Longer suffixes are not distinguished. That bounds the work for periodic sequences, where suffixes of every length
# have occurred, and among matches of this length the newest is as good as a longer one: with 16, the means of
# benchmarks/simulate.py change by .003.
_LONGEST = 32

# How often the newest continuation was right: where several tokens followed the suffix, where it occurred once, and
# where the same token always followed; by the suffix's length, 2 to 3, 4 to 7, 8 to 15, 16 to 31, 32 tokens. Only a
# beginning: each sequence counts its own (no command prints them).
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


class _Match(NamedTuple):
    """The longest suffix that occurs in the automaton: its state, and its length."""

    state: int
    length: int


class _Automaton:
    """Every run of tokens of a growing sequence; state 0 is the empty run.

    Of a state: `followers` leads to its runs with one more token; `parent` is the state of their longest suffix that
    also occurs elsewhere, and `length` is that of the longest run. `newest` is where its runs last ended, and `seen`
    how often they occurred: both are kept for states with a run of up to _LONGEST tokens.
    """

    def __init__(self) -> None:
        self.followers: list[dict[int, int]] = [{}]
        self.newest = [0]
        self.seen = [0]
        self._parent = [-1]
        self._length = [0]
        self._whole = 0
        self.size = 0

    def step(self, match: _Match, token: int) -> _Match:
        """The match of the longest suffix, at most _LONGEST tokens, after one more token."""
        state, length = match
        while state and token not in self.followers[state]:
            state = self._parent[state]
            length = self._length[state]
        following = self.followers[state].get(token)
        if following is None:
            return _Match(0, 0)
        length = min(length + 1, _LONGEST)
        return _Match(self._holder(following, length), length)

    def append(self, token: int, end: _Match) -> _Match:
        """Append a token.

        Args:
            token: the next one.
            end: what `step` gave for it.

        Returns:
            The same suffix in the automaton of the longer sequence.
        """
        self.size += 1
        self._grow(token)
        end = _Match(self._holder(end.state, end.length), end.length)
        state = end.state
        while state:
            self.newest[state] = self.size
            self.seen[state] += 1
            state = self._parent[state]
        return end

    def _holder(self, state: int, length: int) -> int:
        """Of a state and its ancestors the one that has the run of this length."""
        while state and self._length[self._parent[state]] >= length:
            state = self._parent[state]
        return state

    def _grow(self, token: int) -> None:
        """One step of the construction: a state for the whole sequence, and where its known suffix branches off."""
        before = self._whole
        self._whole = self._add({}, length=self.size, parent=0, seen=1)
        while before >= 0 and token not in self.followers[before]:
            self.followers[before][token] = self._whole
            before = self._parent[before]
        if before < 0:
            return
        known = self.followers[before][token]
        if self._length[known] > self._length[before] + 1:
            # Only the shorter runs of this state end here too, so they get a state of their own.
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
        """A new state; its runs end where the sequence does."""
        self.followers.append(followers)
        self._length.append(length)
        self._parent.append(parent)
        self.newest.append(self.size)
        self.seen.append(seen)
        return len(self.followers) - 1


class Lookup:
    """An index over a growing sequence that proposes what followed the same tokens before."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._automaton = _Automaton()
        self._record = HitRates(_PRIORS)
        self._end = _Match(0, 0)
        self._source = 0

    def __len__(self) -> int:
        """Number of tokens in the index."""
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add decided tokens, in order; each first confirms or refutes what would have been proposed."""
        for token in tokens:
            if self._end.length >= _SHORTEST:
                self._record.add(self._kind(self._end), right=self._tokens[self._source] == token)
            end = self._automaton.step(self._end, token)
            # Where the new suffix occurred before: after `append` its newest occurrence is the end itself.
            self._source = self._automaton.newest[end.state]
            self._end = self._automaton.append(token, end)
            self._tokens.append(token)

    def propose(self, drafts: abc.Sequence[int], most: int) -> FreeTokens:
        """What followed the newest earlier occurrence of the longest suffix of the sequence and these drafts.

        The continuation may run on into the drafts and into the proposal itself, so that periodic sequences continue
        without end. Without a matching suffix of two tokens there is no proposal.

        Args:
            drafts: draft tokens after the sequence; they are not added.
            most: the most tokens to propose.
        """
        match, source = self._end, self._source
        for token in drafts:
            match = self._automaton.step(match, token)
            source = self._automaton.newest[match.state]
        proposed = FreeTokens([], [])
        if match.length < _SHORTEST:
            return proposed
        # Sequence and drafts from the source on, as far as they are needed, and then what is proposed.
        run = [*self._tokens[source : source + max(most, 0)], *drafts]
        length, kind = match.length, self._kind(match)
        for i in range(most):
            token = run[i]
            run.append(token)
            proposed.tokens.append(token)
            proposed.confidence.append(self._record.confidence(kind))
            length = min(length + 1, _LONGEST)
            if source + i < len(self._tokens):
                match = self._automaton.step(match, token)
                kind = self._kind(match)
            else:
                kind = kind[0], length.bit_length()
        return proposed

    def _kind(self, match: _Match) -> Kind:
        """What is known of a suffix, and its length in powers of two."""
        state, bits = match.state, match.length.bit_length()
        if len(self._automaton.followers[state]) > 1:
            return "split", bits
        # The occurrence at the end of the sequence has no follower yet.
        followed = self._automaton.seen[state] - (self._automaton.newest[state] == len(self._tokens))
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
