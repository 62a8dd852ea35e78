"""Log-probabilities of tokens, from the very row of logits that p is made of."""

from __future__ import annotations

import numpy as np

from specserve.sampling.distribution import FloatArray
from specserve.sequence import TokenScore


def score(logits: FloatArray, token: int, top: int) -> TokenScore:
    """What the target alone gives a token: temperature 1, before biases, penalties, grammars and cuts.

    Args:
        logits: the target's row for the token's place, shape (vocabulary,).
        token: the one that stands there.
        top: how many of the most probable tokens to name, the most probable first.

    Raises:
        FloatingPointError: the logits are not finite.
    """
    peak = float(logits.max())
    if not np.isfinite(peak):
        raise FloatingPointError("The model gave logits that are not finite.")
    total = peak + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    top = min(top, logits.size)
    best = np.argpartition(-logits, top - 1)[:top] if top else np.empty(0, np.intp)
    logprobs = [(int(other), float(logits[other]) - total) for other in best]
    return TokenScore(token, float(logits[token]) - total, sorted(logprobs, key=lambda pair: (-pair[1], pair[0])))
