"""For all tests: repeatable, with no limit that depends on the machine's speed, and with what skipped ones need."""

import secrets
from collections import Counter
from importlib.util import find_spec
from random import Random

import pytest

# The environment of scripts/test_clients does not have it.
if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any speed")


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences get the same secrets in every run, so a test with a rate of false alarms always has one result."""
    monkeypatch.setattr(secrets, "randbits", Random(0).getrandbits)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the reasons of skipped tests, each of which names what is missing and the command that provides it."""
    skipped = terminalreporter.getreports("skipped")
    reasons = Counter(report.longrepr[-1].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.section("skipped tests, and what they need")
        for reason, count in sorted(reasons.items()):
            terminalreporter.line(f"{count:5}  {reason}")
