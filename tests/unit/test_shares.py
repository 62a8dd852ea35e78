"""What clients keep within one limit: who has most loses first, so nobody pushes out what others keep."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specserve.shares import Shares

LIMIT = 12


def kept(shares: Shares[int, int], client: str) -> list[int]:
    return [key for key in range(100) if shares.use(client, key) is not None]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(1, 4)), max_size=60))
def test_the_limit_holds_and_a_client_within_an_equal_share_loses_nothing(puts: list[tuple[str, int, int]]) -> None:
    shares: Shares[int, int] = Shares(LIMIT)
    sizes: dict[str, dict[int, int]] = {client: {} for client in "abc"}
    always_small = set("abc")
    for client, key, size in puts:
        shares.put(client, key, key, size)
        sizes[client][key] = size
        if sum(sizes[client].values()) > LIMIT // 3:
            always_small.discard(client)
        assert shares.total <= LIMIT
    for client in always_small:
        assert kept(shares, client) == sorted(sizes[client])


def test_a_client_loses_what_it_used_longest_ago() -> None:
    shares: Shares[int, int] = Shares(3)
    for key in (1, 2, 3):
        shares.put("a", key, key)
    assert shares.use("a", 1) == 1
    shares.put("a", 4, 4)
    assert kept(shares, "a") == [1, 3, 4]
    assert shares.use("b", 1) is None


def test_of_clients_with_equal_shares_the_newcomer_loses() -> None:
    shares: Shares[int, int] = Shares(4)
    for client in "ab":
        for key in (1, 2):
            shares.put(client, key, key)
    shares.put("c", 1, 1)
    assert shares.use("c", 1) == 1, "it has least"
    shares.put("c", 2, 2)
    assert (len(kept(shares, "a")), len(kept(shares, "b")), len(kept(shares, "c"))) in {(1, 2, 1), (2, 1, 1), (1, 1, 2)}


def test_what_is_replaced_counts_once() -> None:
    shares: Shares[int, int] = Shares(4)
    shares.put("a", 1, 1, size=3)
    shares.put("a", 1, 2, size=4)
    assert (shares.total, shares.use("a", 1)) == (4, 2)
    shares.remove("a", 1)
    shares.remove("b", 1)
    assert (shares.total, shares.next_to_go("a")) == (0, None)
