"""What does every client get when several ask at once, through HTTP, and what does llama-server give the same ones?

Clients stream answers to prompts that nobody has sent before. Closed loop: each asks again as soon as it is answered.
Open loop: requests come at random at a rate, answered or not. The servers run side by side and take turns, so that
one line of the result was measured in the same minutes as the next; a server that is not asked sleeps.

    .venv/bin/python benchmarks/load.py [--config FILE] [--clients 1 2 4 8] [--rate 0.2] [--turns N]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import monotonic, sleep
from typing import Any

from rich.console import Console
from rich.table import Table

from clients import Answer, Endpoint, Queued, ask, closed, opened, prompts
from machine import describe_machine
from servers import SLOTS, start_ours, start_theirs
from specserve.config import load_yaml
from specserve.tools.paths import DEFAULT_CONFIG

CLIENTS = (1, 2, 4, 8, 16)
LONGEST = 96
TOLD_WITHIN_SECONDS = 10
NOTES = (
    "streams of up to 96 tokens by temperature 0; every prompt begins with a line of its own, so nothing is cached",
    "chunk gaps are between two events with text: llama-server sends a token an event, specserve a round's",
    "llama-cpp-python's servers do not count a stream's tokens: their events are counted",
    "queued: in the worker, for a sequence; with more requests than batchSize others wait in TorchServe before that",
)


@dataclass
class Taken:
    """What a server made of one load: the answers of every turn, the mebibytes it held after each, its queue."""

    turns: list[list[Answer]] = field(default_factory=list)
    mebibytes: list[int] = field(default_factory=list)
    queued_seconds: float = 0.0
    queued_requests: float = 0.0

    def add(self, endpoint: Endpoint, turn: Callable[[Endpoint], list[Answer]]) -> None:
        """One more turn."""
        before = endpoint.queued()
        answers = turn(endpoint)
        self.turns.append(answers)
        after = _told(endpoint, before.requests + sum(not answer.error for answer in answers))
        self.mebibytes.append(endpoint.memory())
        self.queued_seconds += after.seconds - before.seconds
        self.queued_requests += after.requests - before.requests


def _told(endpoint: Endpoint, requests: float) -> Queued:
    """A server's queue when it tells of so many requests, some moments after they were answered; if it counts them."""
    until = monotonic() + TOLD_WITHIN_SECONDS
    while (queued := endpoint.queued()).requests < requests and queued.requests and monotonic() < until:
        sleep(0.1)
    return queued


def in_turns(
    load: str, endpoints: list[Endpoint], turn: Callable[[Endpoint], list[Answer]], turns: int
) -> list[dict[str, Any]]:
    """The same load for every server, one after the other, and again; a row each."""
    taken = [Taken() for _ in endpoints]
    for _ in range(turns):
        for mine, endpoint in zip(taken, endpoints, strict=True):
            mine.add(endpoint, turn)
    return [summarise(load, endpoint, mine) for mine, endpoint in zip(taken, endpoints, strict=True)]


