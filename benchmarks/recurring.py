"""What do lookups in finished answers bring where work recurs: a bank of requests, answered twice?

The bank has turns of an agent over one file, one form filled in many times, and tests of similar functions. Plain
decoding, `auto` without a pool, and `auto` with one answer each request side by side, as in decode.py; of the last, the
first pass finds only what requests of the same kind wrote.

    .venv/bin/python benchmarks/recurring.py [--quick] [--config FILE] [--temperature 0]
"""

from functools import partial
from statistics import mean

import yaml

from common import (
    CHAT,
    MAX_INTERFERENCE,
    PROMPTS,
    Row,
    Task,
    argument_parser,
    loaded,
    print_result,
    print_table,
    with_interference,
    with_progress,
)
from decode import ADAPTIVE, MODES, PLAIN, Run, load_for_one, open_lanes, run_side_by_side
from specserve.cli.archive import prepared_handler
from specserve.sequence import SpeculationParams

LANES = {
    "plain": MODES[PLAIN],
    "auto": MODES[ADAPTIVE],
    "pool": SpeculationParams(15, mode="auto", pool=("", "bank")),
}
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
        (lane, name): mean(runs[index].speed for runs in answers)
        for name, answers in passes.items()
        for index, lane in enumerate(LANES)
    }
    row["plain"] = round(speeds["plain", "first"], 2)
    for name in passes:
        row |= {f"{lane}, {name}": round(speeds[lane, name], 2) for lane in ("auto", "pool")}
    row["pool to auto, first"] = round(speeds["pool", "first"] / speeds["auto", "first"], 3)
    row["second to first"] = round(speeds["pool", "second"] / speeds["pool", "first"], 3)
    same = [runs[0].tokens == runs[2].tokens for answers in passes.values() for runs in answers]
    row["same_text_as_plain"] = f"{sum(same)} of {len(same)}"
    return row


def main() -> None:
    parser = argument_parser(__doc__, quick=f"{QUICK_TASKS} requests of each kind")
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    config = prepared_handler(options.config)
    lanes = open_lanes(load_for_one(config), LANES.values())
    tasks = read_bank(QUICK_TASKS if options.quick else None)
    answers: dict[str, dict[str, list[list[Run]]]] = {}
    disturbed = 0
    for name in PASSES:
        for task in with_progress(tasks, f"{name} pass"):
            answer = partial(run_side_by_side, lanes, task, options.temperature, 1)
            runs, others = with_interference(answer)
            disturbed += others > MAX_INTERFERENCE
            answers.setdefault(task.family, {}).setdefault(name, []).append(runs)
    rows = [summarise(kind, passes) for kind, passes in answers.items()]
    of_all = {name: [runs for passes in answers.values() for runs in passes[name]] for name in PASSES}
    rows.append(summarise("all", of_all))
    print_table("tokens a second after the first token, mean over requests", rows)
    notes = [f"{disturbed} answers were given while other processes used more than {MAX_INTERFERENCE:.0%} of a core"]
    print_result("recurring", loaded(config), rows, notes)


if __name__ == "__main__":
    main()
