"""What does each client get when several send requests at once over HTTP, from this server and from llama-server?

Clients stream completions of prompts that share no prefix. Closed loop: each client sends its next request when the
last one is answered. Open loop: requests arrive at random at a rate. The servers take turns, so that all are measured
within the same minutes. `--mixed` measures instead how long short prompts wait for their first token beside the
prefill of a long one, `--prefix` how a cached prompt prefix shortens that time, `--overhead` what TorchServe and HTTP
add to the handler's own time.

    .venv/bin/python benchmarks/load.py [--quick] [--config FILE] [--clients 1 2 4 8] [--rate 0.2] [--results FILE]
        [--settings NAME ...]
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import requests

from common import CHAT, ResultsFile, Row, argument_parser, print_result, print_table, read_tasks
from peer_engines import SETTINGS, Job, start
from servers import (
    SLOTS,
    Answer,
    Endpoint,
    closed_loop,
    events,
    open_loop,
    random_words,
    start_specserve,
    stream,
    unique_prompts,
)
from specserve.config import load_yaml
from specserve.core.loading import PREFILL_ROWS

CLIENTS = (1, 2, 4, 8, 16)
# Other servers; peers.py compares all.
OTHERS = ("llama-server plain", "llama-server draft 3")
NOTES = (
    "greedy streams; every prompt begins with a line of its own, so no prefix is cached",
    "gap: between two chunks with text; llama-server sends a chunk a token, specserve one or more rounds",
)
# Puts a load on a server once.
Load = Callable[[Endpoint], list[Answer]]
# Requests of one token before the overhead is measured: Java compiles its hot code meanwhile, and the overhead of one
# falls from 15 ms to 8.
WARM_UP = 200
# Texts of about 500 tokens in the shared system prompt, and the lengths of answers in tokens.
PREFIX_TEXTS, SHORT_ANSWER, LONG_ANSWER = 3, 4, 64
# Prompts of mixed lengths, in tokens, that of the chat without its template's.
LONG = "long"
LENGTHS = {"chat": 10, "completion": 200, LONG: 3900}
# Times to the first token by kind of prompt and by case, "alone" or "beside" others.
Seconds = dict[tuple[str, str], list[float]]
# Short prompts of a kind alone, a turn; and the pause after each beside a long one, in times of what its first token
# takes alone, so that short prompts have at most a fifth of the server's time.
SHORT_ALONE, PAUSES = 5, 4
# What the first token may take beside others, in times of what it takes alone; a short one a prefill chunk more.
SHORT_TIMES, LONG_TIMES = 3, 1.3


def percentile(values: list[float], percent: int) -> float:
    """A percentile; the only value where there is one."""
    return round(quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0], 4)


def wall_seconds(turn: list[Answer]) -> float:
    """From the first request of a turn to its last chunk."""
    ends = [answer.chunks[-1] for answer in turn if not answer.error]
    return max(ends) - min(answer.sent for answer in turn) if ends else 0.0


def summarise(load: str, server: str, turns: list[list[Answer]], resident_mib: int) -> Row:
    """One row of the result: a server under a load."""
    answers = [answer for turn in turns for answer in turn]
    good = [answer for answer in answers if not answer.error]
    row: Row = {"load": load, "server": server, "requests": len(answers)}
    if good:
        row["tokens_per_second"] = round(sum(answer.tokens for answer in good) / sum(map(wall_seconds, turns)), 2)
        for name, values in {
            "ttft": [answer.ttft for answer in good],
            "tpot": [answer.tpot for answer in good],
            "gap": [gap for answer in good for gap in answer.gaps],
        }.items():
            if values:
                row |= {f"{name}_s": round(median(values), 4)}
                row |= {f"{name}_p{percent}_s": percentile(values, percent) for percent in (95, 99)}
        rounds, drafted, accepted = (
            sum(answer.speculation.get(key, 0) for answer in good)
            for key in ("rounds", "drafted_tokens", "accepted_tokens")
        )
        if rounds:
            row |= {"drafted_per_round": round(drafted / rounds, 2), "accepted_per_round": round(accepted / rounds, 2)}
    errors = [answer.error for answer in answers if answer.error]
    return row | {"mib": resident_mib, "errors": len(errors), "first_error": errors[0] if errors else None}


def take_turns(load: str, endpoints: list[Endpoint], turn: Load, turns: int) -> list[Row]:
    """Put the same load on every server, one after the other, `turns` times; returns a row for each server."""
    answers: dict[str, list[list[Answer]]] = {endpoint.name: [] for endpoint in endpoints}
    resident = dict.fromkeys(answers, 0)
    for _ in range(turns):
        for endpoint in endpoints:
            answers[endpoint.name].append(turn(endpoint))
            resident[endpoint.name] = max(resident[endpoint.name], endpoint.resident_mib())
    return [summarise(load, name, answers[name], resident[name]) for name in answers]


def closed_loops(clients: Iterable[int], requests_each: int = 2, max_tokens: int = 96) -> dict[str, Load]:
    """Loads by name: numbers of clients, the requests of each client in a turn, and the tokens of an answer."""
    return {
        f"{count} clients": partial(closed_loop, clients=count, number=requests_each * count, max_tokens=max_tokens)
        for count in clients
    }


def measure(loads: dict[str, Load], endpoints: list[Endpoint], results: ResultsFile, turns: int) -> list[Row]:
    """Put every load on all servers, unless the file of results has it."""
    for load, turn in loads.items():
        if load not in results:
            results.add(load, take_turns(load, endpoints, turn, turns))
    return [row for load in loads for row in results[load]]


def specserve_modes(ours: Endpoint) -> list[Endpoint]:
    """Our server, with speculation and without; no answer is drafted from another's to the same prompt."""
    options = {mode: {"speculation": {"mode": mode, "pool": ""}} for mode in ("auto", "off")}
    return [replace(ours, name=f"specserve {mode}", extra=extra) for mode, extra in options.items()]


