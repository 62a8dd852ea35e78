"""A lookup: a sequence may continue as it did after the last occurrence of its present suffix.

Prompt lookup decoding (Saxena 2023).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import abc
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from specserve.speculation.offers import HitRates, Kind, Offer
from specserve.speculation.token_index import TokenIndex

# The lengths by which matching suffixes are distinguished, in tokens. What followed one token followed it again in 7 %
# (prose) to 30 % (code) of cases, what followed two about twice as often (no command prints that).
_LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
# Earlier occurrences of the last two tokens that are compared; this bounds the work for each token.
_NEWEST = 16

# Proposals of one kind that are counted in a prompt, the last so many: with HitRates' memory of .97 nothing that was
# counted before them is left of a double's 53 bits.
_COUNTED = 4096

# How often the newest continuation was right: where several tokens followed the suffix, where it occurred once, and
# where the same token always followed; by the suffix's length, 2 to 3, 4 to 7, 8 to 15, 16 to 31, 32 tokens. Only a
# beginning: each sequence counts its own (no command prints them).
_RATES = {
    "split": (0.25, 0.25, 0.25, 0.25, 0.25),
    "once": (0.45, 0.68, 0.82, 0.91, 0.96),
    "repeated": (0.70, 0.82, 0.91, 0.94, 0.98),
}
_EVIDENCE = tuple(_RATES)
_SPLIT, _ONCE, _REPEATED = range(3)
_PRIORS = {(evidence, bits): rate for evidence, rates in _RATES.items() for bits, rate in enumerate(rates, 2)}

# Ends of earlier occurrences of a run's last two tokens, ascending, and how many tokens before each are the run's last.
_Matches = dict[int, int]


class Lookup:
    """An index over a growing sequence that proposes what followed the same tokens before.

    Args:
        prompt: its first tokens, which are indexed at once; the result is that of `extend`.
    """

    def __init__(self, prompt: abc.Sequence[int] = ()) -> None:
        self._tokens = list(prompt)
        self._prompt = TokenIndex(self._tokens)
        # After which positions the sequence has a pair of tokens: the newest, ascending; of pairs that `extend` added.
        self._pairs: dict[tuple[int, int], abc.Sequence[int]] = {}
        # Of the sequence itself.
        self._matches: _Matches = {}
        self._record = HitRates(_PRIORS)
        if len(self._tokens) > 1:
            ends = self._ends(self._tokens)
            self._matches = _compare(self._tokens, ends[-_NEWEST:-1], {})
            for kind, hits in _hits(self._prompt):
                self._record.add_all(kind, hits)

    def __len__(self) -> int:
        """Number of tokens in the index."""
        return len(self._tokens)

    def copy(self) -> Lookup:
        """An index of the same tokens that grows separately; the prompt's part is shared."""
        other = Lookup()
        other._tokens, other._prompt = self._tokens.copy(), self._prompt
        other._pairs, other._matches = self._pairs.copy(), self._matches
        other._record = self._record.copy()
        return other

    def _ends(self, run: list[int]) -> abc.Sequence[int]:
        """Positions in the sequence after the newest occurrences of the last two tokens of `run`, ascending."""
        first, second = run[-2:]
        if (ends := self._pairs.get((first, second))) is None:
            ends = self._prompt.ends(first, second)[-_NEWEST:].tolist()
        return ends

    def extend(self, tokens: Iterable[int]) -> None:
        """Add decided tokens, in order; each first confirms or refutes what would have been proposed."""
        for token in tokens:
            ends, length = _longest(self._matches)
            if ends:
                self._record.add(_kind(self._tokens, ends, length), right=self._tokens[ends[-1]] == token)
            self._tokens.append(token)
            if len(self._tokens) > 1:
                before = self._ends(self._tokens)[1 - _NEWEST :]
                self._matches = _compare(self._tokens, before, self._matches)
                self._pairs[self._tokens[-2], token] = (*before, len(self._tokens))

    def propose(self, drafts: abc.Sequence[int], max_tokens: int) -> Offer:
        """What followed the newest earlier occurrence of the longest suffix of the sequence and these drafts.

        The continuation may run on into the drafts and into the proposal itself, so that periodic sequences continue
        without end. Without a matching suffix of two tokens there is no proposal.

        Args:
            drafts: draft tokens after the sequence; they are not added.
            max_tokens: the most tokens to propose.
        """
        # A copy of a long sequence would take longer than all else.
        run, length = self._tokens, len(self._tokens)
        run += drafts
        try:
            matches = _compare(run, self._ends(run), {}) if drafts and len(run) > 1 else self._matches
            return self._continuation(run, matches, max_tokens)
        finally:
            del run[length:]

    def _continuation(self, run: list[int], matches: _Matches, max_tokens: int) -> Offer:
        """What followed the newest of the longest matches; it is appended to `run`."""
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


def _hits(prompt: TokenIndex) -> Iterator[tuple[Kind, list[bool]]]:
    """By kind, whether what `Lookup.extend` would have proposed for the tokens of a prompt was right, in order."""
    size = len(prompt.tokens)
    all_runs = list(prompt.runs(_LENGTHS))
    following = np.append(prompt.text[1:], -1)[:size]
    # By position: the place of its pair among all; and of its longest match, the kind, and whether it was right.
    place = np.zeros(size, np.intp)
    place[all_runs[0].last] = np.arange(all_runs[0].last.size)
    kinds = np.full(size, -1, np.int8)
    is_right = np.zeros(size, np.bool_)
    # Nothing follows the last token.
    is_open = np.arange(size) < size - 1
    for runs in reversed(all_runs):
        last, is_again = runs.last, runs.is_again
        at = np.flatnonzero(is_again & is_open[last])
        places = place[last]
        at = at[places[at] - places[at - 1] < _NEWEST]
        if not at.size:
            continue
        followers = following[last]
        is_other = ~is_again
        is_other[1:] |= followers[1:] != followers[:-1]
        # From where on the same token has followed equal runs without interruption.
        begins = np.flatnonzero(is_other)
        begins = begins[np.searchsorted(begins, at - 1, side="right") - 1]
        oldest = places[at] - _NEWEST
        is_split = is_again[begins] & (places[begins - 1] > oldest)
        is_repeated = is_again[at - 1] & (places[at - 2] > oldest)
        evidence = np.where(is_split, _SPLIT, np.where(is_repeated, _REPEATED, _ONCE))
        matched = last[at]
        is_open[matched] = False
        is_right[matched] = ~is_other[at]
        kinds[matched] = evidence + len(_EVIDENCE) * runs.length.bit_length()
    for kind in np.unique(kinds[kinds >= 0]).tolist():
        bits, evidence = divmod(kind, len(_EVIDENCE))
        yield (_EVIDENCE[evidence], bits), is_right[np.flatnonzero(kinds == kind)[-_COUNTED:]].tolist()
