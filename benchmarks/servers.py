"""Servers under test, ours and others', and clients that stream completions from them."""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import requests
from rich.console import Console

from common import read_tasks
from specserve.config import HandlerConfig, usable_cores
from specserve.errors import EnvironmentFailure
from specserve.tools import files
from specserve.tools.archive import handler_of
from specserve.tools.models import prepare
from specserve.tools.paths import PROJECT, models_directory
from specserve.tools.torchserve_process import State

SLOTS = 8
LOAD_TIMEOUT_SECONDS = 300
REQUEST_TIMEOUT_SECONDS = 900
# Sources are those that llama-cpp-python is built from, options those of its build, with the server added.
LLAMA_SERVER_BUILD = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "ON",
    "LLAMA_BUILD_SERVER": "ON",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}


def run_logged(command: list[str | Path], log: Path, *, cwd: Path | None = None) -> None:
    """Run a command of a build, with cmake and ninja of our virtual environment on PATH.

    Raises:
        EnvironmentFailure: it failed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path}
    program = shutil.which(command[0], path=path)
    if program is None:
        raise EnvironmentFailure(f"{command[0]} is not on PATH: pip install {Path(command[0]).name}.")
    with log.open("a", encoding="utf-8") as output:
        done = subprocess.run(
            [program, *command[1:]], stdout=output, stderr=output, check=False, env=environment, cwd=cwd
        )
    if done.returncode:
        raise EnvironmentFailure(f"{Path(command[0]).name} {command[1]} failed; see {log}.")


def build_llama_server() -> Path:
    """Return llama-server of the llama.cpp that llama-cpp-python pins; fetches and compiles it the first time.

    Raises:
        EnvironmentFailure: the sources cannot be fetched or compiled.
    """
    lock = (PROJECT / "requirements.lock").read_text(encoding="utf-8")
    pinned = re.search(r"^llama-cpp-python==(\S+).*(?:\n .*)*", lock, re.MULTILINE)
    if pinned is None:
        raise EnvironmentFailure("requirements.lock does not name llama-cpp-python.")
    home = models_directory().parent / f"llama-server-{pinned[1]}"
    binary = home / "build" / "bin" / "llama-server"
    with files.locked(home / ".lock", "llama-server is being built"):
        if not (home / "source").is_dir():
            (home / "requirement.txt").write_text(pinned[0], encoding="utf-8")
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
            only = ["--no-binary", "llama-cpp-python", "--require-hashes", "-r", "requirement.txt", "-d", "."]
            run_logged([*pip, *only], home / "log", cwd=home)
            with tarfile.open(next(home.glob("llama_cpp_python-*.tar.gz"))) as archive:
                archive.extractall(home / "unpacked", filter="data")
            next((home / "unpacked").glob("*/vendor/llama.cpp")).replace(home / "source")
        if not binary.is_file():
            with Console(stderr=True).status(f"building llama-server, ten minutes on two cores (log: {home}/log)"):
                options = [f"-D{name}={value}" for name, value in LLAMA_SERVER_BUILD.items()]
                run_logged(["cmake", "-S", "source", "-B", "build", *options], home / "log", cwd=home)
                parallel = ["-j", str(usable_cores())]
                run_logged(["cmake", "--build", "build", "--target", "llama-server", *parallel], home / "log", cwd=home)
    return binary


class ServerProcess:
    """A server that `command` starts on a free port.

    Args:
        command: the command line for a port.
        log: where its output goes.
        ready: a route that answers when the model is loaded.
    """

    def __init__(self, command: Callable[[int], list[str | Path]], log: Path, *, ready: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._ready = ready
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as output:
            self._process = subprocess.Popen(command(port), stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def wait_ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            EnvironmentFailure: the server ended, or took too long.
        """
        until = time.monotonic() + LOAD_TIMEOUT_SECONDS
        while self._process.poll() is None and time.monotonic() < until:
            try:
                if requests.get(self.url + self._ready, timeout=5).ok:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.1)
        self.stop()
        raise EnvironmentFailure(f"A server to compare with did not become ready; see {self.log}.")

    def pause(self) -> None:
        """Stop the process (SIGSTOP) so that it uses no core."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the process."""
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kill the process; a second call is harmless."""
        self._process.kill()
        self._process.wait()

    def resident_mib(self) -> int:
        """Resident memory of the process in MiB."""
        return int(psutil.Process(self._process.pid).memory_info().rss) >> 20


def llama_server(
    binary: Path, model: Path, options: Iterable[str], *, slots: int, config: HandlerConfig, log: str
) -> ServerProcess:
    """A llama-server of so many slots, with our context length for each and our number of threads."""
    threads = config.threads or usable_cores()
    common: list[str | Path] = [
        "-m",
        model,
        "-t",
        str(threads),
        "-np",
        str(slots),
        "-c",
        str(slots * config.context_length),
    ]
    # States saved in RAM would take memory from the other servers.
    common += ["--no-ui", "--cache-ram", "0"]
    return ServerProcess(
        lambda port: [binary, "--port", str(port), *common, *options], binary.parent / log, ready="/health"
    )


def draft_options(draft: Path, length: int) -> list[str]:
    """llama-server's options for a draft model and drafts of up to `length` tokens."""
    return ["--model-draft", str(draft), "--spec-type", "draft-simple", "--spec-draft-n-max", str(length)]


