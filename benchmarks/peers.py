"""How fast is this engine beside other CPU engines, on the same GGUF files and with the same number of threads?

Greedy answers of one client. All answer side by side: an engine works only in its turns, and the one with the shortest
answer has the next one. Ratios are to llama-server's plain answer to the same prompt. load.py compares several clients.
Engines are built the first time (peer_engines.py). One that cannot be built or run is named with the reason.

    .venv/bin/python benchmarks/peers.py [--quick] [--settings NAME ...] [--results FILE]
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

from rich.console import Console
from rich.progress import track

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
)
from decode import ADAPTIVE, FIXED, Lane, load_for_one, open_lanes
from decode import PLAIN as OURS_PLAIN
from peer_engines import SETTINGS, Job, start
from servers import Answer, ServerProcess, receive
from specserve.cli.archive import prepared_handler
from specserve.core.generation import Generation
from specserve.core.scheduler import Scheduler
from specserve.errors import EnvironmentFailure

REQUEST_FAMILIES = ("code", "json", "prose", "chat", "summarise", "edit")
PLAIN = "llama-server plain"
QUICK_SETTINGS = (
    PLAIN,
    "llama-server draft 3",
    "llama-server ngram-simple",
    "ik_llama.cpp plain",
    "ik_llama.cpp draft 3",
)
TURN_SECONDS = 1.0
# Servers beside the one that ratios are to: repacked weights and caches must fit into memory together.
SERVERS_AT_A_TIME = 4


class Ours:
    """A mode of this engine, in this process."""

    def __init__(self, lane: Lane) -> None:
        self.name = f"specserve {lane.mode.name}"
        self._lane = lane
        self._running: tuple[Scheduler, Generation] | None = None
        self._text = ""
        self._seconds = 0.0

    @property
    def done(self) -> bool:
        """Whether the answer is complete."""
        return self._running is None or not self._running[0].busy

    @property
    def progress(self) -> tuple[int, float]:
        """Characters so far, and the seconds of its turns."""
        return len(self._text), self._seconds

    def start(self, task: Task) -> None:
        """Take a prompt."""
        self._running, self._text, self._seconds = self._lane.start(task, 0.0), "", 0.0

    def turn(self) -> None:
        """Run whole rounds for about TURN_SECONDS."""
        started = perf_counter()
        while self._running and not self.done and perf_counter() - started < TURN_SECONDS:
            self._running[0].run_round()
            self._text += self._running[1].take_text()
        self._seconds += perf_counter() - started

    def result(self) -> Row:
        """Text and tokens, EOS included; seconds of the prompt and after it; drafted and accepted tokens if known.

        Raises:
            EnvironmentFailure: the request failed.
        """
        if self._running is None or self._running[1].error:
            raise EnvironmentFailure(str(self._running and self._running[1].error))
        sequence = self._running[1]
        stats = sequence.stats
        return {
            "text": self._text,
            "tokens": sequence.generated + (sequence.finish_reason == "stop"),
            "seconds": stats.decode_seconds,
            "prompt_seconds": stats.prefill_seconds,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
        }


class Peer:
    """A setting of another engine: a server whose process is stopped outside its turns."""

    def __init__(self, name: str, process: ServerProcess) -> None:
        self.name = name
        self._process = process
        self._thread = threading.Thread()
        self._answer = Answer(0.0)
        self._resumed: float | None = None
        self._seconds = 0.0
        process.pause()

    @property
    def done(self) -> bool:
        """Whether the answer is complete."""
        return not self._thread.is_alive()

    @property
    def progress(self) -> tuple[int, float]:
        """Characters so far, and the seconds of its turns."""
        return len(self._answer.text), self._seconds

    def start(self, task: Task) -> None:
        """Send a prompt; the process receives it in its first turn."""
        self._answer, self._seconds = Answer(0.0), 0.0
        endpoint = self._process.endpoint(self.name)
        if task.schema:
            # llama-server's field; the other servers are not asked for schemas.
            endpoint = replace(endpoint, extra=endpoint.extra | {"json_schema": task.schema})
        sent = (self._answer, endpoint, task.text, task.max_tokens, self._clock)
        self._thread = threading.Thread(target=receive, args=sent, daemon=True)
        self._thread.start()

    def turn(self) -> None:
        """Let the process run for TURN_SECONDS, or until it is done."""
        self._resumed = perf_counter()
        self._process.resume()
        self._thread.join(TURN_SECONDS)
        self._process.pause()
        self._seconds, self._resumed = self._clock(), None

    def result(self) -> Row:
        """See `Ours.result`."""
        answer = self._answer
        if answer.error:
            raise EnvironmentFailure(answer.error)
        return {
            "text": answer.text,
            "tokens": answer.tokens,
            "seconds": answer.end - answer.chunks[0],
            "prompt_seconds": answer.chunks[0],
            "drafted": answer.timings.get("draft_n", 0),
            "accepted": answer.timings.get("draft_n_accepted", 0),
        }

    def _clock(self) -> float:
        """Seconds that the process has run for this prompt."""
        return self._seconds + (perf_counter() - self._resumed if self._resumed is not None else 0.0)


def answer_side_by_side(contestants: list[Ours | Peer], task: Task) -> tuple[dict[str, Row], dict[str, str]]:
    """Answer a prompt with all engines; the one with the shortest answer always has the next turn.

    Returns:
        The answers, and why others failed, by name.
    """
    for contestant in contestants:
        contestant.start(task)
    while waiting := [contestant for contestant in contestants if not contestant.done]:
        min(waiting, key=lambda contestant: contestant.progress).turn()
    answers, failures = {}, {}
    for contestant in contestants:
        try:
            answers[contestant.name] = contestant.result()
        except EnvironmentFailure as reason:
            failures[contestant.name] = str(reason)
    return answers, failures


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
    drafted, accepted = (sum(answer[key] for answer in answers) for key in ("drafted", "accepted"))
    return {
        "family": family,
        "temperature": 0.0,
        "mode": mode,
        "tokens_per_second": round(median(map(speed, answers)), 2),
        "ratio": round(median(ratios), 3),
        "ratio_with_prefill": round(median(with_prefill), 3),
        "spread": [round(low, 3), round(high, 3)],
        "acceptance_rate": round(accepted / drafted, 3) if drafted else None,
        "prompt_seconds": round(median(answer["prompt_seconds"] for answer in answers), 3),
        "same_text": sum(answer["text"] == plain["text"] for plain, answer in pairs),
        "prompts": len(pairs),
    }


def compare_requests(config: Path, settings: Sequence[str], tasks: list[Task], results: ResultsFile) -> None:
    """Print a table and one JSON object."""
    job = Job.of(config, slots=1)
    models = load_for_one(prepared_handler(config))
    lanes = open_lanes(models, [OURS_PLAIN, FIXED[3], ADAPTIVE])
    names = {"target": job.target.name, "draft": job.draft.name if job.draft else None}
    others = [setting for setting in settings if setting != PLAIN]
    found: dict[tuple[str, str], list[tuple[Row, Row]]] = {}
    failures: dict[str, str] = {}
    disturbed = 0
    for first in range(0, max(1, len(others)), SERVERS_AT_A_TIME):
        group = others[first : first + SERVERS_AT_A_TIME]
        with ExitStack() as stack:
            processes, unready = start(stack, job, [PLAIN, *group])
            failures |= unready
            contestants: list[Ours | Peer] = [Peer(name, process) for name, process in processes.items()]
            contestants += [Ours(lane) for lane in lanes]
            if PLAIN in failures:
                raise SystemExit(f"{PLAIN}, which ratios are to, did not run: {failures[PLAIN]}")
            for task in track(tasks, ", ".join(group), console=Console(stderr=True)):
                key = [names, task.family, task.name, group]
                if key not in results:
                    results.add(key, with_interference(partial(answer_side_by_side, contestants, task)))
                (answers, failed), interference = results[key]
                failures |= failed
                contestants = [contestant for contestant in contestants if contestant.name not in failed]
                disturbed += interference > MAX_INTERFERENCE
                for mode, answer in answers.items() if PLAIN in answers else ():
                    found.setdefault((task.family, mode), []).append((answers[PLAIN], answer))
    rows = [summarise(family, mode, pairs) for (family, mode), pairs in sorted(found.items())]
    print_table("greedy decoding, ratios to llama-server plain of the same run", rows)
    notes = [
        "greedy, one sequence, one slot; seconds of the prompt count in ratio_with_prefill only",
        "n-gram drafts have their engine's default lengths; ngram-mod and ngram-cache also remember earlier prompts",
        f"{disturbed} prompts were answered while other processes used more than {MAX_INTERFERENCE:.0%} of a core",
        *(f"{name} did not run: {reason}" for name, reason in failures.items()),
    ]
    print(*notes, sep="\n")
    print_result("peers", names, rows, notes, measured="requests")


def main() -> None:
    """Compare the answers of one client."""
    parser = argument_parser(__doc__, quick="two prompts a family, fewer settings")
    parser.add_argument(
        "--settings", nargs="+", choices=SETTINGS, metavar="NAME", help=f"of other engines: {', '.join(SETTINGS)}"
    )
    parser.add_argument("--prompts", type=int, help="number of prompts of each family")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=REQUEST_FAMILIES, help="only these")
    parser.add_argument("--results", type=Path, help="file that keeps every answer, from which a run is resumed")
    options = parser.parse_args()
    # Without this a terminated run would leave the servers running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    limit = options.prompts or (2 if options.quick else None)
    tasks = [task for family in options.families for task in read_tasks(family, limit)]
    settings = options.settings or (QUICK_SETTINGS if options.quick else SETTINGS)
    compare_requests(options.config, settings, tasks, ResultsFile(options.results))


if __name__ == "__main__":
    main()
