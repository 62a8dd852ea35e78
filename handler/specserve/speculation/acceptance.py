"""How likely draft tokens are to be accepted, learned online from those that were verified.

A drafter (the draft model, lookup, ...) states its confidence in each token it proposes. One calibration a drafter maps
confidence to acceptance over all sequences; one log-odds offset a drafter and sequence says how this sequence differs.
Only positions that the verification reached teach anything: what follows a rejection was never compared.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import abc

# What half and twice of a constant change is in benchmarks/RESULTS.md, sensitivity.

# Log-odds of confidence that separate a calibration's bins: about .12, .27, .5, .73, .88, .95, .982, .9975.
_EDGES = (-2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 6.0)
# Acceptance probability by confidence, lowest bin first, before anything was verified: measured with a 1.5B and a 0.5B
# of one family (recordings of benchmarks/record.py, counted by these bins; no command prints them).
# "target" is no drafter: the probability that the draft model's token is accepted, by the target's confidence there.
PRIORS = {
    "model": (0.11, 0.3, 0.47, 0.7, 0.88, 0.95, 0.975, 0.99, 0.995),
    "target": (0.05, 0.2, 0.46, 0.68, 0.83, 0.9, 0.95, 0.98, 0.99),
    "lookup": (0.04, 0.12, 0.25, 0.42, 0.6, 0.75, 0.85, 0.92, 0.97),
}
# Prediction and grammar start as calibrated: about the centre of each bin, as a probability.
CALIBRATED = (0.07, 0.18, 0.38, 0.62, 0.82, 0.92, 0.965, 0.985, 0.995)
# Positions that a bin remembers, and positions that its prior counts as.
_MEMORY, _PRIOR_WEIGHT = 400.0, 8.0
# Share of a sequence's acceptance estimate that the latest position does not replace, so that about seven count, and
# positions that its prior counts as.
_FADE, _PRIOR_POSITIONS = 0.85, 2.0
# The same for the estimate over about fifty positions, its prior, and positions that this counts as.
_LONG_FADE, _LONG_PRIOR, _LONG_PRIOR_POSITIONS = 0.98, 0.65, 6.0
# Learning rate of an offset, in log-odds: at the first position, and the least; it falls as 1 / (1 + positions / 6).
_RATE, _LEAST_RATE, _RATE_POSITIONS = 0.5, 0.1, 6
# Offset of lookup on a sequence that has not repeated itself yet, in log-odds: its proposals are judged also when they
# are not drafted.
_LOOKUP_OFFSET = -1.0


def log_odds(probability: float) -> float:
    """The logit of a probability, which is kept within [0.005, 0.995]."""
    kept = min(0.995, max(0.005, probability))
    return math.log(kept / (1 - kept))


def sigmoid(odds: float) -> float:
    """The probability with these log-odds."""
    return 1 / (1 + math.exp(-odds))


class Calibration:
    """Acceptance probability by confidence of one drafter, over all sequences; recent positions weigh most.

    Args:
        prior: acceptance probability of each bin before anything was verified, lowest confidence first.
    """

    def __init__(self, prior: abc.Sequence[float]) -> None:
        self._accepted = [_PRIOR_WEIGHT * probability for probability in prior]
        self._seen = [_PRIOR_WEIGHT] * (len(_EDGES) + 1)

    def probability(self, confidence: float) -> float:
        """The probability that a token proposed with this confidence is accepted once verification reaches it."""
        index = _bin(confidence)
        return self._accepted[index] / self._seen[index]

    @property
    def probabilities(self) -> list[float]:
        """The same for every bin, lowest confidence first."""
        return [accepted / seen for accepted, seen in zip(self._accepted, self._seen, strict=True)]

    def learn(self, confidence: float, accepted: float) -> None:
        """Count one verified position; `accepted` is 1 or 0, or the probability with which the token was accepted."""
        index = _bin(confidence)
        fade = 1 - 1 / _MEMORY if self._seen[index] > _MEMORY else 1.0
        self._accepted[index] = fade * self._accepted[index] + accepted
        self._seen[index] = fade * self._seen[index] + 1


def _bin(confidence: float) -> int:
    kept = min(1 - 1e-9, max(1e-9, confidence))
    return bisect_right(_EDGES, math.log(kept / (1 - kept)))


class SequenceAcceptance:
    """What one sequence has shown of its drafts: two estimates, each corrected by an offset of this sequence.

    Of a token that a drafter proposes (`probability`): the drafter's confidence gives the acceptance probability over
    all sequences, `pooled`, by the drafter's calibration. Of the draft model's next token (`next_token`, `long_run`):
    the target's confidence at each verified position gives a `pooled` probability by the calibration "target", and
    `expect` takes their fading mean.

    Args:
        prior: the acceptance probability of the draft model's next token before anything is known.
    """

    def __init__(self, prior: float) -> None:
        self._offsets = {"lookup": _LOOKUP_OFFSET}
        self._positions: dict[str, int] = {}
        self._expected, self._weight = _PRIOR_POSITIONS * prior, _PRIOR_POSITIONS
        self._long_expected, self._long_weight = _LONG_PRIOR_POSITIONS * _LONG_PRIOR, _LONG_PRIOR_POSITIONS

    def probability(self, drafter: str, pooled: float) -> float:
        """The acceptance probability, from that of all sequences and this one's offset."""
        return sigmoid(log_odds(pooled) + self._offsets.get(drafter, 0.0))

    @property
    def next_token(self) -> float:
        """The acceptance probability of a token that the draft model has not drafted yet.

        The target's confidence in recent positions predicts it better than how many recent drafts were accepted, and
        it is known without drafting.
        """
        return self.probability("target", self._expected / self._weight)

    @property
    def long_run(self) -> float:
        """The same over about fifty positions, if that is lower: what a long catch-up is judged by."""
        return min(self.next_token, self.probability("target", self._long_expected / self._long_weight))

    def learn(self, drafter: str, pooled: float, accepted: float) -> None:
        """One step of online logistic regression towards the offset that explains this sequence's outcomes."""
        seen = self._positions.get(drafter, 0)
        self._positions[drafter] = seen + 1
        rate = max(_LEAST_RATE, _RATE / (1 + seen / _RATE_POSITIONS))
        self._offsets[drafter] = self._offsets.get(drafter, 0.0) + rate * (accepted - self.probability(drafter, pooled))

    def expect(self, pooled: float) -> None:
        """The target was so confident at a position that the draft model would be accepted with this probability."""
        self._expected = _FADE * self._expected + pooled
        self._weight = _FADE * self._weight + 1
        self._long_expected = _LONG_FADE * self._long_expected + pooled
        self._long_weight = _LONG_FADE * self._long_weight + 1
