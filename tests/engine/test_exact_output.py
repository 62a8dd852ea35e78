"""Sampled output has the target's distribution exactly: the whole scheduler, for every case of its random numbers.

A fake pair runs once for each case of the numbers that token and block verification draw (intervals.py). Sequences that
run together or one after the other have one seed, which must not make one's answer tell of the other's.
"""

from collections import abc
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest

from constraints import Alternating, Slow
from costs import flat
from fake_engine import FakeEngine, FakeVocabulary, NoEndToken
from fake_pair import FakePair, exact_answers
from intervals import largest_error, outcomes
from rules import KeyedByPosition, noise
from specserve.engine.base import Row
from specserve.sampling import logits as logits_module
from specserve.sampling.distribution import FloatArray, draw
from specserve.sampling.logits import TargetDistributions
from specserve.sampling.noise import Noise, Purpose
from specserve.sequence import Pool, SamplingParams, SpeculationMode, Verification
from specserve.speculation import round as round_module
from specserve.speculation import step as step_module
from specserve.speculation.ngram import LookupProposer, Pools, PredictionProposer
from specserve.speculation.proposers import GrammarProposer, Proposer
from specserve.speculation.rejection import RULES
from specserve.speculation.step import Draft, SequenceStep

# Of a probability: logits are in single precision.
TOLERANCE = 1e-6

Answers = tuple[tuple[int, ...], ...]
# The rules that draw a number for each position.
BY_NUMBERS: tuple[Verification, ...] = ("token", "block")


class Case(NamedTuple):
    """What is run, chosen for few cases in which much happens."""

    events: set[str]  # that must happen: "n drafts" in a round, "n + adopted" with an alternative, and their drafters
    prompts: tuple[list[int], ...] = ([0, 1],)
    together: bool = True  # whether the sequences run at once or one after the other
    length: int = 6  # of each answer, in tokens
    mode: SpeculationMode = "auto"
    gamma: int = 8
    min_p: float = 0.2  # unlikely tokens get probability 0, which leaves few cases of long answers
    presence_penalty: float = 0.0
    vocabulary: FakeVocabulary = NoEndToken(3)
    cost: float = 0.36  # of the draft model's pass, in seconds; the target's takes one
    blend: float = 0.4  # how much the draft model differs
    alternatives: int = 8
    block_length: int = 1  # that the draft model drafts in one pass
    prediction: tuple[int, ...] = ()
    pool: Pool | None = None  # which the second sequence searches
    masks: int = 0  # that a round has time for; 0 without a grammar
    min_tokens: int = 0
    seed: int = 7

    @property
    def sampling(self) -> SamplingParams:
        sampling = SamplingParams(seed=self.seed, min_p=self.min_p, presence_penalty=self.presence_penalty)
        return replace(sampling, min_tokens=self.min_tokens, end_tokens=tuple(self.vocabulary.end_tokens()))


WITH_END = FakeVocabulary(3)


