"""The rules that keep the target's distribution: which draft tokens are accepted, and which token follows them.

A rule sees the target's distributions p, the distributions q that the drafts were really sampled from (one-hot for
drafters without a model), and noise. Whatever was drafted, the output is distributed exactly as if every token were
sampled from p.

A rule accepts the first drafts, 0 to gamma of them, and adds one token of the target: after a rejection the recovered
token, which replaces the first rejected draft; after gamma accepted drafts the bonus token. Indices count from 0: p_i
is the target's distribution after i drafts, and draft x_i was sampled from q_i. The decision to draft x_i is
made before x_i is sampled, and reveals nothing about random numbers that the sequence has still to draw: it depends on
the drafts before x_i, on q_i, and on what other sequences drew with random numbers of their own. So the number of
drafts is a stopping time.

A greedy request is verified by `accept_equal`. One that samples is verified by the rule that it asks for; if it asks
for none, by `verify_coupled` if it has a seed, so that its output repeats, else by `verify_block`.
"""

from collections import abc
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from specserve.sampling.distribution import FloatArray, draw, race
from specserve.sampling.noise import Noise, Purpose


class Distributions(Protocol):
    """Distributions by draft position: a list of arrays, or one that computes each when it is asked for."""

    def __getitem__(self, index: int, /) -> FloatArray:
        """The distribution of the token after `index` drafts, shape (vocabulary,)."""


class Verdict(NamedTuple):
    """The first `n_accepted` draft tokens are accepted; `next_token` is recovered, or the bonus after all of them."""

    n_accepted: int
    next_token: int


def residual(p: FloatArray, q: FloatArray, weight: float = 1.0) -> FloatArray:
    """max(0, weight p - q), not normalised; shapes (vocabulary,)."""
    return np.maximum(weight * p - q, 0)


def recover(p: FloatArray, q: FloatArray, uniform: float, weight: float = 1.0) -> int:
    """A token drawn in proportion to the residual of p and q, shapes (vocabulary,)."""
    rest = residual(p, q, weight)
    # p = q up to rounding leaves no residual; a rejection is then itself a rounding error, and p is right.
    return draw(rest if rest.any() else p, uniform)


def verify_token(p: Distributions, q: Distributions, drafts: abc.Sequence[int], noise: Noise) -> Verdict:
    """Token verification (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1).

    Draft token x at index i is accepted with probability min(1, p_i(x) / q_i(x)). At the first rejection the next token
    is recovered from norm(max(0, p_i - q_i)); if all are accepted, the bonus token is drawn from p_gamma.

    There are gamma drafts, gamma + 1 distributions p, computed when read, and gamma q: q[i] is the one that drafts[i]
    was sampled from, so positive there. Of the noise ACCEPT, RECOVER and BONUS are used.
    """
    for i, x in enumerate(drafts):
        p_i, q_i = p[i], q[i]
        if noise.uniform(Purpose.ACCEPT, i) * float(q_i[x]) >= float(p_i[x]):
            return Verdict(i, recover(p_i, q_i, noise.uniform(Purpose.RECOVER, i)))
    return Verdict(len(drafts), draw(p[len(drafts)], noise.uniform(Purpose.BONUS, len(drafts))))


