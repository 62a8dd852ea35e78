"""What does TorchServe add to the engine's own time, a request and a call of the handler?

The response says how long the handler worked on a request; everything else of the client's wait is TorchServe,
HTTP and the wait for the handler's turn. A call's share is that rest, spread over the calls that one stream takes.

    .venv/bin/python benchmarks/overhead.py [--config FILE] [--requests N]
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import quantiles
from typing import Any

import requests

from load import start_ours
from machine import describe_machine
from specserve.config import load_yaml
from specserve.operations.places import DEFAULT_CONFIG

PROMPT = "def quicksort(items):\n"


def handler_seconds(answer: dict[str, Any]) -> float:
    """Seconds that the handler spent on a request, by its own account."""
    seconds = answer["speculation"]["seconds"]
    return float(seconds["prefill"] + seconds["draft"] + seconds["target"] + seconds["other"])


def one_request(session: requests.Session, url: str) -> float:
    """Milliseconds beside the handler's own for a request of one token."""
    begun = time.perf_counter()
    answer = session.post(url, json={"prompt": PROMPT, "max_tokens": 1, "temperature": 0}).json()
    return 1000 * (time.perf_counter() - begun - handler_seconds(answer))


def one_call(session: requests.Session, url: str) -> float:
    """Milliseconds beside the handler's own for each call of a stream of 32 tokens."""
    body = {
        "prompt": PROMPT,
        "max_tokens": 32,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun = time.perf_counter()
    with session.post(url, json=body, stream=True) as response:
        lines = [line.removeprefix(b"data: ") for line in response.iter_lines() if line]
    wall = time.perf_counter() - begun
    *chunks, last, _done = lines
    return 1000 * (wall - handler_seconds(json.loads(last))) / len(chunks)


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
    options = parser.parse_args()
    with ExitStack() as stack:
        url = f"{start_ours(stack, options.config, options.port)}/v1/completions"
        session = stack.enter_context(requests.Session())
        for measure in (one_request, one_call):
            measure(session, url)
        counts = range(options.requests)
        rows = [
            row("request", [one_request(session, url) for _ in counts]),
            row("call", [one_call(session, url) for _ in counts]),
        ]
    for entry in rows:
        print(f"{entry['what']:8} {entry['milliseconds']:6.2f} ms  {entry['spread']}")
    _, handler = load_yaml(options.config)
    result = {"benchmark": "overhead", "machine": describe_machine(), "models": {"target": handler.model_id}}
    print(json.dumps({**result, "rows": rows, "notes": ["medians with quartiles; one client, loopback"]}))


if __name__ == "__main__":
    main()
