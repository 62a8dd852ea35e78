"""How long is the longest pause of a client's stream during another client's request, and what memory does that take?

Every quantity that a request controls has a case, sent through TorchServe while a second client reads a stream, and
named after the limit that holds it. A pause counts whole, with the round that it stands for: the first line is the
stream alone. Beside cases for newcomers that client sends short prompts instead, one after the other, and waits for
their first tokens. A client that is not answered in time leaves. RESULTS.md has the longest.

    .venv/bin/python benchmarks/worst_cases.py [--config FILE] [--quick] [--port P] [--only WORD ...]
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import requests

from common import Row, argument_parser, print_result, print_table, served, with_progress
from servers import Endpoint, random_words, server_stack, start_specserve

Body = dict[str, Any]

# Pieces of a stream after which a case begins.
BEGUN = 5
# The most drafts a round that a request may ask for, `max_gamma` of the published configurations.
MOST_DRAFTS = 15
CHAT, COMPLETION = "v1/chat/completions", "v1/completions"
AMBIGUOUS = 'root ::= root root | root root root | "a"'
# Tokens of a long prompt, and of one that nearly fills the context of 32,768.
LONG, LONGEST = 4_000, 30_000
EXPONENTIAL = 'root ::= ([a-y ]{1,900} | [b-y ]{1,900} | ([ac-y ] [a-y ]{5,900}){1,90}) "z" [a-y]{900}'


@dataclass(frozen=True)
class Case:
    """A request, and the limit that holds it."""

    name: str
    limit: str
    body: Callable[[], Body]
    route: str = COMPLETION
    copies: int = 1  # sent at the same time, each by a client of its own
    # Whether the prompt is in the cache, since reading it takes longer than clients wait: all answers begin at once.
    cached: bool = False
    displaced: bool = False  # whether another prompt of that length has then taken its place in the KV cache
    newcomers: bool = False  # whether the other client sends short prompts


class Stream:
    """A second client, who reads a stream all the while, or sends short prompts: when its pieces came.

    Every case has one of its own, that has begun: how long a new stream waits for its turn is no pause.
    """

    def __init__(self, url: str, *, newcomers: bool) -> None:
        self._url = url
        self._newcomers = newcomers
        self._pieces: list[float] = []
        self._leaves = threading.Event()
        self._reader = threading.Thread(target=self._read)

    def __enter__(self) -> Self:
        self._reader.start()
        while len(self._pieces) < BEGUN:
            if not self._reader.is_alive():
                raise RuntimeError("the second client's stream ended before it began")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._leaves.set()
        self._reader.join()

    def _read(self) -> None:
        self._read_one()
        while self._newcomers and not self._leaves.is_set():
            self._read_one()

    def _read_one(self) -> None:
        body = {
            "prompt": random_words(10) if self._newcomers else "Once upon a time there was a king who",
            "max_tokens": 1 if self._newcomers else 4000,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "speculation": {"mode": "off"},
        }
        with requests.post(f"{self._url}/{COMPLETION}", json=body, stream=True, timeout=600) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line:
                    self._pieces.append(time.monotonic())
                if self._leaves.is_set():
                    return

    def longest_gap(self, begun: float, ended: float) -> float:
        """Seconds between two pieces, of which the first came before the end and the second after the beginning."""
        pieces = [begun, *(piece for piece in self._pieces if begun <= piece), time.monotonic()]
        gaps = [after - before for before, after in pairwise(pieces) if before <= ended]
        return max(gaps)


def schema(text: Body, **fields: Any) -> Body:
    form = {"type": "json_schema", "json_schema": {"name": "any", "schema": text}}
    return {"prompt": "[[[[[[[[", "max_tokens": 1000, "response_format": form, **fields}


def by_grammar(grammar: str, **fields: Any) -> Body:
    return {"prompt": "a" * 32, "max_tokens": 1000, "grammar": grammar, **fields}


def chat(content: Any = "Hi", **fields: Any) -> Body:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 16, **fields}


def calls(tools: dict[str, Body], **fields: Any) -> Body:
    """A chat that has to call one of these tools, by name and the schema of its arguments."""
    sent = [{"type": "function", "function": {"name": name, "parameters": text}} for name, text in tools.items()]
    return chat(tools=sent, **{"tool_choice": "required", "max_tokens": 200, **fields})


def stop_strings() -> list[str]:
    """One that holds everything back, and fifteen that hold nearly nothing."""
    return [" " * 999 + "b", *(" " * length + "b" * (1000 - length) for length in range(1, 16))]


def wide_schema() -> Body:
    """Thousands of strings, each with a length of its own."""
    return {"properties": {f"p{number}": {"type": "string", "maxLength": 1000 + number} for number in range(3000)}}


def tree(number: int) -> Body:
    """A schema that contains itself, in objects and lists."""
    return {"properties": {f"p{number}": {"$ref": "#"}, "more": {"type": "array", "items": {"$ref": "#"}}}}


def wide_arguments() -> Body:
    """Two hundred kilobytes of properties."""
    return {"properties": {f"property{n}": {"enum": [f"value{n}-{m}" for m in range(10)]} for n in range(1300)}}


def long_strings() -> Body:
    """Strings whose lengths have to be counted, in an array of at least so many."""
    text = {"type": "string", "pattern": "^([a-y ]{1,30} ?){1,30}$", "minLength": 500, "maxLength": 900}
    return {"type": "array", "minItems": 1000, "items": text}


def many_prompts() -> Body:
    return {"prompt": [f"{n}" + "=-" * 3_500 for n in range(128)], "max_tokens": 1}


def new_prompt(tokens: int) -> Body:
    return {"prompt": random_words(tokens), "max_tokens": 1}


def repeated(prompt: str, **fields: Any) -> Body:
    """Eight greedy answers to a prompt that repeats itself, with as many drafts as a request may ask for."""
    options = {"mode": "fixed", "gamma": MOST_DRAFTS, **fields.pop("speculation", {})}
    return {"prompt": prompt, "n": 8, "max_tokens": 100, "ignore_eos": True, "speculation": options, **fields}


def sampled() -> Body:
    """Eight answers for whose every token the whole vocabulary is sorted."""
    cuts = {"temperature": 2, "top_k": 150_000, "top_p": 0.999, "min_p": 1e-9, "seed": 1}
    penalties = {"presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.1}
    return repeated("a b c " * 500, speculation={"drafter": "model"}) | {"max_tokens": 50} | cuts | penalties


CASES = [
    Case(
        "an ambiguous grammar, 15 drafts, 8 answers",
        "masks within `max_wait_ms` a round",
        lambda: by_grammar(AMBIGUOUS, n=8, speculation={"mode": "fixed", "gamma": MOST_DRAFTS}),
    ),
    Case("a grammar with many lexer states", "50,000 states", lambda: by_grammar(EXPONENTIAL, n=8)),
    Case("3,000 strings of different lengths", "4,000 subschemas", lambda: schema(wide_schema())),
    Case(
        "an enumeration of 17,000 words", "256 KiB", lambda: schema({"enum": [f"w{n:06}" for n in range(17_000)]}, n=8)
    ),
    Case("long strings by a pattern, 8 answers", "50,000 states", lambda: schema(long_strings(), n=8)),
    Case(
        "400 tools, 8 answers", "500 items in a row", lambda: calls({f"t{n}": {} for n in range(400)}, n=8), route=CHAT
    ),
    Case("a tool of 200 kB", "the context, 256 KiB of schemas", lambda: calls({"t": wide_arguments()}), route=CHAT),
    Case(
        "40 recursive tools, 8 answers",
        "llguidance's limits",
        lambda: calls({f"t{n}": tree(n) for n in range(40)}, n=8),
        route=CHAT,
    ),
    Case(
        "newcomers beside a prompt of a megabyte of spaces",
        "its length",
        lambda: {"prompt": " " * 1_000_000},
        newcomers=True,
    ),
    Case("a prompt of 500 kB of spaces", "tokenised beside rounds", lambda: {"prompt": " " * 500_000}),
    Case(
        "128 prompts of 7 kB",
        "1 MiB of body",
        many_prompts,
    ),
    Case(
        "a prediction and a prompt of one word, 15 drafts, 8 answers",
        "drafts as `max_wait_ms` allows",
        lambda: repeated("a " * 3000, prediction={"type": "content", "content": "a " * 3000}),
        cached=True,
    ),
    Case(
        "a lookup in a prompt of one word, 15 drafts, 8 answers",
        "an index a prompt, 32,768 tokens a round",
        lambda: repeated("a " * 3900),
        cached=True,
    ),
    Case(
        "15 drafts a round by a model, 8 answers",
        "drafts as `max_wait_ms` allows",
        lambda: repeated("Once upon a time", speculation={"drafter": "model"}, seed=1),
    ),
    Case(
        "newcomers beside a prompt of 4,000 tokens",
        "prefills share a round",
        lambda: new_prompt(LONG),
        newcomers=True,
    ),
    Case(
        "newcomers beside a prompt of 30,000 tokens",
        "prefills share a round",
        lambda: new_prompt(LONGEST),
        newcomers=True,
    ),
    Case(
        "a prefix of 30,000 tokens that comes back from host memory",
        "copied within `max_wait_ms` a round",
        lambda: new_prompt(LONGEST),
        cached=True,
        displaced=True,
    ),
    Case(
        "every field of sampling, 15 drafts, 8 answers",
        "drafts as `max_wait_ms` allows",
        sampled,
    ),
    Case(
        "16 stop strings of 1,000 characters, 8 answers",
        "a table each",
        lambda: {"prompt": " " * 3000, "n": 8, "max_tokens": 100, "stop": stop_strings(), "ignore_eos": True},
    ),
    Case(
        "20 alternatives everywhere, 8 answers",
        "8 MiB of response",
        lambda: chat(" " * 3000, n=8, max_tokens=200, logprobs=True, top_logprobs=20),
        route=CHAT,
    ),
    Case(
        "echo and log-probabilities together, 20 answers",
        "8 MiB of response",
        lambda: {"prompt": "a b " * 900, "n": 8, "echo": True, "logprobs": 5, "max_tokens": 20},
    ),
    Case(
        "a whole answer by a grammar behind a megabyte of body",
        "handed over once",
        lambda: by_grammar("root ::= [a-z ]{2000}", user="x" * 1_000_000, max_tokens=100),
    ),
    Case(
        "a megabyte that is a dense list, from 12 clients",
        "`batchSize`, 1 MiB of body",
        lambda: chat([[]] * 260_000),
        copies=12,
        route=CHAT,
    ),
    Case(
        "bodies of a megabyte that take long to read, from 12 clients",
        "handed over until they are read",
        many_prompts,
        copies=12,
    ),
    Case(
        "whole answers behind 60 kB of body, from 12 clients",
        "2 s until their status is open",
        lambda: by_grammar("root ::= [a-z ]{2000}", user="x" * 60_000, max_tokens=100),
        copies=12,
    ),
]


class Measure:
    """Sends cases beside a stream, and notes what they cost."""

    def __init__(self, endpoint: Endpoint, seconds: float) -> None:
        self._endpoint = endpoint
        self._seconds = seconds

    def case(self, one: Case) -> Row:
        """One request, or copies of it, to the answer or until the client leaves."""
        # A case that the client has left may still be running.
        while requests.get(f"{self._endpoint.url}/v1/speculation", timeout=60).json()["sequences"]["live"]:
            time.sleep(0.1)
        sent = one.body()
        body = json.dumps(sent)
        for before in [sent] * one.cached + [one.body()] * one.displaced:
            first = before | {"n": 1, "max_tokens": 1}
            requests.post(f"{self._endpoint.url}/{one.route}", json=first, timeout=600).raise_for_status()

        def send() -> str:
            with ThreadPoolExecutor(one.copies) as pool:
                outcomes = Counter(pool.map(lambda _: self._send(one.route, body), range(one.copies)))
            if one.copies == 1:
                return next(iter(outcomes))
            return ", ".join(f"{count} times {outcome}" for outcome, count in outcomes.items())

        return self.beside(one.name, send, one.limit, newcomers=one.newcomers)

    def _send(self, route: str, body: str) -> str:
        url, headers = f"{self._endpoint.url}/{route}", {"Content-Type": "application/json"}
        try:
            response = requests.post(url, data=body, headers=headers, timeout=self._seconds)
        except (requests.exceptions.Timeout, requests.exceptions.ConnectionError):
            # The second where the body had begun to come.
            return "left"
        outcome = str(response.status_code)
        if response.status_code == requests.codes.ok and "error" in response.json():
            outcome += ", " + str(response.json()["error"]["code"])
        return outcome

    def beside(self, name: str, act: Callable[[], str], limit: str = "", *, newcomers: bool) -> Row:
        """One row of the table: what an act has brought, and what it cost."""
        with Stream(self._endpoint.url, newcomers=newcomers) as stream:
            begun, held = time.monotonic(), self._endpoint.resident_mib()
            answer = act()
            ended = time.monotonic()
            # What an answer holds up may be seen a piece later.
            time.sleep(0.5)
            return {
                "case": name,
                "limit": limit,
                "newcomers": newcomers,
                "answer": answer,
                "seconds": round(ended - begun, 2),
                "longest_gap": round(stream.longest_gap(begun, ended), 3),
                "mebibytes": self._endpoint.resident_mib() - held,
            }


def wait() -> str:
    """Leave the other client by itself."""
    time.sleep(5)
    return ""


def main() -> None:
    parser = argument_parser(__doc__, quick="clients wait for 5 seconds", port=9080)
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose names contain one of these words")
    options = parser.parse_args()
    with server_stack() as stack:
        measure = Measure(start_specserve(stack, options.config, options.port), 5 if options.quick else 20)
        rows = [measure.beside("none: the other stream alone", wait, newcomers=False)]
        rows.append(measure.beside("none: newcomers alone", wait, newcomers=True))
        cases = [case for case in CASES if any(word in case.name for word in options.only)]
        rows += [measure.case(case) for case in with_progress(cases, "cases")]
    print_table("requests, and the longest gap of the other stream or wait of a newcomer", rows, omit=["newcomers"])
    print_result("worst_cases", served(options.config), rows, ["seconds; MiB of the worker's resident memory"])


if __name__ == "__main__":
    main()
