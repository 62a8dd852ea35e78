"""What do prompts of 1,000 to 16,000 tokens cost here, on llama-server and on ik_llama.cpp's server?

Over HTTP, of each length: the first token of a new prompt; the speed of the answer, of which most is in the prompt; the
first token of a second turn; and that of a third one, after other prompts have taken its place in our pool. Prompts are
parts of Python's own library, as the interpreter has it. Servers take turns of a request.

    .venv/bin/python benchmarks/long_prompts.py [--quick] [--config FILE] [--lengths N ...] [--ours]
        [--settings NAME ...] [--port P] [--results FILE]
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
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
from library_prompts import Library, Prompt
from load import checked, specserve_modes
from peer_engines import Job, start
from servers import Answer, Endpoint, specserve_processes, start_specserve, stream
from specserve.cli.archive import prepared_document
from specserve.engine.llama_model import LlamaModel

LENGTHS, QUICK_LENGTHS = (1024, 4096, 8192, 16384), (1024, 4096)
PLAIN = "llama-server plain"
SETTINGS = (PLAIN, "ik_llama.cpp plain")
# Tokens of a context, and of our pool.
ROOM = 32_768
# The least tokens of a prompt.
SHORTEST = 128
# Answers and second turns of a conversation.
REPEATS = 3
# New prompts of a length, at most, and their tokens; one may have more.
NEW_PROMPTS, NEW_TOKENS = 3, 8192
# Tokens of an answer whose speed counts, and of one whose first token counts.
ANSWER, SHORT_ANSWER = 128, 4
# Tokens of each prompt that takes the place of the conversations in our pool.
OTHER = 4096
STARTED = perf_counter()
IGNORE_END = {"ignore_eos": True}
NEXT = "{before}{answer}<|im_end|>\n" + CHAT.format(prompt="{number} short tests of this function, please.")
NOTES = (
    "prefill: seconds to the first token of a new prompt, by its tokens",
    "speed: tokens of an answer by the seconds from the request to its last chunk, the prompt being cached",
    "greedy, without ends; one sequence, on servers of one slot",
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


@dataclass
class Run:
    """Our server in mode auto and off, the settings of the others, the file of results, and notes."""

    job: Job
    settings: Sequence[str]
    results: ResultsFile
    notes: list[str]
    ours: list[Endpoint]
    processes: Sequence[psutil.Process]

    def measured(self, key: list[Any], measure: Callable[[], Any]) -> Any:
        """What is measured, unless the file has it, with a note where other processes computed meanwhile."""
        if key not in self.results:
            self.results.add(key, with_interference(measure, self.processes))
        value, others = self.results[key]
        if others > MAX_INTERFERENCE:
            self.notes.append(f"{' '.join(map(str, key[:2]))}: other processes used {others:.0%} of a core meanwhile")
        return value

    def peers(self, stack: ExitStack, job: Job) -> list[Endpoint]:
        """The other servers, with prompts cached."""
        processes, failures = start(stack, job, self.settings)
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


def main() -> None:
    """Measure all lengths and print a table and one JSON object."""
    parser = argument_parser(__doc__, quick="prompts of 1,024 and 4,096 tokens")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="N", help=f"of prompts (default: {LENGTHS})")
    parser.add_argument("--ours", action="store_true", help="without the other servers")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS, help="of other servers")
    parser.add_argument("--port", type=int, default=9800, help="the first of five free ports")
    parser.add_argument("--results", type=Path, help="file that keeps what is measured, from which a run is resumed")
    options = parser.parse_args()
    lengths = sorted(options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS))
    if not SHORTEST <= lengths[0] <= lengths[-1] <= ROOM // 2:
        parser.error(f"--lengths: {SHORTEST} to {ROOM // 2} tokens")
    # Without this a terminated run would leave the servers running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as stack:
        config = with_room(options.config, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        job = Job.of(config, slots=1)
        model = LlamaModel(job.target)
        library = Library(model)
        conversations = {
            length: [library.edit(length) for _ in range(max(1, min(NEW_PROMPTS, NEW_TOKENS // length)))]
            for length in lengths
        }
        others = [library.edit(OTHER) for _ in range(-(-ROOM // OTHER))]
        model.close()
        modes = specserve_modes(start_specserve(stack, config, options.port))
        run = Run(
            job,
            () if options.ours else options.settings,
            ResultsFile(options.results),
            list(NOTES),
            [warmed(replace(mode, extra=mode.extra | IGNORE_END)) for mode in modes],
            specserve_processes(options.port),
        )
        rows = run.conversations(conversations, others)
        print_table("conversations", rows)
    print(*run.notes, sep="\n")
    files = {"target": job.target.name, "draft": job.draft.name if job.draft else None}
    print_result("long_prompts", files, rows, run.notes)


if __name__ == "__main__":
    main()
