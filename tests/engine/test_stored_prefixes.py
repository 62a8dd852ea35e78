"""Prompts that begin like a text which has left the KV cache: it comes back from host memory, and nothing else changes.

The fake engine notices keys and values of another position or another text.
"""

from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fake_engine import FakeEngine
from fake_pair import ENDLESS, SLOTS, FakePair, plain_greedy
from specserve.core import prefix_cache
from specserve.core.prefix_store import BLOCK_TOKENS, PrefixStore
from specserve.core.text_sequence import TextSequence
from specserve.errors import EngineError
from specserve.sequence import Owner

TOKEN_BYTES = 24
BLOCK_BYTES = BLOCK_TOKENS * (TOKEN_BYTES + 4)
CONVERSATION = [n % 19 for n in range(5 * BLOCK_TOKENS + 7)]


def store_all(pair: FakePair) -> None:
    """Store what ended sequences have left, as an idle server does."""
    while pair.scheduler.store_prefixes():
        pass


def pair_with_store(*, blocks: int = 100, **options: Any) -> tuple[FakePair, PrefixStore]:
    store = PrefixStore(TOKEN_BYTES, blocks * BLOCK_BYTES)
    return FakePair(store=store, **{"prefill_rows": 64, **options}), store


def pair_that_read(*prompts: list[int], **options: Any) -> FakePair:
    """A pair that has answered these prompts, which are in host memory now."""
    pair, _ = pair_with_store(**options)
    for prompt in prompts:
        pair.answer(prompt)
    others(pair)
    return pair


def others(pair: FakePair, first: int = 0) -> None:
    """As many other requests as there are slots, so that no slot keeps what it had."""
    pair.answers(([20 + number, first, *range(1, 20)] * 4 for number in range(SLOTS)), max_tokens=5)


def computed(engine: FakeEngine, sequence: TextSequence) -> int:
    """How many rows of its prompt an engine was fed for a sequence."""
    return sum(row.slot == sequence.slot and row.position < sequence.prompt_length for row in engine.decoded)


def test_a_conversation_comes_back_after_others_have_used_the_cache() -> None:
    pair, _ = pair_with_store(window=32, draft_rows=32)
    prompt = CONVERSATION
    for turn in range(4):
        pair.target.decoded.clear()
        answer = pair.answer(prompt, sampling=ENDLESS, max_tokens=40)
        held = (len(prompt) - 44) // BLOCK_TOKENS * BLOCK_TOKENS if turn else 0
        assert answer.cached_tokens >= held
        assert computed(pair.target, answer) == len(prompt) - answer.cached_tokens
        assert answer.answer == plain_greedy(prompt, 40, endless=True)
        assert answer.stats.accepted > 0, "the draft prefill is over"
        others(pair, turn)
        prompt = [*answer.tokens, 3, 1, 4, turn]
    assert pair.target.loaded_tokens > 3 * len(CONVERSATION) - 3 * BLOCK_TOKENS


def test_a_request_that_wants_no_cached_prefix_gets_none_of_either_model_and_the_same_answer() -> None:
    pair = pair_that_read(CONVERSATION, window=32, draft_rows=32)
    for _ in range(2):
        hits = pair.target.loaded_tokens
        pair.target.decoded.clear()
        sequence = pair.answer(CONVERSATION, reuses_prefix=False)
        assert (sequence.cached_tokens, pair.target.loaded_tokens) == (0, hits)
        assert computed(pair.target, sequence) == len(CONVERSATION)
        assert sequence.answer == plain_greedy(CONVERSATION, 20)
    assert pair.answer(CONVERSATION).cached_tokens == len(CONVERSATION) - 1


def test_a_prompt_that_is_stored_as_a_whole_still_computes_its_last_token() -> None:
    prompt = CONVERSATION[: 2 * BLOCK_TOKENS]
    answer = pair_that_read(prompt).answer(prompt)
    assert answer.cached_tokens == len(prompt) - 1
    assert answer.answer == plain_greedy(prompt, 20)


def test_a_slots_short_prefix_is_continued_from_the_store() -> None:
    """A system prompt stays in a slot, that ends within a block; the conversation after it was evicted."""
    pair, system = pair_that_read(CONVERSATION), CONVERSATION[:40]
    pair.submit([*system, 22], max_tokens=30, sampling=ENDLESS)
    pair.step(3)
    before = pair.target.loaded_tokens
    again = pair.answer(CONVERSATION)
    assert again.cached_tokens == 5 * BLOCK_TOKENS
    assert pair.target.loaded_tokens - before == 5 * BLOCK_TOKENS - 40
    assert again.answer == plain_greedy(CONVERSATION, 20)


