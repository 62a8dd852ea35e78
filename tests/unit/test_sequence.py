"""What sequences share: how many leading tokens of two texts are equal."""

from hypothesis import given
from hypothesis import strategies as st

from specserve.sequence import common_prefix

few_tokens = st.lists(st.integers(0, 2), max_size=40)
# Longer than what is compared at once.
long_texts = st.builds(list[int].__mul__, few_tokens, st.integers(0, 12))


@given(long_texts, few_tokens, few_tokens, st.none() | st.integers(-2, 600))
def test_common_prefix_equals_its_definition(
    shared: list[int], left: list[int], right: list[int], max_length: int | None
) -> None:
    left, right = shared + left, shared + right
    most = min(len(left), len(right)) if max_length is None else max(0, min(len(left), len(right), max_length))
    expected = next((i for i in range(most) if left[i] != right[i]), most)
    assert common_prefix(left, right, max_length) == expected
