"""Where an answer stands in the text that its client predicted, through insertions, deletions and replacements."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from itertools import pairwise
from typing import ClassVar, NamedTuple
from weakref import WeakKeyDictionary

from specserve.sequence import DrafterName, Sequence
from specserve.speculation.lookup import FreeTokens, HitRates, Kind

# So many tokens alike are no accident: from there the next search starts, and until there it goes on.
_TRUSTED = 4
# Longer ends of the answer are told apart no further.
_LONGEST = 32
# How many occurrences of a pair of tokens are compared on either side of where the answer left the prediction.
_NEAREST = 16
# How far ahead of there a single common token is believed to be the one that was predicted.
_AHEAD = 64

# How often the next token was as predicted: at the beginning, behind the first other token, behind more of them, and
# behind 1, 2 to 3, 4 to 7, 8 to 15, 16 to 31 and 32 tokens as predicted.
_PRIORS: dict[Kind, float] = {("start", 0): 0.5, ("left", 0): 0.3, ("lost", 0): 0.1}
_PRIORS |= {("run", bits): rate for bits, rate in enumerate((0.35, 0.52, 0.75, 0.93, 0.975, 0.995), 1)}


class _Standing(NamedTuple):
    """The answer is about to write the token at `place` of the prediction, if it does as it did.

    The last `run` tokens were as predicted, counted up to _LONGEST. At `trusted` a run of _TRUSTED tokens last ended.
    """

    place: int = 0
    run: int = 0
    trusted: int = 0

    @property
    def kind(self) -> Kind:
        """What a guess from here goes by."""
        if self.run:
            return "run", self.run.bit_length()
        if not self.place:
            return "start", 0
        return ("left" if self.place == self.trusted + 1 else "lost"), 0


class Follower:
    """Follows a predicted text through the answer, and guesses what it says next.

    Where the answer leaves the prediction, the place is looked for at which both go on alike: at each token the one
    that the longest end of the answer leads up to, and among equals the nearest to where the answer left. A single
    token is enough if the prediction has it only once or, with little confidence, a short way ahead. Until a place is
    found, the answer is believed to replace token for token.

    Args:
        prediction: what the client believes the answer will be.
    """

    def __init__(self, prediction: Iterable[int]) -> None:
        self._prediction = [int(token) for token in prediction]
        self._answer: list[int] = []
        self._record = HitRates(_PRIORS)
        self._standing = _Standing()
        # Behind which places the prediction has a pair of tokens, in order; and a token that occurs only once.
        self._pairs: dict[tuple[int, int], list[int]] = {}
        for place, pair in enumerate(pairwise(self._prediction), 2):
            self._pairs.setdefault(pair, []).append(place)
        counts = Counter(self._prediction)
        self._once = {token: place for place, token in enumerate(self._prediction, 1) if counts[token] == 1}

    def __len__(self) -> int:
        """Number of tokens of the answer that were taken up."""
        return len(self._answer)

    def extend(self, tokens: Iterable[int]) -> None:
        """Take up decided tokens of the answer, in order; each first settles what would have been guessed there."""
        for token in tokens:
            place, kind = self._standing.place, self._standing.kind
            if place < len(self._prediction):
                self._record.add(kind, right=self._prediction[place] == token)
            self._answer.append(token)
            self._standing = self._step(self._standing, self._answer)

    def propose(self, drafts: Tokens[int], most: int) -> FreeTokens:
        """What the prediction says behind the answer and these drafts.

        Args:
            drafts: what may stand behind the decided answer; they are not taken up.
            most: the most tokens to guess.
        """
        standing = self._standing
        written = self._answer[-_LONGEST:]
        for token in drafts:
            written.append(token)
            standing = self._step(standing, written)
        tokens = self._prediction[standing.place : standing.place + max(most, 0)]
        confidence = []
        for _ in tokens:
            confidence.append(self._record.confidence(standing.kind))
            standing = _Standing(standing.place + 1, min(standing.run + 1, _LONGEST), standing.trusted)
        return FreeTokens(tokens, confidence)

    def _step(self, standing: _Standing, written: list[int]) -> _Standing:
        """Where an answer stands whose last token is new."""
        place, run, trusted = standing
        follows = place < len(self._prediction) and self._prediction[place] == written[-1]
        if follows and run + 1 >= _TRUSTED:
            return _Standing(place + 1, min(run + 1, _LONGEST), place + 1)
        places = self._candidates(written, trusted)
        if follows:
            places.insert(0, place + 1)
        if not places:
            return _Standing(place + 1, 0, trusted)
        # The first of equals is taken: the one that was guessed, or else the nearest.
        runs = [self._agreement(behind, written) for behind in places]
        run = max(runs)
        place = places[runs.index(run)]
        return _Standing(place, run, place if run >= _TRUSTED else trusted)

    def _candidates(self, written: list[int], trusted: int) -> list[int]:
        """Places behind a token like the last one written, the most plausible first."""
        token = written[-1]
        places = self._pairs.get((written[-2], token)) if len(written) > 1 else None
        if places:
            middle = bisect_left(places, trusted + 1)
            near = places[max(middle - _NEAREST, 0) : middle + _NEAREST]
            return sorted(near, key=lambda place: (abs(place - trusted), place < trusted))
        if token in self._once:
            return [self._once[token]]
        ahead = self._prediction[trusted : trusted + _AHEAD]
        return [trusted + ahead.index(token) + 1] if token in ahead else []

    def _agreement(self, behind: int, written: list[int]) -> int:
        """How many tokens before a place of the prediction are those written last, counted up to _LONGEST."""
        most = min(behind, len(written), _LONGEST)
        return next((n for n in range(most) if self._prediction[behind - 1 - n] != written[-1 - n]), most)


class PredictionProposer:
    """Proposes what the client predicted, from where the answer stands in it."""

    name: ClassVar[DrafterName] = "prediction"

    def __init__(self) -> None:
        self._followers: WeakKeyDictionary[Sequence, Follower] = WeakKeyDictionary()

    def propose(self, sequence: Sequence, drafts: list[int], limit: int) -> FreeTokens:
        """The prediction's next tokens; see `drafters.Proposer`."""
        if not sequence.prediction.size:
            return FreeTokens([], [])
        if sequence not in self._followers:
            self._followers[sequence] = Follower(sequence.prediction.tolist())
        follower = self._followers[sequence]
        follower.extend(sequence.tokens[sequence.prompt_length + len(follower) :])
        return follower.propose(drafts, limit)
