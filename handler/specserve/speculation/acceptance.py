"""How likely drafts are to stay: learned from those that were reached, for all texts together and for each alone."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

# Log-odds of confidence that part the bins of a calibration: about .12, .27, .5, .73, .88, .95, .982, .9975.
_EDGES = (-2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 6.0)
_LEAST, _MOST = 0.005, 0.995


def log_odds(probability: float) -> float:
    """The logit, of a probability kept away from 0 and 1."""
    kept = min(_MOST, max(_LEAST, probability))
    return math.log(kept / (1 - kept))


def sigmoid(odds: float) -> float:
    """The probability of these log-odds."""
    return 1 / (1 + math.exp(-odds))


class Calibration:
    """From how sure a source is to how often it was right, over all texts, the latest weighing most.

    Args:
        prior: what is believed of each bin before anything was seen, lowest confidence first.
        weight: how many places that belief weighs.
    """

    BINS = len(_EDGES) + 1
    _MEMORY = 400.0

    def __init__(self, prior: Sequence[float], *, weight: float = 8.0) -> None:
        self._right = [weight * chance for chance in prior]
        self._seen = [weight] * self.BINS

    def chance(self, confidence: float) -> float:
        """The probability that what is guessed with this confidence stays where it is reached."""
        place = _bin(confidence)
        return self._right[place] / self._seen[place]

    @property
    def chances(self) -> list[float]:
        """The same for every bin, lowest confidence first."""
        return [right / seen for right, seen in zip(self._right, self._seen, strict=True)]

    def learn(self, confidence: float, label: float) -> None:
        """Count one place that was reached; `label` is 1 or 0, or the probability that the draft stayed."""
        place = _bin(confidence)
        fade = 1 - 1 / self._MEMORY if self._seen[place] > self._MEMORY else 1.0
        self._right[place] = fade * self._right[place] + label
        self._seen[place] = fade * self._seen[place] + 1


def _bin(confidence: float) -> int:
    kept = min(1 - 1e-9, max(1e-9, confidence))
    return bisect_right(_EDGES, math.log(kept / (1 - kept)))


class Outlook:
    """What one text has shown of its drafts so far.

    Args:
        hope: the chance of a draft of the model before anything is known of the text.
    """

    # The last seven places or so say most about the next one; measured on recordings (benchmarks/simulate.py).
    _FADE = 0.85
    _STEADY_FADE = 0.98
    _PRIOR = 2.0
    # An investment wants more evidence than a draft: so many places of a text that is somewhat hard.
    _STEADY_PRIOR, _STEADY_HOPE = 6.0, 0.65
    _RATE, _LEAST_RATE, _SLOWER = 0.5, 0.1, 6
    _FURTHEST = 2.5
    # A text is taken not to repeat itself until it does: what lookup would have guessed shows without being drafted.
    _DOUBTS: ClassVar[dict[str, float]] = {"lookup": -1.0}

    def __init__(self, hope: float) -> None:
        self._right, self._seen = self._PRIOR * hope, self._PRIOR
        self._steady_right, self._steady_seen = self._STEADY_PRIOR * self._STEADY_HOPE, self._STEADY_PRIOR
        self._offsets = dict(self._DOUBTS)
        self._lessons: Counter[str] = Counter()
        self._tokens = 0.0
        self._plain_tokens = 0.0
        self.debt = 0.0
        self.invested = 0
        self.reading = False
        self.plain_seconds = 0.0

    @property
    def hope(self) -> float:
        """The chance of a draft of the model at a place of which nothing is known yet.

        How sure the target was of late says more about it than how many of the last drafts stayed.
        """
        return self.chance("target", self._right / self._seen)

    @property
    def steady_hope(self) -> float:
        """The same over a longer stretch of the text, or the present one if that is lower."""
        return min(self.hope, self.chance("target", self._steady_right / self._steady_seen))

    def chance(self, source: str, pooled: float) -> float:
        """The chance of a draft, from what all texts say of its source and from how this one differs."""
        return sigmoid(log_odds(pooled) + self._offsets.get(source, 0.0))

    def learn(self, source: str, pooled: float, label: float) -> None:
        """A draft was reached: a step towards the offset that explains this text's labels (online logistic)."""
        surprise = label - self.chance(source, pooled)
        rate = max(self._LEAST_RATE, self._RATE / (1 + self._lessons[source] / self._SLOWER))
        self._lessons[source] += 1
        offset = self._offsets.get(source, 0.0) + rate * surprise
        self._offsets[source] = min(self._FURTHEST, max(-self._FURTHEST, offset))

    def expect(self, pooled: float) -> None:
        """So sure was the target of a place: that often drafts of the model stay at such places, in all texts."""
        self._right = self._FADE * self._right + pooled
        self._seen = self._FADE * self._seen + 1
        self._steady_right = self._STEADY_FADE * self._steady_right + pooled
        self._steady_seen = self._STEADY_FADE * self._steady_seen + 1

    @property
    def speedup(self) -> float:
        """Tokens of late, in units of what plain decoding brings in the same time; 1 at least, since that is free."""
        return max(1.0, self._tokens / self._plain_tokens) if self._plain_tokens else 1.0

    def count_round(self, tokens: int, plain_tokens: float, seconds: float, plain_seconds: float) -> None:
        """A round wrote `tokens` where plain decoding would have written `plain_tokens`; both by the cost model."""
        self._tokens = self._FADE * self._tokens + tokens
        self._plain_tokens = self._FADE * self._plain_tokens + plain_tokens
        self.debt += seconds - plain_seconds
        self.plain_seconds += plain_seconds
