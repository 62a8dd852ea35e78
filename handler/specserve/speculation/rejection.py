"""The rules that keep the target's distribution: which drafted tokens stay, and which token follows them.

A rule sees the target's distributions p, the distributions q that the drafts were really sampled from, and noise.
Whatever the draft proposes, the text it leaves has exactly the law of sampling every token from p. How many tokens
are drafted may depend on all that was drafted before, but never on the token that would be drafted next.
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
        """Standard exponential numbers that belong to a position of the text, shape (count,)."""


class Distributions(Protocol):
    """Rows of probabilities by place: a list of arrays, or one that computes a row when it is asked for."""

    def __getitem__(self, place: int, /) -> FloatArray:
        """The distribution at `place`, shape (vocabulary,)."""


class Verdict(NamedTuple):
    """The first `n_accepted` drafted tokens stay; `next_token` is recovered, or the bonus if all stayed."""

    n_accepted: int
    next_token: int


def verify_token(p: Distributions, q: Distributions, drafts: Sequence[int], noise: NoiseSource) -> Verdict:
    """Token verification (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1).

    Draft x at place i stays with probability min(1, p_i(x) / q_i(x)). At the first that does not, the next token
    is recovered from norm(max(0, p_i - q_i)); if all stay, the bonus token is drawn from p_gamma.

    Args:
        p: gamma + 1 rows, each of shape (vocabulary,); rows behind a rejection are never read.
        q: gamma rows, q[i] the distribution that drafts[i] was sampled from.
        drafts: gamma tokens.
        noise: the round's numbers; ACCEPT, RECOVER and BONUS are used.
    """
    for i, x in enumerate(drafts):
        p_i, q_i = p[i], q[i]
        if noise.uniform(Purpose.ACCEPT, i) * float(q_i[x]) >= float(p_i[x]):
            return Verdict(i, recover(p_i, q_i, noise.uniform(Purpose.RECOVER, i)))
    return Verdict(len(drafts), draw(p[len(drafts)], noise.uniform(Purpose.BONUS, len(drafts))))


def verify_block(p: Distributions, q: Distributions, drafts: Sequence[int], noise: NoiseSource) -> Verdict:
    """Block verification (Sun et al. 2025, arXiv 2403.10444, algorithm 2): accepts at least as much as token's.

    With w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)) and w_0 = 1, the first i drafts may end the block with probability
    h_i = s_i / (s_i + 1 - w_i), s_i = sum max(0, w_i p_{i+1} - q_{i+1}), and h_gamma = w_gamma. The longest such i is
    accepted, and behind it the next token is recovered from norm(max(0, w_i p_{i+1} - q_{i+1})), or drawn from
    p_{gamma+1} as the bonus. (Places here count from 1, as in the paper.)

    Args and noise are those of `verify_token`; a row of p behind a draft of probability 0 is never read.
    """
    gamma = len(drafts)
    n_accepted, weight_there, weight = 0, 1.0, 1.0
    for i, x in enumerate(drafts):
        weight = min(1.0, weight * float(p[i][x]) / float(q[i][x]))
        if weight == 0:
            break
        if i + 1 < gamma:
            excess = float(residual(p[i + 1], q[i + 1], weight).sum(dtype=np.float64))
            # Nothing in excess of q and nothing to make up for: p = q there, and the block may end in peace.
            ends = excess / (excess + 1 - weight) if excess + 1 > weight else 1.0
        else:
            ends = weight
        if noise.uniform(Purpose.ACCEPT, i) < ends:
            n_accepted, weight_there = i + 1, weight
    if n_accepted == gamma:
        return Verdict(gamma, draw(p[gamma], noise.uniform(Purpose.BONUS, gamma)))
    uniform = noise.uniform(Purpose.RECOVER, n_accepted)
    return Verdict(n_accepted, recover(p[n_accepted], q[n_accepted], uniform, weight_there))


def verify_coupled(p: Distributions, _q: Distributions, drafts: Sequence[int], noise: NoiseSource) -> Verdict:
    """Coupled verification (Daliri et al. 2024, arXiv 2408.07978): the target's own choice, whatever was drafted.

    At every place the target's token wins a race whose noise belongs to the seed and the position of the text; drafts
    stay while they are that token. So one seed gives one text, with any drafts or none. A draft that raced with the
    same noise mostly wins where the target does.

    Args and noise are those of `verify_token`, but q is not needed and the noise is that of positions.
    """
    for i, x in enumerate(drafts):
        token = race(p[i], partial(noise.exponentials, i))
        if token != x:
            return Verdict(i, token)
    gamma = len(drafts)
    return Verdict(gamma, race(p[gamma], partial(noise.exponentials, gamma)))


def verify_greedy(argmax: Callable[[int], int], drafts: Sequence[int]) -> Verdict:
    """Greedy verification: what every rule comes to where all distributions are one-hot, without a row of either.

    Args:
        argmax: the target's most probable token by place; places behind a rejection are never asked for.
        drafts: gamma tokens.
    """
    for i, x in enumerate(drafts):
        token = argmax(i)
        if token != x:
            return Verdict(i, token)
    return Verdict(len(drafts), argmax(len(drafts)))


def sample_alone(q: FloatArray, place: int, noise: NoiseSource) -> int:
    """A draft for token and block verification: noise that nothing else ever sees."""
    return draw(q, noise.uniform(Purpose.DRAFT, place))


def sample_coupled(q: FloatArray, place: int, noise: NoiseSource) -> int:
    """A draft for coupled verification: the race that the target will run, with the draft's rates."""
    return race(q, partial(noise.exponentials, place))


class Rule(NamedTuple):
    """A way to draft a token and the verification that goes with it."""

    sample: Callable[[FloatArray, int, NoiseSource], int]
    verify: Callable[[Distributions, Distributions, Sequence[int], NoiseSource], Verdict]


RULES: dict[str, Rule] = {
    "token": Rule(sample_alone, verify_token),
    "block": Rule(sample_alone, verify_block),
    "coupled": Rule(sample_coupled, verify_coupled),
}


def residual(p: FloatArray, q: FloatArray, weight: float = 1.0) -> FloatArray:
    """What `weight` times p has beyond q, max(0, weight p - q), not normalised; shapes (vocabulary,)."""
    return np.maximum((p if weight == 1 else weight * p) - q, 0)


def recover(p: FloatArray, q: FloatArray, uniform: float, weight: float = 1.0) -> int:
    """A token from the normalised residual of p and q, shapes (vocabulary,)."""
    rest = residual(p, q, weight)
    # p = q up to rounding leaves no residual; a rejection is then itself a rounding error, and p is right.
    return draw(rest if rest.any() else p, uniform)
