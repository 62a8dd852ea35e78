"""llama-server, built from the llama.cpp sources that the binding's source package carries."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
from rich.console import Console

from peer import Peer
from specserve.config import usable_cores
from specserve.errors import EnvironmentFailure
from specserve.tools import files
from specserve.tools.paths import PROJECT, models_directory

# What llama-cpp-python's own build sets, the server added; everything else is llama.cpp's default in both.
FLAGS = {
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
EXAMPLE = "example_server.py"
ROOM = 1 << 30  # bytes a server takes beside its weights: caches, logits, and some to spare
ANSWERS_WITHIN_SECONDS = 900


def build() -> Path:
    """Return the llama-server of the pinned binding's llama.cpp; the first time it is fetched and compiled.

    Raises:
        EnvironmentFailure: the sources cannot be had, or do not compile.
    """
    requirement, home = _pinned()
    binary = home / "build" / "bin" / "llama-server"
    with files.locked(home / ".lock", "llama-server is being built"):
        if not binary.is_file():
            cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
            if cmake is None:
                raise EnvironmentFailure("cmake is not on PATH, and llama-server is built with it: pip install cmake.")
            _fetch(requirement, home)
            with Console(stderr=True).status(f"building llama-server, ten minutes on two cores (log: {home}/log)"):
                options = [f"-D{name}={value}" for name, value in FLAGS.items()]
                _run(home, cmake, "-S", "source", "-B", "build", *options)
                _run(home, cmake, "--build", "build", "--target", "llama-server", "-j", str(usable_cores()))
    return binary


def _pinned() -> tuple[str, Path]:
    """The lock file's requirement of llama-cpp-python with its hashes, and where that version's sources are kept."""
    lock = (PROJECT / "requirements.lock").read_text(encoding="utf-8")
    found = re.search(r"^llama-cpp-python==(\S+).*(?:\n .*)*", lock, re.MULTILINE)
    if found is None:
        raise EnvironmentFailure("requirements.lock does not name llama-cpp-python.")
    return found[0], models_directory().parent / f"llama-server-{found[1]}"


def python_example() -> Path:
    """Return the server among the binding's examples; its source package is fetched the first time.

    Raises:
        EnvironmentFailure: the sources cannot be had.
    """
    requirement, home = _pinned()
    with files.locked(home / ".lock", "llama-server is being built"):
        _fetch(requirement, home)
    return home / EXAMPLE


def _fetch(requirement: str, home: Path) -> None:
    """Put llama.cpp's sources and the example, as the binding's source package carries them, into `home`, once."""
    if (home / EXAMPLE).is_file():
        return
    (home / "requirement.txt").write_text(requirement, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
    _run(home, *pip, "--no-binary", "llama-cpp-python", "--require-hashes", "-r", "requirement.txt", "-d", ".")
    package = next(home.glob("llama_cpp_python-*.tar.gz"))
    unpacked = home / "unpacked"
    with tarfile.open(package) as archive:
        archive.extractall(unpacked, filter="data")
    if not (home / "source").is_dir():
        next(unpacked.glob("*/vendor/llama.cpp")).replace(home / "source")
    next(unpacked.glob("*/examples/server/server.py")).replace(home / EXAMPLE)
    shutil.rmtree(unpacked)
    package.unlink()


def _run(home: Path, *command: str) -> None:
    with (home / "log").open("a", encoding="utf-8") as log:
        outcome = subprocess.run(command, cwd=home, stdout=log, stderr=log, check=False)
    if outcome.returncode:
        raise EnvironmentFailure(f"llama-server cannot be built: {Path(command[0]).name} failed; see {home}/log.")


def events(response: requests.Response) -> Iterator[dict[str, Any]]:
    """The objects of a stream as they come, but for the mark at its end."""
    for line in response.iter_lines(chunk_size=1):
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line.removeprefix(b"data: "))


class Server(Peer):
    """One llama-server on a port of its own."""

    def __init__(self, binary: Path, options: list[str], log: Path, *, slots: int = 1) -> None:
        super().__init__(lambda port: [binary, "--port", str(port), "-np", str(slots), *options], log, ready="/health")

    def stream(self, prompt: list[int], max_tokens: int) -> Iterator[dict[str, Any]]:
        """The greedy answer to a prompt in an empty cache: events with `tokens`, the last one with `timings`."""
        body = {
            "prompt": prompt,
            "n_predict": max_tokens,
            "temperature": 0,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
        }
        url, patience = f"{self.url}/completion", ANSWERS_WITHIN_SECONDS
        with requests.post(url, json=body, stream=True, timeout=patience) as response:
            if not response.ok:
                raise EnvironmentFailure(f"llama-server answered {response.status_code}; see {self._log}.")
            yield from events(response)