def verify_block(p: Distributions, q: Distributions, drafts: abc.Sequence[int], noise: Noise) -> Verdict:
    """Block verification (Sun et al. 2025, arXiv 2403.10444, algorithm 2).

    It accepts at least as many drafts in expectation as token verification.

    The weight of the first n drafts is w_0 = 1, w_n = min(1, w_{n-1} p_{n-1}(x_{n-1}) / q_{n-1}(x_{n-1})). Each n
    succeeds with probability h_n, by a uniform number of its own, and the largest n that does is accepted, or 0:
    h_gamma = w_gamma, below gamma h_n = s_n / (s_n + 1 - w_n) with s_n = sum max(0, w_n p_n - q_n). Then, given the
    first n drafts, n or more are accepted with probability w_n.

    Proof by induction from n = gamma down. Given the first n + 1 drafts, n + 1 or more are accepted with probability
    w_{n+1}; averaged over x_n, that is sum min(w_n p_n, q_n) = w_n - s_n. Otherwise n succeeds with probability h_n
    (h_0 = 1). So n or more are accepted with probability (w_n - s_n) + (1 - w_n + s_n) h_n = w_n.
    Exactly n are accepted with probability s_n, and the next token is then recovered from
    max(0, w_n p_n - q_n) / s_n. So the token after n drafts is x with probability min(w_n p_n(x), q_n(x)) +
    max(0, w_n p_n(x) - q_n(x)) = w_n p_n(x): given that n or more are accepted, it is distributed as p_n.

    Arguments and noise are those of `verify_token`; reading stops at the first draft with p(x) = 0.
    """
    gamma = len(drafts)
    n_accepted, w_accepted, w = 0, 1.0, 1.0
    # The n-th draft is x_{n-1}.
    for n, x in enumerate(drafts, 1):
        w = min(1.0, w * float(p[n - 1][x]) / float(q[n - 1][x]))
        if w == 0:
            break
        if n < gamma:
            s = float(residual(p[n], q[n], w).sum(dtype=np.float64))
            # A denominator of 0 means weight 1 and p_n = q_n: n + 1 or more are then accepted anyway.
            h = s / (s + 1 - w) if s + 1 - w > 0 else 1.0
        else:
            h = w
        if noise.uniform(Purpose.ACCEPT, n - 1) < h:
            n_accepted, w_accepted = n, w
    if n_accepted == gamma:
        return Verdict(gamma, draw(p[gamma], noise.uniform(Purpose.BONUS, gamma)))
    uniform = noise.uniform(Purpose.RECOVER, n_accepted)
    return Verdict(n_accepted, recover(p[n_accepted], q[n_accepted], uniform, w_accepted))


def verify_coupled(p: Distributions, _q: Distributions, drafts: abc.Sequence[int], noise: Noise) -> Verdict:
    """Coupled verification (Daliri et al. 2024, arXiv 2408.07978): the target's own choice, whatever was drafted.

    At every position the target's token wins an exponential race: it has the smallest E_x / p(x) of all tokens x, with
    exponential random numbers E_x that follow from seed and position. Drafts are accepted while they equal it, so one
    seed gives one output, with any drafts or none. A draft sampled with the same E_x mostly equals the target's token.

    Arguments are those of `verify_token`; q is not needed.
    """
    return accept_equal(lambda index: sample_coupled(p[index], index, noise), drafts)


def accept_equal(choose: Callable[[int], int], drafts: abc.Sequence[int]) -> Verdict:
    """Accept drafts while they equal the target's own choice at their index, which is the next token after them.

    Where all distributions are one-hot, every rule comes to this, with the argmax as the choice. Indices after a
    rejection are never asked for.
    """
    for i, x in enumerate(drafts):
        token = choose(i)
        if token != x:
            return Verdict(i, token)
    return Verdict(len(drafts), choose(len(drafts)))


def sample_independent(q: FloatArray, index: int, noise: Noise) -> int:
    """A draft token for token and block verification, with noise that nothing else uses."""
    return draw(q, noise.uniform(Purpose.DRAFT, index))


def sample_coupled(q: FloatArray, index: int, noise: Noise) -> int:
    """The token at an index by an exponential race; target and draft model share its noise, so they mostly agree."""
    return race(q, partial(noise.exponentials, index))


def likeliest(q: FloatArray, _index: int, _noise: Noise) -> int:
    """The most probable token of q: what token and block verification most likely recover where others are excluded."""
    return int(np.argmax(q))


def next_in_race(q: FloatArray, index: int, noise: Noise) -> int:
    """The winner of the race of `sample_coupled` among the tokens with q > 0; an arbitrary token if there is none."""
    return sample_coupled(q, index, noise) if q.any() else 0


class Rule(NamedTuple):
    """How drafters.py samples a draft token, the verification that goes with it, and a guess of a recovered token."""

    sample: Callable[[FloatArray, int, Noise], int]
    verify: Callable[[Distributions, Distributions, abc.Sequence[int], Noise], Verdict]
    guess: Callable[[FloatArray, int, Noise], int] = likeliest


RULES: dict[str, Rule] = {
    "token": Rule(sample_independent, verify_token),
    "block": Rule(sample_independent, verify_block),
    "coupled": Rule(sample_coupled, verify_coupled, next_in_race),
}
