"""Layout: the prediction of the whitespace that comes next in a JSON text."""

import json

from specserve.grammar.layout import Layout


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


def test_whitespace_of_dumped_json_is_predicted_after_the_first_entry() -> None:
    value = {
        "name": 'a "quoted, [odd]: {name} \\',
        "tags": ["x", "y", "z"],
        "size": {"width": 1, "height": -2.5e3},
        "items": [{"id": 1, "ok": True}, {"id": 2, "ok": False}],
        "end": None,
    }
    for options in ({"indent": 2}, {"indent": 4}, {"indent": "\t"}, {}, {"separators": (",", ":")}):
        seen = gaps(json.dumps(value, **options).encode())
        wrong = [pair for pair in seen if pair[0] != pair[1]]
        # There is no prediction before the first bracket and the first entry, and after the first colon.
        assert [predicted for _, predicted in wrong] == [None] * len(wrong)
        assert len(wrong) <= 3
        assert len(seen) > 50


def test_layout_of_deep_brackets_is_small() -> None:
    layout = Layout()
    for depth in range(3000):
        layout = layout.read(b"[" + b" " * (depth % 40))
    assert len(layout.gaps) < 100
