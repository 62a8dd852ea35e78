"""A real TorchServe with the tiny pair, started and stopped by the project's own scripts."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import requests

from tiny_config import tiny_config

PROJECT = Path(__file__).parents[2]
# The deadline of everything that has to happen: only a server that hangs takes so long, however busy the machine.
PATIENCE_SECONDS = 300


def free_ports(count: int = 5) -> int:
    """The first of `count` consecutive ports that nothing listens on."""
    # Two processes that start servers at once would both find a port free: each of pytest-xdist's (gw0, gw1, ...) has
    # ports of its own.
    begin = 20_000 + 3_000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 4)
    for first in range(begin, begin + 3_000, 10):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("There are no free ports.")


def tiny() -> Path:
    """The model YAML of the tiny pair."""
    return tiny_config(PROJECT / ".specserve" / "tiny")


@dataclass(frozen=True)
class Server:
    """A running server and the ways to talk to it."""

    port: int
    greeting: str = ""
    """What `scripts/serve` printed."""

    @property
    def state(self) -> Path:
        """The directory of its files."""
        return PROJECT / ".specserve" / str(self.port)

    @property
    def url(self) -> str:
        """The URL below which its routes are."""
        return f"http://127.0.0.1:{self.port}/predictions/qwen/1.0"

    @property
    def key(self) -> str:
        """The inference token."""
        return self.token("inference")

    def token(self, kind: str) -> str:
        """One of TorchServe's tokens."""
        keys = json.loads((self.state / "key_file.json").read_text())
        return str(keys[kind]["key"])

    def client(self) -> openai.OpenAI:
        """OpenAI's own client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=PATIENCE_SECONDS)

    def post(self, body: object = None, *, route: str = "/v1/completions", **options: Any) -> requests.Response:
        """A plain POST with the token."""
        headers = {"Authorization": f"Bearer {self.key}", **options.pop("headers", {})}
        timeout = options.pop("timeout", PATIENCE_SECONDS)
        content = options if "data" in options else {"json": body, **options}
        return requests.post(self.url + route, headers=headers, timeout=timeout, **content)

    def get(self, route: str) -> requests.Response:
        """A plain GET with the token."""
        headers = {"Authorization": f"Bearer {self.key}"}
        return requests.get(self.url + route, headers=headers, timeout=PATIENCE_SECONDS)

    def manage(self, method: str, path: str) -> requests.Response:
        """A call of TorchServe's management API."""
        headers = {"Authorization": f"Bearer {self.token('management')}"}
        url = f"http://127.0.0.1:{self.port + 1}{path}"
        return requests.request(method, url, headers=headers, timeout=PATIENCE_SECONDS)

    def metrics(self) -> dict[str, float]:
        """Values by name and labels, as Prometheus reads them."""
        text = requests.get(f"http://127.0.0.1:{self.port + 2}/metrics", timeout=PATIENCE_SECONDS).text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("specserve_")]
        return {name: float(value) for name, value in lines}

    def log(self) -> str:
        """The worker's log."""
        return (self.state / "logs" / "model_log.log").read_text()


@contextlib.contextmanager
def running(*options: str, config: Path | None = None, port: int | None = None) -> Iterator[Server]:
    """Start a server with `scripts/serve --detach`, on free ports without `port`, and kill it at the end.

    Without `config` it serves the tiny pair.
    """
    port = port or free_ports()
    config = config or tiny()
    command = ["scripts/serve", "--config", str(config), "--port", str(port), "--detach", *options]
    try:
        # It has deadlines of its own: `startupTimeout`, and five minutes for its first completion.
        outcome = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
        assert outcome.returncode == 0, outcome.stderr
        yield Server(port, outcome.stdout)
    finally:
        server = Server(port)
        # Stopping takes TorchServe four seconds, in which it waits.
        for process in processes(server.state):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        stop(server)


def stop(server: Server) -> None:
    """Run `scripts/stop`, which only removes files if the server has ended already."""
    command = ["scripts/stop", "--port", str(server.port)]
    subprocess.run(command, cwd=PROJECT, check=True, timeout=PATIENCE_SECONDS)


def processes(state: Path, program: str = "") -> list[psutil.Process]:
    """The processes of a server, or those whose command line contains the name of a program."""
    # With attributes to read, process_iter skips processes that end meanwhile.
    commands = ((process, " ".join(process.info["cmdline"] or ())) for process in psutil.process_iter(["cmdline"]))
    return [process for process, command in commands if program in command and f"{state}{os.sep}" in command]


def workers(state: Path) -> list[psutil.Process]:
    """The worker processes of a server."""
    return processes(state, "model_service_worker")


def worker(state: Path) -> psutil.Process:
    """The worker process of a server."""
    found = workers(state)
    assert found, "There is no worker."
    return found[0]


def seconds_until(condition: Callable[[], bool], what: str) -> float:
    """Wait until the condition holds, and return how long it took."""
    started = time.monotonic()
    until(condition, what)
    return time.monotonic() - started


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE_SECONDS} s: {what}"
        time.sleep(0.1)
