"""How likely draft tokens are to be accepted, learned online from those that were verified.

A drafter (the draft model, lookup, ...) states its confidence in each token it proposes. One calibration a drafter maps
confidence to acceptance over all sequences; one log-odds offset a drafter and sequence says how this sequence differs.
Only positions that the verification reached teach anything: what follows a rejection was never compared.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import abc
from typing import NamedTuple

import numpy as np

from specserve.sampling.distribution import is_greedy
from specserve.sampling.logits import TargetDistributions
from specserve.sequence import BySequence, Sequence
from specserve.speculation.step import Step

# benchmarks/simulate.py --sensitivity prints what half and twice of each of these change.

# Acceptance probability of the draft model on a sequence that has shown nothing yet.
_FIRST = 0.75
# Log-odds of confidence that separate a calibration's bins: about .12, .27, .5, .73, .88, .95, .982, .9975.
_EDGES = (-2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 6.0)
# Acceptance probability by confidence, lowest bin first, before anything was verified: measured with a 1.5B and a 0.5B
# of one family (recordings of benchmarks/record.py, counted by these bins; no command prints them).
# "target" is no drafter: the probability that the draft model's token is accepted, by the target's confidence there.
PRIORS = {
    "model": (0.11, 0.3, 0.47, 0.7, 0.88, 0.95, 0.975, 0.99, 0.995),
    "target": (0.05, 0.2, 0.46, 0.68, 0.83, 0.9, 0.95, 0.98, 0.99),
    "lookup": (0.04, 0.12, 0.25, 0.42, 0.6, 0.75, 0.85, 0.92, 0.97),
    # By its share of the probability that the draft and the alternatives before it leave.
    "alternative": (0.14, 0.24, 0.35, 0.53, 0.75, 0.85, 0.9, 0.95, 0.95),
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


class Observation(NamedTuple):
    """A proposed token that verification reached: its drafter's confidence in it, and whether it was accepted.

    `accepted` is 0, 1, or the probability with which the token was accepted. `target_confidence` is the target's at
    that position; None for a token that was proposed but not drafted.
    """

    drafter: str
    confidence: float
    accepted: float
    target_confidence: float | None


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
    all sequences, `pooled`, by the drafter's calibration. Of the draft model's next token (`next_acceptance` and
    `long_run_acceptance`): the target's confidence at each verified position gives a `pooled` probability by the
    calibration "target", and `expect` takes their fading mean.
    """

    def __init__(self) -> None:
        self._offsets = {"lookup": _LOOKUP_OFFSET}
        self._positions: dict[str, int] = {}
        self._expected, self._weight = _PRIOR_POSITIONS * _FIRST, _PRIOR_POSITIONS
        self._long_expected, self._long_weight = _LONG_PRIOR_POSITIONS * _LONG_PRIOR, _LONG_PRIOR_POSITIONS

    def probability(self, drafter: str, pooled: float) -> float:
        """The acceptance probability, from that of all sequences and this one's offset."""
        return sigmoid(log_odds(pooled) + self._offsets.get(drafter, 0.0))

    @property
    def next_acceptance(self) -> float:
        """The acceptance probability of a token that the draft model has not drafted yet.

        The target's confidence in recent positions predicts it better than how many recent drafts were accepted, and
        it is known without drafting.
        """
        return self.probability("target", self._expected / self._weight)

    @property
    def long_run_acceptance(self) -> float:
        """The same over about fifty positions, if that is lower: what a long catch-up is judged by."""
        return min(self.next_acceptance, self.probability("target", self._long_expected / self._long_weight))

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


