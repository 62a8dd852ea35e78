"""Servers under test, and clients that stream completions from them."""

from __future__ import annotations

import json
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import requests

from common import read_tasks
from specserve.cli.paths import PROJECT
from specserve.cli.torchserve_process import State
from specserve.errors import EnvironmentFailure

SLOTS = 8
# Of `random_words`, with Qwen's tokeniser.
TOKENS_PER_WORD = 1.07
LOAD_TIMEOUT_SECONDS = 300
REQUEST_TIMEOUT_SECONDS = 900


@dataclass(frozen=True)
class Endpoint:
    """A server's base URL, further fields of each request to it, its resident memory in MiB, and its API key."""

    name: str
    url: str
    extra: dict[str, Any] = field(default_factory=dict)
    resident_mib: Callable[[], int] = lambda: 0
    key: str | None = None


class ServerProcess:
    """A server on a free port.

    Args:
        command: the command line, which takes `--port` too.
        log: where its output goes.
    """

    def __init__(self, command: list[str | Path], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as output:
            self._process = subprocess.Popen(
                [*command, "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # ik_llama.cpp's server writes llama.log into its working directory.
                cwd=log.parent,
                # As ours, and as a service: Linux divides the cores by sessions (benchmarks/neighbours.py).
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            EnvironmentFailure: the server ended, or took too long.
        """
        until = time.monotonic() + LOAD_TIMEOUT_SECONDS
        while self._process.poll() is None and time.monotonic() < until:
            try:
                if requests.get(self.url + "/health", timeout=5).ok:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.1)
        self.stop()
        output = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise EnvironmentFailure(f"it did not become ready: {output[-1] if output else 'no message'} (log: {self.log})")

    def stop(self) -> None:
        """Kill the process; a second call is harmless."""
        self._process.kill()
        self._process.wait()

    def endpoint(self, name: str) -> Endpoint:
        """Where clients reach it; its prompt cache stays unused."""
        return Endpoint(name, self.url, {"cache_prompt": False}, self.resident_mib)

    def resident_mib(self) -> int:
        """Resident memory of the process in MiB."""
        return int(psutil.Process(self._process.pid).memory_info().rss) >> 20


def start_specserve(stack: ExitStack, config: Path, port: int, *, with_tokens: bool = False) -> Endpoint:
    """This project's server, through TorchServe; the stack stops it."""
    scripts, flags = PROJECT / "scripts", ["--port", str(port)]
    command: list[str | Path] = [scripts / "serve", "--config", config, *flags, "--detach"]
    subprocess.run(command + ["--no-auth"] * (not with_tokens), check=True, stdout=subprocess.DEVNULL)
    stack.callback(lambda: subprocess.run([scripts / "stop", *flags], check=True, stdout=subprocess.DEVNULL))
    return specserve_endpoint(port)


def specserve_endpoint(port: int) -> Endpoint:
    """This project's server on a port where it already runs."""
    url = f"http://127.0.0.1:{port}/predictions/qwen/1.0"
    return Endpoint(
        "specserve", url, {"speculation": {"pool": ""}}, partial(_worker_mib, port), State(port).key("inference")
    )


def specserve_processes(port: int, program: str = "") -> list[psutil.Process]:
    """TorchServe's processes at a port whose command lines contain `program`."""
    state = str(State(port).directory)
    commands = ((process, " ".join(process.info["cmdline"] or ())) for process in psutil.process_iter(["cmdline"]))
    return [process for process, command in commands if state in command and program in command]


def _worker_mib(port: int) -> int:
    """Resident memory in MiB of the TorchServe worker that serves the model."""
    workers = specserve_processes(port, "model_service_worker")
    return sum(int(process.memory_info().rss) >> 20 for process in workers)


@dataclass
class Answer:
    """One streamed answer: timestamps in seconds, its text and number of tokens, and what the server says about it."""

    sent: float
    chunks: list[float] = field(default_factory=list)
    end: float = 0.0
    text: str = ""
    tokens: int = 0
    speculation: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.chunks[0] - self.sent

    @property
    def tpot(self) -> float:
        """Time per output token after the first."""
        return (self.chunks[-1] - self.chunks[0]) / max(1, self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Time between consecutive chunks with text."""
        return [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]


def events(response: requests.Response) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events as they arrive."""
    for line in response.iter_lines(chunk_size=1):
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line.removeprefix(b"data: "))


def stream(endpoint: Endpoint, prompt: str, max_tokens: int, limit_seconds: float = REQUEST_TIMEOUT_SECONDS) -> Answer:
    """Stream one greedy completion, which the client ends after the limit; a failure is recorded in the answer."""
    answer = Answer(perf_counter())
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    url = f"{endpoint.url}/v1/completions"
    try:
        with requests.post(
            url, json=body | endpoint.extra, headers=headers, stream=True, timeout=limit_seconds
        ) as response:
            response.raise_for_status()
            for event in events(response):
                text = "".join(choice.get("text") or "" for choice in event.get("choices", ()))
                if text:
                    answer.chunks.append(perf_counter())
                    answer.text += text
                if event.get("usage"):
                    answer.tokens = event["usage"]["completion_tokens"]
                answer.speculation = event.get("speculation", answer.speculation)
                if perf_counter() - answer.sent > limit_seconds:
                    break
        answer.end = perf_counter()
    except (requests.RequestException, ValueError, KeyError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if not answer.error and not answer.chunks:
        answer.error = "no text"
    return answer


def unique_prompts(number: int) -> list[str]:
    """Prompts of four families in turn; each begins with a random line, so that none shares a cached prefix."""
    families = (read_tasks(family) for family in ("code", "json", "prose", "chat"))
    texts = [task.text for tasks in zip(*families, strict=False) for task in tasks]
    return [f"{secrets.token_hex(5)}\n{texts[index % len(texts)]}" for index in range(number)]


@cache
def _words() -> list[str]:
    return sorted({*re.findall(r"\b[a-z]+\b", " ".join(task.text for task in read_tasks("summarise")))})


def random_words(tokens: int) -> str:
    """About so many tokens of words in a random order: no two such prompts share a cached prefix."""
    return " ".join(secrets.choice(_words()) for _ in range(round(tokens / TOKENS_PER_WORD)))


def closed_loop(endpoint: Endpoint, *, clients: int, number: int, max_tokens: int) -> list[Answer]:
    """`clients` clients share `number` requests; each sends its next one when the last one is answered."""
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda prompt: stream(endpoint, prompt, max_tokens), unique_prompts(number)))
