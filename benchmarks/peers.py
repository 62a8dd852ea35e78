"""How fast is this engine beside other CPU engines, on the same GGUF files and with the same number of threads?

`requests`: greedy answers of one client beside llama-server, plain, with the draft model and with its n-gram drafts;
ratios are to llama-server's plain answer to the same prompt. All answer side by side: an engine works only in its
turns, and the one with the fewest tokens has the next one. llama-server is built the first time, in ten minutes.
`passes`: cost_curve.py with all engines: ours, llama.cpp, ik_llama.cpp and OpenVINO GenAI. load.py measures several
clients.

    .venv/bin/python benchmarks/peers.py requests|passes [--quick] [--config FILE] [--results FILE]
"""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import requests
from rich.console import Console
from rich.progress import track

import cost_curve
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
from decode import ADAPTIVE, FIXED, Lane, open_lanes
from decode import PLAIN as OURS_PLAIN
from servers import REQUEST_TIMEOUT_SECONDS, ServerProcess, build_llama_server, draft_options, events, llama_server
from specserve.serving.generation import Generation
from specserve.serving.loading import load_models
from specserve.serving.scheduler import Scheduler
from specserve.tools.archive import handler_of
from specserve.tools.models import prepare

REQUEST_FAMILIES = ("code", "json", "prose", "chat", "summarise", "edit")
PLAIN = "llama-server plain"
DRAFT_LENGTHS = (2, 3, 4, 7, 15)
N_GRAM = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
QUICK_MODES = ("llama-server draft 3", "llama-server draft 7", "llama-server ngram-simple")
TURN_SECONDS = 1.0
# llama-server processes beside the plain one at a time: their repacked weights must fit into memory together.
SERVERS_AT_A_TIME = 4


class Ours:
    """A mode of this engine, in this process."""

    def __init__(self, lane: Lane) -> None:
        self.name = f"specserve {lane.mode.name}"
        self._lane = lane
        self._running: tuple[Scheduler, Generation] | None = None
        self._seconds = 0.0

    @property
    def done(self) -> bool:
        """Whether the answer is complete."""
        return self._running is None or not self._running[0].busy

    @property
    def progress(self) -> tuple[int, float]:
        """Tokens so far, and the seconds of its turns."""
        return self._running[1].generated if self._running else 0, self._seconds

    def start(self, prompt: list[int], task: Task) -> None:
        """Take a prompt."""
        del prompt
        self._running, self._seconds = self._lane.start(task, 0.0), 0.0

    def turn(self) -> None:
        """Run whole rounds for about TURN_SECONDS."""
        started = perf_counter()
        while self._running and not self.done and perf_counter() - started < TURN_SECONDS:
            self._running[0].step()
        self._seconds += perf_counter() - started

    def result(self) -> Row:
        """Tokens, seconds after the first token, seconds of the prompt, rounds, drafted and accepted tokens.

        Raises:
            SystemExit: the sequence failed.
        """
        if self._running is None or self._running[1].error:
            raise SystemExit(f"{self.name}: {self._running and self._running[1].error}")
        sequence = self._running[1]
        stats = sequence.stats
        return {
            "tokens": sequence.answer,
            "seconds": stats.decode_seconds,
            "prompt_seconds": stats.prefill_seconds,
            "rounds": stats.rounds,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
        }


class LlamaServer:
    """A llama-server process, which is stopped outside its turns."""

    def __init__(self, name: str, process: ServerProcess) -> None:
        self.name = name
        self._process = process
        self._thread = threading.Thread()
        self._tokens: list[int] = []
        self._times: list[float] = []
        self._resumed: float | None = None
        self._seconds = 0.0
        self._timings: Row = {}
        self._error: Exception | None = None
        process.pause()

    @property
    def done(self) -> bool:
        """Whether the answer is complete."""
        return not self._thread.is_alive()

    @property
    def progress(self) -> tuple[int, float]:
        """Tokens so far, and the seconds of its turns."""
        return len(self._tokens), self._seconds

    def start(self, prompt: list[int], task: Task) -> None:
        """Send a prompt; the process receives it in its first turn."""
        self._tokens, self._times, self._seconds, self._error = [], [], 0.0, None
        self._thread = threading.Thread(target=self._read, args=(prompt, task.max_tokens), daemon=True)
        self._thread.start()

    def turn(self) -> None:
        """Let the process run for TURN_SECONDS, or until it is done."""
        self._resumed = perf_counter()
        self._process.resume()
        self._thread.join(TURN_SECONDS)
        self._process.pause()
        self._seconds, self._resumed = self._clock(), None

    def result(self) -> Row:
        """See `Ours.result`.

        Raises:
            SystemExit: the request failed.
        """
        if self._error or not self._times:
            raise SystemExit(f"{self.name}: {self._error or 'no answer'}")
        accepted = self._timings.get("draft_n_accepted", 0)
        return {
            "tokens": self._tokens,
            "seconds": self._times[-1] - self._times[0],
            "prompt_seconds": self._times[0],
            "rounds": len(self._tokens) - 1 - accepted,
            "drafted": self._timings.get("draft_n", 0),
            "accepted": accepted,
        }

    def _clock(self) -> float:
        """Seconds that the process has run for this prompt."""
        return self._seconds + (perf_counter() - self._resumed if self._resumed is not None else 0.0)

    def _read(self, prompt: list[int], max_tokens: int) -> None:
        body = {
            "prompt": prompt,
            "n_predict": max_tokens,
            "temperature": 0,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
        }
        url, timeout = f"{self._process.url}/completion", REQUEST_TIMEOUT_SECONDS
        try:
            with requests.post(url, json=body, stream=True, timeout=timeout) as response:
                response.raise_for_status()
                for event in events(response):
                    if event["tokens"]:
                        self._tokens += event["tokens"]
                        self._times.append(self._clock())
                    self._timings = event.get("timings", {})
        except (requests.RequestException, KeyError, ValueError) as error:
            self._error = error


