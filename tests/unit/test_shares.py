"""What clients keep within one limit: who has most loses first, so nobody pushes out what others keep."""

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
        for key in range(10):
            shares.remove(client, key)
        assert kept(shares, client) == []


def test_of_clients_with_equal_shares_the_newcomer_loses() -> None:
    shares: Shares[int, int] = Shares(4)
    for client in "ab":
        for key in (1, 2):
            shares.put(client, key, key)
    shares.put("c", 1, 1)
    assert shares.use("c", 1) == 1, "it has least"
    shares.put("c", 2, 2)
    assert [len(kept(shares, client)) for client in "abc"] == [1, 2, 1]
