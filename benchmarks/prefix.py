"""How soon does the first text come where a long beginning of the prompt was read before, here and from llama-server?

Every trial has a system prompt of its own, of about 1,500 tokens: it is asked cold, then again with another question
(warm), then again while an answer to it is still being written, in another slot (beside). The servers take turns.

    .venv/bin/python benchmarks/prefix.py [--config FILE] [--trials N]
"""

from __future__ import annotations

import argparse
import json
import secrets
import threading
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from clients import Endpoint, ask
from decode import read_tasks
from machine import describe_machine
from servers import start_ours, start_theirs
from specserve.config import load_yaml
from specserve.tools.paths import DEFAULT_CONFIG

# Texts of about 500 tokens each.
TEXTS = 3
ANSWER = 4
LONG_ANSWER = 64


def trial(endpoint: Endpoint) -> dict[str, float]:
    """Seconds to the first text, by what was read before."""
    texts = "\n\n".join(task.text for task in list(read_tasks("summarise"))[:TEXTS])
    system = f"{secrets.token_hex(5)}\n{texts}"
    asked = [f"{system}\n\n{task.text}" for task in list(read_tasks("chat"))[:4]]
    found = {"cold": first_text(endpoint, asked[0]), "warm": first_text(endpoint, asked[1])}
    live = threading.Thread(target=ask, args=(endpoint, asked[2], LONG_ANSWER))
    live.start()
    # Behind the first text of the other answer, however long that took.
    live.join(2 * found["warm"])
    found["beside"] = first_text(endpoint, asked[3])
    live.join()
    return found


def first_text(endpoint: Endpoint, prompt: str) -> float:
    """Seconds until the first text of an answer.

    Raises:
        SystemExit: there was none.
    """
    answer = ask(endpoint, prompt, ANSWER)
    if answer.error:
        raise SystemExit(f"{endpoint.name}: {answer.error}")
    return answer.first


def main() -> None:
    """Start the servers, ask them in turns, and print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="a model YAML")
    parser.add_argument("--port", type=int, default=9900, help="the first of five free ports")
    parser.add_argument("--trials", type=int, default=5, help="of each server")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        theirs = [Endpoint(server.name, server.url) for server in start_theirs(stack, options.config)]
        servers = [start_ours(stack, options.config, options.port), *theirs]
        trials = [[trial(server) for server in servers] for _ in range(options.trials)]
    for server, found in zip(servers, zip(*trials, strict=True), strict=True):
        seconds = {case: round(median(one[case] for one in found), 3) for case in found[0]}
        shares = {f"{case}/cold": round(median(one[case] / one["cold"] for one in found), 3) for case in found[0]}
        del shares["cold/cold"]
        rows.append({"server": server.name, **seconds, **shares})
    table = Table(title="seconds to the first text")
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "server" else "right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=140).print(table)
    _, handler = load_yaml(options.config)
    result = {"benchmark": "prefix", "machine": describe_machine(), "models": {"target": handler.model_id}}
    print(json.dumps({**result, "rows": rows, "notes": ["medians; streams by temperature 0 of 4 tokens"]}))


if __name__ == "__main__":
    main()
