"""How much faster is speculative decoding than plain decoding, on this machine, for this kind of text?

Every prompt is answered by all modes side by side: each has caches and a controller of its own, and the mode with the
fewest tokens always goes next, so that every moment of the machine meets all of them alike. A ratio compares two
answers to one prompt. No server runs; see overhead.py for that.

    .venv/bin/python benchmarks/decode.py [--config FILE] [--quick] [--results FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

from machine import describe_machine
from quiet import ALLOWED, watched
from specserve.config import HandlerConfig
from specserve.engine.base import Engine
from specserve.sequence import SamplingParams, SequenceStats, SpeculationParams, Tally
from specserve.serving.generation import Generation
from specserve.serving.loading import Models, load_models, open_engines
from specserve.serving.scheduler import Scheduler
from specserve.speculation.controller import Controller
from specserve.speculation.drafters import Drafters
from specserve.tools.archive import prepared_handler
from specserve.tools.paths import DEFAULT_CONFIG

PROMPTS = Path(__file__).parent / "prompts"
# Families by name: the file of prompts, and which of its fields goes with the prompt.
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
}
QUICK_FAMILIES = ("code", "json", "schema", "prose", "edit", "edit, predicted")
TEMPERATURES = (0.0, 0.8)
CHAT = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Mode:
    """A way to decode; plain is the one that all others are compared with."""

    name: str
    speculation: SpeculationParams


PLAIN = Mode("plain", SpeculationParams(mode="off"))
ADAPTIVE = Mode("adaptive", SpeculationParams(16, mode="adaptive"))
FIXED = {gamma: Mode(f"fixed {gamma}", SpeculationParams(gamma, drafter="model")) for gamma in (1, 2, 3, 4, 7, 15)}
ALONE = [
    Mode(f"{drafter} alone", SpeculationParams(16, mode="adaptive", drafter=drafter))
    for drafter in ("model", "lookup", "prediction", "grammar")
]


@dataclass(frozen=True)
class Task:
    """A prompt as the model reads it, the cap of its answer, and what a client would send with it."""

    family: str
    name: str
    text: str
    max_tokens: int
    schema: dict[str, Any] | None = None
    prediction: str | None = None


@dataclass(frozen=True)
class Run:
    """One answer: its tokens and what they took."""

    tokens: list[int]
    stats: SequenceStats

    @property
    def speed(self) -> float:
        """Tokens per second behind the first token."""
        return (len(self.tokens) - 1) / self.stats.decode_seconds

    @property
    def whole_speed(self) -> float:
        """Tokens per second, the prompt's prefill included."""
        return len(self.tokens) / (self.stats.decode_seconds + self.stats.prefill_seconds)


def read_tasks(family: str, most: int | None = None) -> Iterator[Task]:
    """The prompts of a family."""
    file, extra = FAMILIES[family]
    for entry in yaml.safe_load((PROMPTS / f"{file}.yaml").read_text(encoding="utf-8"))[:most]:
        text = CHAT.format(prompt=entry["prompt"]) if entry["chat"] else entry["prompt"]
        sent = {extra: entry[extra]} if extra else {}
        yield Task(family, entry["name"], text, entry["max_tokens"], **sent)


@dataclass(frozen=True)
class Lane:
    """A mode with caches of its own, and a controller that knows only what this mode has seen."""

    mode: Mode
    models: Models
    config: HandlerConfig
    target: Engine
    drafters: Drafters
    controller: Controller

    def start(self, task: Task, temperature: float) -> tuple[Scheduler, Generation]:
        """Begin to answer a prompt; a new scheduler begins with empty caches."""
        vocabulary = self.models.vocabulary
        scheduler = Scheduler(
            self.target, self.drafters, self.controller, prefill_rows=self.config.prefill_rows, idle_tokens=0
        )
        generation = Generation(
            vocabulary.encode(task.text, special=True),
            SamplingParams(temperature=temperature, seed=1),
            replace(self.mode.speculation, verification="block" if temperature else "token"),
            vocabulary,
            max_tokens=task.max_tokens,
            constraint=self.models.grammars.json_schema(task.schema) if task.schema else None,
            prediction=vocabulary.encode(task.prediction) if task.prediction else (),
        )
        scheduler.submit(generation)
        return scheduler, generation


def open_lanes(models: Models, config: HandlerConfig, modes: list[Mode]) -> list[Lane]:
    """A lane for each mode."""
    config = config.model_copy(update={"sequences": 1})
    return [Lane(mode, models, config, *open_engines(models.vocabulary, models.draft, config)) for mode in modes]


def race(lanes: list[Lane], task: Task, temperature: float) -> list[Run]:
    """Let all lanes answer a prompt; the one with the fewest tokens always goes next."""
    started = [lane.start(task, temperature) for lane in lanes]

    def progress(lane: tuple[Scheduler, Generation]) -> tuple[int, int]:
        return lane[1].generated, lane[1].target_cached

    while running := [lane for lane in started if lane[0].busy]:
        min(running, key=progress)[0].step()
    for _, generation in started:
        if generation.error:
            raise SystemExit(f"{task.name}: {generation.error}")
    return [Run(generation.answer, generation.stats) for _, generation in started]


