"""Logit biases and penalties against their definitions."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.sampling.distribution import FloatArray, to_distribution
from specserve.sampling.logits import penalise, process_logits
from specserve.sequence import SamplingParams, Sequence, SpeculationParams

VOCABULARY = 8
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=12)


def reference_logits(
    logits: FloatArray, sampling: SamplingParams, prompt: list[int], generated: list[int]
) -> FloatArray:
    """The definitions of bias and penalties, token by token."""
    processed = logits.copy()
    for token in range(VOCABULARY):
        processed[token] += dict(sampling.logit_bias).get(token, 0)
        if token in prompt or token in generated:
            factor = sampling.repetition_penalty
            processed[token] = processed[token] / factor if processed[token] > 0 else processed[token] * factor
        processed[token] -= generated.count(token) * sampling.frequency_penalty
        processed[token] -= (token in generated) * sampling.presence_penalty
    return processed


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
def test_penalise_equals_its_definition(
    logits: list[float], sampling: SamplingParams, prompt: list[int], generated: list[int]
) -> None:
    row = np.array(logits)
    processed = penalise(row, sampling, prompt, generated)
    np.testing.assert_allclose(processed, reference_logits(row, sampling, prompt, generated), atol=1e-9)
    assert row.tolist() == logits


def test_draft_tokens_count_as_generated_for_penalties() -> None:
    sampling = SamplingParams(temperature=0, frequency_penalty=2.0)
    sequence = Sequence([1], sampling, SpeculationParams(), max_tokens=9)
    sequence.tokens += [2, 3]
    row = np.array([0.0, 0, 3, 2.5])
    assert to_distribution(process_logits(row, sequence, []), sampling).tolist() == [0, 0, 1, 0]
    assert to_distribution(process_logits(row, sequence, [2]), sampling).tolist() == [0, 0, 0, 1]
