"""What do lookups in finished answers bring where work recurs: a bank of requests, answered twice?

The bank has turns of an agent over one file, one form filled in many times, and tests of similar functions. Plain
decoding, `auto` without a pool, and `auto` with one answer each request side by side, as in decode.py; of the last, the
first pass finds only what requests of the same kind wrote.

    .venv/bin/python benchmarks/recurring.py [--quick] [--config FILE] [--temperature 0]
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import mean

import yaml
from rich.console import Console
from rich.progress import track

from common import (
    CHAT,
    MAX_INTERFERENCE,
    PROMPTS,
    Row,
    Task,
    argument_parser,
    print_result,
    print_table,
    with_interference,
)
from decode import ADAPTIVE, PLAIN, Mode, Run, load_for_one, open_lanes, run_side_by_side
from specserve.cli.archive import prepared_handler
from specserve.sequence import SpeculationParams

POOLED = Mode("with a pool", SpeculationParams(15, mode="auto", pool=("", "bank")))
QUICK_TASKS = 4
PASSES = ("first", "second")


def read_bank(limit: int | None) -> list[Task]:
    """The bank, or so many requests of each kind."""
    entries = yaml.safe_load((PROMPTS / "recurring.yaml").read_text(encoding="utf-8"))
    tasks = [
        Task(
            entry["kind"], entry["name"], CHAT.format(prompt=entry["prompt"]), entry["max_tokens"], entry.get("schema")
        )
        for entry in entries
    ]
    kinds = dict.fromkeys(task.family for task in tasks)
    return [task for kind in kinds for task in [task for task in tasks if task.family == kind][:limit]]


def summarise(kind: str, passes: dict[str, list[list[Run]]]) -> Row:
    """One row of the result: speeds of a kind of request, and their ratios."""
    row: Row = {"kind": kind, "requests": len(passes["first"])}
    speeds = {
        (mode.name, name): mean(runs[index].speed for runs in answers)
        for name, answers in passes.items()
        for index, mode in enumerate((PLAIN, ADAPTIVE, POOLED))
    }
    row["plain"] = round(speeds[PLAIN.name, "first"], 2)
    for name in passes:
        row[f"auto, {name}"] = round(speeds[ADAPTIVE.name, name], 2)
        row[f"pool, {name}"] = round(speeds[POOLED.name, name], 2)
    row["pool to auto, first"] = round(speeds[POOLED.name, "first"] / speeds[ADAPTIVE.name, "first"], 3)
    row["second to first"] = round(speeds[POOLED.name, "second"] / speeds[POOLED.name, "first"], 3)
    same = [runs[0].tokens == runs[2].tokens for answers in passes.values() for runs in answers]
    row["same_text_as_plain"] = f"{sum(same)} of {len(same)}"
    return row


def main() -> None:
    """Run the benchmark and print a table and one JSON object."""
    parser = argument_parser(__doc__, quick=f"{QUICK_TASKS} requests of each kind")
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    config = prepared_handler(options.config)
    lanes = open_lanes(load_for_one(config), [PLAIN, ADAPTIVE, POOLED])
    tasks = read_bank(QUICK_TASKS if options.quick else None)
    answers: dict[str, dict[str, list[list[Run]]]] = {}
    disturbed = 0
    for name in PASSES:
        for task in track(tasks, f"{name} pass", console=Console(stderr=True)):
            answer = partial(run_side_by_side, lanes, task, options.temperature, 1)
            runs, others = with_interference(answer)
            disturbed += others > MAX_INTERFERENCE
            answers.setdefault(task.family, {}).setdefault(name, []).append(runs)
    rows = [summarise(kind, passes) for kind, passes in answers.items()]
    rows.append(
        summarise("all", {name: [runs for passes in answers.values() for runs in passes[name]] for name in PASSES})
    )
    print_table("tokens a second after the first token, mean over requests", rows)
    files = {"target": config.target.path, "draft": config.draft.path if config.draft else None}
    notes = [f"{disturbed} answers were given while other processes used more than {MAX_INTERFERENCE:.0%} of a core"]
    print_result("recurring", {role: Path(path).name if path else None for role, path in files.items()}, rows, notes)


if __name__ == "__main__":
    main()
