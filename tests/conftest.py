"""What holds for all tests."""

from __future__ import annotations

import secrets
from random import Random

import pytest


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences get the same secrets in every run, so a test with a rate of false alarms always has one result."""
    monkeypatch.setattr(secrets, "randbits", Random(0).getrandbits)
