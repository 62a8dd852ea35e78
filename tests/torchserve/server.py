"""A real TorchServe with the tiny pair, started and stopped by the project's own scripts."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import requests
import yaml

PROJECT = Path(__file__).parents[2]
TINY = PROJECT / "config" / "tiny.yaml"


def free_ports(count: int = 5) -> int:
    """The first of `count` consecutive ports that nothing listens on."""
    for first in range(20_000, 32_000, 10):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("There are no free ports.")


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
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=60)

    def post(self, body: object = None, *, route: str = "/v1/completions", **options: Any) -> requests.Response:
        """A plain POST with the token."""
        headers = {"Authorization": f"Bearer {self.key}", **options.pop("headers", {})}
        content = options if "data" in options else {"json": body, **options}
        return requests.post(self.url + route, headers=headers, timeout=60, **content)

    def get(self, route: str) -> requests.Response:
        """A plain GET with the token."""
        return requests.get(self.url + route, headers={"Authorization": f"Bearer {self.key}"}, timeout=60)

    def manage(self, method: str, path: str) -> requests.Response:
        """A call of TorchServe's management API."""
        headers = {"Authorization": f"Bearer {self.token('management')}"}
        return requests.request(method, f"http://127.0.0.1:{self.port + 1}{path}", headers=headers, timeout=120)

    def metrics(self) -> dict[str, float]:
        """Values by name and labels, as Prometheus reads them."""
        text = requests.get(f"http://127.0.0.1:{self.port + 2}/metrics", timeout=10).text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("specserve_")]
        return {name: float(value) for name, value in lines}

    def log(self) -> str:
        """The worker's log."""
        return (self.state / "logs" / "model_log.log").read_text()


@contextmanager
def running(*options: str, config: Path = TINY) -> Iterator[Server]:
    """Start a server with `scripts/serve --detach` on free ports, and stop it at the end."""
    port = free_ports()
    command = ["scripts/serve", "--config", str(config), "--port", str(port), "--detach", *options]
    outcome = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=600, check=False)
    assert outcome.returncode == 0, outcome.stderr
    server = Server(port, outcome.stdout)
    try:
        yield server
    finally:
        stop(server)


def stop(server: Server) -> None:
    """Run `scripts/stop`, which does nothing if the server is stopped already."""
    subprocess.run(["scripts/stop", "--port", str(server.port)], cwd=PROJECT, check=True, timeout=60)


def workers(files: str) -> list[psutil.Process]:
    """The worker processes whose command line contains this path."""
    # With attributes to read, process_iter skips processes that end meanwhile.
    commands = ((process, " ".join(process.info["cmdline"] or ())) for process in psutil.process_iter(["cmdline"]))
    return [process for process, command in commands if "model_service_worker" in command and files in command]


def worker(state: Path) -> psutil.Process:
    """The worker process of a server."""
    found = workers(str(state))
    assert found, "There is no worker."
    return found[0]


def tiny_config(directory: Path, **changes: Any) -> Path:
    """A copy of config/tiny.yaml with these values changed; dicts are merged."""

    def merged(document: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        return document | {
            key: merged(document.get(key) or {}, value) if isinstance(value, dict) else value
            for key, value in changes.items()
        }

    config = directory / "tiny.yaml"
    config.write_text(yaml.safe_dump(merged(yaml.safe_load(TINY.read_text()), changes)))
    return config


def seconds_until(condition: Callable[[], bool], what: str) -> float:
    """Wait until the condition holds, and return how long it took."""
    started = time.monotonic()
    until(condition, what)
    return time.monotonic() - started


def until(condition: Callable[[], bool], what: str, seconds: float = 90) -> None:
    """Wait until the condition holds; the limit allows for a busy machine."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.1)