def read_results(path: Path | None) -> dict[str, list[dict[str, Any]]]:
    """The rows of loads that an earlier run has kept."""
    if path is None or not path.exists():
        return {}
    return dict(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def summarise(load: str, endpoint: Endpoint, taken: Taken) -> dict[str, Any]:
    """One row of the result; the time of a turn runs from its first request to its last text."""
    answers = [answer for turn in taken.turns for answer in turn]
    good = [answer for answer in answers if not answer.error]
    row: dict[str, Any] = {"load": load, "server": endpoint.name, "requests": len(answers)}
    if good:
        wall = sum(map(seconds, taken.turns))
        firsts = [answer.first for answer in good]
        paces = [answer.pace for answer in good]
        gaps = [gap for answer in good for gap in answer.gaps]
        row["tokens_per_second"] = round(sum(answer.tokens for answer in good) / wall, 2)
        row |= spread("first_text", firsts) | spread("a_token", paces) | (spread("gap", gaps) if gaps else {})
        row |= rounds(good)
    if taken.queued_requests:
        row["queued_s"] = round(taken.queued_seconds / taken.queued_requests, 3)
    errors = [answer.error for answer in answers if answer.error]
    return row | {"mib": taken.mebibytes, "errors": len(errors), "first_error": errors[0] if errors else None}


def spread(what: str, values: list[float]) -> dict[str, float]:
    """The median of some seconds, and what the slower ones took."""
    slower = {f"{what}_p{which}_s": percentile(values, which) for which in (95, 99)}
    return {f"{what}_s": round(median(values), 4), **slower}


def rounds(answers: list[Answer]) -> dict[str, float]:
    """Drafts a round, and the share of the target's rows that became text; of servers that account for them."""
    accounts = [answer.account for answer in answers]
    if not all(account.get("rounds") for account in accounts):
        return {}
    made, drafted, accepted = (
        sum(account[key] for account in accounts) for key in ("rounds", "drafted_tokens", "accepted_tokens")
    )
    return {
        "drafts_a_round": round(drafted / made, 2),
        "rows_that_became_text": round((made + accepted) / (made + drafted), 2),
    }


def seconds(turn: list[Answer]) -> float:
    """What a turn took."""
    ends = [answer.pieces[-1] for answer in turn if not answer.error]
    return max(ends) - min(answer.asked for answer in turn) if ends else 0.0


def percentile(values: list[float], which: int) -> float:
    """A percentile, or the largest value where there are few."""
    return round(quantiles(values, n=100, method="inclusive")[which - 1] if len(values) > 1 else values[0], 4)


def show(rows: list[dict[str, Any]]) -> None:
    """The rows as a table for people."""
    table = Table(title="streams under load")
    columns = [column for column in dict.fromkeys(key for row in rows for key in row) if column != "first_error"]
    for column in columns:
        table.add_column(column.replace("_", " "), justify="left" if column == "server" else "right")
    for row in rows:
        table.add_row(*(str(row.get(column, "-")) for column in columns))
    Console(width=220).print(table)


def main() -> None:
    """Start the servers, load them, and print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="a model YAML")
    parser.add_argument("--port", type=int, default=9800, help="the first of five free ports")
    parser.add_argument("--clients", nargs="*", type=int, default=CLIENTS, help="of the closed loop")
    parser.add_argument("--rate", nargs="*", type=float, default=[], help="requests a second of an open loop")
    parser.add_argument(
        "--requests", type=int, default=2, help="of each client in a turn, or of each open loop and slot"
    )
    parser.add_argument("--turns", type=int, default=2, help="that every server has of each load")
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of an answer")
    parser.add_argument("--ours", action="store_true", help="without the other servers")
    parser.add_argument("--python", action="store_true", help="llama-cpp-python's two servers as well")
    parser.add_argument("--results", type=Path, help="keep loads here, a line each, and take up those that are there")
    options = parser.parse_args()
    loads = {f"{clients} clients": partial(closed, clients=clients) for clients in options.clients}
    loads |= {f"{rate} a second": partial(opened, rate=rate) for rate in options.rate}
    numbers = {f"{clients} clients": options.requests * clients for clients in options.clients}
    known = read_results(options.results)
    with ExitStack() as stack:
        theirs = [] if options.ours else start_theirs(stack, options.config, python=options.python)
        ours = start_ours(stack, options.config, options.port)
        modes = [
            replace(ours, name=f"specserve {mode}", extra={"speculation": {"mode": mode}}) for mode in ("auto", "off")
        ]
        for endpoint in [*modes, *theirs]:
            ask(endpoint, prompts(1)[0], 8)
        for load, asking in loads.items():
            if load in known:
                continue
            turn = partial(asking, number=numbers.get(load, options.requests * SLOTS), longest=options.longest)
            known[load] = in_turns(load, [*modes, *theirs], turn, options.turns)
            if options.results:
                with options.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([load, known[load]]) + "\n")
    rows = [row for load in loads for row in known[load]]
    show(rows)
    _, handler = load_yaml(options.config)
    result = {"benchmark": "load", "machine": describe_machine(), "models": {"target": handler.model_id}}
    print(json.dumps({**result, "rows": rows, "notes": NOTES}))


if __name__ == "__main__":
    main()