class Acceptance:
    """What all sequences and each one have shown of their drafts."""

    def __init__(self) -> None:
        self._calibrations: dict[tuple[str, bool], Calibration] = {}
        self._sequences = BySequence(lambda _: SequenceAcceptance())

    @property
    def learned(self) -> dict[tuple[str, bool], list[float]]:
        """By drafter, and whether it is sampled: acceptance probability by confidence, lowest bin first."""
        return {key: calibration.probabilities for key, calibration in self._calibrations.items()}

    def of_token(self, sequence: Sequence, drafter: str, confidence: float) -> float:
        """The acceptance probability of a token in which its drafter has this confidence."""
        return self.of(sequence).probability(drafter, self._calibration(sequence, drafter).probability(confidence))

    def of_alternative(self, sequence: Sequence, confidence: float) -> float:
        """The probability that an alternative is recovered where its draft is rejected; confidence is its share."""
        return self._calibration(sequence, "alternative").probability(confidence)

    def of(self, sequence: Sequence) -> SequenceAcceptance:
        """What one sequence has shown."""
        return self._sequences.of(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drop what a sequence has shown; what all have shown stays."""
        self._sequences.forget(sequence)

    def learn_from(self, step: Step, p: TargetDistributions, decided: list[int]) -> None:
        """Learn from a verification: from the drafts that it reached, up to the first rejected one, and refused offers.

        Args:
            step: its offers were refused at the first position, which is always reached.
            p: the target's distributions.
            decided: the accepted drafts, and the rule's own token if there is one.
        """
        sequence, n_accepted = step.sequence, step.n_accepted
        # The sum of min(p, q) is the acceptance probability in token verification; block verification accepts a little
        # more. Where it is known, it says more than the outcome.
        knows_probability = sequence.speculation.verification != "coupled" and not is_greedy(sequence.sampling)
        observations = []
        for refused in step.refused:
            accepted = float(p[0][refused.token]) if knows_probability else float(refused.token == decided[0])
            observations.append(Observation(refused.drafter, refused.confidence, accepted, target_confidence=None))
        for index, draft in enumerate(step.drafts[: n_accepted + 1]):
            q = draft.q if knows_probability else None
            accepted = float(index < n_accepted) if q is None else float(np.minimum(p[index], q).sum())
            observations.append(
                Observation(draft.drafter, draft.confidence, accepted, target_confidence=p.confidence(index))
            )
        has_own_token = len(decided) > n_accepted
        if has_own_token:
            self._learn_alternatives(step, decided[n_accepted])
        self.learn(
            sequence, observations, p.confidence(n_accepted) if step.learns_from_target and has_own_token else None
        )

    def _learn_alternatives(self, step: Step, recovered: int) -> None:
        """Learn from the first rejected draft's alternatives, whether the target has read them or not."""
        calibration = self._calibration(step.sequence, "alternative")
        for alternative in step.possible:
            if alternative.draft_index == step.n_accepted:
                hit = alternative.token == recovered
                calibration.learn(alternative.confidence, float(hit))
                if hit:
                    break

    def learn(self, sequence: Sequence, observations: abc.Sequence[Observation], confidence: float | None) -> None:
        """Learn from the tokens that verification reached, and from the target's confidence after the accepted ones.

        That predicts whether the draft model's next token will be accepted; None where it is not known.
        """
        own = self.of(sequence)
        by_target = self._calibration(sequence, "target")
        for seen in observations:
            calibration = self._calibration(sequence, seen.drafter)
            own.learn(seen.drafter, calibration.probability(seen.confidence), seen.accepted)
            calibration.learn(seen.confidence, seen.accepted)
            if seen.target_confidence is None:
                continue
            # The calibration "target" predicts the draft model's token from the target's confidence, drafted or not;
            # only the draft model's own outcomes teach it.
            pooled = by_target.probability(seen.target_confidence)
            own.expect(pooled)
            if seen.drafter == "model":
                own.learn("target", pooled, seen.accepted)
                by_target.learn(seen.target_confidence, seen.accepted)
        # After a rejection this is the rejected position again, which so counts twice. Counted once, the slowest
        # recorded answer is at 0.998 of plain decoding instead of 1.018 (benchmarks/simulate.py, 1.5B, our kernels).
        if confidence is not None:
            own.expect(by_target.probability(confidence))

    def _calibration(self, sequence: Sequence, drafter: str) -> Calibration:
        key = (drafter, not is_greedy(sequence.sampling))
        if key not in self._calibrations:
            self._calibrations[key] = Calibration(PRIORS.get(drafter, CALIBRATED))
        return self._calibrations[key]
