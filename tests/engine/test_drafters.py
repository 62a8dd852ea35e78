"""The sources of drafts: the client's prediction, the draft model, and what the controller makes of their proposals."""

from __future__ import annotations

from typing import ClassVar

import pytest

from fake_pair import VOCABULARY, FakePair, plain_greedy
from specserve.sequence import DrafterName, Sequence
from specserve.speculation.lookup import FreeTokens

PROMPT = [1, 2, 3]


def test_a_prediction_is_drafted_verified_and_resumed_after_a_difference() -> None:
    truth = plain_greedy(PROMPT, 40)
    pair = FakePair()
    generation = pair.submit(PROMPT, gamma=4, max_tokens=40, prediction=[*truth[:15], 0, 0, *truth[17:]])
    pair.run()
    assert generation.answer == truth
    assert generation.stats.drafters["prediction"].accepted > 20
    assert generation.stats.rounds < 20


def test_a_wrong_prediction_leaves_the_output_and_the_model_drafts_instead() -> None:
    pair = FakePair()
    generation = pair.submit(PROMPT, max_tokens=40, prediction=[22] * 50)
    pair.run()
    assert generation.answer == plain_greedy(PROMPT, 40)
    assert generation.stats.drafters["model"].accepted > 0


@pytest.mark.parametrize("drafter", ["model", "prediction"])
def test_only_the_drafter_that_was_asked_for_is_used(drafter: DrafterName) -> None:
    pair = FakePair()
    generation = pair.submit(PROMPT, drafter=drafter, prediction=plain_greedy(PROMPT, 20))
    pair.run()
    assert set(generation.stats.drafters) == {drafter}


def test_a_prefill_in_the_same_round_does_not_make_drafts_pay_that_would_not_pay_alone() -> None:
    """Every row costs alike: a draft costs what the token costs that it might spare, in a round of any length."""
    pair = FakePair()
    prediction = plain_greedy(PROMPT, 60)
    sequence = pair.submit(PROMPT, gamma=4, mode="adaptive", drafter="prediction", prediction=prediction, max_tokens=60)
    pair.step()
    long = pair.submit([n % 23 for n in range(120)])
    pair.run_until(lambda: long.generated > 0)
    assert sequence.stats.rounds > 10
    assert sequence.stats.drafted == 0


@pytest.mark.parametrize("right", [True, False])
def test_a_source_is_judged_by_its_proposals_although_none_was_drafted(right: bool) -> None:
    """Every row costs a whole step here, so that no draft pays."""
    truth = plain_greedy(PROMPT, 30)

    class Oracle:
        name: ClassVar[DrafterName] = "lookup"

        def propose(self, sequence: Sequence, drafts: list[int], limit: int) -> FreeTokens:
            del drafts, limit
            token = truth[sequence.generated] if sequence.generated < len(truth) else 0
            return FreeTokens([token if right else (token + 1) % VOCABULARY], [0.6])

    pair = FakePair(proposers=[Oracle()])
    generation = pair.submit(PROMPT, gamma=4, mode="adaptive", drafter="lookup", max_tokens=len(truth))
    before = pair.controller.acceptance(generation, "lookup", 0.6)
    pair.run()
    assert generation.stats.drafted == 0
    assert (pair.controller.acceptance(generation, "lookup", 0.6) > before) == right
