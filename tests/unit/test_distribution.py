"""Logits become the distribution that the settings say, and a draw from it finds every token by its weight."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from specserve.sampling.distribution import FloatArray, argmax, confidence, draw, to_distribution
from specserve.sequence import SamplingParams


def logits(max_size: int = 400) -> st.SearchStrategy[FloatArray]:
    """Rows of logits, ties included."""
    elements = st.one_of(st.floats(-20, 20), st.sampled_from([0.0, 1.0, 2.0]))
    return st.one_of(st.integers(1, max_size), st.integers(1000, 5000)).flatmap(
        lambda size: arrays(np.float64, size, elements=elements)
    )


settings_of_a_request = st.builds(
    SamplingParams,
    temperature=st.floats(0.1, 2),
    top_k=st.one_of(st.just(0), st.integers(1, 500)),
    top_p=st.one_of(st.just(1.0), st.floats(0, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
)


def slow_distribution(row: FloatArray, sampling: SamplingParams) -> FloatArray:
    """The definition, token by token, in the order of probability and then of ids."""
    p = np.exp((row - row.max()) / sampling.temperature)
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = sum(p[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        kept.append(token)
        mass += p[token]
        if mass >= sampling.top_p * total:
            break
    if sampling.top_p >= 1:
        kept = order
    kept = [token for token in kept if p[token] >= sampling.min_p * p[order[0]]]
    result: FloatArray = np.zeros_like(p)
    result[kept] = p[kept] / p[kept].sum()
    return result


def agree_but_for_borders(fast: FloatArray, slow: FloatArray) -> bool:
    """Equal, or cut one token apart where the mass reached top_p to the last bit."""
    return bool(np.allclose(fast, slow, atol=1e-12)) or abs(np.count_nonzero(fast) - np.count_nonzero(slow)) == 1


@settings(max_examples=500, deadline=None)
@given(logits(), settings_of_a_request)
def test_the_fast_way_gives_the_definition(row: FloatArray, sampling: SamplingParams) -> None:
    p = to_distribution(row, sampling)
    assert p.sum() == pytest.approx(1)
    assert agree_but_for_borders(p, slow_distribution(row, sampling))


def test_a_wide_vocabulary_gives_the_definition() -> None:
    row = np.random.default_rng(0).normal(0, 4, 20_000)
    for sampling in (
        SamplingParams(temperature=0.8, top_k=40),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.0, min_p=0.05),
        SamplingParams(temperature=0.7, top_k=50, top_p=0.95, min_p=0.01),
    ):
        np.testing.assert_allclose(to_distribution(row, sampling), slow_distribution(row, sampling), atol=1e-12)


def test_temperature_zero_is_certain_of_the_first_largest_logit() -> None:
    row = np.array([1.0, 3.0, 3.0, 2.0], np.float32)
    assert to_distribution(row, SamplingParams(temperature=0)).tolist() == [0, 1, 0, 0]


def test_top_k_one_is_greedy() -> None:
    row = np.array([1.0, 3.0, 3.0, 2.0])
    assert to_distribution(row, SamplingParams(top_k=1)).tolist() == [0, 1, 0, 0]


def test_a_favourite_that_is_not_finite_is_an_error() -> None:
    for row in (np.full(3, -np.inf), np.array([0.0, np.inf, 0.0]), np.array([0.0, np.nan, 0.0])):
        with pytest.raises(FloatingPointError, match="not finite"):
            argmax(row)


@settings(max_examples=300, deadline=None)
@given(logits())
def test_confidence_is_the_favourites_probability_but_for_what_is_very_unlikely(row: FloatArray) -> None:
    exactly = to_distribution(row, SamplingParams())[argmax(row)]
    assert exactly <= confidence(row) + 1e-12 <= exactly * (1 + row.size * np.exp(-12)) + 2e-12


def test_confidence_of_what_is_impossible_but_for_one_token_is_certainty() -> None:
    row = np.full(1000, -np.inf, np.float32)
    row[7] = 3
    assert confidence(row) == 1


def test_the_logits_are_left_alone() -> None:
    row = np.array([1.0, 3.0, 2.0])
    to_distribution(row, SamplingParams(temperature=0.5, top_k=2))
    assert row.tolist() == [1, 3, 2]


@settings(max_examples=300, deadline=None)
@given(arrays(np.float64, st.integers(1, 400), elements=st.one_of(st.just(0.0), st.floats(1e-6, 1))).filter(np.any))
def test_a_draw_hits_each_token_in_its_share_and_never_one_of_weight_zero(weights: FloatArray) -> None:
    ends = np.cumsum(weights) / weights.sum()
    for token in np.flatnonzero(weights)[:20]:
        start = ends[token - 1] if token else 0.0
        assert draw(weights, (start + ends[token]) / 2) == token
    assert weights[draw(weights, 0.0)] > 0
    assert weights[draw(weights, 1 - 2.0**-53)] > 0


def test_a_draw_from_single_precision_does_not_lose_the_tail() -> None:
    weights = np.full(300_000, 1e-7, np.float32)
    weights[0] = 1
    assert draw(weights, 1 - 2.0**-53) > 299_000
