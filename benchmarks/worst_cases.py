"""What can one client's request cost, and how long is the longest pause of another client's stream meanwhile?

Every quantity that a request controls has a case, sent through TorchServe while a second client reads a stream, and
named after the limit that holds it. A pause counts whole, with the round that it stands for: the first line is the
stream alone. A client that is not answered in time leaves. SECURITY.md has the table.

    .venv/bin/python benchmarks/worst_cases.py [--config FILE] [--port P] [--running] [--only WORD ...] [--seconds N]
"""

from __future__ import annotations

import argparse
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import requests

from clients import Endpoint
from machine import describe_machine
from servers import memory, start_ours
from specserve.tools.paths import DEFAULT_CONFIG
from specserve.tools.torchserve_process import State

Body = dict[str, Any]

PORT = 9080
MEBIBYTE = 2**20
CHAT, COMPLETION = "v1/chat/completions", "v1/completions"
AMBIGUOUS = 'root ::= root root | root root root | "a"'
EXPONENTIAL = 'root ::= ([a-y ]{1,900} | [b-y ]{1,900} | ([ac-y ] [a-y ]{5,900}){1,90}) "z" [a-y]{900}'


@dataclass(frozen=True)
class Case:
    """A request, and the limit that holds it."""

    name: str
    limit: str
    route: str
    body: Callable[[], Body]


@dataclass
class Stream:
    """A second client, who reads a stream all the while: when its pieces came."""

    url: str
    pieces: list[float] = field(default_factory=list)
    ends: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        """Read one stream after the other."""
        body = {
            "prompt": "Once upon a time there was a king who",
            "max_tokens": 1000,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "speculation": {"mode": "off"},
        }
        while not self.ends.is_set():
            with requests.post(f"{self.url}/{COMPLETION}", json=body, stream=True, timeout=600) as response:
                for line in response.iter_lines():
                    if line:
                        self.pieces.append(time.monotonic())
                    if self.ends.is_set():
                        return

    def longest_pause(self, begun: float, ended: float) -> float:
        """Seconds between two pieces, of which the first came before the end and the second after the beginning."""
        pieces = [begun, *(piece for piece in self.pieces if begun <= piece), time.monotonic()]
        gaps = [after - before for before, after in pairwise(pieces) if before <= ended]
        return max(gaps)


