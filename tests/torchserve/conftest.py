"""One server with the tiny pair, shared by the tests of this directory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server import Server, running


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running() as server:
        yield server
