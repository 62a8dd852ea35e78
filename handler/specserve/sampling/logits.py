"""Applies logit biases, penalties and grammar masks, and computes log-probabilities.

All are functions of the tokens before a position, draft tokens included, so there is no state to roll back when drafts
are rejected; the target's logits and the draft model's are treated alike.
"""

from collections import abc

import numpy as np
from numpy.typing import NDArray

from specserve.errors import ConstraintError
from specserve.sampling.distribution import FloatArray, argmax, confidence, to_distribution
from specserve.sequence import SamplingParams, Sequence, TokenScore


def penalise(
    logits: FloatArray, sampling: SamplingParams, prompt: NDArray[np.intp], output: abc.Sequence[int]
) -> FloatArray:
    """The logits after biases and penalties, a copy of shape (vocabulary,).

    First `logit_bias` is added to its tokens. Then `repetition_penalty` divides the positive logits of tokens of
    prompt and output and multiplies the negative ones. Then `frequency_penalty` is subtracted for every occurrence of
    a token in the output, draft tokens included, and `presence_penalty` once if it occurs.
    """
    shaped = logits.copy()
    for token, bias in sampling.logit_bias:
        shaped[token] += bias
    if sampling.repetition_penalty != 1:
        seen = np.concatenate([prompt, np.array(output, np.intp)])
        among = shaped[seen]
        shaped[seen] = np.where(among > 0, among / sampling.repetition_penalty, among * sampling.repetition_penalty)
    if output and (sampling.frequency_penalty or sampling.presence_penalty):
        tokens, counts = np.unique(output, return_counts=True)
        shaped[tokens] -= (counts * sampling.frequency_penalty + sampling.presence_penalty).astype(shaped.dtype)
    return shaped


def restrict(logits: FloatArray, sampling: SamplingParams, n_output: int) -> FloatArray:
    """The logits without the tokens that the request forbids after so many generated ones, shape (vocabulary,).

    Those are all but `allowed_tokens`, and, before `min_tokens`, the tokens that end the answer, unless nothing else is
    left (a grammar may allow only the end).
    """
    restricted = logits.copy()
    if sampling.allowed_tokens is not None:
        allowed = list(sampling.allowed_tokens)
        restricted = np.full_like(logits, -np.inf)
        restricted[allowed] = logits[allowed]
    if n_output < sampling.min_tokens:
        ends = list(sampling.end_tokens)
        ending = restricted[ends]
        restricted[ends] = -np.inf
        if restricted.max() == -np.inf:
            restricted[ends] = ending
    return restricted


def process_logits(logits: FloatArray, sequence: Sequence, drafts: abc.Sequence[int]) -> FloatArray:
    """Apply the request's fields to the logits after a sequence and its drafts; p, or q of a draft, is made of them.

    The grammar comes after biases, so that nothing can make a token possible that it forbids.

    `logits` has shape (vocabulary,) and is not changed; it is returned itself if the request changes nothing.

    Raises:
        ConstraintError: the request's grammar cannot be followed further, or the request forbids every token.
        MaskDeferred: the round has no time left for its mask.
    """
    sampling, constraint = sequence.sampling, sequence.constraint
    output = [*sequence.answer, *drafts] if sampling.shapes_logits or constraint is not None else []
    if sampling.shapes_logits:
        logits = penalise(logits, sampling, sequence.prompt_set, output)
    if constraint is not None:
        allowed = constraint.allowed(output)
        if allowed is not None:
            logits = np.where(allowed, logits, -np.inf)
    if sampling.forbids_tokens:
        logits = restrict(logits, sampling, sequence.generated + len(drafts))
    # A bias may be minus infinity.
    if (sampling.forbids_tokens or sampling.shapes_logits) and logits.max() == -np.inf:
        raise ConstraintError("The request allows no token that could follow.", code="invalid_value")
    return logits


class TargetDistributions:
    """The target's distributions after 0, 1, 2, ... draft tokens, which are computed when a rule first asks for them.

    A softmax over a large vocabulary takes time. Token, coupled and greedy verification never ask for rows after a
    rejection; block verification asks for those of all drafts, up to a draft of probability 0.

    `logits` are the target's rows, from that of the last committed token on; its next pass overwrites them.
    """

    def __init__(self, logits: FloatArray, sequence: Sequence, drafts: list[int]) -> None:
        self.logits = logits
        self._sequence = sequence
        self._drafts = drafts
        self._shaped: dict[int, FloatArray] = {}
        self._distributions: dict[int, FloatArray] = {}

    def __getitem__(self, index: int, /) -> FloatArray:
        if index not in self._distributions:
            self._distributions[index] = to_distribution(self._shaped_at(index), self._sequence.sampling)
        return self._distributions[index]

    @property
    def n_computed(self) -> int:
        """The number of positions at which something was asked for, and had time for its grammar mask."""
        return len(self._shaped)

    def argmax(self, index: int) -> int:
        return argmax(self._shaped_at(index))

    def confidence(self, index: int) -> float:
        """The probability of the most probable token at `index`, at temperature 1."""
        return confidence(self._shaped_at(index))

    def _shaped_at(self, index: int) -> FloatArray:
        if index not in self._shaped:
            self._shaped[index] = process_logits(self.logits[index], self._sequence, self._drafts[:index])
        return self._shaped[index]


def score(logits: FloatArray, token: int, top: int) -> TokenScore:
    """A token's log-probability by the target alone: temperature 1, no biases, penalties, grammar, truncation.

    The logits are the target's for the token's position, shape (vocabulary,); the `top` most probable tokens are named.

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
