"""benchmarks/worst_cases.py sends what a server takes, or the limit that it names is not what holds it."""

from __future__ import annotations

import pytest

from specserve.config import load_yaml
from specserve.tools.paths import DEFAULT_CONFIG
from worst_cases import CASES, Case


@pytest.mark.parametrize("case", [case for case in CASES if "speculation" in case.body()], ids=lambda case: case.name)
def test_a_case_asks_for_as_many_drafts_as_a_request_may(case: Case) -> None:
    """One more, and it is refused before it costs anything."""
    _, handler = load_yaml(DEFAULT_CONFIG)
    assert case.body()["speculation"]["gamma"] == handler.speculation.max_gamma
