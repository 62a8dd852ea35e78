"""What does every client get when several ask at once, through HTTP, and what does llama-server give the same ones?

Clients stream answers to prompts that nobody has sent before. Closed loop: each asks again as soon as it is answered.
Open loop: requests come at random at a rate, answered or not. The servers run side by side and take turns, so that
one line of the result was measured in the same minutes as the next; a server that is not asked sleeps.

    .venv/bin/python benchmarks/load.py [--config FILE] [--clients 1 2 4 8] [--rate 0.2] [--turns N]
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, sleep
from typing import Any

import psutil
import requests
from rich.console import Console
from rich.table import Table

from decode import read_tasks
from llama_server import Server, build, events, python_example
from machine import describe_machine
from peer import Peer
from python_server import batching, one_by_one
from specserve.config import HandlerConfig, load_yaml, usable_cores
from specserve.operations.archive import resolve
from specserve.operations.places import DEFAULT_CONFIG, PROJECT
from specserve.operations.prepare import prepare
from specserve.operations.state import State

FAMILIES = ("code", "json", "prose", "chat")
CLIENTS = (1, 2, 4, 8, 16)
LONGEST = 96
SLOTS = 8
ANSWERED_WITHIN_SECONDS = 600
NOTES = (
    "streams of up to 96 tokens by temperature 0; every prompt begins with a line of its own, so nothing is cached",
    "chunk gaps are between two events with text: llama-server sends a token an event, specserve a round's",
    "llama-cpp-python's servers do not count a stream's tokens: their events are counted",
)


@dataclass(frozen=True)
class Endpoint:
    """A server and what is asked of it beside the prompt."""

    name: str
    url: str
    extra: dict[str, Any] = field(default_factory=dict)
    memory: Callable[[], int] = lambda: 0


@dataclass
class Answer:
    """What a client saw: when it asked, when each piece of text came, and how many tokens it was in all."""

    asked: float
    pieces: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str | None = None

    @property
    def first(self) -> float:
        """Seconds until the first text."""
        return self.pieces[0] - self.asked

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces."""
        return [after - before for before, after in zip(self.pieces, self.pieces[1:], strict=False)]

    @property
    def pace(self) -> float:
        """Seconds a token behind the first."""
        return (self.pieces[-1] - self.pieces[0]) / max(1, self.tokens - 1)


def prompts(number: int) -> list[str]:
    """The same prompts of all families in turn, none like an earlier one from its first word on."""
    texts = [task.text for texts in zip(*map(read_tasks, FAMILIES), strict=False) for task in texts]
    return [f"{secrets.token_hex(5)}\n{texts[place % len(texts)]}" for place in range(number)]


