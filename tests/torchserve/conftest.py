"""One TorchServe with the tiny pair, shared by the tests of this directory; files register further models beside it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from server import Server, running
from specserve.cli.archive import pack, prepared_document
from tiny_config import tiny_config


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="session")
def server(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = tiny_config(tmp_path_factory.mktemp("shared"), handler={"trace": str(traces)})
    with running(config=config) as server:
        yield server
        server.assert_undisturbed()


@pytest.fixture(scope="session")
def archive(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write an archive of a tiny pair into the server's model store: its name, and what `tiny_config` takes."""

    def write(name: str, architecture: str = "qwen2", **changes: Any) -> Path:
        config = tiny_config(tmp_path_factory.mktemp(name), architecture, **changes)
        return pack(prepared_document(config), server.state / "model_store" / f"{name}.mar", name)

    return write
