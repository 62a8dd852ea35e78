"""How likely draft tokens are to be accepted, learned online from those that verification reached.

Each drafter states its confidence in the tokens it proposes; one calibration per drafter maps confidence to acceptance,
over all sequences. A token that the draft model has not drafted yet has no confidence: a fading average per sequence
says how often the model's drafts are accepted there. Drafts after a rejection were never compared, so nothing is
learned from them.
"""

import math
from bisect import bisect_right
from collections import abc
from functools import reduce
from weakref import WeakKeyDictionary

import numpy as np

from specserve.sampling.logits import TargetDistributions
from specserve.sequence import Sequence
from specserve.speculation.step import SequenceStep

# `benchmarks/simulate.py --set acceptance._FADE=.7` prints what another value changes.

# Log-odds of confidence that separate a calibration's bins: about .12, .27, .5, .73, .88, .95, .982, .9975.
_EDGES = (-2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 6.0)
# Acceptance probability by confidence, lowest bin first, before anything was verified: measured with a 1.5B and a 0.5B
# of one family (benchmarks/record.py).
PRIORS = {
    "model": (0.11, 0.3, 0.47, 0.7, 0.88, 0.95, 0.975, 0.99, 0.995),
    # The model's tokens behind masks.
    "masked": (0.12, 0.24, 0.41, 0.63, 0.82, 0.91, 0.93, 0.98, 0.99),
    # No drafter: the probability that the model's token is accepted, by the target's confidence there.
    "target": (0.05, 0.2, 0.46, 0.68, 0.83, 0.9, 0.95, 0.98, 0.99),
    # By its share of the probability that the draft and the alternatives before it leave.
    "alternative": (0.14, 0.24, 0.35, 0.53, 0.75, 0.85, 0.9, 0.95, 0.95),
    # Drafters without a model start as calibrated: about the centre of each bin.
    "other": (0.07, 0.18, 0.38, 0.62, 0.82, 0.92, 0.965, 0.985, 0.995),
}
# Positions that a bin remembers, and positions that its prior counts as.
_MEMORY, _PRIOR_WEIGHT = 400.0, 8.0
# The averages of a sequence that has shown nothing yet, before and behind masks, and what is left of one after another
# position.
_FIRST, _FADE = (0.65, 0.55), 0.9


class Calibration:
    """Acceptance probability by confidence of one drafter, over all sequences; recent positions weigh most."""

    def __init__(self, prior: abc.Sequence[float]) -> None:
        self._accepted = [_PRIOR_WEIGHT * probability for probability in prior]
        self._seen = [_PRIOR_WEIGHT] * (len(_EDGES) + 1)

    def probability(self, confidence: float) -> float:
        index = _bin(confidence)
        return self._accepted[index] / self._seen[index]

    @property
    def probabilities(self) -> list[float]:
        """Of every bin, lowest confidence first."""
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


class Acceptance:
    """The calibrations of all drafters, and the average of each sequence."""

    def __init__(self) -> None:
        self._calibrations: dict[tuple[str, bool], Calibration] = {}
        # By sequence: of tokens before and behind masks.
        self._averages: WeakKeyDictionary[Sequence, tuple[float, float]] = WeakKeyDictionary()

    @property
    def learned(self) -> dict[tuple[str, bool], list[float]]:
        """By drafter, and whether it is sampled: acceptance probability by confidence, lowest bin first."""
        return {key: calibration.probabilities for key, calibration in self._calibrations.items()}

    def of_token(self, sequence: Sequence, drafter: str, confidence: float) -> float:
        """The acceptance probability of a token in which its drafter has this confidence.

        Of an alternative it is the probability that it is recovered where its draft is rejected.
        """
        return self._calibration(sequence, drafter).probability(confidence)

    def of_next(self, sequence: Sequence, *, behind_mask: bool = False) -> float:
        """The acceptance probability of a token that the draft model has not drafted yet."""
        return self._averages.get(sequence, _FIRST)[behind_mask]

    def learn_from(self, step: SequenceStep, p: TargetDistributions, committed: list[int]) -> None:
        """Learn from a verification: from the drafts up to the first rejected one, and from refused proposals.

        Those were refused at the first position, which is always reached. Without them a drafter that was wrong for a
        while would never be tried again. `committed` is the accepted drafts, and the rule's own token if there is one.
        """
        sequence, n_accepted = step.sequence, step.n_accepted
        # The sum of min(p, q) is the acceptance probability in token verification; block verification accepts a little
        # more. Where it is known, it says more than the outcome.
        knows_probability = sequence.speculation.verification != "coupled" and not sequence.sampling.is_greedy
        for refused in step.refused:
            accepted = float(p[0][refused.token] if knows_probability else refused.token == committed[0])
            self._calibration(sequence, refused.drafter).learn(refused.confidence, accepted)
        outcomes: tuple[list[float], list[float]] = [], []
        for index, draft in enumerate(step.drafts[: n_accepted + 1]):
            accepted = float(index < n_accepted)
            if knows_probability:
                accepted = float(p[index][draft.token] if draft.q is None else np.minimum(p[index], draft.q).sum())
            self._calibration(sequence, draft.calibration).learn(draft.confidence, accepted)
            if draft.drafter == "model":
                outcomes[draft.behind_mask].append(accepted)
        self._learn_average(step, p, outcomes)
        if len(committed) > n_accepted:
            self._learn_alternatives(step, committed[n_accepted])

    def _learn_average(
        self, step: SequenceStep, p: TargetDistributions, outcomes: tuple[list[float], list[float]]
    ) -> None:
        """Update the averages by the outcomes of the model's drafts, or else by what the target's confidence predicts.

        Without drafts, only the target's confidence shows when drafts would be accepted again; it takes 0.2 ms.
        """
        by_target = self._calibration(step.sequence, "target")
        if step.drafts and step.drafts[0].drafter == "model":
            by_target.learn(p.confidence(0), outcomes[0][0])
        elif not any(outcomes) and not step.model_ended:
            outcomes[0].append(by_target.probability(p.confidence(0)))
        before = self._averages.get(step.sequence, _FIRST)
        first, masked = (
            reduce(lambda average, accepted: _FADE * average + (1 - _FADE) * accepted, each, average)
            for each, average in zip(outcomes, before, strict=True)
        )
        self._averages[step.sequence] = first, masked

    def _learn_alternatives(self, step: SequenceStep, recovered: int) -> None:
        """Learn from the first rejected draft's alternatives, whether the target has read them or not."""
        calibration = self._calibration(step.sequence, "alternative")
        rejected = step.drafts[step.n_accepted : step.n_accepted + 1]
        for alternative in rejected[0].alternatives if rejected else ():
            hit = alternative.token == recovered
            calibration.learn(alternative.share, float(hit))
            if hit:
                break

    def _calibration(self, sequence: Sequence, drafter: str) -> Calibration:
        key = (drafter, not sequence.sampling.is_greedy)
        if key not in self._calibrations:
            self._calibrations[key] = Calibration(PRIORS.get(drafter, PRIORS["other"]))
        return self._calibrations[key]