def ask(endpoint: Endpoint, prompt: str, longest: int) -> Answer:
    """One streamed answer; what goes wrong is in it."""
    body = {
        "prompt": prompt,
        "max_tokens": longest,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer(perf_counter())
    try:
        with requests.post(
            f"{endpoint.url}/v1/completions", json=body | endpoint.extra, stream=True, timeout=ANSWERED_WITHIN_SECONDS
        ) as response:
            response.raise_for_status()
            for event in events(response):
                if any(choice.get("text") for choice in event.get("choices", ())):
                    answer.pieces.append(perf_counter())
                if event.get("usage"):
                    answer.tokens = event["usage"]["completion_tokens"]
        answer.tokens = answer.tokens or len(answer.pieces)
    except (requests.RequestException, ValueError, KeyError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if not answer.error and not answer.pieces:
        answer.error = "no text"
    return answer


def closed(endpoint: Endpoint, clients: int, number: int, longest: int) -> list[Answer]:
    """So many clients share so many requests, each asking again when it is answered."""
    answers: list[Answer] = []
    left = deque(prompts(number))

    def client() -> None:
        while left:
            answers.append(ask(endpoint, left.popleft(), longest))

    _run_all([threading.Thread(target=client) for _ in range(clients)])
    return answers


def opened(endpoint: Endpoint, rate: float, number: int, longest: int) -> list[Answer]:
    """Requests come at `rate` a second, at random, whether or not earlier ones are answered."""
    answers: list[Answer] = []
    waits = random.Random(0)

    def client(prompt: str, delay: float) -> None:
        sleep(delay)
        answers.append(ask(endpoint, prompt, longest))

    threads, delay = [], 0.0
    for prompt in prompts(number):
        threads.append(threading.Thread(target=client, args=(prompt, delay)))
        delay += waits.expovariate(rate)
    _run_all(threads)
    return answers


def in_turns(
    load: str, endpoints: list[Endpoint], turn: Callable[[Endpoint], list[Answer]], turns: int
) -> list[dict[str, Any]]:
    """The same load for every server, one after the other, and again; a row each."""
    taken: list[list[list[Answer]]] = [[] for _ in endpoints]
    held: list[list[int]] = [[] for _ in endpoints]
    for _ in range(turns):
        for answers, mebibytes, endpoint in zip(taken, held, endpoints, strict=True):
            answers.append(turn(endpoint))
            mebibytes.append(endpoint.memory())
    return [
        summarise(load, endpoint, answers) | {"mib": mebibytes}
        for answers, mebibytes, endpoint in zip(taken, held, endpoints, strict=True)
    ]


def read_results(path: Path | None) -> dict[str, list[dict[str, Any]]]:
    """The rows of loads that an earlier run has kept."""
    if path is None or not path.exists():
        return {}
    return dict(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def _run_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def summarise(load: str, endpoint: Endpoint, turns: list[list[Answer]]) -> dict[str, Any]:
    """One row of the result; the time of a turn runs from its first request to its last text."""
    answers = [answer for turn in turns for answer in turn]
    good = [answer for answer in answers if not answer.error]
    row: dict[str, Any] = {"load": load, "server": endpoint.name, "requests": len(answers)}
    if good:
        wall = sum(map(seconds, turns))
        firsts = [answer.first for answer in good]
        gaps = [gap for answer in good for gap in answer.gaps]
        row |= {
            "tokens_per_second": round(sum(answer.tokens for answer in good) / wall, 2),
            "first_text_s": round(median(firsts), 3),
            "first_text_p95_s": percentile(firsts, 95),
            "seconds_a_token": round(median(answer.pace for answer in good), 4),
            "gap_s": round(median(gaps), 3),
            "gap_p95_s": percentile(gaps, 95),
            "gap_p99_s": percentile(gaps, 99),
        }
    return row | {"errors": len(answers) - len(good), "first_error": next((a.error for a in answers if a.error), None)}


def seconds(turn: list[Answer]) -> float:
    """What a turn took."""
    ends = [answer.pieces[-1] for answer in turn if not answer.error]
    return max(ends) - min(answer.asked for answer in turn) if ends else 0.0


def percentile(values: list[float], which: int) -> float:
    """A percentile, or the largest value where there are few."""
    return round(quantiles(values, n=100, method="inclusive")[which - 1] if len(values) > 1 else values[0], 3)


def show(rows: list[dict[str, Any]]) -> None:
    """The rows as a table for people."""
    table = Table(title="streams under load")
    columns = [column for column in max(rows, key=len) if column != "first_error"]
    for column in columns:
        table.add_column(column.replace("_", " "), justify="left" if column == "server" else "right")
    for row in rows:
        table.add_row(*(str(row.get(column, "-")) for column in columns))
    Console(width=180).print(table)


def start_ours(stack: ExitStack, config: Path, port: int) -> str:
    """This project's server, through TorchServe; its address."""
    scripts, flags = PROJECT / "scripts", ["--port", str(port)]
    serve: list[str | Path] = [scripts / "serve", "--config", config, *flags, "--detach", "--no-auth"]
    subprocess.run(serve, check=True, stdout=subprocess.DEVNULL)
    stack.callback(lambda: subprocess.run([scripts / "stop", *flags], check=True, stdout=subprocess.DEVNULL))
    return f"http://127.0.0.1:{State.of(port).ports.inference}/predictions/qwen/1.0"


def memory(port: int) -> int:
    """Mebibytes that this project's worker holds."""
    state = str(State.of(port).directory)
    commands = ((process.pid, " ".join(process.info["cmdline"] or ())) for process in psutil.process_iter(["cmdline"]))
    return sum(held_by(pid) for pid, command in commands if "model_service_worker" in command and state in command)


def held_by(pid: int) -> int:
    """Mebibytes that a process holds."""
    return int(psutil.Process(pid).memory_info().rss) >> 20


def start_theirs(stack: ExitStack, config: Path, *, python: bool = False) -> list[Endpoint]:
    """Other servers with the same files and threads: llama-server plain and with its drafts, the binding's own two."""
    binary = build()
    document, _ = load_yaml(config)
    prepared = prepare(config)
    handler = HandlerConfig.model_validate(resolve(document, prepared)["handler"])
    threads, context_length = handler.threads or usable_cores(), handler.context_length
    common = ["-m", str(prepared.target), "-t", str(threads), "--no-ui", "--cache-ram", "0"]
    common += ["-c", str(SLOTS * context_length)]
    modes = {"llama-server plain": common}
    if prepared.draft:
        drafts = ["--model-draft", str(prepared.draft), "--spec-type", "draft-simple", "--spec-draft-n-max", "3"]
        modes["llama-server draft 3"] = common + drafts
    logs = binary.parent
    peers: dict[str, Peer] = {}
    for number, (name, options) in enumerate(modes.items()):
        peers[name] = Server(binary, options, logs / f"load-{number}.log", slots=SLOTS)
        stack.callback(peers[name].stop)
    if python:
        size = {"threads": threads, "context_length": context_length}
        peers["llama_cpp.server"] = one_by_one(prepared.target, logs / "one_by_one.log", **size)
        stack.callback(peers["llama_cpp.server"].stop)
        script, log = python_example(), logs / "batching.log"
        peers["llama_cpp example"] = batching(script, prepared.target, log, slots=SLOTS, **size)
        stack.callback(peers["llama_cpp example"].stop)
    for peer in peers.values():
        peer.wait()
    uncached = {"cache_prompt": False}
    return [
        Endpoint(name, peer.url, uncached if isinstance(peer, Server) else {}, partial(held_by, peer.pid))
        for name, peer in peers.items()
    ]


def main() -> None:
    """Start the servers, load them, and print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="a model YAML")
    parser.add_argument("--port", type=int, default=9800, help="the first of five free ports")
    parser.add_argument("--clients", nargs="+", type=int, default=CLIENTS, help="of the closed loop")
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
        held = partial(memory, options.port)
        modes = [Endpoint(f"specserve {mode}", ours, {"speculation": {"mode": mode}}, held) for mode in ("auto", "off")]
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
