"""A lookup: a sequence may continue as it did after the last occurrence of its present suffix.

Prompt lookup decoding (Saxena 2023).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import abc
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace

from specserve.speculation.offers import HitRates, Kind, Offer

# The lengths by which matching suffixes are distinguished, in tokens. What followed one token followed it again in 7 %
# (prose) to 30 % (code) of cases, what followed two about twice as often (no command prints that).
_LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
# Earlier occurrences of the last two tokens that are compared; this bounds the work for each token.
_NEWEST = 16

# How often the newest continuation was right: where several tokens followed the suffix, where it occurred once, and
# where the same token always followed; by the suffix's length, 2 to 3, 4 to 7, 8 to 15, 16 to 31, 32 tokens. Only a
# beginning: each sequence counts its own (no command prints them).
_RATES = {
    "split": (0.25, 0.25, 0.25, 0.25, 0.25),
    "once": (0.45, 0.68, 0.82, 0.91, 0.96),
    "repeated": (0.70, 0.82, 0.91, 0.94, 0.98),
}
_PRIORS = {(evidence, bits): rate for evidence, rates in _RATES.items() for bits, rate in enumerate(rates, 2)}

# Ends of earlier occurrences of a run's last two tokens, ascending, and how many tokens before each are the run's last.
_Matches = dict[int, int]


@dataclass(eq=False)
class Lookup:
    """An index over a growing sequence that proposes what followed the same tokens before."""

    _tokens: list[int] = field(default_factory=list)
    # After which positions the sequence has a pair of tokens: the newest, ascending.
    _pairs: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    # Of the sequence itself.
    _matches: _Matches = field(default_factory=dict)
    _record: HitRates = field(default_factory=lambda: HitRates(_PRIORS))

    def __len__(self) -> int:
        """Number of tokens in the index."""
        return len(self._tokens)

    def copy(self) -> Lookup:
        """An index of the same tokens that grows separately."""
        return replace(self, _tokens=self._tokens.copy(), _pairs=self._pairs.copy(), _record=deepcopy(self._record))

    def extend(self, tokens: Iterable[int]) -> None:
        """Add decided tokens, in order; each first confirms or refutes what would have been proposed."""
        for token in tokens:
            ends, length = _longest(self._matches)
            if ends:
                self._record.add(_kind(self._tokens, ends, length), right=self._tokens[ends[-1]] == token)
            self._tokens.append(token)
            if len(self._tokens) > 1:
                pair = tuple(self._tokens[-2:])
                before = self._pairs.get(pair, ())[1 - _NEWEST :]
                self._matches = _compare(self._tokens, before, self._matches)
                self._pairs[pair] = (*before, len(self._tokens))

    def propose(self, drafts: abc.Sequence[int], max_tokens: int) -> Offer:
        """What followed the newest earlier occurrence of the longest suffix of the sequence and these drafts.

        The continuation may run on into the drafts and into the proposal itself, so that periodic sequences continue
        without end. Without a matching suffix of two tokens there is no proposal.

        Args:
            drafts: draft tokens after the sequence; they are not added.
            max_tokens: the most tokens to propose.
        """
        run = [*self._tokens, *drafts]
        matches = _compare(run, self._pairs.get(tuple(run[-2:]), ()), {}) if drafts else self._matches
        ends, length = _longest(matches)
        proposed = Offer([], [])
        while ends and len(proposed.tokens) < max_tokens:
            token = run[ends[-1]]
            proposed.tokens.append(token)
            proposed.confidence.append(self._record.confidence(_kind(run, ends, length)))
            ends = [end + 1 for end in ends if run[end] == token]
            length = min(length + 1, _LENGTHS[-1])
            run.append(token)
        return proposed


def _compare(run: list[int], ends: abc.Sequence[int], before: Mapping[int, int]) -> _Matches:
    """How many tokens before each of these positions equal the last ones of `run`; exact up to the longest length.

    Args:
        run: tokens.
        ends: positions in it after its last two tokens.
        before: the matches of the run without its last token, as far as they are known; one is one token longer now.
    """
    matches = {}
    for end in ends:
        agreeing = before.get(end - 1, 1) + 1
        if agreeing == 2:
            max_length = min(end, _LENGTHS[-1])
            while agreeing < max_length and run[end - 1 - agreeing] == run[-1 - agreeing]:
                agreeing += 1
        matches[end] = agreeing
    return matches


def _longest(matches: _Matches) -> tuple[list[int], int]:
    """The ends of the longest matches, and their length, rounded down to one of `_LENGTHS`."""
    if not matches:
        return [], 0
    length = _LENGTHS[bisect_right(_LENGTHS, max(matches.values())) - 1]
    return [end for end, agreeing in matches.items() if agreeing >= length], length


def _kind(run: list[int], ends: list[int], length: int) -> Kind:
    """What is known of a suffix that ended there before, and its length in powers of two."""
    split = len({run[end] for end in ends}) > 1
    return "split" if split else "once" if len(ends) == 1 else "repeated", length.bit_length()
