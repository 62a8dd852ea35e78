"""Is a changed checkout still as good as the one before? Answers bit for bit, simulated speed, start, memory, tools.

    .venv/bin/python benchmarks/gates.py run FILE [--checkout DIR] [--parts NAME ...]
    .venv/bin/python benchmarks/gates.py compare BEFORE AFTER

`run` measures a checkout with its own environment and writes a JSON file; `compare` prints what fell below its bar and
exits with 1 if anything did. Speed on a real clock is compared by decode.py, load.py and neighbours.py, run in turns in
both checkouts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
import requests
import yaml

from common import PROMPTS, read_tasks
from specserve.cli.paths import PROJECT

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
    tools = yaml.safe_load((PROMPTS / "tools.yaml").read_text(encoding="utf-8"))
    common = {"max_tokens": MAX_TOKENS, "speculation": {"pool": ""}}
    tasks = [task for family in FAMILIES for task in read_tasks(family)]
    for index in range(ANSWERS - len(tools["tasks"])):
        task = tasks[index % len(tasks)]
        body = {"prompt": task.text} | common | SAMPLING[(index + index // len(tasks)) % len(SAMPLING)]
        if task.prediction:
            body["prediction"] = {"type": "content", "content": task.prediction}
        if task.schema:
            schema = {"name": "answer", "schema": task.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        yield "v1/completions", body
    for index, task in enumerate(tools["tasks"]):
        names = tools["tools"] if task["tools"] == "all" else task["tools"]
        offered = [{"type": "function", "function": {"name": name, **tools["tools"][name]}} for name in names]
        messages = [{"role": "user", "content": task["message"]}]
        body = {"messages": messages, "tools": offered, "tool_choice": "required"} | common
        yield "v1/chat/completions", body | SAMPLING[index % 2]


def start(checkout: Path) -> float:
    """Start the checkout's server and return the seconds until it was ready."""
    begun = time.perf_counter()
    command = [str(checkout / "scripts" / "serve"), "--port", str(PORT), "--detach", "--no-auth"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def stop(checkout: Path) -> None:
    """Stop the checkout's server."""
    subprocess.run([checkout / "scripts" / "stop", "--port", str(PORT)], check=True, stdout=subprocess.DEVNULL)


def worker_mib() -> int:
    """Resident memory of the process that holds the models, the largest of all TorchServe workers."""
    processes = psutil.process_iter(["cmdline", "memory_info"])
    workers = [process.info for process in processes if "model_service" in " ".join(process.info["cmdline"] or ())]
    return max(int(worker["memory_info"].rss) >> 20 for worker in workers)


def answer(request: tuple[str, dict[str, Any]]) -> list[Any]:
    """Return what of an answer may not change: texts, calls, reasons and log-probabilities of its choices."""
    route, body = request
    response = requests.post(f"http://127.0.0.1:{PORT}/predictions/qwen/1.0/{route}", json=body, timeout=600)
    choices = response.json().get("choices", response.text)
    for choice in choices if response.ok else ():
        for call in (choice.get("message") or {}).get("tool_calls") or ():
            del call["id"]
    return [response.status_code, choices]


def answers(checkout: Path) -> list[Any]:
    """The checkout's answers to all requests, several at a time."""
    start(checkout)
    try:
        with ThreadPoolExecutor(AT_A_TIME) as clients:
            return list(clients.map(answer, requests_to_send()))
    finally:
        stop(checkout)


def known_pair(checkout: Path) -> dict[str, float]:
    """Seconds until a server of a pair whose costs are known is ready, and its memory then."""
    start(checkout)
    stop(checkout)
    seconds = []
    for _ in range(STARTS):
        seconds.append(start(checkout))
        memory = worker_mib()
        stop(checkout)
    return {"seconds until ready": median(seconds), "MiB": memory}


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
    """What is worse than its bar."""
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
    """Measure a checkout, or compare two."""
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