@dataclass
class Results:
    """Answers by what was asked; kept in a file, one JSON object a line, so that a run can be gone on with."""

    path: Path | None
    known: dict[tuple[str, str, float, str], Run] = field(default_factory=dict)

    def read(self) -> None:
        """Take up what the file holds."""
        if self.path is None or not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            key, tokens, account = json.loads(line)
            stats = SequenceStats(
                rounds=account["rounds"],
                drafters={name: Tally(*tally) for name, tally in account["drafters"].items()},
                **{name: seconds for name, seconds in account.items() if name.endswith("_seconds")},
            )
            self.known[tuple(key)] = Run(tokens, stats)

    def add(self, key: tuple[str, str, float, str], run: Run) -> None:
        """Keep an answer."""
        self.known[key] = run
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                account = asdict(run.stats) | {"gammas": dict(run.stats.gammas)}
                file.write(json.dumps([key, run.tokens, account]) + "\n")


def summarise(family: str, temperature: float, mode: str, pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    """One row of the result from (plain, this mode) pairs, one a prompt."""
    runs = [run for _, run in pairs]
    ratios = [run.speed / plain.speed for plain, run in pairs]
    stats = SequenceStats.total(run.stats for run in runs)
    seconds = stats.decode_seconds
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "family": family,
        "temperature": temperature,
        "mode": mode,
        "tokens_per_second": round(median(run.speed for run in runs), 2),
        "ratio": round(median(ratios), 3),
        "mean": round(mean(ratios), 3),
        "ratio_with_prefill": round(median(run.whole_speed / plain.whole_speed for plain, run in pairs), 3),
        "least_with_prefill": round(min(run.whole_speed / plain.whole_speed for plain, run in pairs), 3),
        "spread": [round(low, 3), round(high, 3)],
        "acceptance_rate": round(stats.accepted / stats.drafted, 3) if stats.drafted else None,
        "mean_acceptance_length": round(stats.mean_acceptance_length, 3),
        "drafters": {name: list(tally) for name, tally in sorted(stats.drafters.items())},
        "share_target": round(stats.target_seconds / seconds, 4),
        "share_draft": round(stats.draft_seconds / seconds, 4),
        "share_other": round(stats.other_seconds / seconds, 4),
        "same_text_as_plain": sum(run.tokens == plain.tokens for plain, run in pairs),
        "prompts": len(pairs),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """The rows as a table for people."""
    table = Table(title="decoding, ratios to plain decoding of the same run")
    columns = [column for column in rows[0] if column != "drafters"]
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*("-" if row[column] is None else str(row[column]) for column in columns))
    Console(width=200).print(table)


def modes_for(family: str, *, quick: bool) -> list[Mode]:
    """What is compared on a family; a drafter alone only where it has something to say."""
    if quick:
        return [PLAIN, FIXED[3], ADAPTIVE]
    silent = {"prediction", "grammar"} - {{"edit, predicted": "prediction", "schema": "grammar"}.get(family)}
    alone = [mode for mode in ALONE if mode.speculation.drafter not in silent]
    return [PLAIN, *FIXED.values(), ADAPTIVE, *alone]


def main() -> None:
    """Run the benchmark and print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="a model YAML")
    parser.add_argument("--quick", action="store_true", help="three prompts a family, three modes, greedy only")
    parser.add_argument("--prompts", type=int, help="so many prompts of each family")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, help="only these")
    parser.add_argument("--temperatures", nargs="+", type=float, help="instead of 0 and 0.8")
    parser.add_argument("--results", type=Path, help="keep answers here, and take up those that are there")
    options = parser.parse_args()
    config = prepared_handler(options.config)
    models = load_models(config.model_copy(update={"sequences": 1}))
    results = Results(options.results)
    results.read()
    families = options.families or (QUICK_FAMILIES if options.quick else FAMILIES)
    temperatures = options.temperatures or TEMPERATURES[: 1 if options.quick else None]
    rows = []
    disturbed = 0
    needed = dict.fromkeys(mode for family in families for mode in modes_for(family, quick=options.quick))
    lanes = open_lanes(models, config, list(needed))
    for family in families:
        modes = modes_for(family, quick=options.quick)
        tasks = list(read_tasks(family, options.prompts or (3 if options.quick else None)))
        for temperature in temperatures:
            asked = f"{family}, temperature {temperature}"
            for task in track(tasks, asked, console=Console(stderr=True)):
                keys = [(family, task.name, temperature, mode.name) for mode in modes]
                if all(key in results.known for key in keys):
                    continue
                mine = [lane for lane in lanes if lane.mode in modes]
                runs, others = watched(partial(race, mine, task, temperature))
                disturbed += others > ALLOWED
                for lane, run in zip(mine, runs, strict=True):
                    results.add((family, task.name, temperature, lane.mode.name), run)
            for mode in modes:
                keys = [(family, task.name, temperature, mode.name) for task in tasks]
                pairs = [(results.known[*key[:3], PLAIN.name], results.known[key]) for key in keys]
                rows.append(summarise(family, temperature, mode.name, pairs))
    show(rows)
    files = {"target": str(config.target.path), "draft": str(config.draft.path) if config.draft else None}
    print(
        json.dumps(
            {
                "benchmark": "decode",
                "machine": describe_machine(),
                "models": {role: Path(path).name if path else None for role, path in files.items()},
                "rows": rows,
                "notes": [
                    "one sequence, no server; the draft reads the prompt behind the first token, in `ratio` too",
                    f"{disturbed} prompts were answered while other processes used more than {ALLOWED:.0%} of a core",
                ],
            }
        )
    )


if __name__ == "__main__":
    main()
