"""Drafters that cost no forward pass: what followed before, what the client predicted, what the grammar forces.

Lookup: an index over prompt and output (lookup.py), and finished answers of others (history.py).

Prediction: the output is aligned with the client's prediction across insertions, deletions and replacements.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import abc
from collections.abc import Callable, Iterable
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

from specserve.errors import ConstraintError, MaskDeferred
from specserve.sequence import BySequence, DrafterName, Sequence
from specserve.speculation.history import Follower, Pools
from specserve.speculation.lookup import Lookup
from specserve.speculation.offers import HitRates, Kind, Offer
from specserve.speculation.token_index import TokenIndex

# Assumed probability that a forced token is right: the same characters could be split into other tokens; and that the
# last one is, where the model may choose a longer one that goes on beyond the forced text. The controller learns from
# then on what verification shows.
_FORCED_CONFIDENCE, _LAST_FORCED_CONFIDENCE = 0.9, 0.6

# Tokens of prompts, and of predictions, that are indexed in a round, but at least one text: 32,768 take 7 ms of a core
# of an EPYC where a word is repeated, and 11 in the worst text found. To begin a sequence's own from an index counts as
# an eighth of that. And tokens of answers in which lookups, and alignments, catch up in a round: 2 and 5 ms in the
# worst texts found (no command prints these; benchmarks/worst_cases.py has the repeated word).
_INDEXED_A_ROUND, _BEGIN_SHARE, _CAUGHT_UP_A_ROUND = 32_768, 8, 128


class Proposer(Protocol):
    """A source of draft tokens that are a function of the sequence, its drafts included, and of nothing drawn."""

    name: ClassVar[DrafterName]

    def begin_round(self) -> None:
        """A round begins: a proposer may limit what it does in it; most do not."""
        return

    def propose(self, sequence: Sequence, drafts: list[int], max_tokens: int) -> Offer:
        """At most `max_tokens` tokens that may follow the sequence and these drafts of it; none is an answer."""

    def forget(self, sequence: Sequence) -> None:
        """Drop what is known of a sequence; most proposers know nothing."""
        del sequence


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
        prediction: an index of its tokens, which alignments may share.
    """

    def __init__(self, prediction: TokenIndex) -> None:
        self._index = prediction
        self._prediction = prediction.tokens
        self._output: list[int] = []
        self._record = HitRates(_ALIGNMENT_PRIORS)
        self._alignment = _Alignment()

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

    def propose(self, drafts: abc.Sequence[int], max_tokens: int) -> Offer:
        """What the prediction says after the output and these drafts.

        Args:
            drafts: draft tokens after the decided output; they are not added.
            max_tokens: the most tokens to propose.
        """
        alignment = self._alignment
        output = self._output[-_LONGEST:]
        for token in drafts:
            output.append(token)
            alignment = self._step(alignment, output)
        tokens = self._prediction[alignment.position : alignment.position + max(max_tokens, 0)]
        confidence = []
        for _ in tokens:
            confidence.append(self._record.confidence(alignment.kind))
            alignment = _Alignment(alignment.position + 1, min(alignment.run + 1, _LONGEST), alignment.trusted)
        return Offer(tokens, confidence)

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
        ends = self._index.ends(output[-2], token) if len(output) > 1 else ()
        if len(ends):
            middle = bisect_left(ends, trusted + 1)
            near = ends[max(middle - _NEAREST, 0) : middle + _NEAREST]
            return sorted(map(int, near), key=lambda position: (abs(position - trusted), position < trusted))
        positions = self._index.positions(token)
        if len(positions) == 1:
            return [int(positions[0]) + 1]
        ahead = self._prediction[trusted : trusted + _AHEAD]
        return [trusted + ahead.index(token) + 1] if token in ahead else []

    def _agreement(self, end: int, output: list[int]) -> int:
        """How many tokens before a position of the prediction equal the output's last ones, counted up to _LONGEST."""
        max_run = min(end, len(output), _LONGEST)
        return next((n for n in range(max_run) if self._prediction[end - 1 - n] != output[-1 - n]), max_run)


class _Follower(Protocol):
    """Grows with the tokens of a sequence."""

    def __len__(self) -> int:
        """Number of tokens that it has."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Add decided tokens, in order."""


IndexT = TypeVar("IndexT")
FollowerT = TypeVar("FollowerT", bound=_Follower)


