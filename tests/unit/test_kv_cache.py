"""The record of a KV cache: what slots hold, wherever a slot's text begins, and that it agrees with the engine."""

import pytest

from fake_engine import FakeEngine
from specserve.engine.base import Row
from specserve.engine.kv_cache import KVCache
from specserve.errors import EngineError

TEXT = [7, 3, 9, 1, 4, 8]
NOBODY = ("", "")


def filled(*, start: int = 0, end: int = len(TEXT), n_cells: int = 100) -> tuple[FakeEngine, KVCache]:
    """A cache whose slot 0 holds the tokens of TEXT from `start` to `end`."""
    engine = FakeEngine(vocabulary=24, n_slots=3, n_cells=n_cells)
    cache = KVCache(engine)
    cache.restart(0, start)
    cache.forward([Row(TEXT[n], 0, n, wants_logits=n == end - 1) for n in range(start, end)])
    return engine, cache


@pytest.mark.parametrize("start", [0, 2])
def test_positions_are_those_of_the_text_wherever_a_slot_begins(start: int) -> None:
    engine, cache = filled(start=start)
    assert (cache.start(0), cache.num_computed_tokens(0), cache.length(0)) == (start, 6, 6 - start)
    assert cache.prefixes(NOBODY, TEXT, 5) == [5, 0, 0]
    assert cache.prefixes(NOBODY, [*TEXT[:4], 0, 0], 5) == [4, 0, 0]
    for text in ([0] * 6, TEXT[:start]):
        assert cache.prefixes(NOBODY, text, len(text) - 1) == [0, 0, 0]
    cache.copy(0, 1, 5)
    assert (cache.start(1), cache.num_computed_tokens(1)) == (start, 5)
    assert engine.cache[1] == TEXT[start:5]
    cache.truncate(0, 4)
    assert engine.cache[0] == TEXT[start:4]
    cache.forward([Row(5, 0, 4, wants_logits=True)])
    assert engine.cache[0] == [*TEXT[start:4], 5]
    assert cache.check()


def test_an_adopted_alternative_takes_the_place_of_what_follows() -> None:
    engine, cache = filled(end=4)
    drafts = [Row(token, 0, position, wants_logits=True) for position, token in ((4, 5), (5, 6))]
    cache.forward([*drafts, Row(9, 0, 4, wants_logits=True, alternative=True)])
    assert cache.free_cells == 94
    cache.adopt(0, 0)
    assert engine.cache[0] == cache.tokens(0) == [*TEXT[:4], 9]
    assert (cache.num_computed_tokens(0), cache.free_cells) == (5, 95)
    assert cache.check()


def test_a_slot_that_differs_from_the_engine_is_reported_and_emptied(caplog: pytest.LogCaptureFixture) -> None:
    engine, cache = filled()
    cache.copy(0, 1, 3)
    del engine.cache[0][4:]
    assert not cache.check()
    assert "slot 0 of a KV cache holds 4 tokens instead of 6" in caplog.text
    assert (engine.cache[0], cache.num_computed_tokens(0)) == ([], 0)
    assert engine.cache[1] == TEXT[:3], "other slots stay"
    assert cache.check()


def test_what_fails_or_does_not_fit_is_refused_and_changes_nothing() -> None:
    """Neither into the cells, nor, which only the engine knows, into a slot."""
    engine, cache = filled(n_cells=8)
    saved = engine.save(0, 0, 6)
    engine.fail_after = 0
    with pytest.raises(EngineError):
        cache.forward([Row(5, 0, 6, wants_logits=True)])
    engine.fail_after = None
    assert cache.check()
    with pytest.raises(EngineError, match="3 tokens does not fit into 2 free"):
        cache.forward([Row(7, 1, n, wants_logits=False) for n in range(3)])
    with pytest.raises(EngineError, match="4 tokens do not fit into 2 free cells"):
        cache.load(1, TEXT[:4], saved[:4])
    cache.load(1, TEXT[:1], saved[:1])
    engine.slot_length, before = 1, engine.slot_length
    with pytest.raises(EngineError):
        cache.load(1, TEXT[1:2], saved[1:2])
    engine.slot_length = before
    assert (cache.tokens(1), cache.free_cells) == (TEXT[:1], 1)
    cache.forward([Row(7, 2, 0, wants_logits=True)])
    assert cache.free_cells == 0
    assert cache.check()


def test_cells_that_slots_share_count_once() -> None:
    _, cache = filled()
    assert cache.free_cells == 94
    cache.copy(0, 1, 5)
    cache.forward([Row(5, 1, 5, wants_logits=True)])
    assert cache.free_cells == 93
    cache.truncate(0, 0)
    assert cache.free_cells == 94, "the copy keeps what it shared"
    cache.truncate(1, 2)
    assert cache.free_cells == 98
    cache.truncate(1, 0)
    assert cache.free_cells == 100


def test_cells_of_pinned_slots_count_once_and_come_first_in_every_slot() -> None:
    _, cache = filled()
    cache.copy(0, 1, 4)
    cache.pin(1)
    cache.forward([Row(5, 1, 4, wants_logits=True)])
    assert cache.pinned_cells == 5
    assert [cache.pinned_before(0, end) for end in (2, 4, 6)] == [2, 4, 4]
    cache.copy(1, 2, 3)
    cache.pin(2)
    assert (cache.pinned_without([1]), cache.pinned_without([1, 2])) == (3, 0)
    cache.truncate(1, 1)
    assert cache.pinned_cells == 3
    cache.unpin(2)
    assert cache.pinned_cells == 1
    cache.unpin(1)
    assert (cache.pinned_cells, cache.pinned_before(0, 6)) == (0, 0)
