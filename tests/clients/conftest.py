"""Servers for all clients: of the tiny pair, and of the default pair for those that call tools."""

from collections.abc import Iterator

import pytest

from server import Server, running
from store import CONFIG
from wire import Wire, recording


@pytest.fixture(scope="session", autouse=True)
def _no_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is looked up on a hub, and nothing is left in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("huggingface")))
        yield


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server with the tiny pair; with our kernels log-probabilities do not depend on other requests."""
    with running() as server:
        yield server


@pytest.fixture(scope="session")
def default_server() -> Iterator[Server]:
    with running(config=CONFIG) as server:
        yield server


@pytest.fixture
def wire(default_server: Server) -> Iterator[Wire]:
    """The default pair behind a proxy, which checks in the end that the server refused nothing and made valid calls."""
    origin, _, path = default_server.url.partition("/predictions")
    with recording(origin, "/predictions" + path, default_server.key) as wire:
        yield wire
        wire.check()
