"""The detokenizer releases whole characters, each once, and withholds what may become a stop string."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from specserve.core.detokenizer import Detokenizer
from work import lines_run


def released(pieces: list[bytes], stops: list[str]) -> tuple[list[str], bool]:
    """The text released after each piece and after `finish`, and whether a stop string was found."""
    stream = Detokenizer(stops)
    texts = []
    for piece in pieces:
        stream.push(piece)
        texts.append(stream.take())
    stream.finish()
    texts.append(stream.take())
    return texts, bool(stream.stop)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data` split at these offsets."""
    offsets = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(offsets)]


@given(
    st.text(alphabet="ab🙂é世"),
    st.lists(st.integers(0, 100)),
    st.lists(st.text("ab🙂", min_size=1, max_size=4), max_size=4),
)
def test_text_before_the_first_stop_string_is_released(text: str, cuts: list[int], stops: list[str]) -> None:
    texts, stopped = released(split(text.encode(), cuts), stops)
    # The stop string that is complete first wins, as when reading byte by byte, and of several the longest.
    matches = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert "".join(texts) == (text[: min(matches)[1]] if matches else text)
    assert stopped == bool(matches)


@given(st.binary(max_size=30), st.lists(st.integers(0, 100)))
def test_invalid_utf8_is_released_as_replacement_characters(data: bytes, cuts: list[int]) -> None:
    texts, _ = released(split(data, cuts), [])
    assert "".join(texts) == data.decode("utf-8", errors="replace")


def test_character_is_released_when_it_is_complete() -> None:
    texts, _ = released([b"a\xf0\x9f", b"\x99", b"\x82b"], [])
    assert texts == ["a", "", "🙂b", ""]


def test_longest_match_of_several_stop_strings_is_withheld_and_one_may_overlap_text_that_could_not_stop() -> None:
    assert released([b"a", b"b"], ["ab", "cc"]) == (["", "", ""], True)
    stream = Detokenizer(["aa"])
    stream.push(b"aa", may_stop=False)
    stream.push(b"a")
    assert (stream.take(), stream.stop) == ("aa", "aa")


def test_work_per_character_does_not_grow_with_the_withheld_text() -> None:
    """Of sixteen stop strings of 1,000 characters one withholds all of the text, and the others almost none."""
    stops = ["a" * 999 + "b", *("a" * length + "b" * (1000 - length) for length in range(1, 16))]
    stream = Detokenizer(stops)

    def push() -> None:
        for _ in range(20):
            stream.push(b"a")

    first = lines_run(push)
    for _ in range(45):
        push()
    assert lines_run(push) <= 2 * first
