"""A real TorchServe with the tiny pair, started and stopped by the project's own scripts."""

from __future__ import annotations

import json
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import requests

PROJECT = Path(__file__).parents[2]


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

    @property
    def state(self) -> Path:
        """Its files."""
        return PROJECT / ".specserve" / str(self.port)

    @property
    def url(self) -> str:
        """Where its routes lie."""
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

    def log(self) -> str:
        """What the worker has said."""
        return (self.state / "logs" / "model_log.log").read_text()


def start(*options: str, config: str = "config/tiny.yaml") -> tuple[Server, subprocess.CompletedProcess[str]]:
    """Run `scripts/serve --detach` on free ports."""
    server = Server(free_ports())
    command = ["scripts/serve", "--config", config, "--port", str(server.port), "--detach", *options]
    return server, subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=600, check=False)


def stop(server: Server) -> None:
    """Run `scripts/stop`."""
    subprocess.run(["scripts/stop", "--port", str(server.port)], cwd=PROJECT, check=True, timeout=60)


def worker(state: Path) -> psutil.Process:
    """The process that holds the models."""
    for process in psutil.process_iter():
        command = " ".join(process.cmdline())
        if "model_service_worker" in command and str(state) in command:
            return process
    raise AssertionError("There is no worker.")
