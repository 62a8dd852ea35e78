"""N-gram drafts: the longest match is found and continued, pools stay apart, and an edit is found in its prediction."""

import random
import tracemalloc
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.sequence import Pool, SamplingParams, Sequence, SpeculationParams
from specserve.speculation.ngram import _LONGEST, _NEWEST, LookupProposer, NgramIndex, Pools, PredictionProposer
from specserve.speculation.proposers import Proposal
from work import lines_run

ANSWER = [11, 12, 13, 14, 15, 16, 17, 18]


def sequence(prompt: list[int], answer: list[int] | None = None, *, prediction: list[int] | None = None) -> Sequence:
    found = Sequence(prompt, SamplingParams(), SpeculationParams(), max_tokens=10**6, prediction=prediction or ())
    found.tokens += answer or []
    return found


def lookup(tokens: list[int], drafts: list[int] | None = None, most: int = 8) -> Proposal:
    return LookupProposer().propose(sequence(tokens), drafts or [], most)


def pooled(pools: Pools, pool: Pool | None, tokens: list[int], drafts: list[int] | None = None) -> list[int]:
    found = sequence(tokens)
    found.speculation = SpeculationParams(pool=pool)
    return LookupProposer(pools).propose(found, drafts or [], 8).tokens


def predicted(prediction: list[int], answer: list[int], drafts: list[int] | None = None, most: int = 8) -> Proposal:
    """What is proposed after an answer that was asked about token by token."""
    proposer, asked = PredictionProposer(), sequence([1, 2], prediction=prediction)
    for token in answer:
        proposer.propose(asked, [], most)
        asked.tokens.append(token)
    return proposer.propose(asked, drafts or [], most)


def texts(alphabet: int) -> st.SearchStrategy[list[int]]:
    """Texts over a small alphabet with repeated blocks, some repeated often enough to be periodic."""
    block = st.tuples(st.lists(st.integers(1, alphabet), max_size=7), st.integers(1, 12))
    return st.lists(block, max_size=5).map(lambda parts: [t for part, times in parts for t in part * times])


def continuation(text: list[int], drafts: list[int], most: int) -> list[int]:
    """By trying all positions: what followed the longest matches most often, and among equals the newest."""
    run = text + drafts
    # Runs that only share the hash take places among the newest, too.
    place = NgramIndex(2, text)._hash
    ends = [end for end in range(len(text), 1, -1) if place(text[end - 2 : end]) == place(run[-2:])][:_NEWEST]
    ends = [end for end in ends if text[end - 2 : end] == run[-2:]]
    lengths = {
        end: next(n for n in range(_LONGEST + 1) if n == min(_LONGEST, end) or run[end - 1 - n] != run[-1 - n])
        for end in ends
        if end < len(run)
    }
    ends = [end for end in lengths if lengths[end] == max(lengths.values())]
    proposed: list[int] = []
    while ends and len(proposed) < most:
        followers = [(run + proposed)[end] for end in ends]
        proposed.append(max(followers, key=followers.count))
        ends = [end + 1 for end, token in zip(ends, followers, strict=True) if token == proposed[-1]]
    return proposed


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 5).flatmap(texts), st.lists(st.integers(1, 4), max_size=5), st.integers(1, 50), st.integers(0, 99)
)
def test_a_text_goes_on_as_it_did_after_its_longest_suffix_however_it_was_added(
    text: list[int], drafts: list[int], most: int, at_once: int
) -> None:
    proposer, asked = LookupProposer(), sequence(text[:at_once] or [1])
    for token in text[max(1, at_once) :]:
        proposer.propose(asked, drafts, 3)
        asked.tokens.append(token)
    proposal = proposer.propose(asked, drafts, most)
    assert proposal.tokens == continuation(asked.tokens, drafts, most)
    assert len(proposal.confidence) == len(proposal.tokens)
    assert all(0 < confidence < 1 for confidence in proposal.confidence)


