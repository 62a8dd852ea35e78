"""How expensive can one request be, and how long does it interrupt another client's stream?

There is a case for every quantity that a request controls, with the limit that bounds it. Each is sent through
TorchServe while a second client reads a stream; the first row is that stream alone. A client that is not answered in
time disconnects. SECURITY.md has the table.

    .venv/bin/python benchmarks/worst_cases.py [--quick] [--config FILE] [--port P] [--running] [--only WORD ...]
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import requests

from common import argument_parser, print_result
from servers import Endpoint, specserve_endpoint, start_specserve
from specserve.config import load_yaml

Body = dict[str, Any]

PORT = 9080
CHAT, COMPLETION = "v1/chat/completions", "v1/completions"
AMBIGUOUS = 'root ::= root root | root root root | "a"'
EXPONENTIAL = 'root ::= ([a-y ]{1,900} | [b-y ]{1,900} | ([ac-y ] [a-y ]{5,900}){1,90}) "z" [a-y]{900}'


@dataclass(frozen=True)
class Case:
    """A request, and the limit that bounds it."""

    name: str
    limit: str
    route: str
    body: Callable[[], Body]


@dataclass
class Stream:
    """A second client that keeps reading streams; `chunks` are the times at which they arrived."""

    url: str
    chunks: list[float] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

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
        while not self.stopped.is_set():
            with requests.post(f"{self.url}/{COMPLETION}", json=body, stream=True, timeout=600) as response:
                for line in response.iter_lines():
                    if line:
                        self.chunks.append(time.monotonic())
                    if self.stopped.is_set():
                        return

    def longest_gap(self, begun: float, ended: float) -> float:
        """The longest gap between two chunks that overlaps the time from `begun` to `ended`, in seconds."""
        chunks = [begun, *(chunk for chunk in self.chunks if begun <= chunk), time.monotonic()]
        gaps = [after - before for before, after in pairwise(chunks) if before <= ended]
        return max(gaps)


def schema(text: Body, **fields: Any) -> Body:
    """A completion with a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "any", "schema": text}}
    return {"prompt": "[[[[[[[[", "max_tokens": 1000, "response_format": form, **fields}


def by_grammar(grammar: str, **fields: Any) -> Body:
    """A completion with a grammar."""
    return {"prompt": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "max_tokens": 1000, "grammar": grammar, **fields}


def chat(content: Any = "Hi", **fields: Any) -> Body:
    """A chat with one message."""
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 16, **fields}


def unknown(prefix: str) -> dict[str, int]:
    """Nearly a megabyte of unknown fields."""
    return {f"{prefix}{number:06}": 0 for number in range(60_000)}


def stop_strings() -> list[str]:
    """One that withholds all text, and fifteen that withhold almost none."""
    return [" " * 999 + "b", *(" " * length + "b" * (1000 - length) for length in range(1, 16))]


def wide_schema() -> Body:
    """Thousands of strings, each with another maxLength."""
    return {"properties": {f"p{number}": {"type": "string", "maxLength": 1000 + number} for number in range(3000)}}


def counted_schema() -> Body:
    """Optional properties of which at least one is required."""
    return {"properties": {f"p{n}": {} for n in range(64)}, "minProperties": 1, "additionalProperties": False}


def deep_schema() -> Body:
    """Nested objects, by references."""
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
    Case("a prompt of 500 kB of spaces", "tokenised in another thread", COMPLETION, lambda: {"prompt": " " * 500_000}),
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
    Case(
        "a megabyte of unknown fields in a message",
        "the first unknown field",
        CHAT,
        lambda: {"messages": [unknown("a")]},
    ),
    Case("20,000 messages", "1 MiB of body", CHAT, lambda: {"messages": [{"role": "user", "content": ""}] * 20_000}),
    Case("25,000 parts of a message", "1 MiB", CHAT, lambda: chat([{"type": "text", "text": "a"}] * 25_000)),
    Case("128 answers", "slots are assigned in turn", CHAT, lambda: chat(n=128)),
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
        "an answer by a grammar with a megabyte of body",
        "the body is passed on once",
        COMPLETION,
        lambda: by_grammar("root ::= [a-z ]{2000}", user="x" * 1_000_000, max_tokens=100),
    ),
]


