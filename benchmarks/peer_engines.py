"""Engines of other projects, for peers.py and load.py: how they are built, and the settings of their servers.

All is built below `peers` in the cache directory the first time, from the packages that scripts/locks/peer.txt pins:
llama-server and ik_llama.cpp's take ten minutes each on two cores.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from servers import Endpoint, start_peer
from specserve.cli.archive import prepared_handler
from specserve.cli.paths import PROJECT
from specserve.config import cache_directory
from specserve.errors import EnvironmentFailure
from specserve.machine import usable_cores
from specserve.weights import files

PEERS = cache_directory() / "peers"
LOCK = PROJECT / "scripts" / "locks" / "peer.txt"
LLAMA, IK = "llama-cpp-python", "ik-llama-cpp-python"
BUILD = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "ON",
    "LLAMA_BUILD_SERVER": "ON",
    "LLAMA_BUILD_TESTS": "OFF",
}
# The server and what it needs, without web pages and TLS.
LLAMA_BUILD = BUILD | {
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}
# For this processor, without attention for quantised caches; its server is one of its examples.
IK_BUILD = BUILD | {"LLAMA_BUILD_EXAMPLES": "ON", "GGML_NATIVE": "ON", "GGML_IQK_FA_ALL_QUANTS": "OFF"}
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")
# In options: the path of the draft model.
DRAFT = "{draft}"
_CONTEXT_LENGTH = 4096
DRAFT_LENGTHS = (2, 3, 4, 7, 15)
N_GRAM = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")


@dataclass(frozen=True)
class Job:
    """What all engines serve: the files, the threads, and how many sequences of how many tokens."""

    target: Path
    draft: Path | None
    threads: int
    slots: int
    context_length: int

    @classmethod
    def of(cls, config: Path, slots: int) -> Job:
        handler = prepared_handler(config)
        threads = usable_cores(handler.cores, handler.threads).threads
        # Each slot of the others' has its own cells; no request of these benchmarks is longer.
        target, draft = (model.path if model else None for model in (handler.target, handler.draft))
        if target is None:
            raise EnvironmentFailure(f"{config} names no target.")
        return cls(target, draft, threads, slots, min(handler.context_length, _CONTEXT_LENGTH))


def run_logged(command: list[str | Path], log: Path, *, cwd: Path | None = None) -> None:
    """Run a command of a build, with cmake and ninja of our virtual environment on PATH.

    Raises:
        EnvironmentFailure: it failed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    program = shutil.which(command[0], path=path)
    if program is None:
        raise EnvironmentFailure(f"{command[0]} is not on PATH: pip install {Path(command[0]).name}.")
    with log.open("a", encoding="utf-8") as output:
        outcome = subprocess.run(
            [program, *command[1:]], stdout=output, stderr=output, check=False, env=os.environ | {"PATH": path}, cwd=cwd
        )
    if outcome.returncode:
        raise EnvironmentFailure(f"{Path(command[0]).name} {command[1]} failed; see {log}.")


def entries(lock: Path) -> list[str]:
    """A lock file's packages, with their hashes."""
    return [entry for entry in re.split(r"\n(?! )", lock.read_text(encoding="utf-8")) if re.match(r"[\w-]+==", entry)]


def locked(package: str) -> str:
    """A package's entry in the lock file of the peers."""
    return next(entry for entry in entries(LOCK) if entry.startswith(f"{package}=="))


def unpack(entry: str) -> Path:
    """The directory that has the sources of a lock file's package in `package`; they are fetched the first time.

    Raises:
        EnvironmentFailure: they cannot be fetched.
    """
    package = entry.partition("==")[0]
    home = PEERS / entry.split(maxsplit=1)[0].replace("==", "-")
    with files.locked(home / ".lock", f"{package} is being fetched"):
        if not (home / "package").is_dir():
            (home / "requirement.txt").write_text(entry, encoding="utf-8")
            source = ["--no-deps", "--no-build-isolation", "--no-binary", package]
            pip: list[str | Path] = [sys.executable, *PIP, "download", *source]
            run_logged([*pip, "--require-hashes", "-r", "requirement.txt", "-d", "."], home / "log", cwd=home)
            with tarfile.open(next(home.glob("*.tar.gz"))) as archive:
                archive.extractall(home / "unpacked", filter="data")
            next((home / "unpacked").iterdir()).rename(home / "package")
    return home


