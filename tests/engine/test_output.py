"""Speculation changes neither greedy nor seeded output, nor the distribution of sampled output."""

from collections import Counter
from dataclasses import replace
from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from fake_engine import NoEndToken
from fake_pair import END_TOKEN, SEEDED, VOCABULARY, FakePair, exact_answers, plain_greedy
from specserve.sequence import SamplingParams, Verification

# Some begin alike.
ends = st.lists(st.integers(0, END_TOKEN - 1), min_size=1, max_size=30)
prompts = st.builds(lambda begin, end: [*begin, *end], st.sampled_from([[], [*range(20)] * 2]), ends)
draft_models = st.fixed_dictionaries(
    {
        "blend": st.sampled_from([0.0, 0.2, 0.5, 1.0]),
        "draft_rows": st.integers(4, 40),
        "window": st.sampled_from([16, 4096]),
        "context": st.sampled_from([32, 8192]),
    }
)
# A vocabulary of its own, or drafts of which a pass gives several.
outputs = st.sampled_from(
    [{}, *({"draft_width": VOCABULARY + n} for n in (-2, 5)), {"block_length": 2}, {"block_length": 5}]
)


@settings(max_examples=100, deadline=None)
@given(
    jobs=st.lists(st.tuples(prompts, st.integers(0, 6), st.integers(1, 30), st.booleans()), min_size=1, max_size=6),
    prefill_rows=st.integers(1, 40),
    draft_model=draft_models,
    output=outputs,
)
def test_greedy_output_is_the_targets_with_any_draft_model_predictions_and_concurrent_sequences(
    jobs: list[tuple[list[int], int, int, bool]],
    prefill_rows: int,
    draft_model: dict[str, Any],
    output: dict[str, Any],
) -> None:
    """The draft model is never asked for what it cannot read, which would switch it off."""
    pair, expected, sequences = FakePair(prefill_rows=prefill_rows, **draft_model, **output), [], []
    for prompt, gamma, most, is_predicted in jobs:
        expected.append(plain_greedy(prompt, most))
        prediction = expected[-1] if is_predicted else ()
        sequences.append(pair.submit(prompt, gamma=gamma, max_tokens=most, prediction=prediction))
    pair.run()
    assert pair.drafters.model
    for sequence, answer in zip(sequences, expected, strict=True):
        assert sequence.answer == answer
        assert sequence.finish_reason == ("length" if sequence.generated == sequence.max_tokens else "stop")


def test_a_choice_has_the_same_output_alone_and_among_other_choices() -> None:
    def outputs(*choices: int) -> list[list[int]]:
        pair = FakePair()
        several = [pair.submit([1, 2, 3], sampling=SEEDED, verification="coupled", choice=choice) for choice in choices]
        pair.run()
        return [sequence.answer for sequence in several]

    together = outputs(0, 1, 2)
    assert together == [*outputs(0), *outputs(1), *outputs(2)]
    assert len({*map(tuple, together)}) == 3


def test_only_coupled_output_repeats_and_only_with_a_seed() -> None:
    """Other rules share no number between sequences, whatever their seeds (test_exact_output.py)."""

    def outputs(verification: Verification, sampling: SamplingParams) -> set[tuple[int, ...]]:
        sequences = FakePair().answers([[1, 2]] * 4, sampling=sampling, verification=verification)
        return {tuple(sequence.answer) for sequence in sequences}

    for verification in get_args(Verification):
        assert (len(outputs(verification, SEEDED)) == 1) == (verification == "coupled")
        assert len(outputs(verification, SamplingParams())) > 1


TRIALS = 1_200
SAMPLING = SamplingParams(temperature=0.9, top_k=4, presence_penalty=0.8, logit_bias=((2, 0.5),))


def test_coupled_output_has_the_targets_distribution() -> None:
    """Chi-square of 1,200 outputs of three tokens, false-alarm rate 1e-4; drafts change none (test_exact_output.py)."""
    vocabulary = NoEndToken(6)
    pair = FakePair(vocabulary=vocabulary)
    options: dict[str, Any] = {"gamma": 0, "verification": "coupled", "max_tokens": 3}
    answers = (pair.answer([1, 2], sampling=replace(SAMPLING, seed=seed), **options) for seed in range(TRIALS))
    counts = Counter(tuple(sequence.answer) for sequence in answers)
    exact = exact_answers([1, 2], 3, SAMPLING, vocabulary)
    likely = [output for output, probability in exact.items() if probability * TRIALS >= 5]
    observed = [counts[output] for output in likely]
    expected = [exact[output] * TRIALS for output in likely]
    rest = TRIALS - sum(observed), TRIALS - sum(expected)
    assert chisquare([*observed, rest[0]], [*expected, rest[1]]).pvalue > 1e-4
