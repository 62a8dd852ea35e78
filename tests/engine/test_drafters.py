"""Drafters: the client's prediction, the draft model, and what the controller learns from their proposals."""

from collections import abc
from typing import ClassVar

import pytest

from constraints import Alternating
from costs import FixedCost, flat, table
from fake_pair import END_TOKEN, ENDLESS, GREEDY, VOCABULARY, FakePair, plain_greedy, scripted
from specserve.sequence import DrafterName, Pool, Sequence, SpeculationMode, SpeculationParams
from specserve.speculation.ngram import LookupProposer, Pools
from specserve.speculation.proposers import GrammarProposer, Proposal, Proposer

PROMPT = [1, 2, 3]


def test_a_prediction_is_drafted_and_realigned_after_a_difference() -> None:
    truth = plain_greedy(PROMPT, 40)
    sequence = FakePair().answer(PROMPT, gamma=4, max_tokens=40, prediction=[*truth[:15], 0, 0, *truth[17:]])
    assert sequence.answer == truth
    assert sequence.stats.accepted_by["prediction"] > 20
    assert sequence.stats.rounds < 20


@pytest.mark.parametrize("is_likely", [True, False])
def test_a_proposal_ends_a_block_only_where_it_is_likelier_than_the_rest(is_likely: bool) -> None:
    """It comes after the first token of the draft model's, whose pass drafts four."""
    truth = plain_greedy(PROMPT, 60, endless=True)
    script = truth if is_likely else [(token + 1) % END_TOKEN for token in truth]
    early = scripted("lookup", script, [], confidence=0.99 if is_likely else 0.01)

    class Late(Proposer):
        name: ClassVar[DrafterName] = "lookup"

        def propose(self, sequence: Sequence, drafts: list[int], max_tokens: int) -> Proposal:
            return early.propose(sequence, drafts, max_tokens if drafts else 0)

    pair = FakePair(costs=(flat(), flat(0.3)), block_length=4, proposers=[Late()])
    sequence = pair.answer(PROMPT, gamma=4, mode="auto", max_tokens=60, sampling=ENDLESS)
    assert sequence.answer == truth
    behind_masks = sum(draft.behind_mask for step in pair.records.rounds for draft in step.drafts)
    assert (behind_masks > 0) != is_likely
    assert sequence.stats.drafted_by["model"] > 5


def test_only_the_requested_drafter_is_used() -> None:
    drafters: list[DrafterName] = ["model", "prediction"]
    for drafter in drafters:
        sequence = FakePair().answer(PROMPT, drafter=drafter, prediction=plain_greedy(PROMPT, 20))
        assert set(sequence.stats.drafted_by) == {drafter}


def test_a_prefill_in_the_same_round_does_not_make_drafts_pay() -> None:
    """Every row costs the same: verifying a draft costs as much as the decode step that it could save, in any round."""
    pair = FakePair()
    prediction = plain_greedy(PROMPT, 60)
    sequence = pair.submit(PROMPT, gamma=4, mode="auto", drafter="prediction", prediction=prediction, max_tokens=60)
    pair.step()
    long = pair.submit([n % 23 for n in range(120)])
    pair.run_until(lambda: long.generated > 0)
    assert sequence.stats.rounds > 10
    assert sequence.stats.drafted == 0


def test_a_sequence_drafts_when_so_few_are_left_that_the_draft_model_pays() -> None:
    """The first three rows of the draft model take .35 of a step each, worth 1.05 tokens beside two others."""
    pair = FakePair(blend=0.0, costs=(flat(), FixedCost(table(lambda rows: 0.35 * min(rows, 3)))))
    for n in range(2):
        pair.submit([n, 1], gamma=4, mode="auto", max_tokens=20, sampling=ENDLESS)
    long = pair.submit([5, 1], gamma=4, mode="auto", max_tokens=120, sampling=ENDLESS)
    pair.run_until(lambda: long.generated > 1)
    expected = pair.controller.acceptance.of_next(long)
    pair.run_until(lambda: long.generated > 15)
    assert long.stats.drafted == 0
    assert pair.controller.acceptance.of_next(long) == expected
    pair.run(long)
    assert long.stats.accepted > 40


