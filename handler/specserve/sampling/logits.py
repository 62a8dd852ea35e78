"""What a request does to a row of logits before it becomes a distribution: biases, and penalties for what was written.

Every row is shaped from the text alone, drafted tokens included, so there is no state to roll back when drafts are
rejected; and the target's row and the draft's row are shaped alike.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import numpy as np

from specserve.sampling.distribution import FloatArray
from specserve.sequence import SamplingParams, Sequence


def shape_logits(logits: FloatArray, shaping: SamplingParams, prompt: Tokens[int], written: Tokens[int]) -> FloatArray:
    """The logits as the request wants them.

    First `logit_bias` is added to its tokens. Then `repetition_penalty` divides the positive logits of tokens of
    prompt and answer and multiplies the negative ones. Then `frequency_penalty` is taken from a token's logit for
    every time it stands in the answer, and `presence_penalty` once if it does.

    Args:
        logits: shape (vocabulary,); not changed.
        shaping: the request's settings.
        prompt: the tokens before the answer, counted by the repetition penalty only.
        written: the tokens of the answer up to this place, drafted ones included.
    """
    shaped = logits.copy()
    for token, bias in shaping.logit_bias:
        shaped[token] += bias
    if shaping.repetition_penalty != 1:
        seen = np.unique(np.array([*prompt, *written], np.intp))
        among = shaped[seen]
        shaped[seen] = np.where(among > 0, among / shaping.repetition_penalty, among * shaping.repetition_penalty)
    if written:
        tokens, counts = np.unique(written, return_counts=True)
        shaped[tokens] -= (counts * shaping.frequency_penalty + shaping.presence_penalty).astype(shaped.dtype)
    return shaped


def shaped_behind(logits: FloatArray, sequence: Sequence, drafts: Tokens[int]) -> FloatArray:
    """What becomes the distribution of the token behind a sequence and these drafts of it: p's, or q's of a draft.

    A grammar comes last, so that nothing can make a token possible that it forbids.

    Args:
        logits: shape (vocabulary,); not changed.
        sequence: the decided text, and the request's settings.
        drafts: what stands between the decided text and this place.

    Returns:
        The logits themselves where the request asks for nothing.

    Raises:
        ConstraintError: the request's grammar has become too costly to follow.
    """
    sampling, constraint = sequence.sampling, sequence.constraint
    written = [*sequence.answer, *drafts] if sampling.shapes_logits or constraint is not None else []
    if sampling.shapes_logits:
        logits = shape_logits(logits, sampling, sequence.prompt, written)
    if constraint is not None:
        allowed = constraint.allowed(written)
        if allowed is not None:
            logits = np.where(allowed, logits, -np.inf)
    return logits
