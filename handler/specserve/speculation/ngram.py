"""N-gram drafts: a text goes on as it did, or as another text did, after the same tokens. They cost no forward pass.

One index finds the same tokens in four kinds of text: the sequence's own (prompt lookup decoding, Saxena 2023),
finished answers of the same pool and the operator's corpus (as SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975,
drafts from a suffix tree of recent outputs), and the output that the client predicts (OpenAI's Predicted Outputs).

    drafter       searches                              and proposes what followed
    lookup        own text, pool, corpus                the longest match, most often
    prediction    the prediction                        the longest match, the nearest to where the answer left it
"""

from array import array
from collections import abc
from collections.abc import Iterator
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from specserve.sequence import DrafterName, Pool, Sequence
from specserve.shares import Shares
from specserve.speculation.proposers import Proposal, Proposer

# Tokens that are hashed together: in one text of some thousand tokens, and in a pool of a million, where two tokens
# that follow each other tell little.
_IN_TEXT, _IN_POOL = 2, 3
# Occurrences of these tokens that are compared, the newest first, and tokens up to which agreement is counted
# (benchmarks/decisions/tried.md).
_NEWEST, _LONGEST = 16, 32
# How often the proposed token is right, by the number of tokens that agree, with `predicted` 0, 1, then 2 or 3, 4 to 7,
# 8 to 15, 16 to 31, 32. Counted in benchmarks/recordings; the controller calibrates further (acceptance.py).
_RATES = {
    "split": (0.2, 0.28, 0.35, 0.4, 0.45),
    "once": (0.47, 0.72, 0.84, 0.95, 0.98),
    "repeated": (0.75, 0.9, 0.95, 0.97, 0.98),
    "predicted": (0.75, 0.45, 0.7, 0.93, 0.95, 0.98, 0.99),
}

# Stands between the texts of a pool, and equals no token.
_BETWEEN = -1
# The memory limit of all pools together, in full pools (16 bytes a token), and the minimum size of a pool in tokens:
# even an empty index takes 600 bytes.
_FULL_POOLS, _LEAST_POOL = 8, 512
# Occurrences that are compared to find an answer in its prediction again: with 16 an edit with twelve changes takes 4 %
# more rounds.
_SEARCHED = 256


