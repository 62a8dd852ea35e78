"""What do prompts of 1,000 to 16,000 tokens cost here, on llama-server and on ik_llama.cpp's server?

`passes`: a pass of one and of eight rows of our engine after so many tokens, in a process of its own. `conversations`,
over HTTP: the first token of a new prompt; the speed of the answer, of which most is in the prompt; the first token of
a second turn; and that of a third one, after other prompts have taken its place in our pool. `clients`: eight clients
whose prompts begin alike. Prompts are parts of Python's own library, as the interpreter has it. Servers take turns of a
request, in `clients` of a load.

    .venv/bin/python benchmarks/long_prompts.py [--quick] [--config FILE] [--lengths N ...] [--parts NAME ...] [--ours]
        [--settings NAME ...] [--port P] [--results FILE]
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import psutil
import yaml

from common import (
    CHAT,
    MAX_INTERFERENCE,
    ResultsFile,
    Row,
    argument_parser,
    print_result,
    print_table,
    with_interference,
)
from cost_curve import CONTEXT, ENGINES, PASSES_PER_TURN, SETTLE_SECONDS, Worker
from library_prompts import Library, Prompt
from load import checked, specserve_modes, take_turns
from pass_worker import Pass, Setting
from peer_engines import Job, start
from servers import Answer, Endpoint, specserve_processes, start_specserve, stream
from specserve.cli.archive import prepared_document
from specserve.engine.llama_model import LlamaModel

LENGTHS, QUICK_LENGTHS = (1024, 4096, 8192, 16384), (1024, 4096)
PARTS = PASSES, CONVERSATIONS, CLIENTS = "passes", "conversations", "clients"
QUICK_PARTS = (PASSES, CONVERSATIONS)
PLAIN = "llama-server plain"
SETTINGS = (PLAIN, "ik_llama.cpp plain")
# Tokens of a context, and of our pool.
ROOM = 32_768
# The least tokens of a prompt, and the rows of passes.
SHORTEST, ROWS = 128, (1, 8)
# Turns of the passes; answers and second turns of a conversation.
TURNS, REPEATS = 5, 3
# New prompts of a length, at most, and their tokens; one may have more.
NEW_PROMPTS, NEW_TOKENS = 3, 8192
# Tokens of an answer whose speed counts, and of one whose first token counts.
ANSWER, SHORT_ANSWER = 128, 4
# Tokens of each prompt that takes the place of the conversations in our pool.
OTHER = 4096
# Clients, what each sends, and tokens: those that all prompts share, those of each alone, and those of an answer.
NUMBER, REQUESTS_EACH, SHARED, OWN, CLIENT_ANSWER = 8, 2, 3500, 500, 96
# Of each client on the other servers; their caches in host memory, in MiB.
CLIENT_ROOM, CACHE_OPTIONS = 8192, ("--cache-ram", "8192")
STARTED = perf_counter()
IGNORE_END = {"ignore_eos": True}
NEXT = "{before}{answer}<|im_end|>\n" + CHAT.format(prompt="{number} short tests of this function, please.")
NOTES = (
    "prefill: seconds to the first token of a new prompt, by its tokens",
    "speed: tokens of an answer by the seconds from the request to its last chunk, the prompt being cached",
    "greedy, without ends, in `clients` without control tokens; in conversations one sequence, on servers of one slot",
    "a third turn comes after prompts that fill our pool",
)


def say(text: str) -> None:
    """Print what has been measured, and after how many seconds."""
    print(f"{perf_counter() - STARTED:6.0f} s  {text}", file=sys.stderr, flush=True)


def ratio(value: float | None, other: float | None) -> float | None:
    """A rounded ratio, if both are there."""
    return round(value / other, 3) if value and other else None


def speed(answer: Answer) -> float:
    """Tokens a second from the request on."""
    return answer.tokens / (answer.chunks[-1] - answer.sent)


def with_room(config: Path, directory: Path) -> Path:
    """Write a model YAML that differs from another in its context and its pool, of ROOM tokens each."""
    document = prepared_document(config)
    document["handler"] |= {"context_length": ROOM, "cache_tokens": ROOM}
    path = directory / config.name
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


# ---- passes ----


def measure_passes(job: Job, tokens: list[int], lengths: Sequence[int]) -> list[Row]:
    """The cost of a pass by the tokens before it and its rows, of which all have logits.

    Returns:
        Rows with `growth`, the cost as a share of that after CONTEXT tokens, and `v`, as a share of that of one row.
    """
    worker = Worker("ours-long", ENGINES["ours"](None), Setting(str(job.target), job.threads, tokens))
    seconds: dict[tuple[int, int], list[float]] = {}
    with ExitStack() as stack:
        stack.callback(worker.stop)
        for turn in range(TURNS):
            # Descending, so that the cache is filled once a turn, and then cut.
            for context in sorted({CONTEXT, *lengths}, reverse=True):
                for rows in ROWS:
                    sleep(SETTLE_SECONDS)
                    answers = [worker.ask(Pass(context, rows, rows)) for _ in range(PASSES_PER_TURN)]
                    seconds.setdefault((context, rows), []).extend(answer["seconds"][0] for answer in answers[1:])
            say(f"passes: turn {turn + 1} of {TURNS}")
    times = {key: median(values) for key, values in seconds.items()}
    return [
        {
            "tokens": context,
            "rows": rows,
            "ms": round(1000 * time, 2),
            "growth": round(time / times[CONTEXT, rows], 3),
            "v": round(time / times[context, 1], 3),
            "passes": len(seconds[context, rows]),
        }
        for (context, rows), time in sorted(times.items())
    ]


# ---- conversations ----


def first_token(endpoint: Endpoint, text: str) -> float:
    """Seconds to the first token of an answer."""
    return checked(endpoint, stream(endpoint, text, SHORT_ANSWER)).ttft


def warmed(endpoint: Endpoint) -> Endpoint:
    """A server that has answered."""
    first_token(endpoint, CHAT.format(prompt="Hello!"))
    return endpoint


def second_turn(prompt: Prompt, answer: str, number: int) -> str:
    """A conversation's text with the user's next message, one of several that differ from their first token on."""
    return NEXT.format(before=prompt.text, answer=answer, number=number)


def measure_length(length: int, prompts: list[Prompt], ours: list[Endpoint], peers: list[Endpoint]) -> Row:
    """What one length costs, by server: of the last prompt also the answer, its speed, and second turns."""
    auto, off = ours
    *_, prompt = prompts
    found: Row = {endpoint.name: {"new": [], "speed": [], "second": []} for endpoint in [auto, off, *peers]}

    def measure(what: str, endpoint: Endpoint, value: float | list[float]) -> None:
        found[endpoint.name][what].append(value)
        say(f"{length:6,} tokens, {what}: {value if isinstance(value, float) else value[1]:.2f}, {endpoint.name}")

    for new in prompts:
        for endpoint in [auto, *peers]:
            measure("new", endpoint, [new.tokens, first_token(endpoint, new.text)])
    for _ in range(REPEATS):
        for endpoint in [auto, off, *peers]:
            answer = checked(endpoint, stream(endpoint, prompt.text, ANSWER))
            measure("speed", endpoint, speed(answer))
            found[endpoint.name]["text"] = answer.text
    for number in range(REPEATS):
        for endpoint in [auto, *peers]:
            text = second_turn(prompt, found[endpoint.name]["text"], number)
            measure("second", endpoint, first_token(endpoint, text))
    return found


def measure_return(conversations: dict[int, tuple[Prompt, str]], others: list[Prompt], auto: Endpoint) -> Row:
    """Seconds to the first token of a further turn, by length, after other prompts have filled the pool."""
    for prompt, answer in conversations.values():
        # In the cache already, unless the run was resumed.
        first_token(auto, second_turn(prompt, answer, 0))
    for number, other in enumerate(others):
        first_token(auto, other.text)
        say(f"other prompts: {number + 1} of {len(others)}")
    found = {}
    for length, (prompt, answer) in conversations.items():
        found[str(length)] = first_token(auto, second_turn(prompt, answer, REPEATS))
        say(f"{length:6,} tokens, third: {found[str(length)]:.2f}, {auto.name}")
    return found


def conversation_rows(found: dict[int, Row], third: Row) -> list[Row]:
    """A row for each length and server; ratios are to llama-server, above 1 where the server is faster."""
    rows: list[Row] = []
    for length, servers in found.items():
        prefill = {
            server: median(1000 * seconds / tokens for tokens, seconds in values["new"]) if values["new"] else None
            for server, values in servers.items()
        }
        speeds = {server: median(values["speed"]) for server, values in servers.items()}
        for server, values in servers.items():
            milliseconds = prefill[server]
            row: Row = {
                "tokens": length,
                "server": server,
                "prefill_ms": milliseconds and round(milliseconds, 2),
                "prefill_ratio": ratio(prefill.get(PLAIN), milliseconds),
                "tokens_per_second": round(speeds[server], 2),
                "ratio": ratio(speeds[server], speeds.get(PLAIN)),
                "second_turn_s": round(median(values["second"]), 3) if values["second"] else None,
            }
            if server == "specserve auto":
                # The last new prompt is the first turn of the same conversation.
                _, first_turn = values["new"][-1]
                row |= {
                    "third_turn_s": round(third[str(length)], 3),
                    "third_turn_share": ratio(third[str(length)], first_turn),
                }
            rows.append(row)
    return rows


# ---- clients ----


def prompts_that_begin_alike(endpoint: Endpoint, prompts: list[Prompt]) -> list[Answer]:
    """NUMBER clients share the prompts; each sends its next one when the last one is answered."""
    with ThreadPoolExecutor(NUMBER) as pool:
        answers = list(pool.map(lambda prompt: stream(endpoint, prompt.text, CLIENT_ANSWER), prompts))
    say(f"{NUMBER} clients: {perf_counter() - min(answer.sent for answer in answers):.0f} s, {endpoint.name}")
    return answers


# ---- the run ----


@dataclass
class Run:
    """Our server in mode auto and off, the settings of the others, the file of results, and notes."""

    job: Job
    settings: Sequence[str]
    results: ResultsFile
    notes: list[str]
    # Control tokens, which have no text: a client would see a long gap.
    mute: Sequence[int] = ()
    ours: list[Endpoint] = field(default_factory=list)
    processes: Sequence[psutil.Process] = ()

    def measured(self, key: list[Any], measure: Callable[[], Any]) -> Any:
        """What is measured, unless the file has it, with a note where other processes computed meanwhile."""
        if key not in self.results:
            self.results.add(key, with_interference(measure, self.processes))
        value, others = self.results[key]
        if others > MAX_INTERFERENCE:
            self.notes.append(f"{' '.join(map(str, key[:2]))}: other processes used {others:.0%} of a core meanwhile")
        return value

    def peers(self, stack: ExitStack, job: Job, options: Sequence[str] = ()) -> list[Endpoint]:
        """The other servers, with prompts cached."""
        processes, failures = start(stack, job, self.settings, options)
        self.notes += [f"{name} did not run: {reason}" for name, reason in failures.items()]
        return [warmed(replace(process.endpoint(name), extra=IGNORE_END)) for name, process in processes.items()]

    def conversations(self, prompts: dict[int, list[Prompt]], others: list[Prompt]) -> list[Row]:
        """Measure all lengths, one after the other."""
        with ExitStack() as stack:
            peers = self.peers(stack, replace(self.job, context_length=ROOM))
            names = [peer.name for peer in peers]
            found = {
                length: self.measured(
                    ["conversation", length, names], partial(measure_length, length, of_length, self.ours, peers)
                )
                for length, of_length in prompts.items()
            }
        auto, _ = self.ours
        conversations = {length: (prompts[length][-1], found[length][auto.name]["text"]) for length in prompts}
        third = self.measured(["third", [*prompts], names], partial(measure_return, conversations, others, auto))
        return conversation_rows(found, third)

    def clients(self, prompts: list[Prompt]) -> list[Row]:
        """Measure clients whose prompts begin alike; the prefix is new to each server."""
        auto, _ = self.ours
        with ExitStack() as stack:
            peers = self.peers(stack, replace(self.job, slots=NUMBER, context_length=CLIENT_ROOM), CACHE_OPTIONS)
            load = f"{NUMBER} clients"
            turn = partial(prompts_that_begin_alike, prompts=prompts)
            biased = {"logit_bias": {str(token): -100 for token in self.mute}}
            names = [peer.name for peer in peers]
            servers = [replace(server, extra=server.extra | biased) for server in (auto, *peers)]
            rows: list[Row] = self.measured([load, names], partial(take_turns, load, servers, turn, 1))
        speeds = {row["server"]: row.get("tokens_per_second") for row in rows}
        return [row | {"ratio": ratio(speeds[row["server"]], speeds.get(PLAIN))} for row in rows]


def main() -> None:
    """Measure passes, conversations and clients, and print tables and one JSON object."""
    parser = argument_parser(__doc__, quick="prompts of 1,024 and 4,096 tokens, without `clients`")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="N", help=f"of prompts (default: {LENGTHS})")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="only these")
    parser.add_argument("--ours", action="store_true", help="without the other servers")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS, help="of other servers")
    parser.add_argument("--port", type=int, default=9800, help="the first of five free ports")
    parser.add_argument("--results", type=Path, help="file that keeps what is measured, from which a run is resumed")
    options = parser.parse_args()
    lengths = sorted(options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS))
    parts = options.parts or (QUICK_PARTS if options.quick else PARTS)
    if not SHORTEST <= lengths[0] <= lengths[-1] <= ROOM // 2:
        parser.error(f"--lengths: {SHORTEST} to {ROOM // 2} tokens")
    # Without this a terminated run would leave the servers running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as stack:
        config = with_room(options.config, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        job = Job.of(config, slots=1)
        model = LlamaModel(job.target)
        library = Library(model)
        tokens = library.take(lengths[-1] + max(ROWS))
        conversations = {
            length: [library.edit(length) for _ in range(max(1, min(NEW_PROMPTS, NEW_TOKENS // length)))]
            for length in lengths
        }
        others = [library.edit(OTHER) for _ in range(-(-ROOM // OTHER))]
        alike = library.alike(NUMBER * REQUESTS_EACH, SHARED, OWN)
        mute = [token for token in range(model.size) if model.name(token) and not model.piece(token)]
        model.close()
        run = Run(job, () if options.ours else options.settings, ResultsFile(options.results), list(NOTES), mute)
        passes, rows, clients = [], [], []
        if PASSES in parts:
            passes = run.measured([PASSES, lengths], partial(measure_passes, job, tokens, lengths))
            print_table("passes of our engine", passes)
        if {CONVERSATIONS, CLIENTS} & {*parts}:
            modes = specserve_modes(start_specserve(stack, config, options.port))
            run.ours = [warmed(replace(mode, extra=mode.extra | IGNORE_END)) for mode in modes]
            run.processes = specserve_processes(options.port)
        if CONVERSATIONS in parts:
            rows = run.conversations(conversations, others)
            print_table("conversations", rows)
        if CLIENTS in parts:
            clients = run.clients(alike)
            print_table("clients", clients, omit=["first_error"])
    print(*run.notes, sep="\n")
    files = {"target": job.target.name, "draft": job.draft.name if job.draft else None}
    print_result("long_prompts", files, rows, run.notes, passes=passes, clients=clients)


if __name__ == "__main__":
    main()