def checked(endpoint: Endpoint, answer: Answer) -> Answer:
    """The answer.

    Raises:
        SystemExit: the request failed.
    """
    if answer.error:
        raise SystemExit(f"{endpoint.name}: {answer.error}")
    return answer


def prefix_trial(endpoint: Endpoint) -> Row:
    """TTFT behind a system prompt of about 1,500 tokens that is new, cached, and in use by another stream."""
    texts = "\n\n".join(task.text for task in read_tasks("summarise", PREFIX_TEXTS))
    system = f"{secrets.token_hex(5)}\n{texts}"
    prompts = [f"{system}\n\n{task.text}" for task in read_tasks("chat", 4)]

    def ttft(prompt: str) -> float:
        return checked(endpoint, stream(endpoint, prompt, SHORT_ANSWER)).ttft

    found = {"cold": ttft(prompts[0]), "cached": ttft(prompts[1])}
    other = threading.Thread(target=stream, args=(endpoint, prompts[2], LONG_ANSWER))
    other.start()
    other.join(2 * found["cached"])  # until it has its first token
    found["cached_in_use"] = ttft(prompts[3])
    other.join()
    return found


def measure_prefix(endpoints: list[Endpoint], trials: int) -> list[Row]:
    """Medians over the trials of every server, in seconds and as a share of `cold`."""
    found = [[prefix_trial(endpoint) for endpoint in endpoints] for _ in range(trials)]
    rows = []
    for endpoint, results in zip(endpoints, zip(*found, strict=True), strict=True):
        seconds = {f"{case}_s": round(median(result[case] for result in results), 3) for case in results[0]}
        shares = {
            f"{case}_share": round(median(result[case] / result["cold"] for result in results), 3)
            for case in ("cached", "cached_in_use")
        }
        rows.append({"load": "prefix", "server": endpoint.name, **seconds, **shares})
    return rows


def mixed_turn(endpoint: Endpoint, seconds: Seconds) -> None:
    """Note times to the first token: alone, and while a client prefills a long prompt and another sends short ones."""
    endless = replace(endpoint, extra=endpoint.extra | {"ignore_eos": True})

    def send(prompt: str, case: str) -> None:
        text = random_words(LENGTHS[prompt])
        answer = stream(endless, CHAT.format(prompt=text) if prompt == "chat" else text, SHORT_ANSWER)
        seconds[prompt, case].append(checked(endpoint, answer).ttft)

    short = [prompt for prompt in LENGTHS if prompt != LONG]
    for prompt in [*short * SHORT_ALONE, LONG]:
        send(prompt, "alone")
    with ThreadPoolExecutor(1) as pool:
        for prompt in short:
            pause = PAUSES * median(seconds[prompt, "alone"])
            long = pool.submit(send, LONG, "beside")
            time.sleep(pause)
            while not long.done():
                send(prompt, "beside")
                time.sleep(pause)
            long.result()


def mixed_rows(server: str, seconds: Seconds, chunk: int) -> list[Row]:
    """A row for each kind of prompt: waits for the first token, and how many of those beside others are in bounds."""
    rows = []
    for prompt, tokens in LENGTHS.items():
        row: Row = {"load": "mixed lengths", "server": server, "prompt": prompt, "tokens": tokens}
        for case in ("alone", "beside"):
            values = seconds[prompt, case]
            row |= {f"{case}_s": round(median(values), 4), f"{case}_p99_s": percentile(values, 99)}
        alone, beside = median(seconds[prompt, "alone"]), seconds[prompt, "beside"]
        bound = LONG_TIMES * alone
        if prompt != LONG:
            bound = SHORT_TIMES * alone + chunk * median(seconds[LONG, "alone"]) / LENGTHS[LONG]
        row |= {"ratio": round(median(beside) / alone, 2), "bound_s": round(bound, 4)}
        rows.append(row | {"requests": len(beside), "within_bound": sum(value <= bound for value in beside)})
    return rows