class NgramIndex:
    """A growing text, and where it has each run of n tokens: a hash table of the newest, each linked to the one before.

    A token takes 16 bytes. 32,768 tokens are added in 4 ms, a million in .4 s.
    """

    def __init__(self, n: int, tokens: abc.Iterable[int] = ()) -> None:
        self._n = n
        self.tokens = array("i")
        # Positions of runs' last tokens, -1 for none: of the newest run by hash; by such a position, of the run of the
        # same hash before it.
        self._newest = array("i", [-1])
        self._before = array("i")
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: abc.Iterable[int]) -> None:
        begin = len(self)
        self.tokens.extend(tokens)
        size = len(self)
        if size > len(self._newest):
            begin, self._before = 0, array("i")
            self._newest = array("i", [-1]) * 2 ** size.bit_length()
        self._before.extend(array("i", [-1]) * (size - begin))
        first = max(begin, self._n - 1)
        if size - first > _LONGEST:
            self._link_at_once(first)
            return
        for position in range(first, size):
            place = self._hash(self.tokens[position + 1 - self._n : position + 1])
            self._before[position] = self._newest[place]
            self._newest[place] = position

    def _link_at_once(self, first: int) -> None:
        """Link the runs whose last tokens are at `first` or after it, by sorting."""
        n, size = self._n, len(self)
        text = np.frombuffer(self.tokens, np.int32)[first + 1 - n :].astype(np.int64)
        places = self._hash([text[start : start + size - first] for start in range(n)])
        # Runs of one hash together, in the order of the text.
        keys = np.sort(places << 32 | np.arange(first, size))
        places, positions = keys >> 32, keys & (2**32 - 1)
        newest = np.frombuffer(self._newest, np.int32)
        is_first = np.append(True, places[1:] != places[:-1])
        before = np.where(is_first, newest[places], np.roll(positions, 1))
        np.frombuffer(self._before, np.int32)[positions] = before
        is_last = np.append(is_first[1:], True)
        newest[places[is_last]] = positions[is_last]

    def _hash(self, run: Any) -> Any:
        """The place of a run in the table, or of many runs: multiplicative hashing by the golden ratio (Knuth)."""
        mixed = 0
        for token in run:
            mixed = (mixed >> 12) + token * 0x9E3779B1 & (2**44 - 1)
        return mixed >> 12 & (len(self._newest) - 1)

    def agreement(self, end: int, suffix: abc.Sequence[int]) -> int:
        """How many tokens before a position equal the last ones of `suffix`, counted up to 32."""
        most = min(end, len(suffix), _LONGEST)
        pairs = zip(self.tokens[end - most : end][::-1], suffix[::-1], strict=False)
        return next((n for n, (own, other) in enumerate(pairs) if own != other), most)

    def matches(self, suffix: abc.Sequence[int], most: int = _NEWEST) -> Iterator[tuple[int, int]]:
        """Where the newest occurrences of the last n tokens of `suffix` end, and how many tokens before that agree."""
        if len(suffix) < self._n:
            return
        position = self._newest[self._hash(suffix[-self._n :])]
        while position >= 0 and most > 0:
            length = self.agreement(position + 1, suffix)
            if length >= self._n:
                yield position + 1, length
            position = self._before[position]
            most -= 1

    def propose(self, suffix: abc.Sequence[int], max_tokens: int, drafts: list[int] | None = None) -> Proposal:
        """What followed the longest matches of a suffix, drafts included, most often; among equals, after the newest.

        In the index of the text itself, the proposal may run on into the `drafts` after it and into itself, so that a
        periodic text goes on without end; they are None in an index of other texts.
        """
        matches = [(end, agreed) for end, agreed in self.matches(suffix) if end < len(self) or drafts]
        length = max((agreed for _, agreed in matches), default=0)
        rows = [self._following(end, max_tokens, drafts) for end, agreed in matches if agreed == length]
        proposal = Proposal([], [])
        for index in range(max_tokens):
            rows = [row for row in rows if index < len(row)]
            if not rows:
                break
            followers = [row[index] for row in rows]
            token = max(followers, key=followers.count)
            rows = [row for row in rows if row[index] == token]
            kind = "split" if len(rows) < len(followers) else "once" if len(rows) == 1 else "repeated"
            proposal.tokens.append(token)
            proposal.confidence.append(_rate(kind, length + index))
        return proposal

    def _following(self, position: int, max_tokens: int, drafts: list[int] | None) -> list[int]:
        row = self.tokens[position : position + max_tokens].tolist()
        if drafts is not None:
            row += drafts
            return (row * (max_tokens // len(row) + 1))[:max_tokens]
        return row[: row.index(_BETWEEN)] if _BETWEEN in row else row


def _rate(kind: str, length: int) -> float:
    """How often a token is right that is proposed after so many equal ones."""
    return _RATES[kind][min(length, _LONGEST).bit_length() - 7]


class Pools:
    """Finished answers by pool, each seen by its client alone, and the operator's corpus, which all see.

    Where there is no room for another, the client with the most tokens loses the pool that it used longest ago. A pool
    of `max_tokens` loses the older half; 0 keeps none.
    """

    def __init__(self, max_tokens: int, corpus: abc.Iterable[abc.Sequence[int]] = ()) -> None:
        self._max_tokens = max_tokens
        self._pools: Shares[str, NgramIndex] = Shares(_FULL_POOLS * max_tokens)
        self._corpus = NgramIndex(_IN_POOL, (token for text in corpus for token in (*text, _BETWEEN)))

    def of(self, pool: Pool | None) -> list[NgramIndex]:
        own = None if pool is None else self._pools.use(*pool)
        return [index for index in (own, self._corpus) if index]

    def add(self, pool: Pool | None, prompt: abc.Sequence[int], answer: abc.Sequence[int]) -> None:
        if pool is None or not answer or not self._max_tokens:
            return
        client, name = pool
        # The answer's beginning is found by the end of its prompt.
        text = [*prompt[-2 * _LONGEST :], *answer][1 - self._max_tokens :]
        index = self._pools.use(client, name) or NgramIndex(_IN_POOL)
        if len(index) + len(text) >= self._max_tokens:
            kept = min(len(index) // 2, self._max_tokens - len(text) - 1)
            index = NgramIndex(_IN_POOL, index.tokens[len(index) - kept :])
        index.extend([*text, _BETWEEN])
        self._pools.put(client, name, index, max(len(index), _LEAST_POOL))


class LookupProposer(Proposer):
    """Proposes how the sequence, an answer of its pool, or the corpus went on after the sequence's last tokens."""

    name: ClassVar[DrafterName] = "lookup"

    def __init__(self, pools: Pools | None = None) -> None:
        self._pools = pools or Pools(0)
        self._own: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def propose(self, sequence: Sequence, drafts: list[int], max_tokens: int) -> Proposal:
        if sequence not in self._own:
            self._own[sequence] = NgramIndex(_IN_TEXT)
        own = self._own[sequence]
        own.extend(sequence.tokens[len(own) :])
        suffix = [*sequence.tokens[-_LONGEST:], *drafts]
        proposals = [own.propose(suffix, max_tokens, drafts)]
        proposals += [index.propose(suffix, max_tokens) for index in self._pools.of(sequence.speculation.pool)]
        return max(proposals, key=lambda proposal: proposal.expected)

    def forget(self, sequence: Sequence) -> None:
        self._own.pop(sequence, None)
        self._pools.add(sequence.speculation.pool, sequence.prompt, sequence.answer)


class _Aligned:
    """Where an answer is in its prediction."""

    def __init__(self, prediction: abc.Sequence[int]) -> None:
        self.index = NgramIndex(_IN_TEXT, prediction)
        # The last sure alignment, a match of twice a hashed run: the answer's length, and the prediction's position.
        self.answered = self.position = 0

    def find(self, answered: int, suffix: abc.Sequence[int]) -> tuple[int, int] | None:
        """The position that an answer of so many tokens leads up to, and how many of its last tokens say so.

        While the answer follows the prediction that is the next position. Elsewhere the longest match counts, and among
        equals the nearest to where the answer left; without any, a single equal token a short way ahead of there.
        """
        index, left = self.index, self.position
        expected = left + answered - self.answered
        run = index.agreement(expected, suffix) if expected <= len(index) else 0
        if run >= min(2 * _IN_TEXT, answered):
            return expected, run
        found = max(index.matches(suffix, _SEARCHED), key=lambda match: (match[1], -abs(match[0] - left)), default=None)
        if found is None and suffix[-1] in (ahead := index.tokens[left : left + 2 * _LONGEST]):
            found = left + ahead.index(suffix[-1]) + 1, 1
        return found


class PredictionProposer(Proposer):
    """Proposes what the client predicted, from where the answer is in the prediction, also after it has left it."""

    name: ClassVar[DrafterName] = "prediction"

    def __init__(self) -> None:
        self._aligned: WeakKeyDictionary[Sequence, _Aligned] = WeakKeyDictionary()

    def propose(self, sequence: Sequence, drafts: list[int], max_tokens: int) -> Proposal:
        if not sequence.prediction:
            return Proposal([], [])
        if sequence not in self._aligned:
            self._aligned[sequence] = _Aligned(sequence.prediction)
        aligned, answered = self._aligned[sequence], sequence.generated
        suffix = sequence.tokens[max(sequence.prompt_length, len(sequence.tokens) - _LONGEST) :]
        match = aligned.find(answered, suffix)
        if match and match[1] >= 2 * _IN_TEXT:
            aligned.answered, aligned.position = answered, match[0]
        if drafts:
            match = aligned.find(answered + len(drafts), [*suffix, *drafts])
        if match is None:
            return Proposal([], [])
        end, length = match
        tokens = aligned.index.tokens[end : end + max_tokens].tolist()
        return Proposal(tokens, [_rate("predicted", length + index) for index in range(len(tokens))])
