"""Drafters that cost no forward pass: what followed before, what the client predicted, what the grammar forces.

Lookup: a sequence may continue as it did after the last occurrence of its present suffix (Saxena 2023, prompt lookup
decoding).

Prediction: the output is aligned with the client's prediction across insertions, deletions and replacements.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, abc
from collections.abc import Container, Iterable, Mapping
from itertools import pairwise
from typing import ClassVar, NamedTuple, Protocol

from specserve.errors import ConstraintError, MaskDeferred
from specserve.sequence import DrafterName, Sequence

Kind = tuple[str, int]

# Assumed probability that a forced token is right: the same characters could be split into other tokens. The controller
# learns from then on what verification shows.
_FORCED_CONFIDENCE = 0.9

# Proposals that a prior counts as, and the share of the counts that remains after each (RESULTS.md, sensitivity).
_PRIOR_WEIGHT = 6.0
_MEMORY = 0.97


class FreeTokens(NamedTuple):
    """Tokens that cost no forward pass to propose, and the probability of each if all before it are right."""

    tokens: list[int]
    confidence: list[float]

    def until(self, end_tokens: Container[int]) -> FreeTokens:
        """The same without what follows the first of these tokens."""
        length = next((n for n, token in enumerate(self.tokens, 1) if token in end_tokens), len(self.tokens))
        return FreeTokens(self.tokens[:length], self.confidence[:length])


class Proposer(Protocol):
    """A source of draft tokens that are a function of the sequence, its drafts included, and of nothing drawn."""

    name: ClassVar[DrafterName]

    def propose(self, sequence: Sequence, drafts: list[int], limit: int) -> FreeTokens:
        """At most `limit` tokens that may follow the sequence and these drafts of it; none is an answer."""


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
_LOOKUP_PRIORS = {(evidence, bits): rate for evidence, rates in _RATES.items() for bits, rate in enumerate(rates, 2)}


class Lookup:
    """An index over a growing sequence that proposes what followed the same tokens before."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        # After which positions the sequence has a pair of tokens, ascending.
        self._pairs: dict[tuple[int, ...], list[int]] = {}
        self._record = HitRates(_LOOKUP_PRIORS)

    def __len__(self) -> int:
        """Number of tokens in the index."""
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add decided tokens, in order; each first confirms or refutes what would have been proposed."""
        for token in tokens:
            ends, length = self._matches(self._tokens)
            if ends:
                self._record.add(self._kind(self._tokens, ends, length), right=self._tokens[ends[-1]] == token)
            self._tokens.append(token)
            if len(self._tokens) > 1:
                self._pairs.setdefault(tuple(self._tokens[-2:]), []).append(len(self._tokens))

    def propose(self, drafts: abc.Sequence[int], most: int) -> FreeTokens:
        """What followed the newest earlier occurrence of the longest suffix of the sequence and these drafts.

        The continuation may run on into the drafts and into the proposal itself, so that periodic sequences continue
        without end. Without a matching suffix of two tokens there is no proposal.

        Args:
            drafts: draft tokens after the sequence; they are not added.
            most: the most tokens to propose.
        """
        run = [*self._tokens, *drafts]
        proposed = FreeTokens([], [])
        ends, length = self._matches(run)
        while ends and len(proposed.tokens) < most:
            token = run[ends[-1]]
            proposed.tokens.append(token)
            proposed.confidence.append(self._record.confidence(self._kind(run, ends, length)))
            ends = [end + 1 for end in ends if run[end] == token]
            length = min(length + 1, _LENGTHS[-1])
            run.append(token)
        return proposed

    def _matches(self, run: list[int]) -> tuple[list[int], int]:
        """Where the longest suffix of `run` (the sequence, and drafts after it) ended before, and its length."""
        ends = [end for end in self._pairs.get(tuple(run[-2:]), [])[-_NEWEST:] if end < len(run)]
        matched = _LENGTHS[0]
        for length in _LENGTHS[1:]:
            longer = [end for end in ends if end >= length and run[end - length : end] == run[-length:]]
            if not longer:
                break
            ends, matched = longer, length
        return ends, matched

    @staticmethod
    def _kind(run: list[int], ends: list[int], length: int) -> Kind:
        """What is known of a suffix that ended there before, and its length in powers of two."""
        split = len({run[end] for end in ends}) > 1
        return "split" if split else "once" if len(ends) == 1 else "repeated", length.bit_length()


# All in tokens, and assumed. A run of so many equal tokens is no coincidence: alignment is searched for until then, and
# next from there.
_TRUSTED = 4
# Longer runs are not distinguished.
_LONGEST = 32
# Occurrences of a pair of tokens that are compared, on either side of where the output left the prediction; this bounds
# the work for each token.
_NEAREST = 16
# How far ahead of there a single equal token counts as a match.
_AHEAD = 64

# How often the next token was as predicted: at the beginning, after the first different token, after more of them,
# and after 1, 2 to 3, 4 to 7, 8 to 15, 16 to 31 and 32 equal tokens. Only a beginning: each sequence counts its own (no
# command prints them).
_ALIGNMENT_PRIORS: dict[Kind, float] = {("start", 0): 0.5, ("left", 0): 0.3, ("lost", 0): 0.1}
_ALIGNMENT_PRIORS |= {("run", bits): rate for bits, rate in enumerate((0.35, 0.52, 0.75, 0.93, 0.975, 0.995), 1)}


class _Alignment(NamedTuple):
    """The output's next token is aligned with the prediction's token at `position`.

    The last `run` tokens were equal, counted up to _LONGEST. At `trusted` a run of _TRUSTED tokens last ended.
    """

    position: int = 0
    run: int = 0
    trusted: int = 0

    @property
    def kind(self) -> Kind:
        """What the confidence of a proposal from here depends on."""
        if self.run:
            return "run", self.run.bit_length()
        if not self.position:
            return "start", 0
        return ("left" if self.position == self.trusted + 1 else "lost"), 0


class Aligner:
    """Aligns a growing output with its prediction, and proposes what the prediction says next.

    Where the output leaves the prediction, each further token looks for the position at which both continue alike: the
    one that the longest suffix of the output leads up to, and among equals the nearest to where the output left. A
    single token is enough if the prediction has it only once or, with little confidence, a short way ahead. Until a
    position is found, the output is taken to replace it token for token.

    Args:
        prediction: tokens.
    """

    def __init__(self, prediction: Iterable[int]) -> None:
        self._prediction = [int(token) for token in prediction]
        self._output: list[int] = []
        self._record = HitRates(_ALIGNMENT_PRIORS)
        self._alignment = _Alignment()
        # After which positions the prediction has a pair of tokens, ascending; and each token that occurs only once.
        self._pairs: dict[tuple[int, int], list[int]] = {}
        for position, pair in enumerate(pairwise(self._prediction), 2):
            self._pairs.setdefault(pair, []).append(position)
        counts = Counter(self._prediction)
        self._once = {token: position for position, token in enumerate(self._prediction, 1) if counts[token] == 1}

    def __len__(self) -> int:
        """Number of tokens of the output that were added."""
        return len(self._output)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add decided tokens of the output, in order; each first confirms or refutes what would have been proposed."""
        for token in tokens:
            position, kind = self._alignment.position, self._alignment.kind
            if position < len(self._prediction):
                self._record.add(kind, right=self._prediction[position] == token)
            self._output.append(token)
            self._alignment = self._step(self._alignment, self._output)

    def propose(self, drafts: abc.Sequence[int], most: int) -> FreeTokens:
        """What the prediction says after the output and these drafts.

        Args:
            drafts: draft tokens after the decided output; they are not added.
            most: the most tokens to propose.
        """
        alignment = self._alignment
        output = self._output[-_LONGEST:]
        for token in drafts:
            output.append(token)
            alignment = self._step(alignment, output)
        tokens = self._prediction[alignment.position : alignment.position + max(most, 0)]
        confidence = []
        for _ in tokens:
            confidence.append(self._record.confidence(alignment.kind))
            alignment = _Alignment(alignment.position + 1, min(alignment.run + 1, _LONGEST), alignment.trusted)
        return FreeTokens(tokens, confidence)

    def _step(self, alignment: _Alignment, output: list[int]) -> _Alignment:
        """The alignment after one more token."""
        position, run, trusted = alignment
        follows = position < len(self._prediction) and self._prediction[position] == output[-1]
        if follows and run + 1 >= _TRUSTED:
            return _Alignment(position + 1, min(run + 1, _LONGEST), position + 1)
        positions = self._candidates(output, trusted)
        if follows:
            positions.insert(0, position + 1)
        if not positions:
            return _Alignment(position + 1, 0, trusted)
        # Of equals the first is taken: the one that was expected, or else the nearest.
        runs = [self._agreement(end, output) for end in positions]
        run = max(runs)
        position = positions[runs.index(run)]
        return _Alignment(position, run, position if run >= _TRUSTED else trusted)

    def _candidates(self, output: list[int], trusted: int) -> list[int]:
        """Positions after a token equal to the last one of the output, the most plausible first."""
        token = output[-1]
        positions = self._pairs.get((output[-2], token)) if len(output) > 1 else None
        if positions:
            middle = bisect_left(positions, trusted + 1)
            near = positions[max(middle - _NEAREST, 0) : middle + _NEAREST]
            return sorted(near, key=lambda position: (abs(position - trusted), position < trusted))
        if token in self._once:
            return [self._once[token]]
        ahead = self._prediction[trusted : trusted + _AHEAD]
        return [trusted + ahead.index(token) + 1] if token in ahead else []

    def _agreement(self, end: int, output: list[int]) -> int:
        """How many tokens before a position of the prediction equal the output's last ones, counted up to _LONGEST."""
        most = min(end, len(output), _LONGEST)
        return next((n for n in range(most) if self._prediction[end - 1 - n] != output[-1 - n]), most)