def measure_mixed(endpoints: list[Endpoint], turns: int, chunk: int) -> list[Row]:
    """Rows of all servers, which take turns; a prefill chunk has so many tokens."""
    seconds: dict[str, Seconds] = {endpoint.name: defaultdict(list) for endpoint in endpoints}
    for _ in range(turns):
        for endpoint in endpoints:
            mixed_turn(endpoint, seconds[endpoint.name])
    return [row for server, found in seconds.items() for row in mixed_rows(server, found, chunk)]


def measure_overhead(endpoint: Endpoint, number: int) -> list[Row]:
    """Milliseconds that TorchServe and HTTP add: to a request of one token, and to every further call of a stream.

    The `speculation` object says how long the handler worked; the rest of the client's wait is overhead.
    """
    url = f"{endpoint.url}/v1/completions"

    def handler_seconds(event: Row) -> float:
        seconds = event["speculation"]["seconds"]
        return float(sum(seconds[part] for part in ("prefill", "draft", "target", "other")))

    def once(session: requests.Session, tokens: int) -> tuple[float, int]:
        body: Row = {"prompt": "def quicksort(items):\n", "max_tokens": tokens, "temperature": 0}
        streams = tokens > 1
        if streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        started = time.perf_counter()
        with session.post(url, json=body, stream=streams) as response:
            found = list(events(response)) if streams else [response.json()]
        seconds = time.perf_counter() - started
        return 1000 * (seconds - handler_seconds(found[-1])), max(1, len(found) - 1)

    with requests.Session() as session:
        for _ in range(WARM_UP):
            once(session, 1)
        request = [once(session, 1)[0] for _ in range(number)]
        streams = [once(session, 96) for _ in range(number)]
    calls = [(milliseconds - median(request)) / chunks for milliseconds, chunks in streams]
    rows = []
    for what, values in {"request": request, "call": calls}.items():
        low, middle, high = (round(value, 2) for value in quantiles(values, n=4))
        rows.append({"load": f"overhead of a {what}", "server": endpoint.name, "ms": middle, "spread": [low, high]})
    return rows


def main() -> None:
    """Start the servers, measure, and print a table and one JSON object."""
    parser = argument_parser(__doc__, quick="1 and 4 clients, one turn, by default without other servers")
    parser.add_argument("--port", type=int, default=9800, help="the first of five free ports")
    parser.add_argument("--clients", nargs="*", type=int, help="clients of a closed loop (default: 1 2 4 8 16)")
    parser.add_argument("--rate", nargs="*", type=float, default=[], help="requests a second of an open loop")
    parser.add_argument("--requests", type=int, default=2, help="of each client in a turn; of an open loop, times 8")
    parser.add_argument("--turns", type=int, help="of every server under each load (default: 2)")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer")
    of_others = f"of other servers (default: {', '.join(OTHERS)}; --quick, --overhead: none)"
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, metavar="NAME", help=of_others)
    parser.add_argument("--mixed", action="store_true", help="measure short prompts beside a long one instead")
    parser.add_argument("--prefix", action="store_true", help="measure cached prefixes instead")
    parser.add_argument("--overhead", action="store_true", help="measure TorchServe's overhead instead")
    parser.add_argument("--results", type=Path, help="file that keeps every load, from which a run is resumed")
    options = parser.parse_args()
    clients = options.clients if options.clients is not None else ((1, 4) if options.quick else CLIENTS)
    turns = options.turns or (1 if options.quick else 2)
    loads = closed_loops(clients, options.requests, options.max_tokens)
    number = options.requests * SLOTS
    loads |= {
        f"{rate} a second": partial(open_loop, rate=rate, number=number, max_tokens=options.max_tokens)
        for rate in options.rate
    }
    results = ResultsFile(options.results)
    _, handler = load_yaml(options.config)
    with ExitStack() as stack:
        default = () if options.quick or options.overhead else OTHERS
        settings = default if options.settings is None else options.settings
        processes, failures = start(stack, Job.of(options.config, SLOTS), settings)
        others = [process.endpoint(name) for name, process in processes.items()]
        ours = start_specserve(stack, options.config, options.port)
        modes = specserve_modes(ours)
        for endpoint in [*modes, *others]:
            checked(endpoint, stream(endpoint, unique_prompts(1)[0], 8))
        if options.overhead:
            rows = measure_overhead(ours, 5 if options.quick else 20)
        elif options.mixed:
            rows = measure_mixed([ours, *others], options.turns or (1 if options.quick else 5), PREFILL_ROWS)
        elif options.prefix:
            cached = [replace(endpoint, extra={}) for endpoint in others]
            rows = measure_prefix([ours, *cached], 1 if options.quick else 5)
        else:
            rows = measure(loads, [*modes, *others], results, turns)
    print_table("streams", rows, omit=["first_error"])
    notes = [*NOTES, *(f"{name} did not run: {reason}" for name, reason in failures.items())]
    print_result("load", {"target": handler.model_id}, rows, notes)


if __name__ == "__main__":
    main()
