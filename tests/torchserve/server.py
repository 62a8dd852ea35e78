"""A real TorchServe with the tiny pair, started and stopped by the project's own scripts."""

import contextlib
import functools
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai
import psutil
import requests

from tiny_config import MODELS, tiny_config

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
    return tiny_config(MODELS)


@functools.cache
def openai_client(url: str, key: str) -> openai.OpenAI:
    """OpenAI's own client; making one takes longer than a short answer."""
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=PATIENCE_SECONDS)


@dataclass(frozen=True)
class Server:
    """A model of a running TorchServe, and the ways to talk to it."""

    port: int
    greeting: str = ""  # what `scripts/serve` printed
    model: str = "qwen"

    @property
    def state(self) -> Path:
        return PROJECT / ".specserve" / str(self.port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/predictions/{self.model}/1.0"

    @property
    def key(self) -> str:
        return self.token("inference")

    def token(self, kind: str) -> str:
        return str(json.loads((self.state / "key_file.json").read_text())[kind]["key"])

    def client(self) -> openai.OpenAI:
        return openai_client(f"{self.url}/v1", self.key)

    def authorization(self, kind: str = "inference") -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token(kind)}"}

    def post(self, body: object = None, *, route: str = "/v1/completions", **options: Any) -> requests.Response:
        headers = self.authorization() | options.pop("headers", {})
        timeout = options.pop("timeout", PATIENCE_SECONDS)
        content = options if "data" in options else {"json": body, **options}
        return requests.post(self.url + route, headers=headers, timeout=timeout, **content)

    def get(self, route: str) -> requests.Response:
        return requests.get(self.url + route, headers=self.authorization(), timeout=PATIENCE_SECONDS)

    def manage(self, method: str, path: str, *, key: str = "management") -> requests.Response:
        url = f"http://127.0.0.1:{self.port + 1}{path}"
        return requests.request(method, url, headers=self.authorization(key), timeout=PATIENCE_SECONDS)

    def register(self, archive: str) -> None:
        answer = self.manage("POST", f"/models?url={archive}&initial_workers=1&synchronous=true")
        assert answer.ok, answer.text

    def worker(self) -> psutil.Process:
        [found] = self.manage("GET", f"/models/{self.model}").json()[0]["workers"]
        return psutil.Process(found["pid"])

    def metrics(self) -> dict[str, float]:
        """The model's values by name and labels, as Prometheus reads them."""
        text = requests.get(f"http://127.0.0.1:{self.port + 2}/metrics", timeout=PATIENCE_SECONDS).text
        own = [line for line in text.splitlines() if re.match(rf'specserve_\w+{{model="{self.model}"', line)]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in own)}

    def metric(self, name: str, labels: str = "") -> float:
        """The sum of all series of a metric that have these labels; they are updated a moment later."""
        series = self.metrics().items()
        return sum(value for of, value in series if of.startswith(f"specserve_{name}{{") and labels in of)

    def log(self) -> str:
        lines = (self.state / "logs" / "model_log.log").read_text().splitlines()
        return "\n".join(line for line in lines if f"-{self.model}_" in line)

    def assert_undisturbed(self) -> None:
        """Nothing raised in the handler, and the worker is the first."""
        log = self.log()
        assert "specserve: request " not in log
        assert "Invoking custom service failed" not in log
        assert log.count("specserve: a pass of one token takes") == 1


@contextlib.contextmanager
def registered(server: Server, name: str) -> Iterator[Server]:
    """The model of NAME.mar in the server's model store, beside the server's own; it is unregistered at the end."""
    server.register(f"{name}.mar")
    try:
        yield replace(server, model=name)
    finally:
        assert server.manage("DELETE", f"/models/{name}").ok


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
    return processes(state, "model_service_worker")


def worker(state: Path) -> psutil.Process:
    found = workers(state)
    assert found, "There is no worker."
    return found[0]


def until(condition: Callable[[], bool], what: str) -> float:
    """Wait until the condition holds, and return how many seconds it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + PATIENCE_SECONDS, f"not within {PATIENCE_SECONDS} s: {what}"
        time.sleep(0.1)
    return time.monotonic() - started