def answer_side_by_side(contestants: list[Ours | LlamaServer], prompt: list[int], task: Task) -> dict[str, Row]:
    """Answer a prompt with all engines; the one with the fewest tokens always has the next turn."""
    for contestant in contestants:
        contestant.start(prompt, task)
    while waiting := [contestant for contestant in contestants if not contestant.done]:
        min(waiting, key=lambda contestant: contestant.progress).turn()
    return {contestant.name: contestant.result() for contestant in contestants}


def summarise(family: str, mode: str, pairs: list[tuple[Row, Row]]) -> Row:
    """One row of the result, from pairs of llama-server's plain answer and this mode's, one for each prompt."""

    def speed(answer: Row) -> float:
        return float((len(answer["tokens"]) - 1) / answer["seconds"])

    def speed_with_prefill(answer: Row) -> float:
        return float(len(answer["tokens"]) / (answer["seconds"] + answer["prompt_seconds"]))

    answers = [answer for _, answer in pairs]
    ratios = [speed(answer) / speed(plain) for plain, answer in pairs]
    with_prefill = [speed_with_prefill(answer) / speed_with_prefill(plain) for plain, answer in pairs]
    low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    drafted, accepted, rounds = (sum(answer[key] for answer in answers) for key in ("drafted", "accepted", "rounds"))
    return {
        "family": family,
        "temperature": 0.0,
        "mode": mode,
        "tokens_per_second": round(median(map(speed, answers)), 2),
        "ratio": round(median(ratios), 3),
        "ratio_with_prefill": round(median(with_prefill), 3),
        "spread": [round(low, 3), round(high, 3)],
        "acceptance_rate": round(accepted / drafted, 3) if drafted else None,
        "mean_acceptance_length": round((accepted + rounds) / rounds, 3),
        "same_text_as_plain": sum(answer["tokens"] == plain["tokens"] for plain, answer in pairs),
        "prompts": len(pairs),
    }


def compare_requests(config: Path, tasks: list[Task], results: ResultsFile, *, quick: bool) -> None:
    """Print a table and one JSON object."""
    binary = build_llama_server()
    prepared = prepare(config)
    handler = handler_of(config, prepared).model_copy(update={"sequences": 1})
    models = load_models(handler)
    lanes = open_lanes(models, handler, [OURS_PLAIN, FIXED[3], ADAPTIVE])
    modes = {f"llama-server {kind}": ["--spec-type", kind] for kind in N_GRAM}
    if prepared.draft:
        modes |= {f"llama-server draft {length}": draft_options(prepared.draft, length) for length in DRAFT_LENGTHS}
    names = {"target": prepared.target.name, "draft": prepared.draft.name if prepared.draft else None}
    chosen = [mode for mode in modes if mode in QUICK_MODES] if quick else list(modes)
    pairs: dict[tuple[str, str], list[tuple[Row, Row]]] = {}
    disturbed = 0
    for first in range(0, len(chosen), SERVERS_AT_A_TIME):
        group = chosen[first : first + SERVERS_AT_A_TIME]
        with ExitStack() as stack:
            contestants: list[Ours | LlamaServer] = []
            for number, name in enumerate([PLAIN, *group]):
                process = llama_server(
                    binary, prepared.target, modes.get(name, ()), slots=1, config=handler, log=f"peer-{number}.log"
                )
                stack.callback(process.stop)
                process.wait_ready()
                contestants.append(LlamaServer(name, process))
            contestants += [Ours(lane) for lane in lanes]
            for task in track(tasks, ", ".join(group), console=Console(stderr=True)):
                key = [names, task.name, group]
                if key not in results:
                    prompt = models.vocabulary.encode(task.text, special=True)
                    measured = with_interference(partial(answer_side_by_side, contestants, prompt, task))
                    results.add(key, measured)
                answers, others = results[key]
                disturbed += others > MAX_INTERFERENCE
                for mode, answer in answers.items():
                    pairs.setdefault((task.family, mode), []).append((answers[PLAIN], answer))
    rows = [summarise(family, mode, found) for (family, mode), found in sorted(pairs.items())]
    print_table("greedy decoding, ratios to llama-server plain of the same run", rows)
    notes = [
        "greedy, one sequence, one slot; seconds of the prompt count in ratio_with_prefill only",
        "n-gram drafts have llama-server's default lengths; ngram-mod and ngram-cache also remember earlier prompts",
        f"{disturbed} prompts were answered while other processes used more than {MAX_INTERFERENCE:.0%} of a core",
    ]
    print_result("peers", names, rows, notes, measured="requests")


def main() -> None:
    """Compare requests or passes."""
    parser = argument_parser(__doc__, quick="requests: two prompts a family, fewer modes; passes: one file, few passes")
    parser.add_argument("what", choices=("requests", "passes"), help="what is compared")
    parser.add_argument("--prompts", type=int, help="requests: number of prompts of each family")
    parser.add_argument(
        "--families", nargs="+", choices=FAMILIES, default=REQUEST_FAMILIES, help="requests: only these"
    )
    parser.add_argument("--results", type=Path, help="requests: file that keeps every answer, to resume from")
    options = parser.parse_args()
    # Without this a terminated run would leave the servers running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.what == "passes":
        cost_curve.measure("peers", list(cost_curve.ENGINES), quick=options.quick)
    else:
        limit = options.prompts or (2 if options.quick else None)
        tasks = [task for family in options.families for task in read_tasks(family, limit)]
        compare_requests(options.config, tasks, ResultsFile(options.results), quick=options.quick)


if __name__ == "__main__":
    main()