class LookupProposer:
    """Proposes what followed the last time the sequence ended as it does now."""

    name: ClassVar[DrafterName] = "lookup"

    def propose(self, sequence: Sequence, drafts: list[int], limit: int) -> FreeTokens:
        """The continuation of the longest and newest match; see `Proposer.propose`."""
        index = sequence.state(self, Lookup)
        index.extend(sequence.tokens[len(index) :])
        return index.propose(drafts, limit)


class PredictionProposer:
    """Proposes what the client predicted, from where the output is aligned with it."""

    name: ClassVar[DrafterName] = "prediction"

    def propose(self, sequence: Sequence, drafts: list[int], limit: int) -> FreeTokens:
        """The prediction's next tokens; see `Proposer.propose`."""
        if not sequence.prediction:
            return FreeTokens([], [])
        aligner = sequence.state(self, lambda: Aligner(sequence.prediction))
        aligner.extend(sequence.tokens[sequence.prompt_length + len(aligner) :])
        return aligner.propose(drafts, limit)


class GrammarProposer:
    """Proposes the characters that the request's grammar leaves no choice about."""

    name: ClassVar[DrafterName] = "grammar"

    def propose(self, sequence: Sequence, drafts: list[int], limit: int) -> FreeTokens:
        """The forced tokens, as the tokenizer would write them; see `Proposer.propose`."""
        if sequence.constraint is None:
            return FreeTokens([], [])
        try:
            tokens = sequence.constraint.forced([*sequence.answer, *drafts], limit)
        except (ConstraintError, MaskDeferred):
            # Verification asks the grammar about the same position.
            return FreeTokens([], [])
        return FreeTokens(tokens, [_FORCED_CONFIDENCE] * len(tokens))
