"""What finished answers wrote: a sequence may go on as one of them did after the same tokens.

As SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975) drafts from a suffix tree of recent outputs; here a hash table
of the runs of three tokens leads to the newest occurrences, which are then compared as far as they agree. Adding an
answer and finding one take microseconds, whatever the size.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, abc
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specserve.sequence import Pool
from specserve.speculation.offers import HitRates, Kind, Offer

# Tokens that lead to earlier occurrences, in hashed runs: fewer would find what means nothing.
_HASHED = 3
# Occurrences that are compared, the newest, and tokens up to which agreement is counted.
_NEWEST, _LONGEST = 16, 32
# Tokens of the prompt that are kept before an answer: by them its beginning is found again.
_OF_PROMPT = 64
# Positions around the end of a run.
_AROUND = np.arange(-_LONGEST - 1, 2 * _LONGEST)
_GOLDEN, _WORD = 0x9E3779B97F4A7C15, 2**64 - 1
# Stands after every answer, and one that stands before every suffix; both equal no token.
_BETWEEN, _NOTHING = -1, -2
# Decided tokens by which a sequence's own record catches up, at most, when it is asked again after a pause.
_CAUGHT_UP = 16

# How often a continuation was right: where all occurrences of the suffix went on alike, where most did, where there is
# only one, and where they differ; by the suffix's length, 3, 4 to 7, 8 to 15, 16 to 31, 32 tokens. Only a beginning:
# each sequence counts its own (no command prints them).
_RATES = {
    "split": (0.25, 0.3, 0.35, 0.4, 0.45),
    "most": (0.5, 0.65, 0.75, 0.8, 0.85),
    "once": (0.4, 0.6, 0.8, 0.9, 0.95),
    "repeated": (0.65, 0.8, 0.9, 0.95, 0.98),
}
_PRIORS = {(evidence, bits): rate for evidence, rates in _RATES.items() for bits, rate in enumerate(rates, 2)}
# From this share of the occurrences on, most go on alike.
_MOST = 0.75


class Match(NamedTuple):
    """The longest suffix of a sequence that the history has.

    Args:
        length: in tokens, at most 32.
        following: what followed each of its newest occurrences, the newest first; after _BETWEEN anything.
        at: how many tokens of these belong to the match by now.
    """

    length: int
    following: list[list[int]]
    at: int = 0

    def next(self) -> tuple[int, Kind] | None:
        """The likeliest next token, and what is known of it; None at the end of an answer, or of what was returned."""
        if not self.following or self.at == len(self.following[0]):
            return None
        tokens = [row[self.at] for row in self.following]
        counts = Counter(tokens)
        counts.pop(_BETWEEN, None)
        if not counts:
            return None
        token, count = counts.most_common(1)[0]
        if len(counts) > 1:
            evidence = "most" if count >= _MOST * len(tokens) else "split"
        else:
            evidence = "once" if count == 1 else "repeated"
        return token, (evidence, self.length.bit_length())

    def after(self, token: int) -> Match:
        """The same match one token further, if that is this one."""
        following = [row for row in self.following if row[self.at] == token]
        return Match(min(self.length + 1, _LONGEST), following, self.at + 1)


_NONE = Match(0, [])


class History:
    """The last answers of one pool, and where each run of three tokens stands in them.

    Args:
        max_tokens: to keep; the oldest are overwritten.
    """

    def __init__(self, max_tokens: int) -> None:
        self._size = max(max_tokens, 4 * _OF_PROMPT)
        self._tokens = np.full(self._size, _BETWEEN, np.int32)
        # Positions count all tokens that were ever added. By position, where its run occurred before; by hash, where a
        # run occurred last: positions after the run, 0 for none.
        self._before = np.zeros(self._size, np.int64)
        self._bits = max(8, (self._size - 1).bit_length())
        self._last = np.zeros(2**self._bits, np.int64)
        # Of single numbers, a memory view is read several times as fast.
        self._before_of, self._last_of = self._before.data, self._last.data
        self._end = 0

    def __len__(self) -> int:
        """Number of tokens that it has."""
        return min(self._end, self._size)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """All that it has, the oldest first; `add` takes them."""
        return self._tokens[np.arange(self._end - len(self), self._end) % self._size]

    def add(self, tokens: abc.Sequence[int] | NDArray[np.int32]) -> None:
        """Add a text; of one that is too long, the end."""
        text = np.append(np.asarray(tokens, np.int32)[1 - self._size :], np.int32(_BETWEEN))
        begin = self._end
        places = np.arange(begin, begin + text.size)
        self._tokens[places % self._size] = text
        self._end += text.size
        runs = _hashes(text[:-1], self._bits)
        after = begin + _HASHED + np.arange(runs.size)
        # Runs of one hash together, in the order of the text.
        order = np.argsort(runs, kind="stable")
        runs, after = runs[order], after[order]
        is_first = np.ones(runs.size, np.bool_)
        is_first[1:] = runs[1:] != runs[:-1]
        before = np.where(is_first, self._last[runs], np.roll(after, 1))
        self._before[after % self._size] = before
        # Of several values for one hash the last one stays.
        self._last[runs] = after

    def match(self, suffix: abc.Sequence[int], max_tokens: int) -> Match:
        """Find the longest end of a text that the history has, of at least three tokens.

        Args:
            suffix: the last tokens of the text.
            max_tokens: to return of what followed each occurrence.
        """
        ends = self._occurrences(suffix) if len(suffix) >= _HASHED else []
        if not ends:
            return _NONE
        # Positions grow for ever, and `take` subtracts the size until they fit.
        around = np.array(ends)[:, None] % self._size + _AROUND[: _LONGEST + 1 + max_tokens]
        found = self._tokens.take(around, mode="wrap")
        backwards = suffix[: -_LONGEST - 1 : -1]
        sought = np.array([*backwards, *[_NOTHING] * (_LONGEST + 1 - len(backwards))], np.int32)
        # The first difference, from the end on.
        lengths = (found[:, _LONGEST::-1] != sought).argmax(axis=1)
        length = int(lengths.max())
        if length < _HASHED:
            return _NONE
        # Those that agree nearly as far say as much.
        enough = max(_HASHED, 1 << (length.bit_length() - 1))
        return Match(length, found[lengths >= enough, _LONGEST + 1 :].tolist())

    def _occurrences(self, suffix: abc.Sequence[int]) -> list[int]:
        """Positions after the newest runs whose hash is that of the last tokens of a text, the newest first."""
        oldest = max(0, self._end - self._size + _LONGEST)
        ends: list[int] = []
        end = self._last_of[_hash(suffix[-_HASHED:], self._bits)]
        while end > oldest and len(ends) < _NEWEST:
            ends.append(end)
            end = self._before_of[end % self._size]
        return ends


def _hash(run: abc.Sequence[int], bits: int) -> int:
    """A number below 2**bits for a run of tokens: multiplicative hashing (Knuth), by the golden ratio."""
    mixed = 0
    for token in run:
        mixed = (mixed ^ (mixed >> 29) ^ token) * _GOLDEN & _WORD
    return mixed >> (64 - bits)


def _hashes(text: NDArray[np.int32], bits: int) -> NDArray[np.int64]:
    """The same for each run of three tokens of a text."""
    value = text.astype(np.uint64)
    mixed = np.zeros(max(0, value.size + 1 - _HASHED), np.uint64)
    for index in range(_HASHED):
        following = value[index : index + mixed.size]
        mixed = (mixed ^ (mixed >> np.uint64(29)) ^ following) * np.uint64(_GOLDEN)
    return (mixed >> np.uint64(64 - bits)).astype(np.int64)


class Follower:
    """What one sequence draws from the histories, and how often that was right."""

    def __init__(self) -> None:
        self._record = HitRates(_PRIORS)
        self._known = 0
        self._match = _NONE

    def propose(
        self, histories: abc.Sequence[History], tokens: list[int], drafts: abc.Sequence[int], max_tokens: int
    ) -> Offer:
        """Propose what followed the sequence's last tokens and these drafts most often.

        Args:
            histories: the sequence's; of equally long matches the first counts.
            tokens: of the sequence.
            drafts: draft tokens after them.
            max_tokens: the most tokens to propose.
        """
        self._catch_up(histories, tokens)
        match = _longest(histories, [*tokens[-_LONGEST:], *drafts], max_tokens) if drafts else self._match
        offer = Offer([], [])
        while len(offer.tokens) < max_tokens and (found := match.next()):
            token, kind = found
            offer.tokens.append(token)
            offer.confidence.append(self._record.confidence(kind))
            match = match.after(token)
        return offer

    def _catch_up(self, histories: abc.Sequence[History], tokens: list[int]) -> None:
        """Let the tokens that were decided since the last call confirm or refute what would have been proposed."""
        if self._known == len(tokens):
            return
        # Of a sequence that is new, nothing was proposed before its last token.
        known = self._known or len(tokens) - 1
        first = max(known, len(tokens) - _CAUGHT_UP)
        match = self._match if first == self._known else _NONE
        for end in range(first + 1, len(tokens) + 1):
            if found := match.next():
                proposed, kind = found
                self._record.add(kind, right=proposed == tokens[end - 1])
            match = _longest(histories, tokens[max(0, end - _LONGEST) : end], _LONGEST if end == len(tokens) else 1)
        self._match, self._known = match, len(tokens)


def _longest(histories: abc.Sequence[History], suffix: abc.Sequence[int], max_tokens: int) -> Match:
    return max((history.match(suffix, max_tokens) for history in histories), key=lambda match: match.length)


class Pools:
    """The histories of all pools, of which the least recently used is dropped, and a corpus that all search.

    Args:
        max_tokens: of each.
        count: of pools.
    """

    def __init__(self, max_tokens: int, count: int = 8) -> None:
        self._max_tokens, self._count = max_tokens, count
        self._pools: OrderedDict[Pool, History] = OrderedDict()
        self.corpus: History | None = None

    def of(self, pool: Pool | None) -> list[History]:
        """What a sequence of this pool searches; None is no pool."""
        own = [] if pool is None or pool not in self._pools else [self._pools[pool]]
        return own + ([self.corpus] if self.corpus else [])

    def add(self, pool: Pool | None, prompt: abc.Sequence[int], answer: abc.Sequence[int]) -> None:
        """Add an answer to its pool."""
        if pool is not None and answer and self._max_tokens:
            self._open(pool).add([*prompt[-_OF_PROMPT:], *answer])

    def _open(self, pool: Pool) -> History:
        if pool not in self._pools:
            self._pools[pool] = History(self._max_tokens)
            if len(self._pools) > self._count:
                self._pools.popitem(last=False)
        self._pools.move_to_end(pool)
        return self._pools[pool]
