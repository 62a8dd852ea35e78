"""Biases and penalties, by their definitions."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.sampling.distribution import FloatArray, to_distribution
from specserve.sampling.logits import penalise, process_logits
from specserve.sequence import SamplingParams, Sequence, SpeculationParams

VOCABULARY = 8
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=12)


def by_definition(logits: FloatArray, sampling: SamplingParams, prompt: list[int], written: list[int]) -> FloatArray:
    """Token by token."""
    shaped = logits.copy()
    for token in range(VOCABULARY):
        shaped[token] += dict(sampling.logit_bias).get(token, 0)
        if token in prompt or token in written:
            factor = sampling.repetition_penalty
            shaped[token] = shaped[token] / factor if shaped[token] > 0 else shaped[token] * factor
        shaped[token] -= written.count(token) * sampling.frequency_penalty
        shaped[token] -= (token in written) * sampling.presence_penalty
    return shaped


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.floats(-5, 5), min_size=VOCABULARY, max_size=VOCABULARY),
    st.builds(
        SamplingParams,
        logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100)).map(
            lambda d: tuple(d.items())
        ),
        repetition_penalty=st.floats(0.5, 2),
        frequency_penalty=st.floats(-2, 2),
        presence_penalty=st.floats(-2, 2),
    ),
    tokens,
    tokens,
)
def test_shaping_is_its_definition(
    logits: list[float], sampling: SamplingParams, prompt: list[int], written: list[int]
) -> None:
    row = np.array(logits)
    shaped = penalise(row, sampling, prompt, written)
    np.testing.assert_allclose(shaped, by_definition(row, sampling, prompt, written), atol=1e-9)
    assert row.tolist() == logits


def test_drafted_tokens_count_as_written() -> None:
    sampling = SamplingParams(temperature=0, frequency_penalty=2.0)
    sequence = Sequence([1], sampling, SpeculationParams(), max_tokens=9)
    sequence.tokens += [2, 3]
    row = np.array([0.0, 0, 3, 2.5])
    assert to_distribution(process_logits(row, sequence, []), sampling).tolist() == [0, 0, 1, 0]
    assert to_distribution(process_logits(row, sequence, [2]), sampling).tolist() == [0, 0, 0, 1]
