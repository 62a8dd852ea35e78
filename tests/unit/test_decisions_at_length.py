"""What is drafted after 16,384 tokens depends on what passes cost there, and not on what shorter ones let expect."""

from __future__ import annotations

import pytest

from costs import FixedCost
from specserve.sequence import SamplingParams, Sequence, SpeculationParams
from specserve.speculation.cost import CostTable
from specserve.speculation.gain import Candidate, choose_for_model, offer_length
from specserve.speculation.policy import Controller

ROWS = (1, 8, 16)
LENGTHS = (64, 4096, 16_384)
# Seconds of 1, 8 and 16 rows; `EXTRAPOLATED` is on the line through the first two.
SHORT, MIDDLE = (0.036, 0.043, 0.051), (0.041, 0.050, 0.060)
EXTRAPOLATED = (0.056, 0.071, 0.087)
# Each further row takes 15 ms there instead of 2, or hardly anything.
DEARER, CHEAPER = (0.056, 0.161, 0.281), (0.056, 0.0567, 0.0575)


def controller(far: tuple[float, ...], draft_far: tuple[float, ...] = (0.008, 0.011, 0.015)) -> Controller:
    """A controller with these costs of both models after 16,384 tokens."""
    draft = CostTable(ROWS, LENGTHS, ((0.008, 0.011, 0.015), (0.008, 0.011, 0.015), draft_far))
    return Controller(FixedCost(CostTable(ROWS, LENGTHS, (SHORT, MIDDLE, far))), FixedCost(draft))


def drafts_of_an_offer(decides: Controller, kv_len: int) -> int:
    """How many of twelve offered tokens are drafted, of which each is accepted with a probability of .6."""
    costs = decides.costs([sequence()], kv_len, 64)
    return offer_length(1.0, [0.6] * 12, None, 1, costs)


def gain_by_the_model(decides: Controller, kv_len: int, draft_kv_len: int = 64) -> float:
    """What drafts of the draft model are expected to gain, each of which is accepted with a probability of .7."""
    costs = decides.costs([sequence()], kv_len, draft_kv_len)
    return choose_for_model([Candidate(1.0, 0.7, 1, 8)], 1, costs)[1]


def sequence() -> Sequence:
    """A sequence that decodes."""
    return Sequence([1], SamplingParams(temperature=0), SpeculationParams(15, mode="auto"), max_tokens=100)


def test_the_line_through_shorter_lengths_is_what_a_table_without_the_long_one_says() -> None:
    measured = controller(EXTRAPOLATED)
    shorter = Controller(FixedCost(CostTable(ROWS, LENGTHS[:2], (SHORT, MIDDLE))), None)
    assert drafts_of_an_offer(measured, 16_384) == drafts_of_an_offer(shorter, 16_384) == 6


@pytest.mark.parametrize(("far", "drafts"), [(DEARER, 2), (CHEAPER, 9)])
def test_fewer_or_more_are_drafted_where_rows_cost_more_or_less_than_extrapolated(
    far: tuple[float, ...], drafts: int
) -> None:
    assert drafts_of_an_offer(controller(far), 16_384) == drafts
    assert drafts_of_an_offer(controller(far), 64) == drafts_of_an_offer(controller(EXTRAPOLATED), 64)


def test_between_two_lengths_the_decision_lies_between_them() -> None:
    drafts = [drafts_of_an_offer(controller(DEARER), kv_len) for kv_len in (4096, 8192, 12_288, 16_384)]
    assert drafts == sorted(drafts, reverse=True)
    assert drafts[0] > drafts[-1]


def test_the_draft_model_pays_or_not_by_what_the_targets_rows_cost_there() -> None:
    assert gain_by_the_model(controller(EXTRAPOLATED), 16_384) > 0.3
    assert gain_by_the_model(controller(CHEAPER), 16_384) > gain_by_the_model(controller(EXTRAPOLATED), 16_384)
    assert gain_by_the_model(controller((0.056, 0.5, 1.0)), 16_384) == 0


def test_the_draft_models_own_context_counts_and_not_the_targets() -> None:
    """Its slot holds the end of the text only; with 16,384 tokens in it a draft would cost as much as it brings."""
    slow = controller(EXTRAPOLATED, draft_far=(0.06, 0.08, 0.1))
    assert gain_by_the_model(slow, 16_384, 2048) > 0.3
    assert gain_by_the_model(slow, 16_384, 16_384) == 0
