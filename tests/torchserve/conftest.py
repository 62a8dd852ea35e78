"""One server with the tiny pair for all tests of this directory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server import Server, start, stop


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    server, outcome = start()
    assert outcome.returncode == 0, outcome.stderr
    yield server
    stop(server)