CASES = {
    "one draft": Case({"0 drafts", "1 drafts"}, length=4, mode="fixed", gamma=1, min_p=0),
    "two drafts": Case({"0 drafts", "1 drafts", "2 drafts"}, length=4, mode="fixed", gamma=2, min_p=0),
    "four drafts": Case({"2 drafts", "3 drafts", "4 drafts"}, mode="fixed", gamma=4, min_p=0.4),
    "adaptive lengths": Case({"0 drafts", "1 drafts", "2 drafts"}, length=5, alternatives=0),
    "alternatives": Case({"0 drafts", "4 drafts", "1 + adopted", "2 + adopted"}),
    "penalties": Case({"2 drafts", "1 + adopted"}, length=5, presence_penalty=0.8),
    "an end token": Case({"2 drafts", "1 + adopted"}, ([0, 2],), length=5, cost=0.38, vocabulary=WITH_END),
    "a prediction": Case(
        {"model", "prediction", "2 + adopted"}, length=5, min_p=0.25, cost=0.15, blend=0.5, prediction=(1, 1, 2, 0, 1)
    ),
    "a grammar": Case({"2 + adopted"}, ([0, 2],), cost=0.4, vocabulary=NoEndToken(5), masks=99),
    "masks that wait": Case(
        {"a mask waits", "1 + adopted", "2 + adopted"}, ([3, 3],), cost=0.37, vocabulary=NoEndToken(5), masks=4
    ),
    "no end before four tokens": Case(
        {"2 drafts", "2 + adopted"}, ([0, 2],), length=5, cost=0.38, vocabulary=WITH_END, min_tokens=4
    ),
    "two prompts at once": Case({"2 drafts", "1 + adopted"}, ([2, 2], [2, 1]), length=5, min_p=0.5, cost=0.3),
    "a prompt twice at once": Case({"2 drafts", "1 + adopted"}, ([2, 2],) * 2, length=4, min_p=0.5, cost=0.216),
    "a prompt again": Case({"1 drafts", "1 + adopted"}, ([1, 1],) * 2, together=False, length=4, cost=0.6, blend=0.6),
    "a block": Case({"1 behind masks", "2 behind masks"}, length=5, mode="fixed", gamma=3, min_p=0.3, block_length=3),
    "a block of adaptive length": Case(
        {"0 behind masks", "1 behind masks", "2 behind masks"}, length=5, min_p=0.3, block_length=3, alternatives=0
    ),
    "a block and alternatives": Case({"2 behind masks", "3 + adopted"}, min_p=0.4, block_length=3),
    "a block and an end token": Case(
        {"2 behind masks", "3 drafts"},
        ([0, 2],),
        length=5,
        mode="fixed",
        min_p=0.3,
        vocabulary=WITH_END,
        block_length=3,
    ),
    "a block and a grammar": Case(
        {"2 behind masks", "4 drafts"}, ([0, 2],), min_p=0.3, vocabulary=NoEndToken(5), masks=99, block_length=2
    ),
    "a block and masks that wait": Case(
        {"2 behind masks", "a mask waits"}, ([3, 3],), min_p=0.4, vocabulary=NoEndToken(5), masks=4, block_length=3
    ),
    "a block and a prediction": Case(
        {"2 behind masks", "prediction"},
        length=5,
        min_p=0.3,
        cost=0.15,
        blend=0.5,
        prediction=(1, 1, 2, 0, 1),
        block_length=3,
    ),
    "blocks of two prompts": Case(
        {"1 behind masks", "2 + adopted"}, ([0, 2, 1], [0, 1]), length=5, min_p=0.6, block_length=2
    ),
    "a pool of answers": Case(
        {"lookup", "2 drafts"}, ([1, 1],) * 2, together=False, length=4, cost=2.0, pool=("a key", "")
    ),
}


def run(case: Case, verification: Verification, events: set[str]) -> Answers:
    """The answers of one run; adds what happened in it."""
    proposers: list[Proposer] = [PredictionProposer(), GrammarProposer(), LookupProposer()] if case.prediction else []
    if case.pool:
        proposers.append(LookupProposer(Pools(1000)))
    costs = flat(), flat(case.cost)
    pair = FakePair(
        vocabulary=case.vocabulary,
        blend=case.blend,
        costs=costs,
        proposers=proposers,
        masks=case.masks,
        block_length=case.block_length,
    )
    pair.target.max_alternatives = case.alternatives
    grammar = Slow(case.vocabulary.size, pair.masks) if case.masks else None
    options: dict[str, Any] = {"gamma": case.gamma, "mode": case.mode, "verification": verification, "pool": case.pool}
    options |= {"sampling": case.sampling, "max_tokens": case.length}
    sequences = []
    for prompt in case.prompts:
        sequences.append(pair.submit(prompt, prediction=case.prediction, constraint=grammar, **options))
        if not case.together:
            pair.run()
    pair.run()
    for step in pair.records.rounds:
        if step.is_decode_round:
            events |= {f"{len(step.drafts)} drafts", *step.drafted_by}
            events.add(f"{sum(draft.behind_mask for draft in step.drafts)} behind masks")
        if step.adopted:
            events.add(f"{len(step.drafts)} + adopted")
    if pair.masks.deferred:
        events.add("a mask waits")
    return tuple(tuple(sequence.answer) for sequence in sequences)


