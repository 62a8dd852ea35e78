"""What the benchmarks share: prompts, options, a description of the machine, interference, tables and results."""

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import psutil
import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specserve.cli.paths import DEFAULT_CONFIG
from specserve.config import HandlerConfig, load_yaml

PROMPTS = Path(__file__).parent / "prompts"
# Families by name: the file of prompts, and the field that is sent along with the prompt.
FAMILIES = {
    "code": ("code", None),
    "json": ("json", None),
    "schema": ("schema", "schema"),
    "prose": ("prose", None),
    "chat": ("chat", None),
    "summarise": ("summarise", None),
    "edit": ("edit", None),
    "edit, predicted": ("edit", "prediction"),
    "long": ("long", None),
    "short": ("short", None),
}
CHAT = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
# Cores that other processes may use during a measurement. Threads of a forward pass wait for each other at barriers,
# so one that is interrupted delays all of them.
MAX_INTERFERENCE = 0.05
Row = dict[str, Any]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Task:
    """A prompt as the model reads it, the limit of its answer, and what a client sends along with it."""

    family: str
    name: str
    text: str
    max_tokens: int
    schema: dict[str, Any] | None = None
    prediction: str | None = None


def read_tasks(family: str, limit: int | None = None) -> Iterator[Task]:
    """The first `limit` prompts of a family (default: all)."""
    file, extra = FAMILIES[family]
    for entry in yaml.safe_load((PROMPTS / f"{file}.yaml").read_text(encoding="utf-8"))[:limit]:
        text = CHAT.format(prompt=entry["prompt"]) if entry["chat"] else entry["prompt"]
        sent = {extra: entry[extra]} if extra else {}
        yield Task(family, entry["name"], text, entry["max_tokens"], **sent)


def argument_parser(
    doc: str | None,
    *,
    quick: str,
    config: Path | None = DEFAULT_CONFIG,
    port: int | None = None,
    resumable: bool = False,
) -> argparse.ArgumentParser:
    """A parser with `--quick` and, unless their defaults are None, `--config` and `--port`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    if config:
        parser.add_argument("--config", type=Path, default=config, help="a model YAML")
    if port:
        parser.add_argument("--port", type=int, default=port, help="the first of five free ports (%(default)s)")
    if resumable:
        parser.add_argument(
            "--results", type=Path, help="file that keeps what is measured, from which a run is resumed"
        )
    return parser


def with_progress(items: Iterable[Result], what: str) -> Iterable[Result]:
    """The items, with a bar that shows how many are done."""
    return track(items, what, console=Console(stderr=True))


def describe_machine() -> Row:
    """Processor, cores, memory, kernel and the version of llama-cpp-python."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(names, platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "llama_cpp_python": version("llama-cpp-python"),
    }


def with_interference(measure: Callable[[], Result], servers: Sequence[psutil.Process] = ()) -> tuple[Result, float]:
    """Call `measure`; returns its result and the number of cores that other processes used meanwhile.

    `servers` belong to the measurement and are no children of this process.
    """
    others, started = _cpu_seconds_of_others(servers), perf_counter()
    result = measure()
    return result, (_cpu_seconds_of_others(servers) - others) / (perf_counter() - started)


def _cpu_seconds_of_others(servers: Sequence[psutil.Process]) -> float:
    """CPU seconds since boot of all other processes, and those that the host has stolen."""
    system, own = psutil.cpu_times(), psutil.Process()
    busy = system.user + system.nice + system.system + system.irq + system.softirq + system.steal
    for process in (own, *own.children(), *servers):
        times = process.cpu_times()
        busy -= times.user + times.system
    ended_children = own.cpu_times()
    return busy - ended_children.children_user - ended_children.children_system


@dataclass
class ResultsFile:
    """Measurements by key in a file of JSON lines, so that an interrupted run can be resumed; without a path, memory.

    Keys and values are JSON; a line that was cut off is ignored.
    """

    path: Path | None
    _values: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path and self.path.exists() else ():
            try:
                key, value = json.loads(line)
            except ValueError:
                continue
            self._values[json.dumps(key)] = value

    def measured(self, key: list[Any], measure: Callable[[], Any]) -> Any:
        """What is kept under a key, measured now unless an earlier run has done it."""
        name = json.dumps(key)
        if name not in self._values:
            line = json.dumps([key, measure()])
            self._values[name] = json.loads(line)[1]
            if self.path:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
        return self._values[name]


def served(config: Path) -> Row:
    """The models of a result that a server gave."""
    _, handler = load_yaml(config)
    return {"target": handler.model_id}


def loaded(config: HandlerConfig) -> Row:
    """The models of a result that was measured in this process."""
    files = {"target": config.target.path, "draft": config.draft.path if config.draft else None}
    return {role: path and path.name for role, path in files.items()}


def print_table(title: str, rows: list[Row], omit: Iterable[str] = ()) -> None:
    """Print rows as a table with a column for every key but the omitted ones."""
    table = Table(title=title)
    columns = [column for column in dict.fromkeys(key for row in rows for key in row) if column not in omit]
    for column in columns:
        text = any(isinstance(row.get(column), str) for row in rows)
        # Keys are words joined by underscores, which cannot wrap; titles are kept as they are.
        title = column if " " in column else column.replace("_", " ")
        table.add_column(title, justify="left" if text else "right")
    for row in rows:
        table.add_row(*("-" if row.get(column) is None else str(row[column]) for column in columns))
    Console(width=220).print(table)


def print_result(benchmark: str, models: Row, rows: list[Row], notes: Iterable[str], **more: Any) -> None:
    """Print the JSON object that is the last line of every benchmark, as benchmarks/results keeps it."""
    result = {
        "benchmark": benchmark,
        "command": f"benchmarks/{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}".rstrip(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": describe_machine(),
        "models": models,
        "rows": rows,
    }
    print(json.dumps(result | more | {"notes": list(notes)}))