def schema(text: Body, **fields: Any) -> Body:
    """A completion by a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "any", "schema": text}}
    return {"prompt": "[[[[[[[[", "max_tokens": 1000, "response_format": form, **fields}


def by_grammar(grammar: str, **fields: Any) -> Body:
    """A completion by a grammar."""
    return {"prompt": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "max_tokens": 1000, "grammar": grammar, **fields}


def chat(content: Any = "Hi", **fields: Any) -> Body:
    """A chat of one message."""
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 16, **fields}


def unknown(prefix: str) -> dict[str, int]:
    """Nearly a megabyte of fields that do not exist."""
    return {f"{prefix}{number:06}": 0 for number in range(60_000)}


def stop_strings() -> list[str]:
    """One that holds everything back, and fifteen that hold nearly nothing."""
    return [" " * 999 + "b", *(" " * length + "b" * (1000 - length) for length in range(1, 16))]


def wide_schema() -> Body:
    """Thousands of strings, each with a length of its own."""
    return {"properties": {f"p{number}": {"type": "string", "maxLength": 1000 + number} for number in range(3000)}}


def counted_schema() -> Body:
    """Properties of which at least one has to be there."""
    return {"properties": {f"p{n}": {} for n in range(64)}, "minProperties": 1, "additionalProperties": False}


def deep_schema() -> Body:
    """Objects, each in the next, by references."""
    steps = {f"d{n}": {"properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(1300)}
    return {"$ref": "#/$defs/d0", "$defs": {**steps, "d1300": {"type": "null"}}}


CASES = [
    Case("an ambiguous grammar, 8 answers", "500 items in a row", COMPLETION, lambda: by_grammar(AMBIGUOUS, n=8)),
    Case(
        "the same with 16 drafts a round",
        "masks within `max_wait_ms` a round",
        COMPLETION,
        lambda: by_grammar(AMBIGUOUS, n=8, speculation={"mode": "fixed", "gamma": 16}),
    ),
    Case("a grammar with many lexer states", "50,000 states", COMPLETION, lambda: by_grammar(EXPONENTIAL, n=8)),
    Case(
        "a grammar of 32 KiB",
        "32 KiB, 500 rules",
        COMPLETION,
        lambda: by_grammar("root ::= " + " | ".join(f'"{n:05}"' for n in range(2900))),
    ),
    Case("3,000 strings of different lengths", "4,000 subschemas", COMPLETION, lambda: schema(wide_schema())),
    Case("64 counted properties", "64 counted properties", COMPLETION, lambda: schema(counted_schema())),
    Case("a chain of 1,300 references", "4,000 subschemas", COMPLETION, lambda: schema(deep_schema())),
    Case("arrays that only open, 8 answers", "64 layouts", COMPLETION, lambda: schema({"type": "array"}, n=8)),
    Case("a prompt of a megabyte of spaces", "its length", COMPLETION, lambda: {"prompt": " " * 1_000_000}),
    Case("a prompt of 500 kB of spaces", "tokenised beside rounds", COMPLETION, lambda: {"prompt": " " * 500_000}),
    Case(
        "128 prompts of 7 kB",
        "1 MiB of body",
        COMPLETION,
        lambda: {"prompt": [f"{n}" + "=-" * 3_500 for n in range(128)], "max_tokens": 1},
    ),
    Case(
        "a prediction of a megabyte",
        "8 bytes a token of the context",
        COMPLETION,
        lambda: {"prompt": "a", "prediction": {"type": "content", "content": " " * 1_000_000}},
    ),
    Case(
        "16 stop strings of 1,000 characters, 8 answers",
        "a table each",
        COMPLETION,
        lambda: {"prompt": " " * 3000, "n": 8, "max_tokens": 100, "stop": stop_strings(), "ignore_eos": True},
    ),
    Case(
        "1,024 biases, 8 answers",
        "1,024",
        COMPLETION,
        lambda: {"prompt": "a", "n": 8, "max_tokens": 50, "logit_bias": {str(n): 1 for n in range(1024)}},
    ),
    Case("a megabyte of unknown fields in a message", "the first", CHAT, lambda: {"messages": [unknown("a")]}),
    Case("20,000 messages", "1 MiB of body", CHAT, lambda: {"messages": [{"role": "user", "content": ""}] * 20_000}),
    Case("25,000 parts of a message", "1 MiB", CHAT, lambda: chat([{"type": "text", "text": "a"}] * 25_000)),
    Case("128 answers", "slots in turn", CHAT, lambda: chat(n=128)),
    Case(
        "20 alternatives everywhere, 8 answers",
        "8 MiB of response",
        CHAT,
        lambda: chat(" " * 3000, n=8, max_tokens=200, logprobs=True, top_logprobs=20),
    ),
    Case(
        "best_of, echo and log-probabilities together",
        "8 MiB of response",
        COMPLETION,
        lambda: {"prompt": "a b " * 900, "best_of": 20, "n": 8, "echo": True, "logprobs": 5, "max_tokens": 20},
    ),
    Case(
        "a whole answer by a grammar behind a megabyte of body",
        "handed over once",
        COMPLETION,
        lambda: by_grammar("root ::= [a-z ]{2000}", user="x" * 1_000_000, max_tokens=100),
    ),
]


@contextmanager
def slow_connections(port: int, count: int) -> Iterator[None]:
    """So many clients that send a request a byte a second."""
    request = f"POST /predictions/qwen/1.0/{COMPLETION} HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n".encode()
    sockets = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(count)]
    ends = threading.Event()

    def send() -> None:
        for byte in request * 10:
            for one in sockets:
                one.sendall(bytes([byte]))
            if ends.wait(1):
                return

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
        for one in sockets:
            one.close()


class Measure:
    """Sends cases beside a stream, and notes what they cost."""

    def __init__(self, endpoint: Endpoint, stream: Stream, port: int, seconds: float) -> None:
        self._endpoint = endpoint
        self._stream = stream
        self._port = port
        self._seconds = seconds

    def alone(self, name: str, limit: str) -> dict[str, Any]:
        """The stream by itself, for five seconds."""
        begun, held = time.monotonic(), memory(self._port)
        time.sleep(5)
        return {"case": name, "limit": limit, "answer": "", **self._costs(begun, held), "kilobytes_out": 0}

    def case(self, one: Case) -> dict[str, Any]:
        """One request, to its answer or until its client leaves."""
        body = json.dumps(one.body())
        begun, held = time.monotonic(), memory(self._port)
        size = 0
        try:
            response = requests.post(
                f"{self._endpoint.url}/{one.route}",
                data=body,
                headers={"Content-Type": "application/json"},
                timeout=self._seconds,
            )
        except (requests.exceptions.Timeout, requests.exceptions.ConnectionError):
            # The second where the body had begun to come.
            outcome = "left"
        else:
            outcome, size = str(response.status_code), len(response.content)
            if response.status_code == requests.codes.ok and "error" in response.json():
                outcome += ", " + str(response.json()["error"]["code"])
        costs = self._costs(begun, held)
        return {
            "case": one.name,
            "limit": one.limit,
            "answer": outcome,
            **costs,
            "kilobytes_out": round(size / 1000),
        }

    def _costs(self, begun: float, held: int) -> dict[str, Any]:
        ended = time.monotonic()
        # What an answer holds up may be seen a piece later.
        time.sleep(0.5)
        return {
            "seconds": round(ended - begun, 2),
            "longest_pause": round(self._stream.longest_pause(begun, ended), 3),
            "mebibytes": memory(self._port) - held,
        }


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    kv_len = [
        row["answer"],
        f"{row['seconds']:.1f}",
        f"{row['longest_pause']:.2f}",
        row["mebibytes"],
        row["kilobytes_out"],
    ]
    print(f"| {row['case']} | {row['limit']} | " + " | ".join(map(str, kv_len)) + " |", flush=True)


def main() -> None:
    """Run all cases, or those with a word, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="a model YAML")
    parser.add_argument("--port", type=int, default=PORT, help=f"five ports from this one on (default: {PORT})")
    parser.add_argument("--running", action="store_true", help="a server without tokens listens there already")
    parser.add_argument("--only", nargs="*", default=[""], help="cases with one of these words in their name")
    parser.add_argument("--seconds", type=float, default=20, help="how long a client waits (default: 20)")
    options = parser.parse_args()
    rows = []
    with ExitStack() as stack:
        if options.running:
            inference = State.of(options.port).ports.inference
            endpoint = Endpoint("specserve", f"http://127.0.0.1:{inference}/predictions/qwen/1.0")
        else:
            endpoint = start_ours(stack, options.config, options.port)
        stream = Stream(endpoint.url)
        reader = threading.Thread(target=stream.read)
        reader.start()
        stack.callback(reader.join)
        stack.callback(stream.ends.set)
        while not stream.pieces:
            time.sleep(0.1)
        measure = Measure(endpoint, stream, options.port, options.seconds)
        print("| request | held by | answer | seconds | longest pause beside it, s | MB more | kB out |")
        rows.append(measure.alone("none: the stream alone", ""))
        show(rows[-1])
        for one in CASES:
            if any(word in one.name for word in options.only):
                rows.append(measure.case(one))
                show(rows[-1])
        if any(word in "connections" for word in options.only):
            with slow_connections(options.port, 100):
                rows.append(measure.alone("100 connections that send a byte a second", "TorchServe's front end"))
            show(rows[-1])
    print(json.dumps({"benchmark": "worst_cases", "machine": describe_machine(), "rows": rows}))


if __name__ == "__main__":
    main()
