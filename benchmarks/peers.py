"""How fast is this server beside llama-server and ik_llama.cpp's, for one client, with the same files and threads?

Greedy answers over HTTP. The servers take turns of a request, so that changes in the machine's speed affect all alike;
ratios are to llama-server's plain answer to the same prompt. Other servers are built the first time (peer_engines.py);
one that cannot be built or run is named with the reason. load.py compares several clients.

    .venv/bin/python benchmarks/peers.py [--quick] [--settings NAME ...] [--results FILE]
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles

from common import (
    FAMILIES,
    MAX_INTERFERENCE,
    ResultsFile,
    Row,
    Task,
    argument_parser,
    print_result,
    print_table,
    read_tasks,
    with_interference,
    with_progress,
)
from load import checked, specserve_modes
from peer_engines import SETTINGS, Job, start
from servers import Endpoint, server_stack, specserve_processes, start_specserve, stream

REQUEST_FAMILIES = ("code", "json", "prose", "chat", "summarise", "edit")
PLAIN = "llama-server plain"
QUICK_SETTINGS = (
    PLAIN,
    "llama-server draft 3",
    "llama-server ngram-simple",
    "ik_llama.cpp plain",
    "ik_llama.cpp draft 3",
)
# Our modes as decode.py names them.
MODES = {"specserve auto": "specserve adaptive", "specserve off": "specserve plain"}


def answer_in_turn(servers: Sequence[Endpoint], task: Task) -> dict[str, Row]:
    """By server, the answer's tokens, and the seconds of the prompt and after it."""
    answers = {}
    for server in servers:
        answer = checked(server, stream(server, task.text, task.max_tokens))
        answers[server.name] = {
            "text": answer.text,
            "tokens": answer.tokens,
            "seconds": answer.end - answer.chunks[0],
            "prompt_seconds": answer.ttft,
        }
    return answers


def summarise(family: str, mode: str, pairs: list[tuple[Row, Row]]) -> Row:
    """One row of the result, from pairs of a reference answer and this mode's, one for each prompt."""

    def speed(answer: Row) -> float:
        return float((answer["tokens"] - 1) / answer["seconds"])

    def speed_with_prefill(answer: Row) -> float:
        return float(answer["tokens"] / (answer["seconds"] + answer["prompt_seconds"]))

    answers = [answer for _, answer in pairs]
    ratios = [speed(answer) / speed(plain) for plain, answer in pairs]
    with_prefill = [speed_with_prefill(answer) / speed_with_prefill(plain) for plain, answer in pairs]
    low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "family": family,
        "temperature": 0.0,
        "mode": mode,
        "tokens_per_second": round(median(map(speed, answers)), 2),
        "ratio": round(median(ratios), 3),
        "ratio_with_prefill": round(median(with_prefill), 3),
        "spread": [round(low, 3), round(high, 3)],
        "prompt_seconds": round(median(answer["prompt_seconds"] for answer in answers), 3),
        "same_text": sum(answer["text"] == plain["text"] for plain, answer in pairs),
        "prompts": len(pairs),
    }


def compare(
    config: Path, settings: Sequence[str], tasks: list[Task], results: ResultsFile, port: int
) -> tuple[list[Row], list[str]]:
    found: dict[tuple[str, str], list[tuple[Row, Row]]] = {}
    disturbed = 0
    with server_stack() as stack:
        peers, failures = start(stack, Job.of(config, slots=1), settings)
        if PLAIN not in [peer.name for peer in peers]:
            raise SystemExit(f"Ratios are to {PLAIN}: {failures[0]}")
        modes = specserve_modes(start_specserve(stack, config, port))
        servers = [*(replace(mode, name=MODES[mode.name]) for mode in modes), *peers]
        answer_in_turn(servers, replace(tasks[0], max_tokens=8))
        for task in with_progress(tasks, "prompts"):
            key = [task.family, task.name, [server.name for server in servers]]
            turn = partial(answer_in_turn, servers, task)
            measure = partial(with_interference, turn, specserve_processes(port))
            answers, interference = results.measured(key, measure)
            disturbed += interference > MAX_INTERFERENCE
            for mode, answer in answers.items():
                found.setdefault((task.family, mode), []).append((answers[PLAIN], answer))
    rows = [summarise(family, mode, pairs) for (family, mode), pairs in sorted(found.items())]
    return rows, [
        "greedy, one client; seconds of the prompt count in ratio_with_prefill only",
        "n-gram drafts have their engine's default lengths; ngram-mod and ngram-cache also remember earlier prompts",
        f"{disturbed} prompts were answered while other processes used more than {MAX_INTERFERENCE:.0%} of a core",
        *failures,
    ]


def main() -> None:
    parser = argument_parser(__doc__, quick="two prompts a family, fewer settings", port=9800, resumable=True)
    parser.add_argument(
        "--settings", nargs="+", choices=SETTINGS, metavar="NAME", help=f"of other engines: {', '.join(SETTINGS)}"
    )
    parser.add_argument("--prompts", type=int, help="number of prompts of each family")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=REQUEST_FAMILIES, help="only these")
    options = parser.parse_args()
    limit = options.prompts or (2 if options.quick else None)
    tasks = [task for family in options.families for task in read_tasks(family, limit)]
    settings = dict.fromkeys([PLAIN, *(options.settings or (QUICK_SETTINGS if options.quick else SETTINGS))])
    rows, notes = compare(options.config, list(settings), tasks, ResultsFile(options.results), options.port)
    print_table("greedy decoding, ratios to llama-server plain of the same run", rows)
    print(*notes, sep="\n")
    print_result("peers", {"config": options.config.name}, rows, notes, measured="requests")


if __name__ == "__main__":
    main()
