"""Rounds and the scheduler on the fake engine, which refuses every row that does not continue its cache."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.engine.fake import FakeEngine, FakeVocabulary
from specserve.sequence import SamplingParams, Sequence, SpeculationParams
from specserve.serving.generation import Generation
from specserve.serving.scheduler import Scheduler
from specserve.speculation.drafters import ModelDrafter

VOCABULARY = 24
SLOTS = 3


class Bench:
    """A scheduler over a fake target and a fake draft."""

    def __init__(
        self, *, blend: float = 0.3, prefill_rows: int = 8, draft_rows: int = 8, draft_width: int = VOCABULARY
    ) -> None:
        self.target = FakeEngine(vocabulary=VOCABULARY, n_slots=SLOTS)
        self.draft = FakeEngine(vocabulary=draft_width, n_slots=SLOTS, blend=blend)
        self.scheduler = Scheduler(
            self.target, ModelDrafter(self.draft, max_rows=draft_rows, vocabulary=VOCABULARY), prefill_rows=prefill_rows
        )
        self.submitted: list[Generation] = []

    def submit(
        self,
        prompt: list[int],
        *,
        gamma: int = 3,
        max_tokens: int = 20,
        stops: list[str] | None = None,
        sampling: SamplingParams | None = None,
    ) -> Generation:
        sequence = Sequence(
            prompt, sampling or SamplingParams(temperature=0), SpeculationParams(gamma), max_tokens=max_tokens
        )
        generation = Generation(sequence, FakeVocabulary(VOCABULARY), stops or [])
        self.scheduler.submit(generation)
        self.submitted.append(generation)
        return generation

    def run(self) -> None:
        for _ in range(10_000):
            if not self.scheduler.busy:
                return
            self.scheduler.step()
            self.check_caches()
        raise AssertionError("The scheduler does not come to an end.")

    def check_caches(self) -> None:
        """Both caches hold exactly the leading tokens that each sequence says they hold."""
        for slot in range(SLOTS):
            last = [g.sequence for g in self.submitted if g.sequence.slot == slot][-1:]
            for sequence in last:
                assert self.target.cache[slot] == sequence.tokens[: sequence.target_cached]
                assert self.draft.cache[slot] == sequence.tokens[: sequence.draft_cached]


def answer(generation: Generation) -> list[int]:
    """The tokens behind the prompt."""
    sequence = generation.sequence
    return sequence.tokens[sequence.prompt_length :]


def plain_greedy(prompt: list[int], max_tokens: int) -> list[int]:
    """The target's own greedy text, without any cache, up to its end token."""
    target = FakeEngine(vocabulary=VOCABULARY, n_slots=1)
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        token = int(np.argmax(target.logits(tokens)))
        if FakeVocabulary(VOCABULARY).ends_text(token):
            break
        tokens.append(token)
    return tokens[len(prompt) :]


prompts = st.lists(st.integers(0, VOCABULARY - 2), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(st.tuples(prompts, st.integers(0, 6), st.integers(1, 30)), min_size=1, max_size=6),
    blend=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    prefill_rows=st.integers(1, 40),
    draft_rows=st.integers(4, 40),
)
def test_greedy_speculative_text_is_the_targets_greedy_text_whatever_runs_beside_it(
    jobs: list[tuple[list[int], int, int]], blend: float, prefill_rows: int, draft_rows: int
) -> None:
    bench = Bench(blend=blend, prefill_rows=prefill_rows, draft_rows=draft_rows)
    generations = [bench.submit(prompt, gamma=gamma, max_tokens=most) for prompt, gamma, most in jobs]
    bench.run()
    for generation, (prompt, _, most) in zip(generations, jobs, strict=True):
        assert answer(generation) == plain_greedy(prompt, most)
        assert generation.finish_reason == ("length" if len(answer(generation)) == most else "stop")


def test_a_perfect_draft_is_always_accepted_and_gamma_one_more_token_is_free() -> None:
    bench = Bench(blend=0.0)
    generation = bench.submit([1, 2, 3], gamma=3, max_tokens=17)
    bench.run()
    account = generation.sequence.account
    assert account.accepted == account.drafted == 12
    assert account.rounds == 4  # one token ends the prefill, then four rounds of four
    assert account.mean_acceptance_length == 4


def test_the_draft_never_reads_a_token_twice_unless_it_was_cut_away() -> None:
    bench = Bench(blend=0.0)
    bench.submit([1, 2, 3], gamma=3, max_tokens=30)
    bench.run()
    positions = [row.position for row in bench.draft.decoded]
    assert positions == sorted(set(positions))


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_inside_a_draft_ends_the_text_there(max_tokens: int) -> None:
    bench = Bench(blend=0.0)
    generation = bench.submit([1, 2, 3], gamma=5, max_tokens=max_tokens)
    bench.run()
    assert len(answer(generation)) == max_tokens
    assert generation.finish_reason == "length"


def test_the_end_token_inside_a_draft_ends_the_text_and_is_not_part_of_it() -> None:
    prompt = next([a, b] for a in range(23) for b in range(23) if 2 <= len(plain_greedy([a, b], 50)) < 12)
    bench = Bench(blend=0.0)
    generation = bench.submit(prompt, gamma=10, max_tokens=50)
    bench.run()
    assert generation.finish_reason == "stop"
    assert answer(generation) == plain_greedy(prompt, 50)


