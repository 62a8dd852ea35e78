"""Grammars while speculating: neither a draft that leads to a dead end nor a mask that is late changes an answer."""

import math
import random
import re
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from constraints import Pieces
from costs import flat
from fake_engine import FakeEngine
from fake_pair import GREEDY, FakePair
from intervals import largest_error, outcomes
from specserve.core.text_sequence import TextSequence
from specserve.errors import ConstraintError, MaskDeferred
from specserve.grammar import compiler as compiler_module
from specserve.grammar import constraint as constraint_module
from specserve.grammar.compiler import GrammarCompiler
from specserve.grammar.constraint import Constraint
from specserve.sampling.distribution import to_distribution
from specserve.sequence import SamplingParams, SequenceStats, SpeculationMode, Verification

# After "x" the target often chooses the dead end by the first, and never by the second.
PROMPT, BESIDE = [2, 1], [2, 0]
TOLERANCE = 1e-6
BY_NUMBERS: list[Verification] = ["token", "block"]  # the rules that draw a number for each position


class Result(NamedTuple):
    """What a client sees of an answer."""

    text: str
    end: str
    logprobs: list[float]


def result(sequence: TextSequence) -> Result:
    error = sequence.error
    end = sequence.finish_reason if error is None else error.message
    return Result(sequence.take_text(), str(end), [score.logprob for score in sequence.scores])


# Makes a wrong constraint of a right one; the list is shared by all answers at once.
Wrapper = Callable[[Constraint, list[str]], Constraint]


def unchanged(constraint: Constraint, _failures: list[str]) -> Constraint:
    return constraint


# Mode, gamma, and a draft pass's share of a step: fixed lengths, and the controller's with alternatives.
Drafts = tuple[SpeculationMode, int, float]
DRAFTS: list[Drafts] = [("fixed", 1, 0.1), ("fixed", 3, 0.1), ("auto", 4, 0.1), ("auto", 4, 0.2)]

# Without a token for "b" nothing follows "xa".
WITHOUT_B = Pieces([b"a", b"c", b"d", b"e", b"x"])
DEAD_END = GrammarCompiler(WITHOUT_B), 'root ::= "x" ("ab" | "cd" | "ed") "d"'


def answers(
    verification: Verification,
    jobs: list[tuple[list[int], SamplingParams]],
    drafts: Drafts = ("off", 0, 0.1),
    wrap: Wrapper = unchanged,
) -> tuple[list[Result], SequenceStats]:
    """Answers by DEAD_END to these prompts, three at once, which share the compiled grammar."""
    (compiler, source), (mode, gamma, draft_seconds) = DEAD_END, drafts
    pair = FakePair(vocabulary=WITHOUT_B, blend=0.6, costs=(flat(), flat(draft_seconds)))
    failures: list[str] = []
    options: dict[str, Any] = {"mode": mode, "gamma": gamma, "verification": verification, "max_tokens": 9}
    sequences = [
        pair.submit(prompt, sampling=sampling, constraint=wrap(compiler.gbnf(source), failures), **options)
        for prompt, sampling in jobs
    ]
    pair.run()
    return list(map(result, sequences)), SequenceStats.total([sequence.stats for sequence in sequences])


def error(verification: Verification, drafts: Drafts, wrap: Wrapper = unchanged) -> float:
    """The largest error of the probability of an answer, beside one that does not come to the dead end."""
    logits = FakeEngine(vocabulary=WITHOUT_B.size, n_slots=1).logits([PROMPT[-1], 4])
    after_x = np.isin(np.arange(WITHOUT_B.size), [0, 1, 3])
    p = to_distribution(np.where(after_x, logits, -np.inf), SamplingParams())
    expected: dict[tuple[str, ...], float] = {("xa!", "xcdd"): p[0], ("xcdd", "xcdd"): p[1], ("xedd", "xcdd"): p[3]}
    assert 0.03 < p[0] < 0.5
    total = SequenceStats()

    def texts() -> tuple[str, ...]:
        nonlocal total
        jobs = [(PROMPT, SamplingParams()), (BESIDE, GREEDY)]
        found, stats = answers(verification, jobs, drafts, wrap)
        total = SequenceStats.total([total, stats])
        assert all((end == "stop") == (len(text) == 4) or "no text can follow" in end for text, end, _ in found)
        return tuple(text if end == "stop" else f"{text}!" for text, end, _ in found)

    found = outcomes(texts)
    assert 0 < total.accepted < total.drafted
    assert drafts[0] != "auto" or total.adopted > 0
    return largest_error(found, expected)


class Shared(Constraint):
    """A wrong constraint: a dead end of any answer, or of any draft, fails all that share the grammar."""

    def __init__(self, right: Constraint, failures: list[str]) -> None:
        vars(self).update(vars(right))
        self._failures = failures

    def allowed(self, tokens: Sequence[int]) -> NDArray[np.bool_] | None:
        if self._failures:
            raise ConstraintError(self._failures[0])
        try:
            return super().allowed(tokens)
        except ConstraintError as error:
            self._failures.append(str(error))
            raise


class Permanent(Shared):
    """A wrong constraint: a dead end behind a draft fails the answer of that draft, though not the others."""

    def __init__(self, right: Constraint, _failures: list[str]) -> None:
        super().__init__(right, [])


