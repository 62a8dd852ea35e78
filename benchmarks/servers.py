"""Servers under test, and clients that stream completions from them."""

import contextlib
import json
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import requests

from common import read_tasks
from specserve.cli.paths import PROJECT, STATE
from specserve.cli.torchserve_process import State
from specserve.errors import EnvironmentFailure

SLOTS = 8
# Of `random_words`, with Qwen's tokeniser.
TOKENS_PER_WORD = 1.07
LOAD_TIMEOUT_SECONDS = 300
REQUEST_TIMEOUT_SECONDS = 900


@dataclass(frozen=True)
class Endpoint:
    """A server as clients see it."""

    name: str
    url: str  # base URL
    extra: dict[str, Any] = field(default_factory=dict)  # further fields of each request
    resident_mib: Callable[[], int] = lambda: 0
    key: str | None = None


@contextmanager
def server_stack() -> Iterator[ExitStack]:
    """A stack that stops servers, also those of a run that is terminated."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as stack:
        yield stack


def start_peer(stack: ExitStack, name: str, command: list[str | Path], log: Path) -> Endpoint:
    """Start a server on a free port, whose prompt cache stays unused, and wait until it is ready.

    Raises:
        EnvironmentFailure: the server ended, or took too long.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # ik_llama.cpp's server writes llama.log into its working directory.
            cwd=log.parent,
            # As ours, and as a service: Linux divides the cores by sessions (benchmarks/neighbours.py).
            start_new_session=True,
        )
    stack.callback(process.wait)
    stack.callback(process.kill)
    until = time.monotonic() + LOAD_TIMEOUT_SECONDS
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(requests.RequestException):
            if requests.get(url + "/health", timeout=5).ok:
                return Endpoint(
                    name, url, {"cache_prompt": False}, partial(_resident_mib, [psutil.Process(process.pid)])
                )
        time.sleep(0.1)
    process.kill()
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    raise EnvironmentFailure(f"it did not become ready: {said[-1] if said else 'no message'} (log: {log})")


def start_specserve(
    stack: ExitStack, config: Path | None, port: int, *, with_tokens: bool = False, checkout: Path = PROJECT
) -> Endpoint:
    """This project's server, through TorchServe; the stack stops it. Without `config` it has the checkout's default."""
    scripts, flags = checkout / "scripts", ["--port", str(port)]
    chosen = ["--config", str(config)] if config else []
    command = [str(scripts / "serve"), *flags, "--detach", *chosen, *["--no-auth"] * (not with_tokens)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    stack.callback(lambda: subprocess.run([scripts / "stop", *flags], check=True, stdout=subprocess.DEVNULL))
    url = f"http://127.0.0.1:{port}/predictions/qwen/1.0"
    key = State(port).key("inference") if with_tokens else None
    return Endpoint("specserve", url, {"speculation": {"pool": ""}}, partial(_worker_mib, port, checkout), key)


def specserve_processes(port: int, program: str = "", checkout: Path = PROJECT) -> list[psutil.Process]:
    """TorchServe's processes at a port whose command lines contain `program`."""
    state = str(checkout / STATE.relative_to(PROJECT) / str(port))
    commands = ((process, " ".join(process.info["cmdline"] or ())) for process in psutil.process_iter(["cmdline"]))
    return [process for process, command in commands if state in command and program in command]


def _worker_mib(port: int, checkout: Path) -> int:
    return _resident_mib(specserve_processes(port, "model_service_worker", checkout))


def _resident_mib(processes: list[psutil.Process]) -> int:
    return sum(int(process.memory_info().rss) >> 20 for process in processes)


@dataclass
class Answer:
    """One streamed answer."""

    sent: float  # this and the next two: timestamps in seconds
    chunks: list[float] = field(default_factory=list)
    end: float = 0.0
    text: str = ""
    tokens: int = 0
    speculation: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.chunks[0] - self.sent

    @property
    def tpot(self) -> float:
        """Time per output token after the first."""
        return (self.chunks[-1] - self.chunks[0]) / max(1, self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Time between consecutive chunks with text."""
        return [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]


def stream(endpoint: Endpoint, prompt: str, max_tokens: int, limit_seconds: float = REQUEST_TIMEOUT_SECONDS) -> Answer:
    """Stream one greedy completion, which the client ends after the limit; a failure is recorded in the answer."""
    answer = Answer(perf_counter())
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    url, body = f"{endpoint.url}/v1/completions", body | endpoint.extra
    try:
        with requests.post(url, json=body, headers=headers, stream=True, timeout=limit_seconds) as response:
            response.raise_for_status()
            for line in response.iter_lines(chunk_size=1):
                if not line.startswith(b"data: ") or line == b"data: [DONE]":
                    continue
                event = json.loads(line.removeprefix(b"data: "))
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
