"""Drafters: the client's prediction, the draft model, and what the controller learns from their proposals."""

from costs import FixedCost, flat, table
from fake_pair import ENDLESS, VOCABULARY, FakePair, plain_greedy, scripted
from specserve.sequence import DrafterName
from specserve.speculation.ngram import LookupProposer, Pools

PROMPT = [1, 2, 3]


def test_a_prediction_is_drafted_and_realigned_after_a_difference() -> None:
    truth = plain_greedy(PROMPT, 40)
    sequence = FakePair().answer(PROMPT, gamma=4, max_tokens=40, prediction=[*truth[:15], 0, 0, *truth[17:]])
    assert sequence.answer == truth
    assert sequence.stats.accepted_by["prediction"] > 20
    assert sequence.stats.rounds < 20


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


def test_an_answer_joins_its_pool_though_it_was_cancelled_or_not_drafted_for() -> None:
    pools = Pools(1000)
    pair = FakePair(proposers=[LookupProposer(pools)])
    cancelled = pair.submit([5, 6, 7, 8], pool=("", "a"), mode="off", gamma=0, max_tokens=40)
    pair.run_until(lambda: cancelled.generated == 10)
    pair.scheduler.cancel(cancelled)
    [history] = pools.of(("", "a"))
    assert history.tokens.tolist() == [5, 6, 7, 8, *plain_greedy([5, 6, 7, 8], 10), -1]