@pytest.mark.parametrize("verification", BY_NUMBERS)
def test_a_dead_end_fails_as_many_answers_as_the_target_leads_there(verification: Verification) -> None:
    """For every case of the numbers that are drawn (intervals.py), and never the answer beside it."""
    for drafts in DRAFTS:
        assert error(verification, drafts) < TOLERANCE
    for wrong in (Shared, Permanent):
        assert error(verification, DRAFTS[1], wrong) > 0.01


def test_a_dead_end_fails_the_same_answers_with_and_without_drafts() -> None:
    """Greedy, and seeded by coupled verification; the text before the failure is the same, too."""
    for samplings in ([GREEDY] * 30, [SamplingParams(seed=seed) for seed in range(30)]):
        jobs = [([2, number % 5], sampling) for number, sampling in enumerate(samplings)]
        plain, _ = answers("coupled", jobs)
        assert len({text for text, *_ in plain}) > 1
        for drafts in DRAFTS:
            drafted, stats = answers("coupled", jobs, drafts)
            assert drafted == plain
            assert 0 < stats.accepted < stats.drafted
            assert drafts[0] != "auto" or stats.adopted > 0
        for wrong in (Shared, Permanent):
            assert answers("coupled", jobs, DRAFTS[1], wrong)[0] != plain


# Some answers can only end where they do; others go on, until an end token or max_tokens.
ENDS = 'root ::= "a" [a-e]{1,3} | [b-c] [a-c] | [d-e] "a"* "b"'
COMPLETE = "a[a-e]{3}|[b-c][a-c]|[d-e]a*b"
LETTERS = Pieces([b"a", b"b", b"c", b"d", b"e"])


class Rounds:
    """Gives each round time for one to three steps of all constraints if `late` is set, else for all."""

    def __init__(self, *, late: bool) -> None:
        self.compiler = GrammarCompiler(LETTERS)
        self.count = 0
        self._random = random.Random(0)
        self._late = late

    def begin(self, _seconds: float) -> None:
        self.count += 1
        self.compiler.limit_masks(self._random.randint(1, 3) if self._late else math.inf)


def ended(
    verification: Verification, gamma: int, rounds: Rounds, *, greedy: bool = False, wrap: Wrapper = unchanged
) -> list[Result]:
    """Answers by ENDS, three at once, with max_tokens 2 to 5."""
    pair = FakePair(vocabulary=LETTERS, blend=0.6, limit_masks=rounds.begin)
    sequences = []
    for seed in range(60):
        sampling, grammar = GREEDY if greedy else SamplingParams(seed=seed), wrap(rounds.compiler.gbnf(ENDS), [])
        options: dict[str, Any] = {"max_tokens": 2 + seed % 4, "constraint": grammar, "top_logprobs": 0}
        prompt = [seed % 5, seed // 5 % 5]
        sequences.append(pair.submit(prompt, gamma=gamma, verification=verification, sampling=sampling, **options))
        # Two runs are compared number by number.
        sequences[-1].secret = seed
    pair.run()
    return [result(sequence) for sequence in sequences]


@pytest.fixture
def _a_step_takes_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint_module, "thread_time", map(float, count()).__next__)
    monkeypatch.setattr(compiler_module, "MAX_SECONDS", math.inf)


@pytest.mark.usefixtures("_a_step_takes_a_second")
def test_a_complete_answer_ends_there_however_late_its_masks_are() -> None:
    """It never ends with "length", and has log-probabilities of its tokens alone."""
    cases: list[tuple[Verification, bool]] = [("coupled", True), ("coupled", False), ("token", False), ("block", False)]
    for gamma in [0, 3]:
        for verification, greedy in cases:
            in_time, late = Rounds(late=False), Rounds(late=True)
            expected = ended(verification, gamma, in_time, greedy=greedy)
            found = ended(verification, gamma, late, greedy=greedy)
            assert late.count > 1.3 * in_time.count, "no mask was late"
            for text, end, logprobs in expected + found:
                if re.fullmatch(COMPLETE, text):
                    assert (end, len(logprobs)) == ("stop", len(text))
            if gamma == 0 or verification == "coupled":
                assert found == expected
            assert {end for _, end, _ in found} == {"stop", "length"}


class SaysNoWhenLate(Shared):
    """A wrong constraint: an answer whose next mask is late is not known to be complete, and goes on."""

    def complete(self, tokens: Sequence[int]) -> bool:
        try:
            mask = self.allowed(tokens)
        except MaskDeferred:
            return False
        return mask is not None and np.flatnonzero(mask).tolist() == LETTERS.end_tokens()


@pytest.mark.usefixtures("_a_step_takes_a_second")
def test_an_answer_that_asks_for_its_end_too_late_ends_elsewhere() -> None:
    for gamma in [0, 3]:
        expected = ended("coupled", gamma, Rounds(late=False))
        found = ended("coupled", gamma, Rounds(late=True), wrap=SaysNoWhenLate)
        differing = [(right, wrong) for right, wrong in zip(expected, found, strict=True) if right != wrong]
        assert {(right.end, wrong.end) for right, wrong in differing} == {("stop", "length")}
