"""What does TorchServe add to the engine's own time, a request and a call, and what does it leave of speed-ups?

The response says how long the handler worked on a request; everything else of the client's wait is TorchServe,
HTTP and the wait for the handler's turn. A call's share is that rest, a request's taken off, spread over the calls
that one stream takes. A speed-up is that of `auto` to `off` behind a prompt that was read before, by the engine's
account and by the client's clock.

    .venv/bin/python benchmarks/overhead.py [--config FILE] [--requests N]
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import requests

from clients import Endpoint, ask
from decode import Task, read_tasks
from machine import describe_machine
from servers import start_ours
from specserve.config import load_yaml
from specserve.tools.paths import DEFAULT_CONFIG

PROMPT = "def quicksort(items):\n"
FAMILIES = ("code", "prose", "edit", "edit, predicted")


def handler_seconds(answer: dict[str, Any]) -> float:
    """Seconds that the handler spent on a request, by its own account."""
    seconds = answer["speculation"]["seconds"]
    return float(seconds["prefill"] + seconds["draft"] + seconds["target"] + seconds["other"])


def one_request(session: requests.Session, url: str) -> float:
    """Milliseconds beside the handler's own for a request of one token."""
    begun = time.perf_counter()
    answer = session.post(url, json={"prompt": PROMPT, "max_tokens": 1, "temperature": 0}).json()
    return 1000 * (time.perf_counter() - begun - handler_seconds(answer))


def one_call(session: requests.Session, url: str, request: float) -> float:
    """Milliseconds beside the handler's own for each call of a stream, of which `request` are taken once."""
    body = {
        "prompt": PROMPT,
        "max_tokens": 96,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun = time.perf_counter()
    with session.post(url, json=body, stream=True) as response:
        lines = [line.removeprefix(b"data: ") for line in response.iter_lines() if line]
    wall = time.perf_counter() - begun
    *chunks, last, _done = lines
    return (1000 * (wall - handler_seconds(json.loads(last))) - request) / len(chunks)


def speed_ups(server: Endpoint, task: Task) -> tuple[float, float]:
    """How much faster `auto` answers than `off`: by the engine's account, and by the client's clock.

    Raises:
        SystemExit: there was no answer.
    """
    sent: dict[str, Any] = {"prediction": {"type": "content", "content": task.prediction}} if task.prediction else {}
    engine, client = {"off": 0.0, "auto": 0.0}, {"off": 0.0, "auto": 0.0}
    ask(server, task.text, 1)
    # What drifts along is felt by both alike.
    for mode in ("off", "auto", "auto", "off"):
        endpoint = replace(server, extra={**sent, "speculation": {"mode": mode}})
        answer = ask(endpoint, task.text, task.max_tokens)
        if answer.error:
            raise SystemExit(f"{task.name}: {answer.error}")
        seconds = answer.account["seconds"]
        engine[mode] += seconds["draft"] + seconds["target"] + seconds["other"]
        client[mode] += answer.pieces[-1] - answer.asked - seconds["prefill"]
    return engine["off"] / engine["auto"], client["off"] / client["auto"]


def row(what: str, milliseconds: list[float]) -> dict[str, Any]:
    """One row of the result."""
    low, middle, high = quantiles(milliseconds, n=4)
    return {"what": what, "milliseconds": round(middle, 2), "spread": [round(low, 2), round(high, 2)]}


def main() -> None:
    """Start a server, measure, stop it, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="a model YAML")
    parser.add_argument("--port", type=int, default=9700, help="the first of five free ports")
    parser.add_argument("--requests", type=int, default=20, help="measurements of each kind")
    parser.add_argument("--prompts", type=int, default=2, help="of each family whose speed-up is measured")
    options = parser.parse_args()
    with ExitStack() as stack:
        server = start_ours(stack, options.config, options.port)
        url = f"{server.url}/v1/completions"
        session = stack.enter_context(requests.Session())
        one_call(session, url, one_request(session, url))
        counts = range(options.requests)
        request = [one_request(session, url) for _ in counts]
        calls = [one_call(session, url, median(request)) for _ in counts]
        rows = [row("request", request), row("call", calls)]
        kept = []
        for family in FAMILIES:
            found = [speed_ups(server, task) for task in read_tasks(family, options.prompts)]
            engine, client = (round(mean(ratios), 3) for ratios in zip(*found, strict=True))
            kept.append({"family": family, "engine": engine, "client": client})
    for entry in rows:
        print(f"{entry['what']:8} {entry['milliseconds']:6.2f} ms  {entry['spread']}")
    for entry in kept:
        print(f"{entry['family']:16} {entry['engine']:.3f} by the engine, {entry['client']:.3f} by the client")
    _, handler = load_yaml(options.config)
    result = {"benchmark": "overhead", "machine": describe_machine(), "models": {"target": handler.model_id}}
    print(json.dumps({**result, "rows": [*rows, *kept], "notes": ["medians with quartiles; one client, loopback"]}))


if __name__ == "__main__":
    main()