@pytest.mark.parametrize(("mode", "pays"), [("fixed", True), ("off", False)])
def test_a_sequence_drafts_in_passes_that_another_has_made_anyway(mode: SpeculationMode, pays: bool) -> None:
    """A pass of the draft model takes .7 of a step, whatever its rows, worth 1.4 tokens beside another sequence."""
    pair = FakePair(blend=0.0, costs=(flat(), flat(0.7)))
    pair.submit([1, 1], gamma=1, mode=mode, drafter="model", max_tokens=100, sampling=ENDLESS)
    one = pair.submit([2, 1], gamma=1, mode="auto", max_tokens=40, sampling=ENDLESS)
    pair.run(one)
    assert (one.stats.accepted > 10) == pays


def test_acceptance_is_learned_from_proposals_that_were_not_drafted() -> None:
    """Every further row costs .94 of a decode step, so that only a draft pays that is likelier than these."""
    truth = plain_greedy(PROMPT, 30)
    for right, tokens in ((True, truth), (False, [(token + 1) % VOCABULARY for token in truth])):
        costs = FixedCost(table(lambda rows: 0.06 + 0.94 * rows)), flat()
        pair = FakePair(proposers=[scripted("lookup", tokens, [], confidence=0.6)], costs=costs)
        sequence = pair.submit(PROMPT, gamma=4, mode="auto", drafter="lookup", max_tokens=len(truth))
        before = pair.controller.acceptance.of_token(sequence, "lookup", 0.6)
        pair.run()
        assert sequence.stats.drafted == 0
        assert (pair.controller.acceptance.of_token(sequence, "lookup", 0.6) > before) == right


def test_what_an_answer_of_the_same_pool_wrote_is_drafted() -> None:
    truth, pool = plain_greedy([5, 6, 7, 8], 40), ("", "a")
    cases: list[tuple[Pool | None, Pool | None]] = [(pool, pool), (pool, ("", "b")), (pool, None), (None, None)]
    for case in cases:
        pair = FakePair(proposers=[LookupProposer(Pools(1000))])
        accepted = []
        for searched in case:
            sequence = pair.answer([5, 6, 7, 8], drafter="lookup", pool=searched, gamma=8, max_tokens=40)
            assert sequence.answer == truth
            accepted.append(sequence.stats.accepted)
        alone, after = accepted
        assert after > max(alone, 30) if case == (pool, pool) else after == alone


def test_the_last_token_of_forced_text_is_less_certain_than_those_before() -> None:
    """The model may choose a longer one; of a text that goes on beyond the drafts all are alike."""

    class Forcing(Alternating):
        def forced(self, written: abc.Sequence[int], max_tokens: int) -> list[int]:
            del written
            return [5, 6, 7][:max_tokens]

    sequence = Sequence([1, 2, 3], GREEDY, SpeculationParams(8), max_tokens=20, constraint=Forcing(VOCABULARY))
    whole, part = (GrammarProposer().propose(sequence, [], most) for most in (8, 2))
    assert (whole.tokens, part.tokens) == ([5, 6, 7], [5, 6])
    assert part.confidence == whole.confidence[:2]
    assert whole.confidence[0] == whole.confidence[1] > whole.confidence[2]


def test_an_answer_joins_its_pool_though_it_was_cancelled_or_not_drafted_for() -> None:
    pools = Pools(1000)
    pair = FakePair(proposers=[LookupProposer(pools)])
    cancelled = pair.submit([5, 6, 7, 8], pool=("", "a"), mode="off", gamma=0, max_tokens=40)
    pair.run_until(lambda: cancelled.generated == 10)
    pair.scheduler.cancel(cancelled)
    [history] = pools.of(("", "a"))
    assert history.tokens.tolist() == [5, 6, 7, 8, *plain_greedy([5, 6, 7, 8], 10), -1]
