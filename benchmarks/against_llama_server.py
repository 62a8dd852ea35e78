"""How fast is this engine beside llama-server, with the same files, in the same minutes?

Every prompt is answered greedily by all modes side by side (see contest.py): llama-server plain, with the draft model
at several lengths and with its n-gram drafts (a process each, since it takes no such setting per request), and this
engine. The ratios are to llama-server's plain answer to the same prompt. llama-server is built first, once, from the
llama.cpp sources of the pinned llama-cpp-python.

    .venv/bin/python benchmarks/against_llama_server.py [--config FILE] [--quick] [--results FILE]
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil
from rich.console import Console
from rich.progress import track
from rich.table import Table

from contest import Answer, Contestant, Ours, Theirs, contest
from decode import ADAPTIVE, FIXED, open_lanes, read_tasks
from decode import PLAIN as OURS_PLAIN
from llama_server import ROOM, Server, build
from machine import describe_machine
from quiet import ALLOWED, watched
from specserve.config import usable_cores
from specserve.serving.loading import load_models
from specserve.tools.archive import handler_of
from specserve.tools.models import prepare
from specserve.tools.paths import DEFAULT_CONFIG

FAMILIES = ("code", "json", "prose", "chat", "summarise", "edit")
QUICK_PROMPTS = 2
PLAIN = "llama-server plain"
DRAFT_LENGTHS = (2, 3, 4, 7, 15)
LOOKUPS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
QUICK = (PLAIN, "llama-server draft 3", "llama-server draft 7", "llama-server ngram-simple")
NOTES = (
    "greedy, one sequence, one slot; seconds of the prompt are in ratio_with_prefill only",
    "n-gram drafts have llama-server's default lengths; ngram-mod and ngram-cache also remember earlier prompts",
    f"disturbed: contests in which other processes used more than {ALLOWED:.0%} of a core",
)


Peer = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class Heat:
    """One contest: all answers to one prompt, in the modes that ran side by side."""

    prompt: str
    time: int
    answers: dict[str, Answer]
    others: float


def peers(draft: Path | None) -> list[Peer]:
    """llama-server's modes by name, with their options; each is a process, since none can be set per request."""
    modes = []
    if draft is not None:
        for length in DRAFT_LENGTHS:
            options = ("--model-draft", str(draft), "--spec-type", "draft-simple", "--spec-draft-n-max", str(length))
            modes.append((f"llama-server draft {length}", options))
    return modes + [(f"llama-server {kind}", ("--spec-type", kind)) for kind in LOOKUPS]


def heats(modes: list[Peer], size: int) -> list[list[Peer]]:
    """As many modes at a time as fit into memory, each time with llama-server plain; one takes `size` bytes."""
    room = max(1, psutil.virtual_memory().available // (size + ROOM) - 2)
    return [[(PLAIN, ()), *modes[first : first + room]] for first in range(0, len(modes), room)]


def read_heats(file: Path | None, names: dict[str, str]) -> list[Heat]:
    """What earlier runs with these models left in a file, but for a line that was cut off."""
    known = []
    for line in file.read_text(encoding="utf-8").splitlines() if file and file.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry.pop("models") == names:
            answers = {mode: Answer(**answer) for mode, answer in entry.pop("answers").items()}
            known.append(Heat(**entry, answers=answers))
    return known


def keep(file: Path | None, names: dict[str, str], heat: Heat) -> None:
    """Add a heat to the file."""
    if file is not None:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"models": names, **asdict(heat)}) + "\n")


