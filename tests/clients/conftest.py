"""Servers for all clients: of the tiny pair, and of the default pair for those that call tools."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ours import Ours
from server import Server, running, tiny
from store import CONFIG
from tiny_config import tiny_config
from wire import Wire, recording


@pytest.fixture(scope="session", autouse=True)
def _no_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is looked up on a hub, and nothing is left in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("huggingface")))
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with one slot, so that log-probabilities do not depend on earlier or concurrent requests.

    With llama.cpp's attention a sequence's sums are added in an order that depends on the other sequences in the cache.
    """
    with running(config=tiny_config(tmp_path_factory.mktemp("config"), handler={"sequences": 1})) as server:
        yield server


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    """A server that decodes eight sequences at once."""
    with running() as server:
        yield server


@pytest.fixture(scope="session")
def ours() -> Ours:
    return Ours()


@pytest.fixture(scope="session")
def model(ours: Ours) -> Path:
    """The file of the server's target."""
    return ours.target(tiny())


@pytest.fixture(scope="session")
def tokenizer(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tokenizer for that target."""
    directory = tmp_path_factory.mktemp("tokenizer")
    # Its packages are in the environment of the tests that use it.
    importlib.import_module("gguf_tokenizer").save_tokenizer(model, directory)
    return directory


@pytest.fixture(scope="session")
def default_server() -> Iterator[Server]:
    """A server with the default pair."""
    with running(config=CONFIG) as server:
        yield server


@pytest.fixture
def wire(default_server: Server) -> Iterator[Wire]:
    """The default pair behind a proxy, which checks in the end that the server refused nothing and made valid calls."""
    origin, _, path = default_server.url.partition("/predictions")
    with recording(origin, "/predictions" + path, default_server.key) as wire:
        yield wire
        wire.check()
