"""The rules that keep the target's distribution: which drafted tokens stay, and which token follows them.

A rule sees the target's distributions p, the distributions q that the drafts were really sampled from, and
noise that was used for nothing else. Whatever the draft proposes, the text it leaves has exactly the law of
sampling every token from p.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from specserve.speculation.distribution import FloatArray, draw
from specserve.speculation.noise import Purpose


class UniformSource(Protocol):
    """Where a rule's random numbers come from."""

    def uniform(self, purpose: Purpose, index: int) -> float:
        """A number in [0, 1), independent of every other (purpose, index)."""


class Distributions(Protocol):
    """Rows of probabilities by place: a list of arrays, or one that computes a row when it is asked for."""

    def __getitem__(self, place: int, /) -> FloatArray:
        """The distribution at `place`, shape (vocabulary,)."""


class Verdict(NamedTuple):
    """The first `n_accepted` drafted tokens stay; `next_token` is recovered, or the bonus if all stayed."""

    n_accepted: int
    next_token: int


def verify_token(p: Distributions, q: Distributions, drafts: Sequence[int], noise: UniformSource) -> Verdict:
    """Token verification (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1).

    Draft x at place i stays with probability min(1, p_i(x) / q_i(x)). At the first that does not, the next token
    is recovered from norm(max(0, p_i - q_i)) (equation for p'); if all stay, the bonus token is drawn from p_gamma.

    Args:
        p: gamma + 1 rows, each of shape (vocabulary,); rows behind a rejection are never read.
        q: gamma rows, q[i] the distribution that drafts[i] was sampled from.
        drafts: gamma tokens.
        noise: the round's numbers; ACCEPT, RECOVER and BONUS are used.
    """
    for i, x in enumerate(drafts):
        p_i, q_i = p[i], q[i]
        if noise.uniform(Purpose.ACCEPT, i) * q_i[x] >= p_i[x]:
            return Verdict(i, recover(p_i, q_i, noise.uniform(Purpose.RECOVER, i)))
    return Verdict(len(drafts), draw(p[len(drafts)], noise.uniform(Purpose.BONUS, len(drafts))))


def residual(p: FloatArray, q: FloatArray) -> FloatArray:
    """What p has beyond q, max(0, p - q), not normalised; shapes (vocabulary,)."""
    return np.maximum(p - q, 0)


def recover(p: FloatArray, q: FloatArray, uniform: float) -> int:
    """A token from the normalised residual of p and q, shapes (vocabulary,)."""
    weights = residual(p, q)
    # p = q up to rounding leaves no residual; a rejection is then itself a rounding error, and p is right.
    return draw(weights if weights.any() else p, uniform)