def test_a_stop_string_inside_a_draft_ends_the_text_before_it() -> None:
    text = bytes(97 + token for token in plain_greedy([1, 2, 3], 12)).decode()
    stop = text[4:6]
    bench = Bench(blend=0.0)
    generation = bench.submit([1, 2, 3], gamma=8, max_tokens=50, stops=[stop])
    bench.run()
    assert generation.finish_reason == "stop"
    assert generation.take_text() == text[: text.index(stop)]


def test_an_end_inside_a_draft_leaves_caches_that_the_next_request_can_continue() -> None:
    bench = Bench(blend=0.0)
    first = bench.submit([1, 2, 3], gamma=8, max_tokens=9)
    bench.run()
    prompt = first.sequence.tokens[:10]
    second = bench.submit(prompt, max_tokens=12)
    bench.run()
    assert second.sequence.reused > 0
    assert answer(second) == plain_greedy(prompt, 12)


def test_more_requests_than_slots_all_come_to_their_end() -> None:
    bench = Bench()
    generations = [bench.submit([n, n + 1], max_tokens=15) for n in range(3 * SLOTS)]
    bench.run()
    assert all(g.done for g in generations)


@pytest.mark.parametrize("steps", range(6))
def test_a_cancelled_request_frees_its_slot_at_once(steps: int) -> None:
    bench = Bench()
    cancelled = [bench.submit([n] * 20, max_tokens=1000) for n in range(2 * SLOTS)]
    for _ in range(steps):
        bench.scheduler.step()
    for generation in cancelled:
        bench.scheduler.cancel(generation)
    assert not bench.scheduler.busy
    after = [bench.submit([n, 5], max_tokens=10) for n in range(SLOTS)]
    bench.scheduler.step()
    assert bench.scheduler.live == sum(not g.done for g in after)
    bench.run()
    for generation in after:
        assert answer(generation) == plain_greedy(generation.sequence.tokens[:2], 10)


def test_cancelling_twice_or_after_the_end_changes_nothing() -> None:
    bench = Bench()
    generation = bench.submit([1, 2], max_tokens=3)
    bench.run()
    bench.scheduler.cancel(generation)
    bench.scheduler.cancel(generation)
    assert not bench.scheduler.busy


@pytest.mark.parametrize("draft_width", [VOCABULARY - 5, VOCABULARY + 5])
def test_a_draft_with_a_narrower_or_wider_vocabulary_drafts_what_both_know(draft_width: int) -> None:
    bench = Bench(draft_width=draft_width, blend=0.5)
    prompt = [1, 2, VOCABULARY - 2]  # its last token is unknown to the narrower one
    greedy = bench.submit(prompt, max_tokens=20)
    sampled = bench.submit([1, 2], max_tokens=40, sampling=SamplingParams(temperature=1.5, seed=3))
    bench.run()
    assert answer(greedy) == plain_greedy(prompt, 20)
    assert sampled.sequence.account.drafted > 0
    assert max(row.token for row in bench.draft.decoded) < draft_width


def test_logits_that_are_not_finite_end_the_answer_with_an_error() -> None:
    bench = Bench()
    failed = bench.submit([1, 2, 3], max_tokens=10)
    bench.target.poison_next = True
    bench.scheduler.step()
    assert failed.error is not None
    after = bench.submit([1, 2, 3], max_tokens=10)
    bench.run()
    assert answer(after) == plain_greedy([1, 2, 3], 10)


def test_a_failing_target_ends_the_answers_of_that_round_and_the_next_ones_are_served() -> None:
    bench = Bench()
    failed = bench.submit([1, 2, 3], max_tokens=10)
    bench.scheduler.step()
    bench.target.fail_next = True
    bench.scheduler.step()
    assert failed.error is not None
    assert failed.error.status == 500
    after = bench.submit([1, 2, 3], max_tokens=10)
    bench.run()
    assert answer(after) == plain_greedy([1, 2, 3], 10)


def test_a_failing_draft_costs_the_speculation_and_nothing_else() -> None:
    bench = Bench()
    generation = bench.submit([1, 2, 3], max_tokens=20)
    bench.scheduler.step()
    bench.scheduler.step()
    bench.draft.fail_next = True
    while bench.scheduler.busy:
        bench.scheduler.step()
    assert answer(generation) == plain_greedy([1, 2, 3], 20)


def test_a_seed_gives_the_same_text_again() -> None:
    texts = []
    for _ in range(2):
        bench = Bench()
        generation = bench.submit([1, 2], max_tokens=20, sampling=SamplingParams(seed=7))
        bench.run()
        texts.append(answer(generation))
    assert texts[0] == texts[1]


def test_a_seed_gives_the_same_text_whether_or_not_the_prompt_is_already_in_a_slot() -> None:
    bench = Bench()
    texts = []
    for _ in range(3):
        generation = bench.submit([1, 2, 3, 4], max_tokens=20, sampling=SamplingParams(seed=7))
        bench.run()
        texts.append(answer(generation))
    assert generation.sequence.reused == 3
    assert texts[0] == texts[1] == texts[2]


def test_without_a_seed_texts_differ() -> None:
    bench = Bench()
    generations = [bench.submit([1, 2], max_tokens=20, sampling=SamplingParams()) for _ in range(4)]
    bench.run()
    assert len({tuple(answer(g)) for g in generations}) > 1
