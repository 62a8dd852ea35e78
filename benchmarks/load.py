"""What does each client get when several send requests at once over HTTP, from this server and from llama-server?

Clients stream completions of prompts that share no prefix. Each client sends its next request when the last one is
answered. The servers take turns, so that all are measured within the same minutes. `--mixed` measures instead how long
short prompts wait for their first token beside the prefill of a long one.

    .venv/bin/python benchmarks/load.py [--quick] [--config FILE] [--clients 1 2 4 8] [--results FILE]
        [--settings NAME ...]
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import median, quantiles

from common import CHAT, ResultsFile, Row, argument_parser, print_result, print_table, served
from peer_engines import SETTINGS, Job, start
from servers import SLOTS, Answer, Endpoint, random_words, server_stack, start_specserve, stream, unique_prompts
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
# Tokens of an answer whose first one counts.
SHORT_ANSWER = 4
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


def closed_loop(endpoint: Endpoint, *, clients: int, number: int, max_tokens: int) -> list[Answer]:
    """`clients` clients share `number` requests; each sends its next one when the last one is answered."""
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda prompt: stream(endpoint, prompt, max_tokens), unique_prompts(number)))


def closed_loops(clients: Iterable[int], requests_each: int = 2, max_tokens: int = 96) -> dict[str, Load]:
    """Loads by name: numbers of clients, the requests of each client in a turn, and the tokens of an answer."""
    return {
        f"{count} clients": partial(closed_loop, clients=count, number=requests_each * count, max_tokens=max_tokens)
        for count in clients
    }


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


def main() -> None:
    quick = "1 and 4 clients, one turn, by default without other servers"
    parser = argument_parser(__doc__, quick=quick, port=9800, resumable=True)
    parser.add_argument("--clients", nargs="*", type=int, help="clients at a time (default: 1 2 4 8 16)")
    parser.add_argument("--requests", type=int, default=2, help="of each client in a turn")
    parser.add_argument("--turns", type=int, help="of every server under each load (default: 2)")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer")
    of_others = f"of other servers (default: {', '.join(OTHERS)}; --quick: none)"
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, metavar="NAME", help=of_others)
    parser.add_argument("--mixed", action="store_true", help="measure short prompts beside a long one instead")
    options = parser.parse_args()
    clients = options.clients if options.clients is not None else ((1, 4) if options.quick else CLIENTS)
    default = () if options.quick else OTHERS
    results = ResultsFile(options.results)
    with server_stack() as stack:
        settings = default if options.settings is None else options.settings
        others, failures = start(stack, Job.of(options.config, SLOTS), settings)
        ours = start_specserve(stack, options.config, options.port)
        modes = specserve_modes(ours)
        for endpoint in [*modes, *others]:
            checked(endpoint, stream(endpoint, unique_prompts(1)[0], 8))
        if options.mixed:
            rows = measure_mixed([ours, *others], options.turns or (1 if options.quick else 5), PREFILL_ROWS)
        else:
            turns = options.turns or (1 if options.quick else 2)
            loads = closed_loops(clients, options.requests, options.max_tokens)
            measures = {load: partial(take_turns, load, [*modes, *others], turn, turns) for load, turn in loads.items()}
            rows = [row for load, measure in measures.items() for row in results.measured([load], measure)]
    print_table("streams", rows, omit=["first_error"])
    print_result("load", served(options.config), rows, [*NOTES, *failures])


if __name__ == "__main__":
    main()
