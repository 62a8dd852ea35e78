"""Turns logits into a probability distribution, and samples from it."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from specserve.sequence import SamplingParams

FloatArray = NDArray[np.floating]
IntArray = NDArray[np.intp]

# Weights are summed as a matrix whose lines are this many consecutive weights: adding long lines is fast, and there are
# few column sums compared with a vocabulary of 150,000 tokens.
_COLUMNS = 1024

# In logits: the tokens further below the largest logit are most of the vocabulary, but together have only a few
# thousandths of the probability.
_NEGLIGIBLE = 12.0


def to_distribution(logits: FloatArray, sampling: SamplingParams) -> FloatArray:
    """The distribution that a token is sampled from: temperature, then top_k, top_p and min_p, then normalised.

    The same function makes p of the target's logits and q of the draft's; greedy is one-hot.

    Logits and probabilities have shape (vocabulary,) and the same precision; the logits, -inf for what is impossible,
    are not changed.

    Raises:
        FloatingPointError: the largest logit is not finite.
    """
    best = argmax(logits)
    if sampling.is_greedy:
        return one_hot(best, logits.size, logits.dtype)
    weights: FloatArray = np.subtract(logits, logits[best])
    weights /= sampling.temperature
    np.exp(weights, out=weights)
    total = float(_column_sums(weights).sum())
    top_k = sampling.top_k if sampling.top_k < weights.size else 0
    if not top_k and sampling.top_p >= 1 and sampling.min_p <= 0:
        weights /= total
        return weights
    kept = _truncate(weights, total, top_k, sampling.top_p, sampling.min_p)
    probabilities: FloatArray = np.zeros_like(weights)
    probabilities[kept] = weights[kept] / float(weights[kept].sum(dtype=np.float64))
    return probabilities


def argmax(logits: FloatArray) -> int:
    """The token with the largest logit, the lowest id among equals; a FloatingPointError if that is not finite."""
    best = int(np.argmax(logits))
    if not np.isfinite(logits[best]):
        raise FloatingPointError("The model gave logits that are not finite.")
    return best


def confidence(logits: FloatArray) -> float:
    """The probability of the most probable token at temperature 1, very improbable tokens neglected.

    The logits have shape (vocabulary,), the largest of them finite.
    """
    best = logits.max()
    return 1 / float(np.exp(logits[logits > best - _NEGLIGIBLE] - best).sum())


def one_hot(token: int, size: int, dtype: np.dtype[np.floating] | type[np.floating] = np.float32) -> FloatArray:
    """The distribution of a token that is certain, shape (size,)."""
    certain = np.zeros(size, dtype)
    certain[token] = 1
    return certain


def draw(weights: FloatArray, uniform: float) -> int:
    """The token at `uniform`, in [0, 1), of the cumulative weights; a token of weight 0 is never drawn.

    The weights have shape (vocabulary,), none negative, some positive, and need not sum to 1.
    """
    # Two levels, columns and then their tokens, avoid a cumulative sum over the whole vocabulary.
    sums = _column_sums(weights)
    column, rest = _locate(sums, uniform * float(sums.sum()))
    return _token(weights, column, _locate(_column(weights, column), rest)[0])


def race(weights: FloatArray, exponentials: Callable[[int, int], FloatArray]) -> int:
    """The token that wins an exponential race with these rates: an exact draw, whose noise is keyed by token.

    Two similar distributions with the same noise mostly give the same token: that couples a draft to its target
    (Daliri et al., arXiv 2408.07978; an exponential over a rate is a Gumbel number plus a log-probability).
    Columns of tokens race first, then the tokens of the winning column: the same law, a hundredth of the noise.

    The weights have shape (vocabulary,), none negative, some positive, and need not sum to 1; `exponentials` gives the
    noise of a race by its number and its size: race 0 is the columns'.
    """
    sums = _column_sums(weights)
    column = _first(sums, exponentials(0, sums.size))
    inside = _column(weights, column)
    return _token(weights, column, _first(inside, exponentials(1 + column, inside.size)))


def _first(rates: FloatArray, exponentials: FloatArray) -> int:
    times = np.full(rates.size, np.inf)
    np.divide(exponentials, rates, out=times, where=rates > 0)
    return int(np.argmin(times))


def _column(weights: FloatArray, column: int) -> FloatArray:
    """The weights of a column of `_column_sums`, the last of which is the incomplete last line; float64."""
    whole = weights.size - weights.size % _COLUMNS
    return (weights[whole:] if column == _COLUMNS else weights[column:whole:_COLUMNS]).astype(np.float64)


def _token(weights: FloatArray, column: int, index: int) -> int:
    whole = weights.size - weights.size % _COLUMNS
    return whole + index if column == _COLUMNS else column + _COLUMNS * index


def _column_sums(weights: FloatArray) -> FloatArray:
    """The sums of every _COLUMNS-th weight, and last that of the incomplete last line; float64.

    Adding line to line is many times faster than adding along lines. In single precision it rounds the sum of a column,
    for 150,000 tokens, by at most 1e-5 of itself, no more than the logits were rounded.
    """
    whole = weights.size - weights.size % _COLUMNS
    sums = np.empty(_COLUMNS + 1)
    sums[:-1] = weights[:whole].reshape(-1, _COLUMNS).sum(axis=0)
    sums[-1] = weights[whole:].sum(dtype=np.float64)
    return sums


def _locate(weights: FloatArray, level: float) -> tuple[int, float]:
    """The index whose share of the cumulative weights holds `level`, and how far into that share it lies."""
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, level, side="right"))
    if index == cumulative.size:
        # Rounding can carry the level to the very end: the last index with any weight has it.
        index = int(np.flatnonzero(weights)[-1])
    return index, level - (float(cumulative[index - 1]) if index else 0.0)


def _truncate(weights: FloatArray, total: float, top_k: int, top_p: float, min_p: float) -> IntArray:
    """The ids that survive all three cuts; the largest weight is 1, and `top_k` 0 cuts nothing."""
    kept = _candidates(weights, total, top_k, top_p, min_p)
    if top_k:
        kept = _heaviest(weights, kept, top_k)
        total = float(weights[kept].sum(dtype=np.float64))
    if top_p < 1:
        kept = _nucleus(weights, kept, top_p * total)
    return kept[weights[kept] >= min_p]


def _nucleus(weights: FloatArray, ids: IntArray, mass: float) -> IntArray:
    """The fewest of the heaviest of these ordered ids that hold `mass`, lower ids first among equals."""
    # Values are sorted several times as fast as their indices.
    held = np.cumsum(np.sort(weights[ids])[::-1], dtype=np.float64)
    return np.sort(_heaviest(weights, ids, int(np.searchsorted(held, mass)) + 1))


def _candidates(weights: FloatArray, total: float, top_k: int, top_p: float, min_p: float) -> IntArray:
    """Ids that hold all tokens the first cut may keep, and few others, in order, without sorting them all."""
    floor = 0.0
    whole = weights.size - weights.size % _COLUMNS
    if top_k:
        if whole and top_k <= _COLUMNS:
            # This many columns hold a weight of at least this floor, so the largest weights all reach it.
            maxima = weights[:whole].reshape(-1, _COLUMNS).max(axis=0)
            floor = float(np.partition(maxima, -top_k)[-top_k])
    elif top_p < 1:
        # The tokens below this floor together weigh less than top_p may cut away; the factor is for rounding.
        floor = 0.999 * (1 - top_p) * total / weights.size
    else:
        floor = min_p
    return np.flatnonzero(weights >= floor if floor > 0 else weights > 0)


def _heaviest(weights: FloatArray, ids: IntArray, count: int) -> IntArray:
    """The `count` of these ordered ids with the largest weights, lower ids first among equals; or all."""
    if count >= ids.size:
        return ids
    among = weights[ids]
    cut = np.partition(among, -count)[-count]
    above = ids[among > cut]
    return np.concatenate([above, ids[among == cut][: count - above.size]])
