"""Layout: the prediction of the whitespace that comes next in a JSON text."""

from __future__ import annotations

import json
from typing import Any

from specserve.grammar.layout import Layout

VALUE = {
    "name": 'a "quoted, [odd]: {name} \\',
    "tags": ["x", "y", "z"],
    "size": {"width": 1, "height": -2.5e3},
    "items": [{"id": 1, "ok": True}, {"id": 2, "ok": False}],
    "end": None,
}


def gaps(text: bytes) -> list[tuple[bytes, bytes | None]]:
    """Actual and predicted whitespace between all adjacent characters outside strings, numbers and literals."""
    found = []
    layout = Layout()
    position = 0
    while position < len(text):
        start = position
        while position < len(text) and text[position] in b" \n\r\t":
            position += 1
        if not layout.in_string and (layout.last != "v" or text[position] in b"]},:"):
            found.append((text[start:position], layout.before(text[position])))
        layout = layout.read(text[start : position + 1])
        position += 1
    return found


TEXTS: list[Any] = [
    json.dumps(VALUE, indent=2),
    json.dumps(VALUE, indent=4),
    json.dumps(VALUE, indent="\t"),
    json.dumps(VALUE),
    json.dumps(VALUE, separators=(",", ":")),
]


def test_whitespace_of_dumped_json_is_predicted_after_the_first_entry() -> None:
    for text in TEXTS:
        seen = gaps(text.encode())
        wrong = [pair for pair in seen if pair[0] != pair[1]]
        # There is no prediction before the first bracket and the first entry, and after the first colon.
        assert [predicted for _, predicted in wrong] == [None] * len(wrong)
        assert len(wrong) <= 3
        assert len(seen) > 50


def test_one_line_lists_among_indented_entries_are_predicted() -> None:
    layout = Layout().read(b'{\n  "a": [1, 2],\n  "b": [')
    assert layout.before(ord("3")) == b""
    layout = layout.read(b"3")
    assert layout.before(ord(",")) == b""
    assert layout.read(b",").before(ord("4")) == b" "
    assert layout.before(ord("]")) == b""
    assert layout.read(b"]").before(ord("}")) == b"\n"


def test_rest_of_a_gap_is_predicted_after_its_start() -> None:
    layout = Layout().read(b'{\n    "a": 1,\n')
    assert layout.before(ord('"')) == b"    "
    assert layout.read(b"    ").before(ord('"')) == b""
    assert layout.read(b"     ").before(ord('"')) is None
    assert layout.read(b"\t").before(ord('"')) is None


def test_text_may_be_read_in_parts() -> None:
    text = json.dumps(VALUE, indent=2).encode()
    parts = Layout()
    for start in range(0, len(text), 7):
        parts = parts.read(text[start : start + 7])
    assert parts == Layout().read(text)


def test_layout_of_deep_brackets_is_small() -> None:
    layout = Layout()
    for depth in range(3000):
        layout = layout.read(b"[" + b" " * (depth % 40))
    assert len(layout.gaps) < 100


def test_brackets_beyond_the_maximum_depth_share_one_layout() -> None:
    deep = Layout().read(b"[" * 50 + b"1, ")
    assert deep.read(b"2,").before(ord("3")) == b" "
    assert deep.read(b"2]").before(ord("]")) == b""
