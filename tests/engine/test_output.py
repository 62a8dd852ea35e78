"""Speculation changes neither greedy nor seeded output, nor the distribution of sampled output."""

from collections import Counter
from dataclasses import replace
from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from constraints import Slow
from costs import flat
from fake_engine import NoEndToken
from fake_pair import END_TOKEN, SEEDED, SLOTS, FakePair, exact_answers, plain_greedy
from specserve.sequence import SamplingParams, Verification
from specserve.speculation.ngram import LookupProposer, PredictionProposer
from specserve.speculation.proposers import GrammarProposer

prompts = st.lists(st.integers(0, END_TOKEN - 1), min_size=1, max_size=30)


@settings(max_examples=40, deadline=None)
@given(
    jobs=st.lists(st.tuples(prompts, st.integers(0, 6), st.integers(1, 30)), min_size=1, max_size=6),
    blend=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    prefill_rows=st.integers(1, 40),
    draft_rows=st.integers(4, 40),
    block_length=st.sampled_from([1, 2, 5]),
)
def test_greedy_output_is_the_targets_with_any_concurrent_sequences(
    jobs: list[tuple[list[int], int, int]], blend: float, prefill_rows: int, draft_rows: int, block_length: int
) -> None:
    pair = FakePair(blend=blend, prefill_rows=prefill_rows, draft_rows=draft_rows, block_length=block_length)
    sequences = [pair.submit(prompt, gamma=gamma, max_tokens=most) for prompt, gamma, most in jobs]
    pair.run()
    for sequence, (prompt, _, most) in zip(sequences, jobs, strict=True):
        assert sequence.answer == plain_greedy(prompt, most)
        assert sequence.finish_reason == ("length" if sequence.generated == most else "stop")


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
# Some of its tokens match likely outputs and others do not.
PREDICTION = [0, 1, 2, 3, 4, 5, 0, 2, 4, 1]
CASES: dict[str, dict[str, Any]] = {
    "the draft model": {},
    "a grammar": {"masks": 99},
    # Drafts of two tokens leave no time for the mask of the bonus token.
    "masks that wait": {"masks": 2},
    "masks that wait, with a prediction": {"masks": 2, "prediction": PREDICTION},
    "a prediction": {"prediction": PREDICTION, "drafter": "prediction"},
    # At these costs some draft tokens of either source pay and others do not.
    "adaptive lengths": {"mode": "auto", "draft_seconds": 0.38},
    "adaptive lengths with a prediction": {"mode": "auto", "draft_seconds": 0.1, "prediction": PREDICTION},
    # One draft a round, whose alternatives take the other rows.
    "alternatives": {"mode": "auto", "draft_seconds": 0.38, "max_tokens": 9, "gamma": 4},
    "alternatives beside several drafts": {"mode": "auto", "draft_seconds": 0.15, "max_tokens": 9, "gamma": 8},
}


def outputs(
    trials: int, *, masks: int = 0, draft_seconds: float = 0.1, max_tokens: int = 4, **options: Any
) -> tuple[list[tuple[int, ...]], Counter[int]]:
    """The first three output tokens for each seed, by the whole scheduler, and how many rounds had how many drafts.

    With a grammar if a round has time for some masks.
    """
    proposers = [PredictionProposer(), GrammarProposer(), LookupProposer()]
    machine: dict[str, Any] = {"costs": (flat(), flat(draft_seconds)), "max_wait_seconds": 1.0, "masks": masks}
    pair = FakePair(vocabulary=NoEndToken(6), blend=0.6, window=32, proposers=proposers, **machine)
    sequences = []
    for seed in range(trials):
        sampling, grammar = replace(SAMPLING, seed=seed), Slow(6, pair.masks) if masks else None
        options |= {"sampling": sampling, "constraint": grammar, "max_tokens": max_tokens}
        sequences.append(pair.submit([1, 2], verification="coupled", **options))
        if len(sequences) % SLOTS == 0:
            pair.run()
    rounds = [step for step in pair.records.rounds if step.is_decode_round]
    return [tuple(sequence.answer[:3]) for sequence in sequences], Counter(len(step.drafts) for step in rounds)


def test_coupled_output_has_the_targets_distribution() -> None:
    """Chi-square of 1,200 outputs of three tokens, false-alarm rate 1e-4; drafts change none (below).

    For other rules: test_exact_output.py.
    """
    found, _ = outputs(TRIALS, gamma=0)
    counts, exact = Counter(found), exact_answers([1, 2], 3, SAMPLING, NoEndToken(6))
    likely = [output for output, probability in exact.items() if probability * TRIALS >= 5]
    observed = [counts[output] for output in likely]
    expected = [exact[output] * TRIALS for output in likely]
    rest = TRIALS - sum(observed), TRIALS - sum(expected)
    assert chisquare([*observed, rest[0]], [*expected, rest[1]]).pvalue > 1e-4


def test_coupled_output_is_the_same_with_and_without_drafts() -> None:
    for case, options in CASES.items():
        plain, _ = outputs(60, masks=99 if "masks" in options else 0, gamma=0)
        drafted, gammas = outputs(60, **options)
        assert drafted == plain, case
        assert gammas[1] + gammas[2] > 30