class _Followers(Generic[IndexT, FollowerT]):
    """The lookups or the alignments of all sequences, each begun from an index that all sequences with its text share.

    No round waits for them long: where it has no time to build an index, or to catch up with an answer for which nobody
    has asked in many rounds, a later one does.

    Args:
        text: of a sequence, which is indexed.
        build: an index of a text.
        begin: a sequence's own, from that index.
        has_prompt: whether this has the tokens of the prompt, or only those of the answer.
    """

    def __init__(
        self,
        text: Callable[[Sequence], list[int]],
        build: Callable[[list[int]], IndexT],
        begin: Callable[[IndexT], FollowerT],
        *,
        has_prompt: bool,
    ) -> None:
        self._text = text
        self._build = build
        self._begin = begin
        self._has_prompt = has_prompt
        # Kept as long as a sequence has it; the last one until another comes, since more answers may follow.
        self._indices: WeakKeyDictionary[IndexT, list[int]] = WeakKeyDictionary()
        self._last: IndexT | None = None
        self._by_sequence: BySequence[list[tuple[IndexT, FollowerT]]] = BySequence(lambda _: [])
        self._indexed = self._caught_up = 0

    def begin_round(self) -> None:
        """Allow further work."""
        self._indexed = self._caught_up = 0

    def of(self, sequence: Sequence) -> FollowerT | None:
        """What has all tokens of a sequence; None if that would take the round too long."""
        known = self._by_sequence.of(sequence)
        if not known:
            if self._indexed >= _INDEXED_A_ROUND:
                return None
            text = self._text(sequence)
            index = next((index for index, indexed in self._indices.items() if indexed == text), None)
            work = len(text) if index is None else len(text) // _BEGIN_SHARE
            if self._indexed and self._indexed + work > _INDEXED_A_ROUND:
                return None
            self._indexed += work
            if index is None:
                index = self._build(text)
                self._indices[index] = text
            self._last = index
            known.append((index, self._begin(index)))
        [(_, follower)] = known
        have = len(follower) + (0 if self._has_prompt else sequence.prompt_length)
        missing = sequence.tokens[have : have + _CAUGHT_UP_A_ROUND - self._caught_up]
        follower.extend(missing)
        self._caught_up += len(missing)
        return follower if have + len(missing) == len(sequence.tokens) else None

    def forget(self, sequence: Sequence) -> None:
        """Drop what is known of a sequence."""
        self._by_sequence.forget(sequence)


class LookupProposer(Proposer):
    """Proposes what followed before: the last time the sequence ended as it does now, or answers of its pool.

    Args:
        pools: of finished answers, which those that end join.
    """

    name: ClassVar[DrafterName] = "lookup"

    def __init__(self, pools: Pools | None = None) -> None:
        self._lookups = _Followers(lambda sequence: sequence.prompt, Lookup, Lookup.copy, has_prompt=True)
        self._pools = pools or Pools(0)
        self._followers = BySequence(lambda _: Follower())

    def begin_round(self) -> None:
        """Allow further indexing; see `Proposer.begin_round`."""
        self._lookups.begin_round()

    def propose(self, sequence: Sequence, drafts: list[int], max_tokens: int) -> Offer:
        """The continuation of the sequence's own match or of its pool's, whichever is expected to go further."""
        lookup = self._lookups.of(sequence)
        offer = Offer([], []) if lookup is None else lookup.propose(drafts, max_tokens)
        histories = self._pools.of(sequence.speculation.pool)
        if not histories:
            return offer
        other = self._followers.of(sequence).propose(histories, sequence.tokens, drafts, max_tokens)
        return other if other.expected > offer.expected else offer

    def forget(self, sequence: Sequence) -> None:
        """Drop the sequence's index, and keep what it has written."""
        self._lookups.forget(sequence)
        self._followers.forget(sequence)
        self._pools.add(sequence.speculation.pool, sequence.prompt, sequence.answer)


class PredictionProposer(Proposer):
    """Proposes what the client predicted, from where the output is aligned with it."""

    name: ClassVar[DrafterName] = "prediction"

    def __init__(self) -> None:
        self._aligners = _Followers(lambda sequence: list(sequence.prediction), TokenIndex, Aligner, has_prompt=False)

    def begin_round(self) -> None:
        """Allow further indexing and alignment; see `Proposer.begin_round`."""
        self._aligners.begin_round()

    def propose(self, sequence: Sequence, drafts: list[int], max_tokens: int) -> Offer:
        """The prediction's next tokens, once it is indexed and the output aligned; see `Proposer.propose`."""
        if not sequence.prediction:
            return Offer([], [])
        aligner = self._aligners.of(sequence)
        return Offer([], []) if aligner is None else aligner.propose(drafts, max_tokens)

    def forget(self, sequence: Sequence) -> None:
        """Drop the sequence's alignment."""
        self._aligners.forget(sequence)


class GrammarProposer(Proposer):
    """Proposes the characters that the request's grammar leaves no choice about."""

    name: ClassVar[DrafterName] = "grammar"

    def propose(self, sequence: Sequence, drafts: list[int], max_tokens: int) -> Offer:
        """The forced tokens, as the tokenizer would write them; see `Proposer.propose`."""
        if sequence.constraint is None:
            return Offer([], [])
        try:
            tokens = sequence.constraint.forced([*sequence.answer, *drafts], max_tokens + 1)
        except (ConstraintError, MaskDeferred):
            # Verification asks the grammar about the same position.
            return Offer([], [])
        confidence = [*[_FORCED_CONFIDENCE] * (len(tokens) - 1), _LAST_FORCED_CONFIDENCE]
        return Offer(tokens[:max_tokens], confidence[: min(len(tokens), max_tokens)])
