"""Layout: what whitespace a JSON text is likely to have next."""

from __future__ import annotations

import json

import pytest

from specserve.grammar.layout import WHITESPACE, Layout

VALUE = {
    "name": 'a "quoted, [odd]: {name} \\',
    "tags": ["x", "y", "z"],
    "size": {"width": 1, "height": -2.5e3},
    "items": [{"id": 1, "ok": True}, {"id": 2, "ok": False}],
    "end": None,
}


def gaps(text: bytes) -> list[tuple[bytes, bytes | None]]:
    """Between any two characters outside strings and numbers: the whitespace that is there, and what is expected."""
    found = []
    layout = Layout()
    place = 0
    while place < len(text):
        start = place
        while place < len(text) and text[place] in WHITESPACE:
            place += 1
        if not layout.inside and (layout.last != "value" or text[place] in b"]},:"):
            found.append((text[start:place], layout.before(text[place])))
        layout = layout.read(text[start : place + 1])
        place += 1
    return found


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(VALUE, indent=2),
        json.dumps(VALUE, indent=4),
        json.dumps(VALUE, indent="\t"),
        json.dumps(VALUE),
        json.dumps(VALUE, separators=(",", ":")),
    ],
    ids=["two spaces", "four spaces", "tabs", "one line", "compact"],
)
def test_a_text_that_json_writes_is_expected_but_for_its_first_entry(text: str) -> None:
    seen = gaps(text.encode())
    wrong = [pair for pair in seen if pair[0] != pair[1]]
    # The first bracket, the first entry and the first colon; nothing can tell them.
    assert [expected for _, expected in wrong] == [None] * len(wrong)
    assert len(wrong) <= 3
    assert len(seen) > 50


def test_lists_within_a_line_among_indented_entries_stay_there() -> None:
    layout = Layout().read(b'{\n  "a": [1, 2],\n  "b": [')
    assert layout.before(ord("3")) == b""
    layout = layout.read(b"3")
    assert layout.before(ord(",")) == b""
    assert layout.read(b",").before(ord("4")) == b" "
    assert layout.before(ord("]")) == b""
    assert layout.read(b"]").before(ord("}")) == b"\n"


def test_what_is_left_of_a_gap_is_expected_behind_its_beginning() -> None:
    layout = Layout().read(b'{\n    "a": 1,\n')
    assert layout.before(ord('"')) == b"    "
    assert layout.read(b"    ").before(ord('"')) == b""
    assert layout.read(b"     ").before(ord('"')) is None
    assert layout.read(b"\t").before(ord('"')) is None


def test_reading_leaves_the_layout_before_as_it_was() -> None:
    before = Layout().read(b'{"a":')
    after = before.read(b'  1, "b":')
    assert before == Layout().read(b'{"a":')
    assert after.before(ord("2")) == b"  "
    assert before.before(ord("2")) is None


def test_a_text_read_in_parts_is_the_same_text() -> None:
    text = json.dumps(VALUE, indent=2).encode()
    parts = Layout()
    for start in range(0, len(text), 7):
        parts = parts.read(text[start : start + 7])
    assert parts == Layout().read(text)


def test_a_layout_stays_small_however_deep_the_brackets() -> None:
    layout = Layout()
    for depth in range(3000):
        layout = layout.read(b"[" + b" " * (depth % 40))
    assert len(layout.gaps) < 100


def test_deep_brackets_are_laid_out_alike() -> None:
    deep = Layout().read(b"[" * 50 + b"1, ")
    assert deep.read(b"2,").before(ord("3")) == b" "
    assert deep.read(b"2]").before(ord("]")) == b""
