"""The distribution that sampling parameters define for a row of logits, and drawing tokens from it."""

from dataclasses import replace
from itertools import accumulate, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from specserve.sampling.distribution import FloatArray, argmax, confidence, draw, to_distribution
from specserve.sequence import SamplingParams


def logits() -> st.SearchStrategy[FloatArray]:
    """Rows of logits, including ties."""
    elements = st.floats(-20, 20) | st.sampled_from([0.0, 1.0, 2.0])
    sizes = st.integers(1, 400) | st.integers(1000, 5000)
    return sizes.flatmap(lambda size: arrays(np.float64, size, elements=elements))


sampling_params = st.builds(
    SamplingParams,
    temperature=st.floats(0.1, 2),
    top_k=st.one_of(st.just(0), st.integers(1, 500)),
    top_p=st.one_of(st.just(1.0), st.floats(0, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
)


def reference_distribution(row: FloatArray, sampling: SamplingParams) -> FloatArray:
    """The definition, token by token, by descending probability and then by id."""
    p = np.exp((row - row.max()) / sampling.temperature)
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        masses = list(accumulate(p[token] for token in order))
        order = order[: 1 + sum(mass < sampling.top_p * masses[-1] for mass in masses)]
    kept = [token for token in order if p[token] >= sampling.min_p * p[order[0]]]
    result: FloatArray = np.zeros_like(p)
    result[kept] = p[kept] / p[kept].sum()
    return result


@settings(max_examples=200, deadline=None)
@given(logits(), sampling_params)
def test_distribution_equals_its_definition(row: FloatArray, sampling: SamplingParams) -> None:
    """Up to rounding, by which `top_p` or `min_p` may be reached one token earlier or later."""
    before, p = row.copy(), to_distribution(row, sampling)
    assert (row == before).all()
    assert p.sum() == pytest.approx(1)
    nearly_equal = (
        replace(sampling, top_p=sampling.top_p * top, min_p=sampling.min_p * least)
        for top, least in product((1.0, 1 - 1e-10, 1 + 1e-10), repeat=2)
    )
    assert any(np.allclose(p, reference_distribution(row, params), atol=1e-9) for params in nearly_equal)


def test_temperature_0_and_top_k_1_are_one_hot_at_the_first_largest_logit() -> None:
    row = np.array([1.0, 3.0, 3.0, 2.0], np.float32)
    for sampling in (SamplingParams(temperature=0), SamplingParams(top_k=1)):
        assert to_distribution(row, sampling).tolist() == [0, 1, 0, 0]


def test_argmax_of_a_largest_logit_that_is_not_finite_is_an_error() -> None:
    for row in (np.full(3, -np.inf), np.array([0.0, np.inf, 0.0]), np.array([0.0, np.nan, 0.0])):
        with pytest.raises(FloatingPointError, match="not finite"):
            argmax(row)


@settings(max_examples=150, deadline=None)
@given(logits())
def test_confidence_is_the_largest_probability_up_to_the_tail(row: FloatArray) -> None:
    exact = to_distribution(row, SamplingParams())[argmax(row)]
    assert exact <= confidence(row) + 1e-12 <= exact * (1 + row.size * np.exp(-12)) + 2e-12


@settings(max_examples=150, deadline=None)
@given(arrays(np.float64, st.integers(1, 400), elements=st.one_of(st.just(0.0), st.floats(1e-6, 1))).filter(np.any))
def test_draw_maps_each_tokens_interval_to_it_and_never_gives_weight_0(weights: FloatArray) -> None:
    cumulative = np.cumsum(weights) / weights.sum()
    for token in np.flatnonzero(weights)[:20]:
        start = cumulative[token - 1] if token else 0.0
        assert draw(weights, (start + cumulative[token]) / 2) == token
    assert weights[draw(weights, 0.0)] > 0
    assert weights[draw(weights, 1 - 2.0**-53)] > 0


def test_draw_from_float32_weights_reaches_the_tail() -> None:
    weights = np.full(300_000, 1e-7, np.float32)
    weights[0] = 1
    assert draw(weights, 1 - 2.0**-53) > 299_000
