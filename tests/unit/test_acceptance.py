"""Acceptance probabilities of draft tokens: calibrated over all sequences, and an average of each."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specserve.sampling.distribution import FloatArray, one_hot
from specserve.sampling.logits import TargetDistributions
from specserve.sequence import DrafterName, SamplingParams, Sequence, SpeculationParams, Verification
from specserve.speculation.acceptance import PRIORS, Acceptance, Calibration
from specserve.speculation.step import Alternative, Draft, SequenceStep

GREEDY, SAMPLED = SamplingParams(temperature=0), SamplingParams(temperature=1)
WIDTH = 4


def sequence(sampling: SamplingParams = GREEDY, verification: Verification = "block") -> Sequence:
    return Sequence([1], sampling, SpeculationParams(8, verification, mode="auto"), max_tokens=100)


def step_of(own: Sequence, *drafters: DrafterName, accepted: int = 0, q: FloatArray | None = None) -> SequenceStep:
    """A verified step with a draft, of confidence .9, by each of these."""
    step = SequenceStep(own, 0, 1, 8)
    step.drafts += [Draft(0, q, drafter, 0.9, 0.9) for drafter in drafters]
    step.n_accepted = accepted
    return step


def learn(acceptance: Acceptance, step: SequenceStep, own_token: int = 3) -> None:
    """Learn from a step, whose drafts and own token these are; the target's tokens are equally likely."""
    p = TargetDistributions(np.zeros((len(step.drafts) + 1, WIDTH), np.float32), step.sequence, step.draft_tokens)
    acceptance.learn_from(step, p, [*step.draft_tokens[: step.n_accepted], own_token])


def test_a_calibration_begins_with_its_prior_by_log_odds_of_confidence() -> None:
    calibration = Calibration(PRIORS["model"])
    confidences = [1 / (1 + np.exp(-odds)) for odds in (-3, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5, 5, 7)]
    assert tuple(map(calibration.probability, confidences)) == PRIORS["model"]
    assert (calibration.probability(0.0), calibration.probability(1.0)) == (PRIORS["model"][0], PRIORS["model"][-1])


def test_a_calibration_corrects_an_overconfident_drafter_and_forgets_what_is_old() -> None:
    calibration, generator = Calibration(PRIORS["model"]), random.Random(1)
    for share in (0.9, 0.4):
        for _ in range(3000):
            calibration.learn(0.97, float(generator.random() < share))
        assert abs(calibration.probability(0.97) - share) < 0.08
    assert calibration.probability(0.6) == PRIORS["model"][3]


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=60))
def test_probabilities_stay_between_0_and_1_whatever_is_learned(seen: list[tuple[float, float]]) -> None:
    calibration = Calibration(PRIORS["model"])
    for confidence, accepted in seen:
        calibration.learn(confidence, accepted)
    assert all(0 < probability < 1 for probability in calibration.probabilities)


def test_only_positions_that_verification_reached_teach() -> None:
    acceptance, own = Acceptance(), sequence()
    learn(acceptance, step_of(own, "model", "lookup", "prediction", accepted=1))
    assert {drafter for drafter, _ in acceptance.learned} == {"model", "lookup", "target", "alternative"}
    assert acceptance.of_token(own, "model", 0.9) > PRIORS["model"][5]
    assert acceptance.of_token(own, "lookup", 0.9) < PRIORS["other"][5]


def test_calibrations_are_shared_between_sequences_but_not_by_greedy_and_sampled_ones() -> None:
    acceptance = Acceptance()
    for _ in range(100):
        learn(acceptance, step_of(sequence(), "model"))
    assert acceptance.of_token(sequence(), "model", 0.9) < 0.1
    assert acceptance.of_token(sequence(SAMPLED), "model", 0.9) == PRIORS["model"][5]


def test_where_the_acceptance_probability_is_known_it_teaches_and_not_the_outcome() -> None:
    """p is uniform over four tokens and q certain, so a quarter of such drafts is accepted."""
    cases: list[tuple[Verification, float, float]] = [("block", 0.2, 0.3), ("coupled", 0.0, 0.1)]
    for verification, least, most in cases:
        acceptance = Acceptance()
        for _ in range(300):
            learn(acceptance, step_of(sequence(SAMPLED, verification), "model", q=one_hot(0, WIDTH)))
        assert least < acceptance.of_token(sequence(SAMPLED), "model", 0.9) < most


def test_alternatives_teach_up_to_the_one_that_was_recovered() -> None:
    acceptance, own = Acceptance(), sequence()
    before = acceptance.of_token(own, "alternative", 0.6), acceptance.of_token(own, "alternative", 0.3)
    step = step_of(own, accepted=1)
    for alternatives in ((Alternative(0, 3, 0.3, 0.1),), (Alternative(1, 3, 0.6, 0.1), Alternative(1, 2, 0.3, 0.1))):
        step.drafts.append(Draft(0, None, "model", 0.9, 0.9, alternatives))
    learn(acceptance, step)
    assert acceptance.of_token(own, "alternative", 0.6) > before[0]
    assert acceptance.of_token(own, "alternative", 0.3) == before[1]


def test_the_average_of_a_sequence_follows_its_own_drafts_of_the_model() -> None:
    acceptance, own, other = Acceptance(), sequence(), sequence()
    first = acceptance.of_next(own)
    for accepted, low, high in ((1, 0.9, 1.0), (0, 0.0, 0.1)):
        for _ in range(30):
            learn(acceptance, step_of(own, "model", accepted=accepted))
        assert low <= acceptance.of_next(own) <= high
    assert acceptance.of_next(other) == first


def test_what_was_drafted_behind_masks_has_a_calibration_and_an_average_of_its_own() -> None:
    acceptance, own = Acceptance(), sequence()
    before = acceptance.of_token(own, "model", 0.9), acceptance.of_token(own, "masked", 0.9)
    for _ in range(30):
        step = step_of(own, "model", "model", accepted=1)
        step.drafts[1] = step.drafts[1]._replace(behind_mask=True)
        learn(acceptance, step)
    assert acceptance.of_next(own) > 0.9
    assert acceptance.of_next(own, behind_mask=True) < 0.1
    assert acceptance.of_token(own, "model", 0.9) > before[0]
    assert acceptance.of_token(own, "masked", 0.9) < before[1]


def test_without_drafts_of_the_model_the_average_follows_the_targets_confidence() -> None:
    """Otherwise a sequence whose drafts were rejected would never be tried again."""
    acceptance, own = Acceptance(), sequence()
    for _ in range(30):
        learn(acceptance, step_of(own, "model"))
    cases: list[tuple[float, list[DrafterName], float, float]] = [(10.0, [], 0.9, 1.0), (0.0, ["lookup"], 0.0, 0.3)]
    for best, drafters, low, high in cases:
        for _ in range(30):
            step = step_of(own, *drafters)
            logits = np.zeros((len(step.drafts) + 1, WIDTH), np.float32)
            logits[0, 3] = best
            acceptance.learn_from(step, TargetDistributions(logits, own, step.draft_tokens), [3])
        assert low < acceptance.of_next(own) < high
    before, ended = acceptance.of_next(own), step_of(own)
    ended.model_ended = True
    learn(acceptance, ended)
    assert acceptance.of_next(own) == before, "where no draft could pay, the confidence is not computed"
