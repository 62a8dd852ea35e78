"""The promise that speculation never makes anyone slower, kept by the real engine on a simulated clock.

Costs are exact here and nothing is measured, so these are statements about decisions, not about this machine.
"""

from __future__ import annotations

from statistics import mean

import pytest

from simulate import MACHINES, PROCESSES, Simulation, oracle, read_recordings, synthetic
from specserve.sequence import SpeculationParams
from specserve.speculation.cost import Cost

PLAIN, ADAPTIVE = SpeculationParams(mode="off"), SpeculationParams(16, mode="adaptive")
SLOW, MIDDLE, LINEAR = "2 cores, 3B by 0.5B", "2 cores, 1.5B by 0.5B", "every row costs alike"


def speedup(machine: str, kind: str, policy: SpeculationParams = ADAPTIVE) -> float:
    recording = synthetic(kind)
    plain, _ = Simulation(*MACHINES[machine], PLAIN).run(recording)
    seconds, sequence = Simulation(*MACHINES[machine], policy).run(recording)
    assert sequence.generated == len(recording.answer)
    return plain / seconds


@pytest.mark.parametrize("kind", PROCESSES)
@pytest.mark.parametrize("machine", [SLOW, LINEAR])
def test_no_text_is_more_than_two_per_cent_slower_than_plain_and_an_adversary_makes_it_five(
    machine: str, kind: str
) -> None:
    """An adversary is a pair that is sure of everything and never agrees; the draft reads its prompt for nothing."""
    assert speedup(machine, kind) >= (0.95 if kind == "adversarial" else 0.98)


@pytest.mark.parametrize("kind", ["hard", "adversarial"])
def test_a_fixed_number_of_drafts_fails_that_test(kind: str) -> None:
    assert speedup(SLOW, kind, SpeculationParams(3)) < 0.9


@pytest.mark.parametrize("kind", ["easy", "bursty", "drifting", "story then code"])
def test_what_is_easy_in_parts_is_faster_in_these(kind: str) -> None:
    assert speedup(SLOW, kind) > 1.02


def test_a_story_that_ends_in_code_is_drafted_again_within_a_few_tokens() -> None:
    """Its second half is easy; drafted by threes from its first token on, three quarters of that would be drafts."""
    recording = synthetic("story then code")
    simulation = Simulation(*MACHINES[SLOW], ADAPTIVE)
    _, sequence = simulation.run(recording)
    easy = len(recording.answer) // 2
    assert sequence.stats.accepted > 0.5 * easy


@pytest.mark.parametrize("machine", [SLOW, MIDDLE])
@pytest.mark.parametrize("texts", [4, 8])
def test_a_crowd_is_not_slower_for_being_allowed_to_speculate(machine: str, texts: int) -> None:
    """All ask at once, so that for most of the time prompts are being read beside those that are written.

    What counts is how long clients wait in the mean: one that is helped by drafts is, in part, at the cost of others.
    """
    recordings = [r for r in read_recordings() if r.temperature == 0][: 3 * texts : 3]
    plain, adaptive = (
        mean(Simulation(*MACHINES[machine], policy, slots=8, max_wait_seconds=1.0).together(recordings)[0])
        for policy in (PLAIN, ADAPTIVE)
    )
    assert adaptive <= plain / 0.98


@pytest.mark.parametrize("machine", MACHINES)
def test_no_policy_beats_the_oracle_of_the_model_alone(machine: str) -> None:
    target, draft = MACHINES[machine]
    for kind in ("easy", "bursty", "hard"):
        recording = synthetic(kind)
        best = oracle(recording, Cost(target, most=64), Cost(draft, most=64))
        for policy in (PLAIN, ADAPTIVE, SpeculationParams(3), SpeculationParams(7)):
            seconds, _ = Simulation(target, draft, policy).run(recording)
            assert seconds >= 0.99 * best


def test_a_recorded_text_comes_out_as_it_was_recorded_whatever_the_policy() -> None:
    recording = read_recordings()[0]
    for policy in (PLAIN, ADAPTIVE, SpeculationParams(4)):
        _, sequence = Simulation(*MACHINES[SLOW], policy).run(recording)
        assert len(set(sequence.answer)) == len(set(recording.answer))
        assert sequence.generated == len(recording.answer)
