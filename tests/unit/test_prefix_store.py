"""Prefixes in host memory: texts share the blocks of what they share, the least recently used leave first."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specserve.core.prefix_store import BLOCK_TOKENS, PrefixStore
from specserve.errors import EngineError
from specserve.sequence import Owner

TOKEN_BYTES = 16
NOBODY = ("", "")
BLOCK_BYTES = BLOCK_TOKENS * (TOKEN_BYTES + 4)


class Text:
    """A text of one block for each number; "keys and values" of a token are a hash of what it ends, and its place."""

    def __init__(self, *parts: int) -> None:
        self.tokens = [1000 * part + n for part in parts for n in range(BLOCK_TOKENS)]
        self.saved: list[int] = []

    def save(self, start: int, end: int) -> NDArray[np.uint8]:
        self.saved.append(start // BLOCK_TOKENS)
        return self.keys(start, end)

    def keys(self, start: int, end: int) -> NDArray[np.uint8]:
        rows = [(hash(tuple(self.tokens[: n + 1])), n) for n in range(start, end)]
        return np.array(rows, np.int64).reshape(-1, 2).view(np.uint8)


def store_of(blocks: int, *, spare_bytes: int = 0) -> PrefixStore:
    return PrefixStore(TOKEN_BYTES, blocks * BLOCK_BYTES + spare_bytes)


def added(store: PrefixStore, *parts: int, owner: Owner = NOBODY, max_blocks: int = 99) -> Text:
    text = Text(*parts)
    store.add(owner, text.tokens, text.save, max_blocks)
    return text


def stored(store: PrefixStore, *parts: int, owner: Owner = NOBODY) -> int:
    """How many blocks of such a text are stored; they are used thereby."""
    return store.length(owner, Text(*parts).tokens, 10**6) // BLOCK_TOKENS


def loaded(store: PrefixStore, text: Text, start: int, end: int, owner: Owner = NOBODY) -> NDArray[np.uint8]:
    return np.concatenate([np.empty((0, TOKEN_BYTES), np.uint8), *store.saved(owner, text.tokens, start, end)])


def test_whole_blocks_come_back_from_any_position_to_any_other() -> None:
    store = store_of(9)
    text = Text(1, 2, 3)
    assert store.add(NOBODY, text.tokens[:-1], text.save, 9)
    assert store.stored_bytes == 2 * BLOCK_BYTES
    assert [store.length(NOBODY, text.tokens, most) for most in (0, -1, 63, 64, 99)] == [0, 0, 63, 64, 64]
    places = (0, 1, 31, 32, 33, 64, 95)
    for start, end in product(places, places):
        assert np.array_equal(loaded(store, text, start, end), text.keys(start, max(start, min(end, 64))))


def test_a_text_that_differs_in_one_token_shares_only_the_blocks_before_it() -> None:
    store = store_of(9)
    text = added(store, 1, 2).tokens
    for position in range(2 * BLOCK_TOKENS):
        other = [token + (n == position) for n, token in enumerate(text)]
        assert store.length(NOBODY, other, 1000) == position // BLOCK_TOKENS * BLOCK_TOKENS
    assert added(store, 1, 3, 2).saved == [1, 2], "the first was stored already"
    assert store.stored_bytes == 4 * BLOCK_BYTES
    assert stored(store, 2) == 0, "equal blocks after other beginnings are other blocks"


def test_the_least_recently_used_text_is_evicted_first_its_end_before_its_beginning() -> None:
    store = store_of(4)
    added(store, 1, 2)
    added(store, 1, 3)
    added(store, 4)
    assert stored(store, 1, 3) == 2
    for number in range(10, 13):
        added(store, number)
        assert [stored(store, 1, 3), stored(store, 1, 2), stored(store, number)] == [2, 1, 1]


def test_a_text_longer_than_the_limit_keeps_its_beginning() -> None:
    """Also if the end of what it had was stored before the rest: a block is never without those before it."""
    for portion in (1, 2, 9):
        store = store_of(3)
        text = Text(1, 2, 3, 4, 5)
        while not store.add(NOBODY, text.tokens, text.save, portion):
            pass
        assert stored(store, 1, 2, 3, 4, 5) == 3


def test_what_was_stored_before_a_failure_stays_usable() -> None:
    store = store_of(3)
    text = Text(1, 2, 3)

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
    spare_bytes=st.integers(0, BLOCK_BYTES - 1),
)
@settings(max_examples=100, deadline=None)
def test_whatever_comes_only_leaves_are_evicted_and_every_key_is_right(
    texts: list[tuple[list[int], int, bool, Owner]], blocks: int, spare_bytes: int
) -> None:
    store = store_of(blocks, spare_bytes=spare_bytes)
    for parts, max_blocks, adds, owner in texts:
        text = added(store, *parts, owner=owner, max_blocks=max_blocks * adds)
        length = store.length(owner, text.tokens, 1000)
        assert np.array_equal(loaded(store, text, 0, 1000, owner), text.keys(0, length))
        keys = [key for entries in store._blocks._entries.values() for key in entries]
        assert store.stored_bytes == len(keys) * BLOCK_BYTES <= blocks * BLOCK_BYTES
        kept = {entry[0] for entries in store._blocks._entries.values() for entry in entries.values()}
        assert all(before in kept or before in OWNERS for before, _ in keys), "a block without the one before it"


def test_a_client_that_stores_without_end_pushes_out_its_own_texts() -> None:
    """Under one cache salt after another, too; the other client has less than half of the room."""
    store = store_of(10)
    added(store, 1, 2, 3, 4, owner=("victim", ""))
    for number in range(50):
        added(store, number, 99, owner=("hostile", str(number)))
    assert stored(store, 1, 2, 3, 4, owner=("victim", "")) == 4
    assert store.stored_bytes == 10 * BLOCK_BYTES
    for number in range(10):
        added(store, 100 + number, 99, owner=("victim", ""))
    assert stored(store, 49, 99, owner=("hostile", "49")) == 2, "each has half"