def test_an_index_built_at_once_equals_one_that_grew_for_large_tokens_and_long_texts() -> None:
    for alphabet, n in ((3, 2), (1000, 2), (40, 3)):
        text = random.Random(1).choices(range(2**31 - alphabet, 2**31), k=3000)
        built, grown = NgramIndex(n, text), NgramIndex(n)
        for start in range(0, len(text), 7):
            grown.extend(text[start : start + 7])
        for start in range(0, 3000, 50):
            suffix = text[start : start + 40]
            assert [*built.matches(suffix)] == [*grown.matches(suffix)] != []


def test_confidence_rises_with_the_match_and_falls_where_occurrences_differ() -> None:
    text = list(range(50))
    for found in (
        [lookup([*text, *text[10 : 10 + n]]).confidence for n in (2, 4, 8, 16, 32)],
        [predicted(text, [99, *text[10 : 10 + n]]).confidence for n in (1, 2, 4, 8, 16, 32)],
    ):
        first = [confidence[0] for confidence in found]
        assert first == sorted(first)
        assert first[0] < 0.5
        assert first[-1] > 0.95
        assert found[0] == sorted(found[0])
    once = lookup([1, 2, 3, 7, 8, 9, 1, 2]).confidence[0]
    repeated = lookup([1, 2, 3, 7, 1, 2, 3, 9, 1, 2]).confidence[0]
    split = lookup([1, 2, 4, 7, 1, 2, 3, 9, 1, 2]).confidence[0]
    assert split < once < repeated


def test_no_text_takes_much_work_or_memory() -> None:
    """Nothing is copied, and Python's part of adding and proposing does not grow with the text."""
    for tokens in ([1], [1, 2], range(1000), range(10**6)):
        text = random.Random(1).choices(tokens, k=32_768)
        proposer, asked = LookupProposer(), sequence(text)
        tracemalloc.start()
        assert lines_run(partial(proposer.propose, asked, [], 15)) < 2500
        assert tracemalloc.get_traced_memory()[0] < 20 * len(text)
        # The arrays grow, now and then.
        asked.tokens.append(1)
        proposer.propose(asked, [], 15)
        asked.tokens.append(1)
        memory, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        assert lines_run(partial(proposer.propose, asked, text[:5], 15)) < 2500
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak - memory < 50_000


def test_an_answer_goes_on_as_a_finished_one_of_its_pool_did_but_never_beyond_its_end() -> None:
    pools = Pools(1000)
    pools.add(("", "a"), [1, 2], ANSWER)
    pools.add(("", "a"), [5, 6], [21, 22, 23])
    assert pooled(pools, ("", "a"), [9, 11, 12, 13]) == ANSWER[3:]
    assert pooled(pools, ("", "a"), [9, 11, 12], [13, 14]) == ANSWER[4:]
    assert pooled(pools, ("", "a"), [9, 12, 13]) == [], "two tokens are no match"
    pools.add(("", "a"), list(range(100, 300)), [500, 501, 502])
    assert pooled(pools, ("", "a"), list(range(200, 300))) == [500, 501, 502], "by the end of its prompt"
    assert pooled(pools, ("", "a"), ANSWER[-3:]) == pooled(pools, ("", "a"), [17, 18, 5]) == []


def test_pools_do_not_see_each_other_and_all_see_the_corpus() -> None:
    pools = Pools(1000)
    for pool, last in ((("", "a"), 6), (("other", "a"), 8)):
        pools.add(pool, [1, 2], [3, 4, 5, last])
    assert pooled(pools, ("", "a"), [3, 4, 5]) == [6]
    assert pooled(pools, ("other", "a"), [3, 4, 5]) == [8]
    assert pooled(pools, ("", "b"), [3, 4, 5]) == pooled(pools, None, [3, 4, 5]) == []
    pools = Pools(1000, [[3, 4, 5, 7], [5, 7, 9, 1]])
    pools.add(("", "a"), [1, 2], [3, 4, 5, 6])
    assert pooled(pools, ("", "b"), [3, 4, 5]) == pooled(pools, None, [3, 4, 5]) == [7]
    assert pooled(pools, ("", "a"), [1, 2, 3, 4, 5]) == [6]
    assert pooled(pools, None, [4, 5, 7]) == [], "texts of the corpus are separate"