def test_a_stored_prompt_does_not_wait_for_another_that_is_being_prefilled() -> None:
    pair = pair_that_read(CONVERSATION, prefill_rows=8)
    first = pair.submit([*CONVERSATION, 1], top_logprobs=0, scores_prompt=True)
    pair.step()
    second = pair.submit([*CONVERSATION, *[2] * 40])
    pair.step()
    assert second.timestamps.start is not None
    assert first.cached_tokens == 0, "what is scored is computed"


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions of all blocks that were saved, one after the other."""
    saved: list[int] = []
    save = FakeEngine.save

    def recorded(engine: FakeEngine, slot: int, start: int, end: int) -> NDArray[np.uint8]:
        saved.append(start)
        return save(engine, slot, start, end)

    monkeypatch.setattr(FakeEngine, "save", recorded)
    return saved


def most_saves_in_a_round(pair: FakePair, saves: list[int], rounds: int) -> int:
    most = 0
    for _ in range(rounds):
        before = len(saves)
        pair.step()
        most = max(most, len(saves) - before)
    return most


def test_a_finished_text_is_stored_in_portions_after_the_rounds_of_others(saves: list[int]) -> None:
    pair, store = pair_with_store()
    pair.submit([9, 8], sampling=ENDLESS, max_tokens=400)
    pair.submit(CONVERSATION, max_tokens=2)
    assert most_saves_in_a_round(pair, saves, 30) == 2
    assert store.stored_bytes == 5 * BLOCK_BYTES
    assert pair.scheduler.busy


def test_an_idle_server_stores_a_long_text_part_by_part() -> None:
    pair, store = pair_with_store(n_cells=50 * BLOCK_TOKENS, prefill_rows=200)
    pair.answer([n % 19 for n in range(48 * BLOCK_TOKENS)], max_tokens=1, mode="off")
    before = store.stored_bytes
    pair.scheduler.store_prefixes()
    assert before < store.stored_bytes <= before + 4 * BLOCK_BYTES
    store_all(pair)
    assert store.stored_bytes == 48 * BLOCK_BYTES


def test_a_round_that_takes_the_room_of_two_texts_stores_as_little(
    saves: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_cache, "_BLOCKS_A_ROUND", 20)
    pair, _ = pair_with_store(n_cells=50 * BLOCK_TOKENS, prefill_rows=200)
    sizes = {20: 40, 21: 24, 22: 24}
    texts = [[first, *(n % 19 for n in range(1, size * BLOCK_TOKENS))] for first, size in sizes.items()]
    for text in texts:
        pair.answer(text, max_tokens=1, mode="off")
        if text is texts[0]:
            store_all(pair)
    pair.submit([*texts[0], 1], max_tokens=1, mode="off")
    assert 20 <= most_saves_in_a_round(pair, saves, 3) <= 22
    assert pair.target.loaded_tokens == 40 * BLOCK_TOKENS


def test_an_idle_server_without_a_store_has_nothing_to_do(saves: list[int]) -> None:
    pair = FakePair()
    first = pair.answer(CONVERSATION, max_tokens=2)
    store_all(pair)
    assert saves == []
    again = pair.answer([*first.tokens, 5], max_tokens=2)
    assert again.cached_tokens == len(first.tokens) - 1, "the text has stayed in its slot"


def test_a_prefix_that_comes_back_makes_room_for_itself() -> None:
    """All slots but the one that it gets are full, and no cell is free."""
    pair, _ = pair_with_store(n_cells=3 * 190)
    pair.answer(CONVERSATION, max_tokens=2)
    pair.answers(([20 + number] * 188 for number in range(3)), max_tokens=2)
    assert pair.answer(CONVERSATION, max_tokens=2).cached_tokens == 5 * BLOCK_TOKENS
    assert pair.target_cache.free_cells >= 0


def test_what_a_preempted_sequence_loses_comes_back_without_a_pass() -> None:
    """Two answers grow until the pool is full; the second one loses its cells to the first, and gets them back."""
    pair, _ = pair_with_store(n_cells=2200)
    prompts = [[number, *range(2, 22)] * 2 for number in (1, 5)]
    answers = pair.answers(prompts, mode="off", sampling=ENDLESS, max_tokens=1300)
    assert answers[1].preemptions == 1
    assert pair.target.loaded_tokens > 200
    computed_again = len(pair.target.decoded) - sum(len(answer.tokens) - 1 for answer in answers)
    assert computed_again <= BLOCK_TOKENS
    for answer in answers:
        assert answer.answer == plain_greedy(answer.prompt, 1300, endless=True)


def test_a_failed_sequence_is_not_stored() -> None:
    pair, store = pair_with_store()
    pair.target.poison_after = 0
    assert pair.answer(CONVERSATION).error is not None
    store_all(pair)
    assert store.stored_bytes == 0


def test_a_sequence_that_never_had_finite_logits_is_not_stored() -> None:
    """Its keys and values may not be finite either; a slot keeps them only until it is used again."""
    pair, _ = pair_with_store(prefill_rows=40)
    cancelled = pair.submit(CONVERSATION)
    pair.step(2)
    pair.scheduler.cancel(cancelled)
    others(pair)
    pair.answer([*CONVERSATION], max_tokens=1)
    assert pair.target.loaded_tokens == 0


def test_a_copy_that_fails_is_computed_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = pair_that_read(CONVERSATION)
    loads = iter([True, True, False, False])
    load = FakeEngine.load

    def fails_third(engine: FakeEngine, slot: int, saved: NDArray[np.uint8]) -> None:
        if not next(loads):
            raise EngineError("no room")
        load(engine, slot, saved)

    monkeypatch.setattr(FakeEngine, "load", fails_third)
    again = pair.answer(CONVERSATION)
    assert again.answer == plain_greedy(CONVERSATION, 20)
    assert again.cached_tokens == pair.target.loaded_tokens == 2 * BLOCK_TOKENS
    assert "no room" in caplog.text


def test_a_slot_stays_free_if_its_engine_breaks_while_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_that_read(CONVERSATION)
    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "load", lambda *_: 1 / 0)
        broken = pair.submit(CONVERSATION)
        pair.scheduler.run_round()
    assert broken.error is not None
    after = [pair.submit([*CONVERSATION, n], request=str(n)) for n in range(SLOTS)]
    pair.run()
    assert [answer.answer for answer in after] == [plain_greedy(answer.prompt, 20) for answer in after]


def test_a_text_that_cannot_be_saved_is_dropped_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for error in (EngineError("no keys"), MemoryError("no memory")):
        monkeypatch.setattr(FakeEngine, "save", mock.Mock(side_effect=error))
        again = pair_that_read(CONVERSATION).answer(CONVERSATION)
        assert again.answer == plain_greedy(CONVERSATION, 20)
        assert again.cached_tokens == 0
        assert str(error) in caplog.text


@pytest.mark.parametrize("fault", ["a stale copy", "a neighbour's", "a block twice"])
def test_keys_of_another_text_or_position_would_be_noticed(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The planted faults; that these tests notice them shows that there is none where they pass."""
    pair = pair_that_read(CONVERSATION, [8, *CONVERSATION[1:]])
    saved = PrefixStore.saved

    def wrong(store: PrefixStore, owner: Owner, tokens: list[int], start: int, end: int) -> list[NDArray[np.uint8]]:
        if fault == "a neighbour's":
            return saved(store, owner, [8, *tokens[1:]], start, end)
        parts = saved(store, owner, tokens, start, end)
        return [parts[1], *parts[1:]] if fault == "a stale copy" else [parts[0], parts[0], *parts[2:]]

    monkeypatch.setattr(PrefixStore, "saved", wrong)
    again = pair.submit(CONVERSATION)
    try:
        pair.step()
    except AssertionError:
        return
    assert again.error is not None


@given(seed=st.integers(0, 10**6), blocks=st.integers(0, 30), n_cells=st.integers(450, 900))
@settings(max_examples=12, deadline=None)
def test_every_text_is_the_one_that_it_is_alone_however_small_the_pool(seed: int, blocks: int, n_cells: int) -> None:
    random = Random(seed)
    pair, store = pair_with_store(blocks=blocks, n_cells=n_cells, prefill_rows=32)
    system = CONVERSATION[:70]
    conversations = [[*system[: random.randrange(70)], number] for number in range(5)]
    running: dict[int, TextSequence] = {}
    for _ in range(20):
        number = random.randrange(5)
        if number in running:
            pair.run(running[number])
            finished = running.pop(number)
            assert finished.answer == plain_greedy(finished.prompt, 25)
            conversations[number] = finished.tokens
        else:
            more = [random.randrange(20) for _ in range(random.randrange(1, 50))]
            running[number] = pair.submit([*conversations[number], *more], max_tokens=25)
        pair.step(random.randrange(4))
        if random.random() < 0.2:
            store_all(pair)
        assert store.stored_bytes <= blocks * BLOCK_BYTES
    pair.run()
    for sequence in running.values():
        assert sequence.answer == plain_greedy(sequence.prompt, 25)