def summarise(family: str, mode: str, heats: list[Heat]) -> dict[str, Any]:
    """One row of the result: what a mode did beside llama-server plain."""
    pairs = [(heat.answers[PLAIN], heat.answers[mode]) for heat in heats]
    answers = [answer for _, answer in pairs]
    ratios = [answer.speed / plain.speed for plain, answer in pairs]
    low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    drafted, accepted, rounds = (sum(getattr(a, what) for a in answers) for what in ("drafted", "accepted", "rounds"))
    return {
        "family": family,
        "temperature": 0.0,
        "mode": mode,
        "tokens_per_second": round(median(answer.speed for answer in answers), 2),
        "ratio": round(median(ratios), 3),
        "ratio_with_prefill": round(median(answer.whole_speed / plain.whole_speed for plain, answer in pairs), 3),
        "spread": [round(low, 3), round(high, 3)],
        "acceptance_rate": round(accepted / drafted, 3) if drafted else None,
        "mean_acceptance_length": round((accepted + rounds) / rounds, 3),
        "same_text_as_plain": sum(answer.tokens == plain.tokens for plain, answer in pairs),
        "disturbed": sum(heat.others > ALLOWED for heat in heats),
        "answers": len(pairs),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """The rows as a table for people."""
    table = Table(title="greedy decoding, ratios to llama-server plain of the same run")
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="left" if column == "mode" else "right")
    for row in rows:
        table.add_row(*("-" if value is None else str(value) for value in row.values()))
    Console(width=180).print(table)


def main() -> None:
    """Run the benchmark and print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="a model YAML")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_PROMPTS} prompts a family, fewer modes")
    parser.add_argument("--prompts", type=int, help="so many prompts of each family")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES, help="only these")
    parser.add_argument("--times", type=int, default=1, help="so often each")
    parser.add_argument("--results", type=Path, help="JSON lines, added to; answers there are not asked for again")
    options = parser.parse_args()
    # The servers are children that outlive a process which is ended without its `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    binary = build()
    prepared = prepare(options.config)
    config = handler_of(options.config, prepared)
    # One sequence, as llama-server's one slot; more would only take memory.
    config = config.model_copy(update={"sequences": 1})
    models = load_models(config)
    ours = [Ours(lane) for lane in open_lanes(models, config, [OURS_PLAIN, FIXED[3], ADAPTIVE])]
    names = {"target": prepared.target.name, "draft": prepared.draft.name if prepared.draft else ""}
    known = read_heats(options.results, names)
    # Saved states of earlier prompts would take the memory of other servers.
    common = ["-m", str(prepared.target), "-t", str(usable_cores()), "-c", str(config.context_length)]
    common += ["--cache-ram", "0", "--no-ui"]
    modes = [mode for mode in peers(prepared.draft) if not options.quick or mode[0] in QUICK]
    number = options.prompts or (QUICK_PROMPTS if options.quick else None)
    tasks = {family: list(read_tasks(family, number)) for family in options.families}
    size = sum(path.stat().st_size for path in (prepared.target, prepared.draft) if path)
    for heat in heats(modes, size):
        with ExitStack() as stack:
            theirs = start(stack, binary, common, heat)
            contestants: list[Contestant] = [*theirs, *ours]
            asked = list(product(range(options.times), chain.from_iterable(tasks.values())))
            for time, task in track(asked, ", ".join(name for name, _ in heat), console=Console(stderr=True)):
                if any((one.prompt, one.time) == (task.name, time) and heat[-1][0] in one.answers for one in known):
                    continue
                prompt = models.vocabulary.encode(task.text, special=True)
                answers, others = watched(partial(contest, contestants, prompt, task))
                known.append(Heat(task.name, time, answers, round(others, 3)))
                keep(options.results, names, known[-1])
    rows = []
    for family in options.families:
        prompts = {task.name for task in tasks[family]}
        mine = [heat for heat in known if heat.prompt in prompts]
        found = dict.fromkeys(mode for heat in mine for mode in heat.answers)
        rows += [summarise(family, mode, [heat for heat in mine if mode in heat.answers]) for mode in found]
    show(rows)
    result = {"benchmark": "against_llama_server", "machine": describe_machine(), "models": names}
    print(json.dumps({**result, "rows": rows, "notes": NOTES}))


def start(stack: ExitStack, binary: Path, common: list[str], modes: list[Peer]) -> list[Theirs]:
    """llama-server in each of these modes, which the stack will stop."""
    servers = {}
    for number, (name, options) in enumerate(modes):
        server = servers[name] = Server(binary, [*common, *options], binary.parent / f"server-{number}.log")
        stack.callback(server.stop)
        server.wait()
    return [Theirs(name, server) for name, server in servers.items()]


if __name__ == "__main__":
    main()