def error(case: Case, verification: Verification, *, of: slice = slice(None)) -> float:
    """The largest error of the probability of any answers to these prompts together."""
    events: set[str] = set()
    found = outcomes(lambda: run(case, verification, events)[of])
    assert case.events <= events, f"only these have happened: {events}"
    grammar = Alternating(case.vocabulary.size) if case.masks else None
    expected: dict[Answers, float] = {(): 1.0}
    for prompt in case.prompts[of]:
        exact = exact_answers(prompt, case.length, case.sampling, case.vocabulary, grammar)
        pairs = product(expected.items(), exact.items())
        expected = {(*before, answer): first * second for (before, first), (answer, second) in pairs}
    return largest_error(found, expected)


@pytest.mark.parametrize("case", CASES)
def test_every_answer_has_the_targets_probability(case: str) -> None:
    for verification in BY_NUMBERS:
        assert error(CASES[case], verification) < TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_coupled_answers_are_the_same_with_and_without_drafts(case: str) -> None:
    """Without drafts they have the target's distribution (test_output.py)."""
    events: set[str] = set()
    for seed in range(30):
        drafted = CASES[case]._replace(seed=seed)
        plain = drafted._replace(mode="off", gamma=0, masks=99 if drafted.masks else 0)
        assert run(drafted, "coupled", events) == run(plain, "coupled", set()), seed
    assert {"1 drafts", "2 drafts", "3 drafts"} & events


def draw_from_the_seed(patch: pytest.MonkeyPatch) -> None:
    """Two sequences with one seed share their numbers, so one's drafts depend on what the other is going to draw."""
    patch.setattr(step_module, "Noise", lambda **keys: Noise(**{**keys, "secret": keys["seed"]}))


def reuse_numbers_after_an_alternative(patch: pytest.MonkeyPatch) -> None:
    """The round after an adopted alternative has the numbers that gave the token after it."""

    def begin(self: SequenceStep) -> None:
        begin_step(self)
        number = self.sequence.round_number - self.sequence.stats.adopted
        self.noise = noise(secret=self.sequence.secret, round_number=number)

    begin_step = SequenceStep.__post_init__
    patch.setattr(SequenceStep, "__post_init__", begin)


def draft_the_likeliest_instead_of_unlikely_tokens(patch: pytest.MonkeyPatch) -> None:
    for name, rule in RULES.items():

        def sample(
            q: FloatArray, index: int, numbers: Noise, drawn: Callable[[FloatArray, int, Noise], int] = rule.sample
        ) -> int:
            token = drawn(q, index, numbers)
            return token if q[token] > 0.3 else int(q.argmax())

        patch.setitem(RULES, name, rule._replace(sample=sample))


def penalise_without_the_adopted_token(patch: pytest.MonkeyPatch) -> None:
    adopt, forward, penalise = FakeEngine.adopt, FakeEngine.forward, logits_module.penalise
    adopted = False

    def adopting(self: FakeEngine, slot: int, number: int) -> None:
        nonlocal adopted
        adopted = True
        adopt(self, slot, number)

    def next_pass(self: FakeEngine, rows: list[Row]) -> FloatArray:
        nonlocal adopted
        adopted = False
        return forward(self, rows)

    def forgetful(logits: FloatArray, sampling: SamplingParams, prompt: Any, output: abc.Sequence[int]) -> FloatArray:
        return penalise(logits, sampling, prompt, output[:-1] if adopted else output)

    patch.setattr(FakeEngine, "adopt", adopting)
    patch.setattr(FakeEngine, "forward", next_pass)
    patch.setattr(logits_module, "penalise", forgetful)


def restrict_by_the_output_without_its_last_token(patch: pytest.MonkeyPatch) -> None:
    restrict = logits_module.restrict

    def late(logits: FloatArray, sampling: SamplingParams, n_output: int) -> FloatArray:
        return restrict(logits, sampling, n_output - 1)

    patch.setattr(logits_module, "restrict", late)


