"""How fast is this engine beside llama-server, with the same files, in the same minutes?

Every prompt is answered greedily by all modes one after the other: llama-server plain, with the draft model at several
lengths and with its n-gram drafts (a process each, since it takes no such setting per request), and this engine, whose
modes run side by side. The ratios are to llama-server's plain answer to the same prompt. llama-server is built first,
once, from the llama.cpp sources of the pinned llama-cpp-python.

    .venv/bin/python benchmarks/against_llama_server.py [--config FILE] [--quick] [--results FILE]
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from decode import ADAPTIVE, FIXED, Task, open_lanes, race, read_tasks
from decode import PLAIN as OURS_PLAIN
from llama_server import Pool, build
from machine import describe_machine
from quiet import ALLOWED, undisturbed
from specserve.config import HandlerConfig, load_yaml, usable_cores
from specserve.operations.archive import resolve
from specserve.operations.places import DEFAULT_CONFIG
from specserve.operations.prepare import Prepared, prepare
from specserve.serving.loading import Models, load_models

FAMILIES = ("code", "json", "prose", "chat", "summarise", "edit")
QUICK_PROMPTS = 2
PLAIN = "llama-server plain"
OURS = "specserve plain"
DRAFT_LENGTHS = (2, 3, 4, 7, 15)
LOOKUPS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
QUICK = (PLAIN, "llama-server draft 3", "llama-server draft 7", "llama-server ngram-simple")
NOTES = (
    "greedy, one sequence, one slot; seconds of the prompt are in ratio_with_prefill only",
    "n-gram drafts have llama-server's default lengths; ngram-mod and ngram-cache also remember earlier prompts",
    f"disturbed: pairs in which other processes used more than {ALLOWED:.0%} of a core, in each of three tries",
)


@dataclass(frozen=True)
class Answer:
    """What one mode did with one prompt.

    `seconds` begin behind the first token, as both engines count them; `others` is the share of a core that other
    processes used meanwhile.
    """

    tokens: list[int]
    seconds: float
    prompt_seconds: float
    drafted: int
    accepted: int
    rounds: int
    others: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens per second behind the first token."""
        return (len(self.tokens) - 1) / self.seconds

    @property
    def whole_speed(self) -> float:
        """Tokens per second, the prompt included."""
        return len(self.tokens) / (self.seconds + self.prompt_seconds)


# Answers a prompt in several modes, by name.
Answerer = Callable[[Task], dict[str, Answer]]
Results = dict[tuple[str, str, int], Answer]


def peers(pool: Pool, models: Models, prepared: Prepared) -> dict[str, Answerer]:
    """llama-server's modes by name, one at a time: a server each."""

    def mode(name: str, options: tuple[str, ...], *weights: Path) -> tuple[str, Answerer]:
        size = sum(path.stat().st_size for path in weights)

        def answer(task: Task) -> dict[str, Answer]:
            prompt = models.vocabulary.encode(task.text, special=True)
            document = pool.get(options, size).complete(prompt, task.max_tokens)
            timings = document["timings"]
            drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
            given = Answer(
                tokens=document["tokens"],
                seconds=timings["predicted_ms"] / 1000,
                prompt_seconds=timings["prompt_ms"] / 1000,
                drafted=drafted,
                accepted=accepted,
                rounds=timings["predicted_n"] - 1 - accepted,
            )
            return {name: given}

        return name, answer

    target, draft = prepared.target, prepared.draft
    modes = [mode(PLAIN, (), target)]
    if draft is not None:
        for length in DRAFT_LENGTHS:
            options = ("--model-draft", str(draft), "--spec-type", "draft-simple", "--spec-draft-n-max", str(length))
            modes.append(mode(f"llama-server draft {length}", options, target, draft))
    modes += [mode(f"llama-server {kind}", ("--spec-type", kind), target) for kind in LOOKUPS]
    return dict(modes)


def ours(models: Models, config: HandlerConfig) -> Answerer:
    """This engine's modes by name, side by side; `OURS` is one of them."""
    lanes = open_lanes(models, config, [OURS_PLAIN, FIXED[3], ADAPTIVE])

    def answer(task: Task) -> dict[str, Answer]:
        return {
            f"specserve {lane.mode.name}": Answer(
                tokens=run.tokens,
                seconds=run.account.decode_seconds,
                prompt_seconds=run.account.prefill_seconds,
                drafted=run.account.drafted,
                accepted=run.account.accepted,
                rounds=run.account.rounds,
            )
            for lane, run in zip(lanes, race(lanes, task, 0.0), strict=True)
        }

    return answer


def read_results(file: Path | None, names: dict[str, str]) -> Results:
    """What earlier runs with these models left in a file, but for disturbed answers and a line that was cut off."""
    results: Results = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file and file.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        answer = Answer(**entry["answer"])
        if entry["models"] == names and answer.others <= ALLOWED:
            results[entry["prompt"], entry["mode"], entry["time"]] = answer
    return results


def summarise(family: str, mode: str, pairs: list[tuple[Answer, Answer]]) -> dict[str, Any]:
    """One row of the result from (llama-server plain, this mode) pairs, one for each time that a prompt was asked."""
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
        "disturbed": sum(max(plain.others, answer.others) > ALLOWED for plain, answer in pairs),
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
    parser.add_argument("--times", type=int, default=1, help="so often each, since one answer says little")
    parser.add_argument("--results", type=Path, help="JSON lines, added to; answers there are not asked for again")
    options = parser.parse_args()
    # The servers are children that outlive a process which is ended without its `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    binary = build()
    document, _ = load_yaml(options.config)
    prepared = prepare(options.config)
    config = HandlerConfig.model_validate(resolve(document, prepared)["handler"])
    # One sequence, as llama-server's one slot; more would only take memory.
    config = config.model_copy(update={"sequences": 1})
    models = load_models(config)
    names = {"target": prepared.target.name, "draft": prepared.draft.name if prepared.draft else ""}
    results = read_results(options.results, names)
    common = ["-m", str(prepared.target), "-t", str(usable_cores()), "-c", str(config.context_length)]
    # Saved states of earlier prompts would take the memory of other servers.
    common += ["--cache-ram", "0", "--no-ui"]
    rows = []
    with closing(Pool(binary, common)) as pool:
        modes = peers(pool, models, prepared)
        modes = {name: mode for name, mode in modes.items() if not options.quick or name in QUICK}
        modes[OURS] = ours(models, config)
        for family in FAMILIES:
            tasks = list(read_tasks(family, options.prompts or (QUICK_PROMPTS if options.quick else None)))
            for task in track(tasks, family, console=Console(stderr=True)):
                for time, name in product(range(options.times), modes):
                    if (task.name, name, time) in results:
                        continue
                    answers, others = undisturbed(partial(modes[name], task))
                    for mode, answer in answers.items():
                        kept = results[task.name, mode, time] = replace(answer, others=round(others, 3))
                        if options.results:
                            key = {"models": names, "prompt": task.name, "mode": mode, "time": time}
                            with options.results.open("a", encoding="utf-8") as file:
                                file.write(json.dumps(key | {"answer": asdict(kept)}) + "\n")
            asked = list(product((task.name for task in tasks), range(options.times)))
            rows += [
                summarise(
                    family, mode, [(results[name, PLAIN, time], results[name, mode, time]) for name, time in asked]
                )
                for mode in dict.fromkeys(mode for _, mode, _ in results)
            ]
    show(rows)
    result = {"benchmark": "against_llama_server", "machine": describe_machine(), "models": names}
    print(json.dumps({**result, "rows": rows, "notes": NOTES}))


if __name__ == "__main__":
    main()
