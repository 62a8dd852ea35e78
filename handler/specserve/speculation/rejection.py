"""The rules that keep the target's distribution: which draft tokens are accepted, and which token follows them.

A rule sees the target's distributions p, the distributions q that the drafts were really sampled from, and noise.
Whatever was drafted, the output is distributed exactly as if every token were sampled from p. How many tokens
are drafted may depend on all that was drafted before, also on q of the next position, but never on the token that is
sampled from it: a stopping time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from specserve.sampling.distribution import FloatArray, draw, race
from specserve.sampling.noise import Purpose


class NoiseSource(Protocol):
    """Where a rule's random numbers come from."""

    def uniform(self, purpose: Purpose, index: int) -> float:
        """A number in [0, 1), independent of every other (purpose, index) and of every other round."""

    def exponentials(self, index: int, part: int, count: int) -> FloatArray:
        """Standard exponential numbers that belong to a position of the sequence, shape (count,)."""


class Distributions(Protocol):
    """Distributions by draft position: a list of arrays, or one that computes each when it is asked for."""

    def __getitem__(self, index: int, /) -> FloatArray:
        """The distribution of the token after `index` drafts, shape (vocabulary,)."""


class Verdict(NamedTuple):
    """The first `n_accepted` draft tokens are accepted; `next_token` is recovered, or the bonus after all of them."""

    n_accepted: int
    next_token: int


def verify_token(p: Distributions, q: Distributions, drafts: Sequence[int], noise: NoiseSource) -> Verdict:
    """Token verification (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1).

    Draft token x at index i is accepted with probability min(1, p_i(x) / q_i(x)). At the first rejection the next token
    is recovered from norm(max(0, p_i - q_i)); if all are accepted, the bonus token is drawn from p_gamma.

    Args:
        p: gamma + 1 distributions, each of shape (vocabulary,); those after a rejection are never read.
        q: gamma distributions, q[i] the one that drafts[i] was sampled from.
        drafts: gamma tokens.
        noise: the round's numbers; ACCEPT, RECOVER and BONUS are used.
    """
    for i, x in enumerate(drafts):
        p_i, q_i = p[i], q[i]
        if noise.uniform(Purpose.ACCEPT, i) * float(q_i[x]) >= float(p_i[x]):
            return Verdict(i, recover(p_i, q_i, noise.uniform(Purpose.RECOVER, i)))
    return Verdict(len(drafts), draw(p[len(drafts)], noise.uniform(Purpose.BONUS, len(drafts))))


def verify_block(p: Distributions, q: Distributions, drafts: Sequence[int], noise: NoiseSource) -> Verdict:
    """Block verification (Sun et al. 2025, arXiv 2403.10444, algorithm 2).

    It accepts at least as many drafts in expectation as token verification.

    With w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)) and w_0 = 1, the first i drafts may end the block with probability
    h_i = s_i / (s_i + 1 - w_i), s_i = sum max(0, w_i p_{i+1} - q_{i+1}), and h_gamma = w_gamma. The longest such i is
    accepted, and after it the next token is recovered from norm(max(0, w_i p_{i+1} - q_{i+1})), or drawn from
    p_{gamma+1} as the bonus. (Indices count from 1 here, as in the paper.)

    Args and noise are those of `verify_token`; p after a draft token of probability 0 is never read.
    """
    gamma = len(drafts)
    n_accepted, weight_there, weight = 0, 1.0, 1.0
    for i, x in enumerate(drafts):
        weight = min(1.0, weight * float(p[i][x]) / float(q[i][x]))
        if weight == 0:
            break
        if i + 1 < gamma:
            excess = float(residual(p[i + 1], q[i + 1], weight).sum(dtype=np.float64))
            # No residual and weight 1: p = q at this index, and the block may end here.
            ends = excess / (excess + 1 - weight) if excess + 1 > weight else 1.0
        else:
            ends = weight
        if noise.uniform(Purpose.ACCEPT, i) < ends:
            n_accepted, weight_there = i + 1, weight
    if n_accepted == gamma:
        return Verdict(gamma, draw(p[gamma], noise.uniform(Purpose.BONUS, gamma)))
    uniform = noise.uniform(Purpose.RECOVER, n_accepted)
    return Verdict(n_accepted, recover(p[n_accepted], q[n_accepted], uniform, weight_there))


def verify_coupled(p: Distributions, drafts: Sequence[int], noise: NoiseSource) -> Verdict:
    """Coupled verification (Daliri et al. 2024, arXiv 2408.07978): the target's own choice, whatever was drafted.

    At every position the target's token wins an exponential race whose noise is keyed by seed and position; drafts are
    accepted while they equal it. So one seed gives one output, with any drafts or none. A draft sampled with the same
    noise mostly equals the target's token.

    Args are those of `verify_token` without q; the noise is that of positions.
    """
    for i, x in enumerate(drafts):
        token = race(p[i], partial(noise.exponentials, i))
        if token != x:
            return Verdict(i, token)
    gamma = len(drafts)
    return Verdict(gamma, race(p[gamma], partial(noise.exponentials, gamma)))


def verify_greedy(argmax: Callable[[int], int], drafts: Sequence[int]) -> Verdict:
    """Greedy verification: what every rule comes to where all distributions are one-hot, without computing them.

    Args:
        argmax: the target's most probable token by index; indices after a rejection are never asked for.
        drafts: gamma tokens.
    """
    for i, x in enumerate(drafts):
        token = argmax(i)
        if token != x:
            return Verdict(i, token)
    return Verdict(len(drafts), argmax(len(drafts)))


def sample_alone(q: FloatArray, index: int, noise: NoiseSource) -> int:
    """A draft token for token and block verification, with noise that nothing else uses."""
    return draw(q, noise.uniform(Purpose.DRAFT, index))


def sample_coupled(q: FloatArray, index: int, noise: NoiseSource) -> int:
    """A draft token for coupled verification: the target's race, run with the draft's probabilities."""
    return race(q, partial(noise.exponentials, index))


class Rule(NamedTuple):
    """How a draft token is sampled, and the verification that goes with it."""

    sample: Callable[[FloatArray, int, NoiseSource], int]
    verify: Callable[[Distributions, Distributions, Sequence[int], NoiseSource], Verdict]


RULES: dict[str, Rule] = {
    "token": Rule(sample_alone, verify_token),
    "block": Rule(sample_alone, verify_block),
    "coupled": Rule(sample_coupled, lambda p, _q, drafts, noise: verify_coupled(p, drafts, noise)),
}


def residual(p: FloatArray, q: FloatArray, weight: float = 1.0) -> FloatArray:
    """max(0, weight p - q), not normalised; shapes (vocabulary,)."""
    return np.maximum((p if weight == 1 else weight * p) - q, 0)


def recover(p: FloatArray, q: FloatArray, uniform: float, weight: float = 1.0) -> int:
    """A token from the normalised residual of p and q, shapes (vocabulary,)."""
    rest = residual(p, q, weight)
    # p = q up to rounding leaves no residual; a rejection is then itself a rounding error, and p is right.
    return draw(rest if rest.any() else p, uniform)