def build(home: Path, source: Path, options: dict[str, str]) -> Path:
    """The llama-server in `home`, which is compiled the first time.

    Raises:
        EnvironmentFailure: it cannot be compiled.
    """
    log, directory = home / "log", home / "build"
    server = directory / "bin" / "llama-server"
    with files.locked(home / ".lock", f"{home.name} is being built"):
        if not server.is_file():
            with Console(stderr=True).status(f"building {home.name}, some ten minutes on two cores (log: {log})"):
                defined = [f"-D{name}={value}" for name, value in options.items()]
                run_logged(["cmake", "-S", source, "-B", directory, *defined], log)
                parallel = ["--target", "llama-server", "--parallel", str(usable_cores().threads)]
                run_logged(["cmake", "--build", directory, *parallel], log)
    return server


def build_llama() -> Path:
    """`build` llama.cpp as llama-cpp-python pins it."""
    home = unpack(locked(LLAMA))
    return build(home, home / "package" / "vendor" / "llama.cpp", LLAMA_BUILD)


def build_ik() -> Path:
    """`build` ik_llama.cpp."""
    home = unpack(locked(IK))
    source = home / "package" / "vendor" / "ik_llama.cpp"
    # The package lacks the script that writes this file from its template.
    info = source / "common" / "build-info.cpp"
    if not info.exists():
        template = info.with_suffix(".cpp.in").read_text(encoding="utf-8")
        info.write_text(re.sub(r"@\w+@", "unknown", template.replace("@BUILD_NUMBER@", "0")), encoding="utf-8")
    return build(home, source, IK_BUILD)


@dataclass(frozen=True)
class Engine:
    """Another project's server."""

    build: Callable[[], Path]  # returns the program
    options: tuple[str, ...]
    settings: dict[str, tuple[str, ...]]  # further options by setting


def _draft(*options: str) -> tuple[str, ...]:
    return "--model-draft", DRAFT, *options


_DRAFTS = {length: f"draft {length}" for length in DRAFT_LENGTHS}
ENGINES = {
    "llama-server": Engine(
        build_llama,
        ("--no-ui",),
        {"plain": ()}
        | {name: _draft("--spec-type", "draft-simple", "--spec-draft-n-max", str(n)) for n, name in _DRAFTS.items()}
        | {kind: ("--spec-type", kind) for kind in N_GRAM},
    ),
    "ik_llama.cpp": Engine(
        build_ik,
        # Weights are repacked at load; flash attention and an F16 cache are its defaults.
        ("--run-time-repack",),
        {"plain": ()}
        | {name: _draft("--draft-max", str(n)) for n, name in _DRAFTS.items()}
        | {"draft autotuned": _draft("--spec-autotune")}
        | {kind: ("--spec-type", kind) for kind in N_GRAM},
    ),
}
SETTINGS = [f"{engine} {setting}" for engine in ENGINES for setting in ENGINES[engine].settings]


def command(job: Job, name: str) -> list[str | Path]:
    """The command of a setting's server, whose engine is built if need be.

    Raises:
        EnvironmentFailure: it cannot be built, or the job has no draft model.
    """
    engine_name, _, setting = name.partition(" ")
    engine = ENGINES[engine_name]
    options = engine.settings[setting]
    if DRAFT in options and job.draft is None:
        raise EnvironmentFailure("the configuration has no draft model")
    # States saved in RAM would take memory from the other servers.
    sizes = {"threads": job.threads, "parallel": job.slots, "ctx-size": job.slots * job.context_length, "cache-ram": 0}
    given = [text for option, value in sizes.items() for text in (f"--{option}", str(value))]
    drafts = (str(job.draft) if option == DRAFT else option for option in options)
    return [engine.build(), "-m", job.target, *given, *engine.options, *drafts]


def start(stack: ExitStack, job: Job, names: Iterable[str]) -> tuple[list[Endpoint], list[str]]:
    """Start servers by the names of their settings; returns those that are ready, and notes why others are not."""
    ready, failures = [], []
    for name in names:
        try:
            log = PEERS / "logs" / f"{name.replace(' ', '-')}.log"
            ready.append(start_peer(stack, name, command(job, name), log))
        except EnvironmentFailure as reason:
            failures.append(f"{name} did not run: {reason}")
    return ready, failures