def test_a_full_pool_loses_its_oldest_answers_and_one_answer_may_be_longer_than_it() -> None:
    pools = Pools(300)
    for number in range(60):
        pools.add(("", "a"), [], [1000 + 10 * number + offset for offset in range(9)])
        assert sum(map(len, pools.of(("", "a")))) <= 300
    assert pooled(pools, ("", "a"), [1000, 1001, 1002, 1003]) == []
    for number in (45, 59):
        start = 1000 + 10 * number
        assert pooled(pools, ("", "a"), [start, start + 1, start + 2])[:1] == [start + 3]
    pools.add(("", "a"), [], list(range(5000, 6000)))
    assert sum(map(len, pools.of(("", "a")))) <= 300
    assert pooled(pools, ("", "a"), [5995, 5996, 5997]) == [5998, 5999]


def test_a_client_with_many_pools_loses_the_one_it_used_longest_ago_and_others_lose_none() -> None:
    pools, full = Pools(1000), list(range(900))
    pools.add(("victim", "a"), [], [1, 2, 3, 4])
    for number in range(20):
        pools.of(("hostile", "0"))
        pools.add(("hostile", str(number)), [], full)
    assert len(pools.of(("victim", "a"))) == 1
    kept = [number for number in range(20) if pools.of(("hostile", str(number)))]
    assert kept == [0, *range(20 - len(kept) + 1, 20)]
    assert 7 <= len(kept) <= 8
    for number in range(100):
        pools.add(("tiny", str(number)), [1], [2])
    for none, pool in ((pools, None), (Pools(0), ("", "a"))):
        none.add(pool, [1], [2, 3, 4])
        assert none.of(pool) == []
    assert sum(bool(pools.of(("tiny", str(number)))) for number in range(100)) < 20, "a token counts as more"


def test_a_prediction_is_proposed_from_its_beginning_and_not_after_its_end() -> None:
    assert predicted([1, 2, 3], []).tokens == [1, 2, 3]
    assert predicted([1, 2, 3], [], most=2).tokens == [1, 2]
    assert predicted([1, 2, 3], [1, 2, 3]) == ([], [])
    assert predicted([], [1, 2]) == ([], [])
    assert predicted([1, 2, 3], [], [1, 2]).tokens == [3]


def test_an_answer_is_found_again_after_other_tokens() -> None:
    page = list(range(100, 200))
    assert predicted(page, [9, 8, 7, 100, 101]).tokens[:2] == [102, 103], "other first tokens"
    assert predicted(page, [*page[:10], 1, 2, 3, *page[10:12]]).tokens[:2] == page[12:14], "an insertion"
    assert predicted(page, [*page[:10], *page[30:32]]).tokens[:2] == page[32:34], "a deletion"
    assert predicted(page, [*page[:10], 1, 2, *page[12:14]]).tokens[:2] == page[14:16], "a replacement"
    assert predicted(page, [*page[:10], 1, page[11]]).tokens[:2] == page[12:14], "by a single token"
    assert predicted(page, [*page[:10], 1]) == ([], []), "while it is elsewhere nothing is proposed"
    assert predicted(page, [*page[:10], page[90]]) == ([], []), "a single token far away is no match"


def test_the_longest_match_counts_and_among_equals_the_nearest_to_where_the_answer_left() -> None:
    start = [80, 81, 82, 83]
    page = [1, 2, 50, *range(100, 120), *start, *range(120, 125), 1, 2, 51, *range(130, 150), 1, 2, 52]
    assert predicted(page, [*start, 7, 1, 2]).tokens[:1] == [51]
    nearer = [*range(60, 70), *[5, 1, 0, 1, 2, 50] * 5, *range(70, 90), 4, 5, 1, 2, 51]
    assert predicted(nearer, [*range(60, 70), 4, 5, 1, 2]).tokens[:1] == [51]


def test_drafts_are_found_like_the_answer_but_not_taken_for_it() -> None:
    page = list(range(100, 200))
    proposer, asked = PredictionProposer(), sequence([1], page[:10], prediction=page)
    before = proposer.propose(asked, [], 4)
    assert proposer.propose(asked, page[50:55], 4).tokens == page[55:59]
    assert proposer.propose(asked, [], 4) == before
    assert before.tokens == page[10:14]
