"""How many tokens are expected to follow, against what the answers before had."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from specserve.speculation.answer_length import AnswerLengths


def taught(*lengths: int, is_cut_off: bool = False) -> AnswerLengths:
    lengths_seen = AnswerLengths()
    for length in lengths:
        lengths_seen.learn(length, is_cut_off=is_cut_off)
    return lengths_seen


def test_a_new_server_expects_few_more_after_few() -> None:
    assert [AnswerLengths().following(generated) for generated in (1, 2, 8, 100, 10_000)] == [3, 6, 8, 28, 10_000]


@given(st.lists(st.integers(1, 500), min_size=200, max_size=300), st.integers(1, 400))
def test_nine_of_ten_answers_that_came_so_far_had_as_many_more(lengths: list[int], generated: int) -> None:
    following = taught(*lengths).following(generated)
    so_far = [length for length in lengths[-200:] if length > generated]
    if so_far:
        assert sum(length >= generated + following for length in so_far) >= 0.9 * len(so_far)
        # And no more: the next one would be beyond a tenth.
        assert (
            sum(length > generated + following for length in so_far) <= 0.9 * len(so_far) + 1
            or len({length for length in so_far if length <= generated + following}) == 1
        )
    else:
        assert following == generated


def test_answers_that_were_cut_off_would_have_gone_on() -> None:
    assert taught(*[5] * 200).following(2) == 3
    assert math.isinf(taught(*[5] * 200, is_cut_off=True).following(2))


def test_old_answers_are_forgotten() -> None:
    assert taught(*[300] * 200, *[5] * 200).following(2) == 3