def discard_drafts_without_a_bonus_token(patch: pytest.MonkeyPatch) -> None:
    verify = round_module._verify

    def discard(p: TargetDistributions, step: SequenceStep) -> tuple[int, int | None]:
        n_accepted, next_token = verify(p, step)
        if next_token is not None:
            return n_accepted, next_token
        # The next round draws anew, with other noise.
        step.sequence.round_number += 1
        return 0, None

    patch.setattr(round_module, "_verify", discard)


def report_half_of_q_for_free_drafts(patch: pytest.MonkeyPatch) -> None:
    def half_certain(token: int, size: int) -> FloatArray:
        spread = np.full(size, 0.5 / (size - 1))
        spread[token] = 0.5
        return spread

    patch.setattr(round_module, "one_hot", half_certain)


def drop_unlikely_drafts_and_end_tokens(patch: pytest.MonkeyPatch) -> None:
    """A controller must not do this: decide by the sampled token whether it is drafted."""

    class Likely(list[Draft]):
        def __init__(self, step: SequenceStep) -> None:
            self.step = step

        def append(self, draft: Draft) -> None:
            assert draft.q is not None
            if draft.q[draft.token] > 0.3 and draft.token != draft.q.size - 1:
                super().append(draft)
            else:
                self.step.model_ended = True

    def begin(self: SequenceStep) -> None:
        begin_step(self)
        self.drafts = Likely(self)

    begin_step = SequenceStep.__post_init__
    patch.setattr(SequenceStep, "__post_init__", begin)


def share_noise_between_draft_and_rule(patch: pytest.MonkeyPatch) -> None:
    def sample(q: FloatArray, position: int, noise: Noise) -> int:
        return draw(q, noise.uniform(Purpose.ACCEPT, position))

    for name in BY_NUMBERS:
        patch.setitem(RULES, name, RULES[name]._replace(sample=sample))


def compute_alternatives_after_the_draft(patch: pytest.MonkeyPatch) -> None:
    """Their logits are those of the draft that they take the place of."""
    forward = FakeEngine.forward

    def wrong(self: FakeEngine, rows: list[Row]) -> FloatArray:
        logits = forward(self, rows).copy()
        asked = [row for row in rows if row.wants_logits]
        drafts = {(row.slot, row.position): n for n, row in enumerate(asked) if not row.alternative}
        for n, row in enumerate(asked):
            logits[n] = logits[drafts[row.slot, row.position]]
        return logits

    patch.setattr(FakeEngine, "forward", wrong)


@pytest.mark.parametrize(
    ("fault", "cases"),
    [
        (draw_from_the_seed, ["two prompts at once", "a prompt twice at once", "a prompt again", "a pool of answers"]),
        (reuse_numbers_after_an_alternative, ["alternatives"]),
        (draft_the_likeliest_instead_of_unlikely_tokens, ["one draft", "a block"]),
        (penalise_without_the_adopted_token, ["penalties"]),
        (restrict_by_the_output_without_its_last_token, ["no end before four tokens"]),
        (discard_drafts_without_a_bonus_token, ["masks that wait"]),
        (report_half_of_q_for_free_drafts, ["a prediction"]),
        (drop_unlikely_drafts_and_end_tokens, ["one draft", "an end token", "a block"]),
        (share_noise_between_draft_and_rule, ["one draft", "a block"]),
        (compute_alternatives_after_the_draft, ["alternatives"]),
    ],
)
def test_a_planted_fault_changes_the_probability_of_an_answer(
    fault: Callable[[pytest.MonkeyPatch], None], cases: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an answer to the last prompt, whatever the answers to others are."""
    fault(monkeypatch)
    for case, verification in product(cases, BY_NUMBERS):
        # What the fault keeps from happening does not matter.
        expected = CASES[case]._replace(events=set())
        assert error(expected, verification, of=slice(-1, None)) > 100 * TOLERANCE, (case, verification)


def test_numbers_keyed_by_position_are_wrong_for_block_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """It draws numbers after a rejected draft too, and the next round would give these positions the same ones."""
    monkeypatch.setattr(step_module, "Noise", KeyedByPosition)
    assert error(CASES["two drafts"], "token") < TOLERANCE
    assert error(CASES["two drafts"], "block") > 100 * TOLERANCE