@contextmanager
def slow_connections(port: int, count: int) -> Iterator[None]:
    """`count` clients that send a request at a byte a second."""
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
    """Sends cases beside a stream and measures their cost."""

    def __init__(self, endpoint: Endpoint, stream: Stream, seconds: float) -> None:
        self._endpoint = endpoint
        self._stream = stream
        self._seconds = seconds

    def alone(self, name: str, limit: str) -> dict[str, Any]:
        """Five seconds of the stream without a case."""
        begun, before = time.monotonic(), self._endpoint.resident_mib()
        time.sleep(5)
        return {"case": name, "limit": limit, "answer": "", **self._costs(begun, before), "kilobytes_out": 0}

    def case(self, one: Case) -> dict[str, Any]:
        """Send one request and wait for its answer or its timeout."""
        body = json.dumps(one.body())
        begun, before = time.monotonic(), self._endpoint.resident_mib()
        size = 0
        try:
            response = requests.post(
                f"{self._endpoint.url}/{one.route}",
                data=body,
                headers={"Content-Type": "application/json"},
                timeout=self._seconds,
            )
        except (requests.exceptions.Timeout, requests.exceptions.ConnectionError):
            # A ConnectionError where part of the body had arrived.
            outcome = "timed out"
        else:
            outcome, size = str(response.status_code), len(response.content)
            if response.status_code == requests.codes.ok and "error" in response.json():
                outcome += ", " + str(response.json()["error"]["code"])
        costs = self._costs(begun, before)
        return {
            "case": one.name,
            "limit": one.limit,
            "answer": outcome,
            **costs,
            "kilobytes_out": round(size / 1000),
        }

    def _costs(self, begun: float, before: int) -> dict[str, Any]:
        ended = time.monotonic()
        # A delay may show one chunk later.
        time.sleep(0.5)
        return {
            "seconds": round(ended - begun, 2),
            "longest_gap": round(self._stream.longest_gap(begun, ended), 3),
            "mebibytes": self._endpoint.resident_mib() - before,
        }


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    costs = f"{row['seconds']:.1f} | {row['longest_gap']:.2f} | {row['mebibytes']} | {row['kilobytes_out']}"
    print(f"| {row['case']} | {row['limit']} | {row['answer']} | {costs} |", flush=True)


def main() -> None:
    """Run all cases, or the selected ones, and print one JSON object."""
    parser = argument_parser(__doc__, quick="clients wait for 5 seconds")
    parser.add_argument("--port", type=int, default=PORT, help=f"five ports from this one on (default: {PORT})")
    parser.add_argument("--running", action="store_true", help="use the server without tokens that already runs there")
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose names contain one of these words")
    parser.add_argument("--seconds", type=float, help="how long a client waits (default: 20, with --quick 5)")
    options = parser.parse_args()
    rows = []
    with ExitStack() as stack:
        port = options.port
        endpoint = specserve_endpoint(port) if options.running else start_specserve(stack, options.config, port)
        stream = Stream(endpoint.url)
        reader = threading.Thread(target=stream.read)
        reader.start()
        stack.callback(reader.join)
        stack.callback(stream.stopped.set)
        while not stream.chunks:
            time.sleep(0.1)
        measure = Measure(endpoint, stream, options.seconds or (5 if options.quick else 20))
        print("| request | bounded by | answer | seconds | longest gap of the other stream, s | MiB more | kB out |")
        rows.append(measure.alone("none: the other stream alone", ""))
        show(rows[-1])
        for one in CASES:
            if any(word in one.name for word in options.only):
                rows.append(measure.case(one))
                show(rows[-1])
        if any(word in "connections" for word in options.only):
            with slow_connections(options.port, 100):
                rows.append(measure.alone("100 connections that send a byte a second", "TorchServe's front end"))
            show(rows[-1])
    _, handler = load_yaml(options.config)
    print_result("worst_cases", {"target": handler.model_id}, rows, ["seconds; MiB of the worker's resident memory"])


if __name__ == "__main__":
    main()
