"""What finished answers wrote: found by the longest common suffix, proposed by how they went on, per pool."""

from __future__ import annotations

import random

import pytest

from specserve.speculation import history
from specserve.speculation.history import Follower, History, Pools

ANSWER = [11, 12, 13, 14, 15, 16, 17, 18]


def proposed(histories: list[History], tokens: list[int], drafts: list[int] | None = None, most: int = 8) -> list[int]:
    return Follower().propose(histories, tokens, drafts or [], most).tokens


def test_a_sequence_goes_on_as_a_finished_answer_did() -> None:
    history = History(1000)
    history.add(ANSWER)
    assert proposed([history], [1, 11, 12, 13]) == [14, 15, 16, 17, 18]
    assert proposed([history], [1, 11, 12, 13], most=2) == [14, 15]
    assert proposed([history], [1, 11, 12], [13, 14]) == [15, 16, 17, 18]


def test_two_tokens_are_no_match_and_three_are() -> None:
    history = History(1000)
    history.add(ANSWER)
    assert proposed([history], [12, 13]) == []
    assert proposed([history], [9, 12, 13]) == []
    assert proposed([history], [9, 11, 12, 13])[:1] == [14]


def test_no_match_and_no_proposal_reach_beyond_the_end_of_an_answer() -> None:
    history = History(1000)
    history.add([1, 2, 3, 4])
    history.add([5, 6, 7, 8])
    assert proposed([history], [1, 2, 3]) == [4]
    assert proposed([history], [2, 3, 4]) == []
    assert proposed([history], [3, 4, 5]) == []


def test_the_longest_suffix_counts() -> None:
    history = History(1000)
    history.add([1, 2, 3, 4, 5, 6, 7, 8, 50])
    history.add([9, 9, 9, 9, 9, 6, 7, 8, 60])
    assert proposed([history], [1, 2, 3, 4, 5, 6, 7, 8]) == [50]
    assert proposed([history], [9, 9, 9, 9, 9, 6, 7, 8]) == [60]


def test_of_equal_matches_the_most_frequent_continuation_is_proposed_and_among_equals_the_newest() -> None:
    history = History(1000)
    for last in (50, 60, 60, 50, 60, 70):
        history.add([1, 2, 3, last])
    assert proposed([history], [1, 2, 3]) == [60]
    history.add([1, 2, 3, 50])
    assert proposed([history], [1, 2, 3]) == [50]


def test_what_all_occurrences_say_is_more_certain_than_what_most_say_and_that_than_what_one_of_many_says() -> None:
    def confidence(*lasts: int) -> float:
        history = History(1000)
        for last in lasts:
            history.add([1, 2, 3, last])
        return Follower().propose([history], [1, 2, 3], [], 1).confidence[0]

    assert confidence(5, 5, 5, 5) > confidence(5, 5, 5, 6) > confidence(5, 6, 7, 8)


def test_confidence_follows_what_the_sequence_has_confirmed_or_refuted() -> None:
    history = History(10_000)
    rng = random.Random(1)
    text = [rng.randrange(1000) for _ in range(400)]
    history.add(text)
    right, wrong = Follower(), Follower()
    first = [follower.propose([history], text[:10], [], 1).confidence[0] for follower in (right, wrong)]
    assert first[0] == first[1]
    tokens = text[:10]
    for length in range(11, 60):
        sure = right.propose([history], text[:length], [], 1).confidence[0]
        # Every fourth token is another one than in the answer.
        tokens.append(2000 if length % 4 == 0 else text[length - 1])
        wrong.propose([history], tokens, [], 1)
    unsure = wrong.propose([history], tokens[:-4] + text[55:59], [], 1)
    assert sure > first[0]
    assert not unsure.confidence or unsure.confidence[0] < sure


def test_the_oldest_answers_are_overwritten() -> None:
    history = History(300)
    history.add(ANSWER)
    for number in range(60):
        history.add([1000 + 10 * number + offset for offset in range(9)])
        assert len(history) <= 300
    assert proposed([history], ANSWER[:4]) == []
    assert proposed([history], [1590, 1591, 1592, 1593]) == [1594, 1595, 1596, 1597, 1598]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_proposed_agrees_with_a_search_of_all_answers(seed: int) -> None:
    """By exhaustive search: the first token is one that followed the same three tokens or more."""
    rng = random.Random(seed)
    answers = [[rng.randrange(4) for _ in range(rng.randrange(40))] for _ in range(rng.randrange(1, 6))]
    history = History(5000)
    for answer in answers:
        history.add(answer)
    for _ in range(50):
        tokens = [rng.randrange(4) for _ in range(rng.randrange(1, 30))]
        agreeing: dict[int, set[int]] = {}
        for answer in answers:
            for end in range(1, len(answer)):
                length = 0
                while length < min(end, len(tokens), 32) and answer[end - 1 - length] == tokens[-1 - length]:
                    length += 1
                agreeing.setdefault(length, set()).add(answer[end])
        possible = set().union(*(found for length, found in agreeing.items() if length >= 3))
        assert set(proposed([history], tokens)[:1]) <= possible


def test_pools_do_not_see_each_other_and_all_see_the_corpus() -> None:
    pools = Pools(1000)
    pools.add(("", "a"), [1, 2], [3, 4, 5, 6])
    assert proposed(pools.of(("", "a")), [3, 4, 5]) == [6]
    assert pools.of(("", "b")) == []
    assert pools.of(None) == []
    pools.corpus = History(1000)
    pools.corpus.add([3, 4, 5, 7])
    assert proposed(pools.of(("", "b")), [3, 4, 5]) == [7]
    assert proposed(pools.of(None), [3, 4, 5]) == [7]
    assert proposed(pools.of(("", "a")), [2, 3, 4, 5]) == [6]


def test_the_beginning_of_an_answer_is_found_by_its_prompt() -> None:
    pools = Pools(1000)
    pools.add(("", "a"), list(range(200)), [500, 501, 502])
    assert proposed(pools.of(("", "a")), list(range(200))) == [500, 501, 502]


def test_a_client_with_many_pools_loses_the_one_it_used_longest_ago_and_others_lose_none() -> None:
    pools = Pools(1000)
    pools.add(("victim", "a"), [], [1, 2, 3, 4])
    for number in range(20):
        pools.of(("hostile", "0"))
        pools.add(("hostile", str(number)), [], [1, 2, 3, 4])
    assert len(pools.of(("victim", "a"))) == 1
    kept = [number for number in range(20) if pools.of(("hostile", str(number)))]
    assert kept == [0, *range(14, 20)]


def test_a_pool_grows_with_what_is_written_and_finds_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_FIRST_TOKENS", 300)
    pools = Pools(5000)
    for number in range(40):
        pools.add(("a", ""), [], [1000 * number + n for n in range(100)])
        sizes = [kept.size for kept in pools.of(("a", ""))]
        assert sizes[0] >= min(5000, 101 * (number + 1))
    assert 4040 <= sizes[0] <= 5000
    for number in range(40):
        assert proposed(pools.of(("a", "")), [1000 * number + n for n in range(50)])[0] == 1000 * number + 50


def test_an_answer_of_no_pool_is_kept_nowhere() -> None:
    pools = Pools(1000)
    pools.add(None, [1], [2, 3, 4])
    assert pools.of(None) == []


def test_without_room_nothing_is_kept() -> None:
    pools = Pools(0)
    pools.add(("", "a"), [1], [2, 3, 4])
    assert pools.of(("", "a")) == []
