"""Nothing is drafted, read or learned after the end of an answer: an end token, or where its grammar ends."""

from collections import Counter
from collections.abc import Sequence as Tokens
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from constraints import Alternating
from costs import flat
from fake_pair import END_TOKEN, ENDLESS, GREEDY, VOCABULARY, FakePair, plain_greedy, scripted
from pairs import Pair, TinyFiles
from specserve.engine.base import Row
from specserve.engine.llama import LlamaEngine
from specserve.sampling.distribution import FloatArray
from specserve.sequence import DrafterName, SamplingParams, SpeculationMode
from specserve.speculation.ngram import LookupProposer

# Prompts whose greedy answers have 1 to 11 tokens, and more drafts than that.
PROMPTS = [[a, b] for a in range(6) for b in range(END_TOKEN) if 1 <= len(plain_greedy([a, b], 20)) < 12]
GAMMA = 12


def draft_passes(pair: FakePair) -> int:
    """Passes of the draft model, one sequence at a time: each has one row with logits."""
    return sum(row.wants_logits for row in pair.draft.decoded)


def test_a_short_answer_takes_a_pass_of_the_draft_model_for_each_token_after_the_first_and_for_its_end() -> None:
    """One round verifies all of them; without speculation each token and the end would take a step of one second."""
    for prompt in PROMPTS:
        pair = FakePair(blend=0.0)
        sequence = pair.answer(prompt, gamma=GAMMA)
        assert (sequence.answer, sequence.finish_reason) == (plain_greedy(prompt, 20), "stop")
        assert draft_passes(pair) == sequence.stats.drafted == sequence.generated
        assert (sequence.stats.rounds, sequence.stats.accepted) == (1, sequence.generated - 1)
        assert sequence.stats.plain_seconds == pytest.approx(sequence.generated)


def test_the_draft_model_reads_no_end_token() -> None:
    """It would read one only to draft what follows. The end is drafted, and often not what the target says."""
    for mode, verification, temperature in product(("fixed", "auto"), ("token", "block", "coupled"), (0.0, 1.0)):
        pair = FakePair(blend=0.4, costs=(flat(), flat(0.05)))
        for seed, prompt in enumerate(PROMPTS):
            sampling = SamplingParams(temperature=temperature, seed=seed)
            pair.submit(prompt, gamma=GAMMA, mode=mode, verification=verification, sampling=sampling)  # type: ignore[arg-type]
        pair.run()
        assert END_TOKEN in {row.token for row in pair.target.decoded}
        assert END_TOKEN not in {row.token for row in pair.draft.decoded}


@pytest.mark.parametrize("drafter", ["lookup", "prediction", "grammar"])
def test_an_offer_is_drafted_up_to_its_first_end_token(drafter: DrafterName) -> None:
    for number, prompt in enumerate(PROMPTS):
        truth = plain_greedy(prompt, 20)
        proposer = scripted(drafter, [*truth, END_TOKEN, 1, 2, END_TOKEN, 3], asked=[])
        pair = FakePair(costs=(flat(), flat(0.05)), proposers=[proposer])
        sequence = pair.answer(prompt, gamma=GAMMA, mode="auto" if number % 2 else "fixed", drafter=drafter)
        assert sequence.answer == truth
        assert sequence.stats.drafted_by == {drafter: len(truth)}
        assert pair.target.decoded[-1].token == END_TOKEN


def test_end_tokens_of_the_prompt_end_no_answer_that_may_have_none() -> None:
    """With `ignore_eos`: a lookup that proposes the end of an earlier turn is wrong, and others are found after it."""
    turn = [3, 4, 5, 6, 7, 8]
    prompt = [*turn, END_TOKEN, 9, *turn, END_TOKEN, 9, *turn]
    pair = FakePair(proposers=[LookupProposer()])
    sequence = pair.answer(prompt, gamma=GAMMA, drafter="lookup", sampling=ENDLESS, max_tokens=200)
    assert sequence.answer == plain_greedy(prompt, 200, endless=True)
    assert sequence.stats.accepted > 100


class Ending(Alternating):
    """After `length` tokens the end is the only one allowed, as with a real grammar."""

    def allowed(self, written: Tokens[int]) -> NDArray[np.bool_]:
        mask = super().allowed(written)
        return np.arange(len(mask)) == END_TOKEN if self.complete(written) else mask


@pytest.mark.parametrize("mode", ["fixed", "auto"])
def test_the_draft_model_reads_nothing_where_only_the_end_of_a_grammar_may_follow(mode: SpeculationMode) -> None:
    """Of an answer of n tokens it reads n - 1 at most: the end after the last needs no draft."""
    prompt = [1, 2]
    for length in range(2, 9):
        pair = FakePair(blend=0.0, costs=(flat(), flat(0.05)))
        sequence = pair.answer(prompt, gamma=GAMMA, mode=mode, constraint=Ending(VOCABULARY, length=length))
        assert (sequence.generated, sequence.finish_reason) == (length, "stop")
        assert draft_passes(pair) > 0
        assert max(row.position for row in pair.draft.decoded) <= len(prompt) + length - 2


def test_a_loaded_pair_knows_its_end_tokens(files: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither model reads one where a real grammar ends."""
    read: list[int] = []
    forward = LlamaEngine.forward

    def recorded(self: LlamaEngine, rows: list[Row]) -> FloatArray:
        read.extend(row.token for row in rows)
        return forward(self, rows)

    pair = Pair(files.config("llama"))
    monkeypatch.setattr(LlamaEngine, "forward", recorded)
    answer = pair.complete("a", temperature=0, grammar='root ::= "abababab"', speculation={"mode": "fixed", "gamma": 9})
    assert answer.text == "abababab"
    assert answer.sequence.stats.drafted > 0
    assert not set(read) & set(pair.vocabulary.end_tokens())


def test_an_end_token_is_no_alternative() -> None:
    """The row of one gives the token after it, which nobody reads; `adopted` would count what no answer has."""
    pair = FakePair(costs=(flat(), flat(0.05)), blend=0.45)
    prompts = [[a, b] for a in range(END_TOKEN) for b in range(END_TOKEN)]
    sampling = replace(GREEDY, logit_bias=((END_TOKEN, 1.5),))
    sequences = pair.answers(prompts, gamma=8, mode="auto", sampling=sampling)
    alternatives = Counter(row.token for row in pair.target.decoded if row.alternative)
    assert alternatives.total() > 50
    assert alternatives[END_TOKEN] == 0
    for sequence in sequences:
        if sequence.finish_reason == "stop":
            stats = sequence.stats
            # On a slow machine some age, and preempt others, whose next token then comes with a prefill.
            in_rounds = sequence.generated - sequence.preemptions
            assert stats.committed == stats.accepted + stats.rounds + stats.adopted == in_rounds
