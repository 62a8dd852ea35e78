"""Logit biases, penalties and forbidden tokens against their definitions."""

from collections import abc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from constraints import Alternating
from specserve.errors import ConstraintError
from specserve.sampling.distribution import FloatArray
from specserve.sampling.logits import penalise, process_logits
from specserve.sequence import SamplingParams, Sequence, SpeculationParams

VOCABULARY = 8
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=12)
biases = st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100)).map(lambda found: tuple(found.items()))


def reference_logits(row: FloatArray, sampling: SamplingParams, prompt: list[int], generated: list[int]) -> FloatArray:
    """The definitions of bias and penalties, token by token."""
    processed = row.copy()
    for token in range(VOCABULARY):
        processed[token] += dict(sampling.logit_bias).get(token, 0)
        if token in prompt or token in generated:
            factor = sampling.repetition_penalty
            processed[token] = processed[token] / factor if processed[token] > 0 else processed[token] * factor
        processed[token] -= generated.count(token) * sampling.frequency_penalty
        processed[token] -= (token in generated) * sampling.presence_penalty
    return processed


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(-5, 5), min_size=VOCABULARY, max_size=VOCABULARY),
    st.builds(
        SamplingParams,
        logit_bias=biases,
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
    processed = penalise(row, sampling, np.array(prompt, np.intp), generated)
    np.testing.assert_allclose(processed, reference_logits(row, sampling, prompt, generated), atol=1e-9)
    assert row.tolist() == logits


def processed(
    row: FloatArray, output: list[int], drafts: list[int], constraint: Alternating | None = None, **sampling: Any
) -> FloatArray:
    sequence = Sequence([1], SamplingParams(**sampling), SpeculationParams(), max_tokens=9, constraint=constraint)
    sequence.tokens += output
    return process_logits(row, sequence, drafts)


def possible(output: list[int], constraint: Alternating | None = None, **sampling: Any) -> list[int]:
    """The tokens that may follow an output, of which all but the first token are drafts."""
    row = np.arange(VOCABULARY, dtype=np.float32)
    return np.flatnonzero(np.isfinite(processed(row, output[:1], output[1:], constraint, **sampling))).tolist()


def test_draft_tokens_count_as_generated_for_penalties() -> None:
    row = np.array([0.0, 0, 3, 2.5])
    assert [processed(row, [2, 3], drafts, frequency_penalty=2.0).argmax() for drafts in ([], [2])] == [2, 3]


def test_tokens_that_a_request_forbids_have_probability_0() -> None:
    everything = list(range(VOCABULARY))
    assert possible([], allowed_tokens=(2, 5)) == [2, 5]
    early: dict[str, Any] = {"min_tokens": 2, "end_tokens": (0, 7)}
    assert possible([3], **early) == [1, 2, 3, 4, 5, 6]
    assert possible([3, 4], **early) == everything
    # Only the end is left, so it may come.
    assert possible([3], allowed_tokens=(7,), **early) == [7]
    with pytest.raises(ConstraintError, match="no token"):
        possible([], allowed_tokens=(7,), logit_bias=((7, -np.inf),))


def test_a_grammar_and_biases_that_leave_no_token_say_so() -> None:
    no_odd, grammar = tuple((token, -np.inf) for token in (1, 3, 5, 7)), Alternating(VOCABULARY)
    assert possible([], grammar, logit_bias=no_odd) == [0, 2, 4, 6]
    with pytest.raises(ConstraintError, match="no token"):
        possible([2], grammar, logit_bias=no_odd)
    # Logits that are no numbers are the model's failure.
    assert np.isnan(processed(np.full(VOCABULARY, np.nan), [], [2], grammar)).any()


def test_an_answer_that_follows_a_grammar_may_end_before_min_tokens_where_nothing_else_can_follow() -> None:
    class OnlyTheEnd(Alternating):
        def allowed(self, written: abc.Sequence[int]) -> NDArray[np.bool_]:
            return np.arange(VOCABULARY) == 7 if written else np.arange(VOCABULARY) > 3

    early: dict[str, Any] = {"min_tokens": 3, "end_tokens": (7,)}
    assert possible([], OnlyTheEnd(VOCABULARY), **early) == [4, 5, 6]
    assert possible([4], OnlyTheEnd(VOCABULARY), **early) == [7]