@dataclass(frozen=True)
class Endpoint:
    """A server's base URL, further fields of each request to it, its resident memory in MiB, and its API key."""

    name: str
    url: str
    extra: dict[str, Any] = field(default_factory=dict)
    resident_mib: Callable[[], int] = lambda: 0
    key: str | None = None


def start_specserve(stack: ExitStack, config: Path, port: int) -> Endpoint:
    """This project's server, through TorchServe and without tokens; the stack stops it."""
    scripts, flags = PROJECT / "scripts", ["--port", str(port)]
    command: list[str | Path] = [scripts / "serve", "--config", config, *flags, "--detach", "--no-auth"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    stack.callback(lambda: subprocess.run([scripts / "stop", *flags], check=True, stdout=subprocess.DEVNULL))
    return specserve_endpoint(port)


def specserve_endpoint(port: int) -> Endpoint:
    """This project's server on a port where it already runs without tokens."""
    url = f"http://127.0.0.1:{State.of(port).ports.inference}/predictions/qwen/1.0"
    return Endpoint("specserve", url, resident_mib=partial(_worker_mib, port))


def _worker_mib(port: int) -> int:
    """Resident memory in MiB of the TorchServe worker that serves the model."""
    state = str(State.of(port).directory)
    workers = ((process, " ".join(process.info["cmdline"] or ())) for process in psutil.process_iter(["cmdline"]))
    mine = (process for process, command in workers if "model_service_worker" in command and state in command)
    return sum(int(process.memory_info().rss) >> 20 for process in mine)


def start_others(stack: ExitStack, config: Path, *, python: bool = False) -> list[Endpoint]:
    """llama-server, plain and with 3 drafts, and llama-cpp-python's server, with our files and number of threads.

    llama-cpp-python's server (dependency group `peer`) answers one request after the other. The stack stops them all.
    """
    binary = build_llama_server()
    prepared = prepare(config)
    handler = handler_of(config, prepared)
    modes = {"llama-server plain": list[str]()}
    if prepared.draft:
        modes["llama-server draft 3"] = draft_options(prepared.draft, 3)
    processes = {}
    for number, (name, options) in enumerate(modes.items()):
        processes[name] = llama_server(
            binary, prepared.target, options, slots=SLOTS, config=handler, log=f"load-{number}.log"
        )
        stack.callback(processes[name].stop)
    if python:
        # By default a new request would interrupt the running one.
        settings = {
            "model": prepared.target,
            "n_threads": handler.threads or usable_cores(),
            "n_ctx": handler.context_length,
        }
        flags = [str(part) for name, value in settings.items() for part in (f"--{name}", value)]
        flags += ["--interrupt_requests", "False"]
        processes["llama_cpp.server"] = ServerProcess(
            lambda port: [sys.executable, "-m", "llama_cpp.server", "--port", str(port), *flags],
            binary.parent / "llama_cpp_server.log",
            ready="/v1/models",
        )
        stack.callback(processes["llama_cpp.server"].stop)
    for process in processes.values():
        process.wait_ready()
    return [
        Endpoint(name, process.url, {"cache_prompt": False} if name in modes else {}, process.resident_mib)
        for name, process in processes.items()
    ]


@dataclass
class Answer:
    """Timestamps of one streamed answer in seconds, its number of tokens, and our server's `speculation` object."""

    sent: float
    chunks: list[float] = field(default_factory=list)
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


def stream(endpoint: Endpoint, prompt: str, max_tokens: int) -> Answer:
    """Stream one greedy completion; a failure is recorded in the answer."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    url, timeout = f"{endpoint.url}/v1/completions", REQUEST_TIMEOUT_SECONDS
    answer = Answer(perf_counter())
    try:
        with requests.post(url, json=body | endpoint.extra, headers=headers, stream=True, timeout=timeout) as response:
            response.raise_for_status()
            for event in events(response):
                if any(choice.get("text") for choice in event.get("choices", ())):
                    answer.chunks.append(perf_counter())
                if event.get("usage"):
                    answer.tokens = event["usage"]["completion_tokens"]
                    answer.speculation = event.get("speculation", {})
        # llama-cpp-python's server does not count the tokens of a stream; it sends one a chunk.
        answer.tokens = answer.tokens or len(answer.chunks)
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


def closed_loop(endpoint: Endpoint, *, clients: int, number: int, max_tokens: int) -> list[Answer]:
    """`clients` clients share `number` requests; each sends its next one when the last one is answered."""
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda prompt: stream(endpoint, prompt, max_tokens), unique_prompts(number)))


def open_loop(endpoint: Endpoint, *, rate: float, number: int, max_tokens: int) -> list[Answer]:
    """Requests arrive as a Poisson process of `rate` a second, always with the same intervals."""
    intervals = random.Random(0)
    arrivals = accumulate(intervals.expovariate(rate) for _ in range(number))

    def client(prompt: str, arrival: float) -> Answer:
        time.sleep(arrival)
        return stream(endpoint, prompt, max_tokens)

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(client, unique_prompts(number), arrivals))
