"""Prefixes in host memory: texts share the blocks of what they share, the least recently used leave first."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specserve.core.prefix_store import BLOCK_TOKENS, PrefixStore
from specserve.errors import EngineError
from specserve.sequence import Owner
from stored_texts import BLOCK_BYTES, NOBODY, Text, added, joined, store_of, stored, tokens_of


def test_whole_blocks_of_a_text_are_stored() -> None:
    store = store_of(9)
    text = Text(tokens_of(1, 2, 3)[:-1])
    assert store.add(NOBODY, text.tokens, text.save, 9)
    assert store.length(NOBODY, text.tokens, 1000) == 2 * BLOCK_TOKENS
    assert store.stored_bytes == 2 * BLOCK_BYTES


def test_what_comes_back_are_the_keys_of_exactly_these_positions() -> None:
    store = store_of(9)
    text = added(store, 1, 2, 3)
    places = (0, 1, 31, 32, 33, 64, 95, 96)
    for start, end in product(places, places):
        assert np.array_equal(joined(store.saved(NOBODY, text.tokens, start, end)), text.keys(start, max(start, end)))


def test_a_length_is_counted_up_to_what_the_prompt_may_reuse() -> None:
    store = store_of(9)
    text = added(store, 1, 2)
    assert [store.length(NOBODY, text.tokens, most) for most in (0, -1, 63, 64, 65)] == [0, 0, 63, 64, 64]


def test_branches_share_the_blocks_before_they_part() -> None:
    store = store_of(9)
    first, second = added(store, 1, 2, 3, 4), added(store, 1, 2, 5)
    assert store.stored_bytes == 5 * BLOCK_BYTES
    assert second.saved == [(2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS)], "the others were stored already"
    for text in (first, second):
        size = len(text.tokens)
        assert np.array_equal(joined(store.saved(NOBODY, text.tokens, 0, size)), text.keys(0, size))


def test_a_text_that_differs_in_one_token_shares_only_the_blocks_before_it() -> None:
    store = store_of(9)
    text = added(store, 1, 2).tokens
    for position in range(2 * BLOCK_TOKENS):
        other = [token + (n == position) for n, token in enumerate(text)]
        assert store.length(NOBODY, other, 1000) == position // BLOCK_TOKENS * BLOCK_TOKENS


def test_equal_blocks_after_different_beginnings_are_different_blocks() -> None:
    store = store_of(9)
    added(store, 1, 3)
    assert stored(store, 3) == stored(store, 2, 3) == 0
    other = added(store, 2, 3)
    assert np.array_equal(joined(store.saved(NOBODY, other.tokens, 32, 64)), other.keys(32, 64))


def test_the_least_recently_used_text_is_evicted_first() -> None:
    store = store_of(3)
    for part in (1, 2, 3):
        added(store, part)
    assert stored(store, 1) == 1
    added(store, 4)
    assert [stored(store, part) for part in (1, 2, 3, 4)] == [1, 0, 1, 1]


def test_the_end_of_a_text_is_evicted_before_its_beginning() -> None:
    store = store_of(4)
    added(store, 1, 2, 3)
    for number in (7, 8, 9):
        added(store, number)
        assert stored(store, number) == 1
    assert stored(store, 1, 2, 3) == 1


def test_a_shared_beginning_stays_while_any_branch_is_used() -> None:
    store = store_of(4)
    added(store, 1, 2)
    added(store, 1, 3)
    for number in range(10, 15):
        added(store, number)
        assert stored(store, 1, 3) == 2
    assert stored(store, 1, 2) == 1


def test_a_text_longer_than_the_limit_keeps_its_beginning() -> None:
    """Also if the end of what it had was stored before the rest: a block is never without those before it."""
    for portion in (1, 2, 9):
        store = store_of(3)
        text = Text(tokens_of(1, 2, 3, 4, 5))
        while not store.add(NOBODY, text.tokens, text.save, portion):
            pass
        assert stored(store, 1, 2, 3, 4, 5) == 3


def test_no_byte_beyond_the_limit_is_used() -> None:
    for blocks, spare_bytes in product((0, 2), (0, 1, BLOCK_BYTES - 1)):
        store = store_of(blocks, spare_bytes=spare_bytes)
        for number in range(5):
            added(store, number)
        assert store.stored_bytes == blocks * BLOCK_BYTES
    store = PrefixStore()
    assert not added(store, 1).saved
    assert stored(store, 1) == store.stored_bytes == 0


def test_a_text_can_be_stored_in_portions_between_which_others_come() -> None:
    store = store_of(9)
    text = Text(tokens_of(1, 2, 3))
    more = []
    while not store.add(NOBODY, text.tokens, text.save, max_blocks=1):
        added(store, 1, 9)
        more.append(store.length(NOBODY, text.tokens, 1000))
    assert more == [BLOCK_TOKENS, 2 * BLOCK_TOKENS], "after each portion but the last"
    assert text.saved == [(0, 32), (32, 64), (64, 96)]


def test_what_was_stored_before_a_failure_stays_usable() -> None:
    store = store_of(3)
    text = Text(tokens_of(1, 2, 3))

    def save(start: int, end: int) -> NDArray[np.uint8]:
        if start == 2 * BLOCK_TOKENS:
            raise EngineError("no keys")
        return text.save(start, end)

    with pytest.raises(EngineError):
        store.add(NOBODY, text.tokens, save, 9)
    assert stored(store, 1, 2, 3) == 2
    for number in (7, 8, 9):
        added(store, number)
    assert [stored(store, *parts) for parts in ((1, 2), (7,), (8,), (9,))] == [0, 1, 1, 1]


OWNERS: list[Owner] = [("a", ""), ("a", "salt"), ("b", "")]
TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=5)


@given(
    texts=st.lists(st.tuples(TEXTS, st.integers(1, 5), st.booleans(), st.sampled_from(OWNERS)), max_size=40),
    blocks=st.integers(0, 8),
)
@settings(max_examples=150, deadline=None)
def test_whatever_comes_only_leaves_are_evicted_and_every_key_is_right(
    texts: list[tuple[list[int], int, bool, Owner]], blocks: int
) -> None:
    store = store_of(blocks)
    for parts, max_blocks, adds, owner in texts:
        text = Text(tokens_of(*parts))
        if adds:
            store.add(owner, text.tokens, text.save, max_blocks)
        length = store.length(owner, text.tokens, 1000)
        assert np.array_equal(joined(store.saved(owner, text.tokens, 0, 1000)), text.keys(0, length))
        keys = [key for entries in store._blocks._entries.values() for key in entries]
        assert store.stored_bytes == len(keys) * BLOCK_BYTES <= blocks * BLOCK_BYTES
        kept = {entry[0] for entries in store._blocks._entries.values() for entry in entries.values()}
        assert all(before in kept or before in OWNERS for before, _ in keys), "a block without the one before it"


def test_owners_do_not_see_each_others_texts() -> None:
    store = store_of(9)
    text = Text(tokens_of(1, 2))
    owners = [("a", ""), ("b", ""), ("a", "salt")]
    store.add(owners[0], text.tokens, text.save, 9)
    assert [store.length(owner, text.tokens, 1000) for owner in owners] == [64, 0, 0]
    assert store.saved(owners[1], text.tokens, 0, 64) == []
    for owner in owners[1:]:
        store.add(owner, text.tokens, text.save, 9)
    assert store.stored_bytes == 6 * BLOCK_BYTES, "nor do they share blocks"


def test_a_client_that_stores_without_end_pushes_out_its_own_texts() -> None:
    """Under one cache salt after another, too; the other client has less than half of the room."""
    store = store_of(10)
    kept = Text(tokens_of(1, 2, 3, 4))
    store.add(("victim", ""), kept.tokens, kept.save, 9)
    for number in range(50):
        text = Text(tokens_of(number, 99))
        store.add(("hostile", str(number)), text.tokens, text.save, 9)
    assert store.length(("victim", ""), kept.tokens, 1000) == 4 * BLOCK_TOKENS
    assert store.stored_bytes == 10 * BLOCK_BYTES
    for number in range(10):
        text = Text(tokens_of(100 + number, 99))
        store.add(("victim", ""), text.tokens, text.save, 9)
    assert store.length(("hostile", "49"), tokens_of(49, 99), 1000) == 2 * BLOCK_TOKENS, "each has half"
