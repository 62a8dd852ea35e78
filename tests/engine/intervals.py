"""Every outcome of a program that draws uniform numbers, with its probability: exactly, and without random numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from math import prod
from typing import TypeVar
from unittest import mock

from specserve.sampling.noise import Noise

Outcome = TypeVar("Outcome", bound=Hashable)

# No interval is split so near to its end: a border may be computed in two ways that round differently.
_ROUNDING = 1e-12
_MOST_PATHS = 100_000


class _Interval:
    """All that is known of a uniform number; a question that this leaves open splits the interval."""

    def __init__(self, path: _Path) -> None:
        self._low, self._high = 0.0, 1.0
        self._path = path

    @property
    def length(self) -> float:
        """The probability of what is known."""
        return self._high - self._low

    def is_below(self, border: float) -> bool:
        """Whether the number is less than `border`."""
        if border <= self._low + _ROUNDING:
            return False
        if border >= self._high - _ROUNDING:
            return True
        if self._path.answer():
            self._high = border
            return True
        self._low = border
        return False


class _Number:
    """A uniform number times `scale` plus `offset`, as code may compute and compare it."""

    def __init__(self, interval: _Interval, scale: float = 1.0, offset: float = 0.0) -> None:
        self._interval, self._scale, self._offset = interval, scale, offset

    def __mul__(self, factor: float) -> _Number:
        assert factor > 0
        return _Number(self._interval, self._scale * factor, self._offset * factor)

    def __sub__(self, number: float) -> _Number:
        return _Number(self._interval, self._scale, self._offset - number)

    def __lt__(self, other: float | _Number) -> bool:
        # np.searchsorted compares a number with itself.
        return not isinstance(other, _Number) and self._interval.is_below((other - self._offset) / self._scale)

    def __ge__(self, other: float) -> bool:
        return not self < other

    def __gt__(self, other: float | _Number) -> bool:
        # That both are equal has no probability.
        return not isinstance(other, _Number) and not self < other


class _Path:
    """One run: the answers to its questions, first those that are given and then always yes, and what they tell."""

    def __init__(self, answers: list[bool]) -> None:
        self._answers = answers
        self._asked = 0
        self._known: dict[float, _Interval] = {}

    def answer(self) -> bool:
        """Answer the next question."""
        if self._asked == len(self._answers):
            self._answers.append(True)
        self._asked += 1
        return self._answers[self._asked - 1]

    def number(self, name: float) -> _Number:
        """The uniform number of this name."""
        return _Number(self._known.setdefault(name, _Interval(self)))

    @property
    def probability(self) -> float:
        """That all these answers are given."""
        return prod(interval.length for interval in self._known.values())


def largest_error(found: Mapping[Outcome, float], expected: Mapping[Outcome, float]) -> float:
    """The largest error of the probability of any outcome."""
    return max(abs(float(found.get(key, 0.0) - expected.get(key, 0.0))) for key in found.keys() | expected.keys())


def outcomes(program: Callable[[], Outcome]) -> dict[Outcome, float]:
    """The probability of every outcome of a program that is random by `Noise.uniform` alone.

    It runs once for each sequence of answers to its comparisons with uniform numbers, and an interval of a number has
    its length as probability. Two numbers are one if their keys give the same number: so a key that is used twice,
    whoever uses it, has the effect that it has in production.
    """
    uniform = Noise.uniform
    probabilities: dict[Outcome, float] = defaultdict(float)
    answers: list[bool] = []
    for _ in range(_MOST_PATHS):
        path = _Path(answers)
        with mock.patch.object(Noise, "uniform", lambda *key, path=path: path.number(uniform(*key))):
            outcome = program()
        probabilities[outcome] += path.probability
        # The last question that has another answer gets it.
        while answers and not answers[-1]:
            answers.pop()
        if not answers:
            return probabilities
        answers[-1] = False
    raise AssertionError(f"The program has more than {_MOST_PATHS} paths.")
