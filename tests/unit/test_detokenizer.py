"""Text is released once, whole characters only, and never a part of a stop string."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.serving.detokenizer import Detokenizer
from work import lines_run


def released(pieces: list[bytes], stops: list[str]) -> tuple[list[str], bool]:
    """The text that each piece and the end released, and whether a stop string was found."""
    stream = Detokenizer(stops)
    texts = []
    for piece in pieces:
        stream.push(piece)
        texts.append(stream.take())
    stream.finish()
    texts.append(stream.take())
    return texts, stream.stopped


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data` cut at these places."""
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


@given(
    st.text(alphabet="ab🙂é世"),
    st.lists(st.integers(0, 100)),
    st.lists(st.text("ab🙂", min_size=1, max_size=4), max_size=4),
)
def test_any_pieces_release_the_text_before_the_first_stop(text: str, cuts: list[int], stops: list[str]) -> None:
    texts, stopped = released(split(text.encode(), cuts), stops)
    # Of two stops, the one that is complete first wins; that is what reading byte by byte meets.
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if not ends:
        assert "".join(texts) == text
        assert not stopped
    else:
        assert stopped
        assert "".join(texts) in {text[:start] for _, start in ends}
        assert not any(stop in "".join(texts) for stop in stops)


@given(st.binary(max_size=30), st.lists(st.integers(0, 100)))
def test_any_bytes_become_what_utf8_makes_of_them(data: bytes, cuts: list[int]) -> None:
    texts, _ = released(split(data, cuts), [])
    assert "".join(texts) == data.decode("utf-8", errors="replace")


def test_a_character_is_released_when_it_is_whole() -> None:
    texts, _ = released([b"a\xf0\x9f", b"\x99", b"\x82b"], [])
    assert texts == ["a", "", "🙂b", ""]


def test_an_incomplete_character_is_a_replacement_at_the_end() -> None:
    assert released([b"a\xf0\x9f"], [])[0] == ["a", "\ufffd"]


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    assert released([b"one\n", b"\ntwo"], ["\n\n\n"])[0] == ["one", "\n\ntwo", ""]


def test_a_stop_string_across_pieces_is_not_released() -> None:
    texts, stopped = released([b"one\n", b"\n", b"two"], ["\n\n"])
    assert "".join(texts) == "one"
    assert stopped


@pytest.mark.parametrize("stops", [["ab", "b"], ["b", "ab"]])
def test_of_two_stops_in_one_piece_the_earlier_ends_the_text(stops: list[str]) -> None:
    assert "".join(released([b"xxab"], stops)[0]) == "xx"


def test_a_character_costs_the_same_with_much_text_held_back() -> None:
    """Of sixteen stop strings of 1,000 characters one holds everything back, and the others nearly nothing."""
    stops = ["a" * 999 + "b", *("a" * length + "b" * (1000 - length) for length in range(1, 16))]
    stream = Detokenizer(stops)

    def push() -> None:
        for _ in range(20):
            stream.push(b"a")

    first = lines_run(push)
    for _ in range(45):
        push()
    assert lines_run(push) <= 2 * first
