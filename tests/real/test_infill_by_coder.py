"""Infill by the default pair, asked as llama.cpp's plug-ins for editors ask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from server import Server, running
from specserve.cli.paths import DEFAULT_CONFIG

pytestmark = pytest.mark.real

OTHER_FILE = {"filename": "shapes.py", "text": "def area_of_rectangle(width, height):\n    return width * height\n"}
GAP: dict[str, Any] = {
    "input_prefix": "from shapes import area_of_rectangle\n\n\ndef area_of_square(side):\n",
    "input_suffix": "\n\n\nprint(area_of_square(3))\n",
    "input_extra": [OTHER_FILE],
    "prompt": "    return area_of_",
    "n_predict": 32,
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.99,
    "samplers": ["top_k", "top_p", "infill"],
    "t_max_predict_ms": 5000,
}


@pytest.fixture(scope="module")
def coder() -> Iterator[Server]:
    with running(config=DEFAULT_CONFIG) as server:
        yield server


def test_the_gap_is_filled_by_what_another_file_says(coder: Server) -> None:
    warm = {"input_prefix": "", "input_suffix": "", "input_extra": [OTHER_FILE], "n_predict": 0}
    assert coder.post({**warm, "response_fields": [""]}, route="/infill").json() == {}
    answer = coder.post(GAP, route="/infill").json()
    assert answer["content"].strip() == "rectangle(side, side)"
    assert answer["stop_type"] == "eos"
    # The other file was prefilled before.
    assert answer["timings"]["cache_n"] > 20
    off = coder.post({**GAP, "speculation": {"mode": "off"}}, route="/infill").json()
    assert off["content"] == answer["content"]


def test_a_line_that_is_indented_too_little_ends_the_text(coder: Server) -> None:
    fields = {"prompt": "", "input_suffix": "", "n_predict": 120, "ignore_eos": True}
    free = coder.post({**GAP, **fields, "n_indent": 0}, route="/infill").json()["content"]
    kept = coder.post({**GAP, **fields, "n_indent": 4}, route="/infill").json()["content"]
    assert free.startswith(kept)
    lines = kept.split("\n")[1:]
    assert all(line.startswith("    ") for line in lines[:-1])
    assert not lines[-1].strip()
