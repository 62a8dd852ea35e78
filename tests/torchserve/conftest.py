"""One server with the tiny pair, shared by the tests of this directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server import Server, running
from tiny_config import tiny_config


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which the server writes its trace."""
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="session")
def server(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = tiny_config(tmp_path_factory.mktemp("shared"), handler={"trace": str(traces)})
    with running(config=config) as server:
        yield server
