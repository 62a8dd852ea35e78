"""Is a changed checkout still as good as the one before? Answers bit for bit, simulated speed, start, memory, tools.

    .venv/bin/python benchmarks/gates.py run FILE [--checkout DIR] [--parts NAME ...]
    .venv/bin/python benchmarks/gates.py compare BEFORE AFTER

`run` measures a checkout with its own environment and writes a JSON file; `compare` prints what fell below its bar and
exits with 1 if anything did. Speed on a real clock is compared by decode.py, load.py and neighbours.py, run in turns in
both checkouts.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import requests

from common import read_tasks
from servers import server_stack, start_specserve
from specserve.cli.paths import PROJECT
from tools import BANK, tools_of

PORT = 9180
ANSWERS = 200
MAX_TOKENS = 64
AT_A_TIME = 4
STARTS = 3
# Bars: a mean, the slowest text, and what is better the smaller it is, in times of the checkout before.
MEAN, SLOWEST, WORSE = 0.98, 0.97, 1.05
FAMILIES = ("code", "json", "schema", "prose", "chat", "edit, predicted", "short")
# Greedy and seeded: only these have one answer each, whatever is drafted.
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0, "frequency_penalty": 0.5, "logprobs": 2},
    {"temperature": 1.0, "top_p": 0.9, "seed": 2, "n": 2},
)


def requests_to_send() -> Iterator[tuple[str, dict[str, Any]]]:
    """Route and body of each request: completions of every family in every kind of sampling, then tool calls."""
    common = {"max_tokens": MAX_TOKENS, "speculation": {"pool": ""}}
    tasks = [task for family in FAMILIES for task in read_tasks(family)]
    for index in range(ANSWERS - len(BANK["tasks"])):
        task = tasks[index % len(tasks)]
        body = {"prompt": task.text} | common | SAMPLING[(index + index // len(tasks)) % len(SAMPLING)]
        if task.prediction:
            body["prediction"] = {"type": "content", "content": task.prediction}
        if task.schema:
            schema = {"name": "answer", "schema": task.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        yield "v1/completions", body
    for index, task in enumerate(BANK["tasks"]):
        messages = [{"role": "user", "content": task["message"]}]
        body = {"messages": messages, "tools": tools_of(task), "tool_choice": "required"} | common
        yield "v1/chat/completions", body | SAMPLING[index % 2]


def answer(url: str, request: tuple[str, dict[str, Any]]) -> list[Any]:
    """What of an answer may not change: its status, and texts, calls, reasons and log-probabilities of its choices."""
    route, body = request
    response = requests.post(f"{url}/{route}", json=body, timeout=600)
    choices = response.json().get("choices", response.text)
    for choice in choices if response.ok else ():
        for call in (choice.get("message") or {}).get("tool_calls") or ():
            del call["id"]
    return [response.status_code, choices]


def answers(checkout: Path) -> list[Any]:
    """The checkout's answers to all requests, several at a time."""
    with server_stack() as stack, ThreadPoolExecutor(AT_A_TIME) as clients:
        server = start_specserve(stack, None, PORT, checkout=checkout)
        return list(clients.map(partial(answer, server.url), requests_to_send()))


def known_pair(checkout: Path) -> dict[str, float]:
    """Seconds until a server of a pair whose costs are known is ready, and its memory then."""
    seconds, memory = [], 0
    # The first start measures the costs. Neighbours only add to the others, and the trees are not started in turns.
    for _ in range(1 + STARTS):
        with server_stack() as stack:
            begun = time.perf_counter()
            server = start_specserve(stack, None, PORT, checkout=checkout)
            seconds.append(time.perf_counter() - begun)
            memory = server.resident_mib()
    return {"seconds until ready": min(seconds[1:]), "MiB": memory}


def benchmark(checkout: Path, program: str, *arguments: str) -> dict[str, Any]:
    """Run one of the checkout's benchmarks and return the JSON object that it prints last."""
    command = [str(checkout / ".venv" / "bin" / "python"), f"benchmarks/{program}", *arguments]
    output = subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(output.stdout.splitlines()[-1])
    return result


def simulated(checkout: Path) -> dict[str, Any]:
    """By machine, the mean and the slowest recorded text in times plain decoding, and the ratio of several clients."""
    result: dict[str, Any] = {}
    families = {task.family for family in FAMILIES for task in read_tasks(family, 1)}
    for row in benchmark(checkout, "simulate.py")["rows"]:
        if row["mode"] == "adaptive" and row["family"] in families:
            result.setdefault(row["machine"], {}).setdefault("rows", []).append((row["ratio"], row["least"]))
    for figures in result.values():
        ratios, least = zip(*figures.pop("rows"), strict=True)
        figures |= {"mean": mean(ratios), "slowest": min(least)}
    for row in benchmark(checkout, "simulate.py", "--clients", "2", "4", "8")["rows"]:
        result[row["machine"]][f"{row['clients']} clients"] = row["ratio"]
    return result


def tool_calls(checkout: Path) -> dict[str, Any]:
    """How many tool calls were written, and how many of them were invalid."""
    rows = benchmark(checkout, "tools.py", "--quick", "--port", str(PORT))["rows"]
    return {name: sum(row[name] for row in rows) for name in ("calls", "faults")}


PARTS = {"answers": answers, "start": known_pair, "simulated": simulated, "tool_calls": tool_calls}


def shortfalls(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for number, (old, new) in enumerate(zip(before["answers"], after["answers"], strict=True)):
        if old != new:
            yield f"answer {number} differs: {old} -> {new}"
    for name, value in before["start"].items():
        if after["start"][name] > value * WORSE:
            yield f"start, {name}: {value:.4g} -> {after['start'][name]:.4g}"
    for machine, figures in after["simulated"].items():
        for name, value in figures.items():
            old = before["simulated"][machine][name]
            if value < old * (SLOWEST if name == "slowest" else MEAN):
                yield f"simulate.py, {machine}, {name}: {old:.3f} -> {value:.3f}"
    if after["tool_calls"]["faults"]:
        yield f"{after['tool_calls']['faults']} of {after['tool_calls']['calls']} tool calls are invalid"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run")
    run.add_argument("file", type=Path)
    run.add_argument("--checkout", type=Path, default=PROJECT)
    run.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    compare = verbs.add_parser("compare")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.verb == "run":
        result = json.loads(options.file.read_text(encoding="utf-8")) if options.file.exists() else {}
        for part in options.parts:
            result[part] = PARTS[part](options.checkout.resolve())
            options.file.write_text(json.dumps(result), encoding="utf-8")
        return 0
    before, after = (json.loads(path.read_text(encoding="utf-8")) for path in (options.before, options.after))
    missed = list(shortfalls(before, after))
    print(*missed or ["every bar is met"], sep="\n")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
