"""The draft model: draft prefill and copied prefixes, and failed passes; what else it cannot read: test_output.py."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from constraints import Alternating
from costs import proportional
from fake_engine import FakeEngine
from fake_pair import ENDLESS, GREEDY, SLOTS, VOCABULARY, FakePair, plain_greedy
from specserve.engine.kv_cache import KVCache
from specserve.sequence import RequestInfo, SamplingParams, Sequence, SpeculationParams
from specserve.speculation.draft_model import DraftModel
from specserve.speculation.step import Draft, SequenceStep

MASK = VOCABULARY


def model_and_steps(*lengths: int, **limits: int) -> tuple[DraftModel, list[SequenceStep]]:
    """A draft model with empty caches, and prompts of these lengths, each in a slot of its own."""
    cache = KVCache(FakeEngine(vocabulary=VOCABULARY + 1, n_slots=SLOTS))
    limits = {"window": 64, "context_length": 8192, "max_rows": 8, **limits}
    model = DraftModel(cache, proportional(), vocabulary=VOCABULARY, **limits)
    steps = [SequenceStep(Sequence([1] * n, GREEDY, SpeculationParams(3), max_tokens=9), 0, n, 5) for n in lengths]
    for slot, step in enumerate(steps):
        step.sequence.slot = slot
    return model, steps


def rows_read(model: DraftModel, *steps: SequenceStep, is_shared: bool = False) -> list[int]:
    """How many tokens of each a pass reads."""
    assert isinstance(model.cache.engine, FakeEngine)
    model.cache.engine.decoded.clear()
    model.read(steps, [0] * len(steps), is_shared=is_shared)
    slots = [row.slot for row in model.cache.engine.decoded]
    return [slots.count(step.sequence.slot) for step in steps]


def test_no_token_is_fed_twice_while_all_drafts_are_accepted() -> None:
    pair = FakePair(blend=0.0)
    pair.answer([1, 2, 3], max_tokens=30)
    positions = [row.position for row in pair.draft.decoded]
    assert positions == sorted(set(positions))


def test_read_gives_the_rows_of_each_sequence_shortest_draft_prefill_first() -> None:
    model, steps = model_and_steps(3, 20)
    assert rows_read(model, *steps) == [3, 5]
    assert [step.seconds.draft_model for step in steps] == pytest.approx([3, 5]), "a second a row"
    assert [rows_read(model, steps[1]) for _ in range(3)] == [[8], [7], [0]]


def test_a_pass_that_others_wait_for_reads_at_most_16_tokens() -> None:
    model, [step] = model_and_steps(32, max_rows=64)
    assert [rows_read(model, step, is_shared=True) for _ in range(3)] == [[16], [16], [0]]
    model, [step] = model_and_steps(64, max_rows=64)
    assert rows_read(model, step) == [64]


def test_masks_follow_the_tokens_and_leave_the_cache() -> None:
    """In one pass it gives the logits of the next token, and of those behind masks."""
    model, steps = model_and_steps(3, 20, mask_token=MASK)
    engine = model.cache.engine
    assert isinstance(engine, FakeEngine)
    logits = model.read(steps, [2, 2])
    assert [row[1:] for row in engine.decoded[:5]] == [(0, n, n >= 2, False) for n in range(5)]
    assert [row.token for row in engine.decoded[:5]] == [1, 1, 1, MASK, MASK]
    assert list(logits) == [0], "more of the second sequence is left to read"
    expected = [engine.logits([*[1] * 3, *[MASK] * n])[:VOCABULARY] for n in range(3)]
    assert np.array_equal(logits[0], expected)
    assert model.cache.tokens(0) == [1] * 3
    assert model.cache.check()


def test_no_more_masks_are_read_than_the_step_the_pass_and_the_slot_have_room_for() -> None:
    model, steps = model_and_steps(3, 3, mask_token=MASK, context_length=10)
    steps[0].max_drafts = 2
    assert {index: len(rows) for index, rows in model.read(steps, [9, 9]).items()} == {0: 2, 1: 5}
    model, [step] = model_and_steps(4, mask_token=MASK, context_length=8)
    step.max_drafts = 9
    assert len(model.read([step], [9])[0]) == 1 + 8 - 4
    model, steps = model_and_steps(3, 3, mask_token=MASK)
    model.cache.engine.max_logits = 7
    assert {len(rows) for rows in model.read(steps, [9, 9]).values()} == {3}


def test_the_mask_is_never_drafted() -> None:
    """Its logit is the largest of a draft model with as wide a vocabulary as the target."""
    model, [step] = model_and_steps(3, mask_token=2)
    assert all(row[2] == -np.inf and np.isfinite(np.delete(row, 2)).all() for row in model.read([step], [2])[0])


def test_the_draft_prefill_that_is_told_is_the_one_that_is_read_also_where_a_slot_is_full() -> None:
    """The last 6 of 12 tokens are read, then one a draft; 12 tokens fit into the slot, and instead of 13 it has 6."""
    model, [step] = model_and_steps(12, window=6, context_length=12)
    told, read = [], []
    for token in range(12):
        told.append(model.draft_prefill(step))
        read += rows_read(model, step)
        step.drafts.append(Draft(token, None, "lookup", 0.9))
    assert told == read == [6, *[1] * 6, 6, *[1] * 4]


def test_a_lag_within_the_window_is_read_also_in_a_long_sequence() -> None:
    """What the model has read before stays of use to it."""
    model, [step] = model_and_steps(500, max_rows=64)
    model.read([step], [0])
    for token in range(60):
        step.drafts.append(Draft(token % VOCABULARY, None, "lookup", 0.9))
    assert model.draft_prefill(step) == 60
    assert rows_read(model, step) == [60]
    assert model.cache.length(0) == 64 + 60


def test_a_long_draft_prefill_does_not_delay_the_drafts_of_other_sequences() -> None:
    pair = FakePair(blend=0.0)
    long = pair.submit([n % 23 for n in range(120)], max_tokens=100)
    short = pair.submit([1, 2, 3])
    pair.run(short)
    assert pair.draft_cache.num_computed_tokens(long.slot) < len(long.tokens) - 1
    assert short.stats.mean_acceptance_length > 3


def test_what_another_slot_holds_of_a_sequence_is_copied_from_the_one_that_holds_most() -> None:
    """Sequences 1 and 2 share 140 tokens with sequence 0, and 165 with each other."""
    model, steps = model_and_steps(140, 168, 200, window=256, max_rows=256)
    steps[1].sequence.tokens[165:] = [2] * 3
    assert rows_read(model, steps[0]) == [140]
    assert rows_read(model, steps[1]) == [168 - 140]
    assert rows_read(model, steps[2]) == [200 - 165]


def test_no_client_copies_what_another_one_s_slot_holds() -> None:
    """Its own it copies without the last token, whose logits are those that are drafted from."""
    for client, read in (("", 1), ("other", 40)):
        model, steps = model_and_steps(40, 40, max_rows=64)
        steps[1].sequence.info = RequestInfo(client=client)
        model.cache.claim(1, steps[1].sequence.info.owner)
        assert [rows_read(model, step) for step in steps] == [[40], [read]]


@pytest.mark.parametrize(
    ("options", "is_reused"),
    [({"client": "a"}, True), ({}, False), ({"client": "a", "reuses_prefix": False}, False)],
)
def test_what_a_slot_holds_of_a_prompt_is_read_again_only_for_another_client_or_if_asked_for(
    options: dict[str, Any], *, is_reused: bool
) -> None:
    pair, prompt = FakePair(slots=1), list(range(20))
    pair.answer(prompt, client="a")
    pair.draft.decoded.clear()
    pair.answer(prompt, **options)
    assert (0 not in {row.position for row in pair.draft.decoded}) == is_reused


def test_the_draft_cache_restarts_before_it_exceeds_the_draft_context() -> None:
    pair = FakePair(blend=0.0, context=32)
    sequence = pair.answer([1, 2, 3], max_tokens=100, sampling=ENDLESS)
    assert max(row.position for row in pair.draft.decoded) < 32
    assert sequence.stats.accepted > 60


def test_a_token_outside_the_draft_vocabulary_does_not_matter_before_the_window() -> None:
    pair = FakePair(draft_width=VOCABULARY - 2, window=16)
    assert pair.answer([VOCABULARY - 2, *range(20)], sampling=ENDLESS).stats.drafted_by["model"] > 0


def test_a_draft_vocabulary_without_allowed_tokens_is_no_failure() -> None:
    pair = FakePair(draft_width=4)
    pair.answer([1, 2], max_tokens=2, constraint=Alternating(VOCABULARY, least=5), gamma=1)
    later = pair.answer([1, 2], max_tokens=30, sampling=SamplingParams(temperature=0, top_k=4))
    assert later.stats.drafted > 0


def test_a_failed_draft_pass_switches_the_draft_model_off_and_changes_no_output() -> None:
    """The pass may be a prefill, or draft any token of a round."""
    prompt = list(range(12))
    for failing_pass, fault in product(range(8), ("fail_after", "poison_after")):
        pair = FakePair()
        drafted, plain = pair.submit(prompt), pair.submit([4, 5], gamma=0)
        setattr(pair.draft, fault, failing_pass)
        pair.run()
        assert getattr(pair.draft, fault) is None, "the fault was not reached"
        assert drafted.answer == plain_greedy(prompt, 20)
        assert plain.answer == plain_greedy([4, 5], 20)
        passes = len(pair.draft.decoded)
        pair.answer([1, 2])
        assert len(pair.draft.decoded) == passes, "a failed draft model is not called again"
