"""How much of its speed does a server keep while other processes compute on the same machine, and after they have gone?

One client streams completions. Each setting of a server is measured quiet and beside each neighbour, in turns: quiet,
then with the neighbour, request by request. Neighbours run in sessions of their own, as services do, where Linux
divides the time by sessions and nice values count for nothing between them. A server that is not being measured is
idle.

    .venv/bin/python benchmarks/neighbours.py [--quick] [--config FILE] [--only NAME ...] [--ours] [--results FILE]
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import requests

from common import ResultsFile, Row, argument_parser, print_result, print_table, served
from load import checked, percentile, specserve_modes
from peer_engines import Job, start
from servers import SLOTS, Answer, Endpoint, server_stack, start_specserve, stream, unique_prompts
from specserve.cli.archive import TORCH_STUB, write_mar
from specserve.cli.torchserve_process import State

# The other server that is measured.
PEER = "llama-server plain"
# A request is ended after so many seconds: beside a neighbour some would take many minutes.
LIMIT_SECONDS = 30.0
SETTLE_SECONDS = 2.0
AFTER_SECONDS = 10.0
CGROUPS = Path("/sys/fs/cgroup")
LOOP = "while True: pass"
# Neighbours that take a server of their own.
OTHERS = MODEL, AFTER, SERVER, CONTAINER = (
    "a busy model on the same TorchServe",
    "after neighbours",
    "another busy server of ours",
    "a cgroup of 1.5 cores",
)
NOTES = (
    "kept: characters a second after the first text, as a share of the same prompt's quiet turn just before; median",
    "gap: 99th percentile between two chunks with text, in s, quiet and beside the neighbour",
    f"requests are ended after {LIMIT_SECONDS:.0f} s",
)


def speed(answer: Answer) -> float:
    """Characters a second after the first text; 0 where nothing followed."""
    return len(answer.text) / (answer.chunks[-1] - answer.chunks[0]) if len(answer.chunks) > 1 else 0.0


def stream_for(endpoint: Endpoint, prompt: str, max_tokens: int) -> Answer:
    """Stream one greedy completion for LIMIT_SECONDS at most; it may have no text by then."""
    answer = stream(endpoint, prompt, max_tokens, LIMIT_SECONDS)
    late = answer.error == "no text" or "timed out" in (answer.error or "")
    return answer if late else checked(endpoint, answer)


Pairs = list[tuple[Answer, Answer]]
# Something that keeps a core busy while it is entered.
Neighbour = Callable[[], AbstractContextManager[None]]


# ---- neighbours ----


@contextmanager
def loops(number: int, nice: int) -> Iterator[None]:
    """So many endless loops in a session of their own."""
    loop = f'"{sys.executable}" -c "{LOOP}" & '
    command = ["nice", "-n", str(nice), "sh", "-c", loop * number + "wait"]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def repeated(work: Callable[[], object]) -> Iterator[None]:
    """Do something again and again in a thread."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            work()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def busy_model(stack: ExitStack, port: int) -> Neighbour:
    """Register a second model on the TorchServe of a port; returns the neighbour that keeps it busy."""
    state = State(port)
    handler = Path(__file__).with_name("busy_handler.py")
    model = {"modelName": "busy", "modelVersion": "1.0", "handler": handler.name}
    write_mar(state.model_store / "busy.mar", model, {handler.name: handler, "torch.py": TORCH_STUB})
    management = f"http://127.0.0.1:{state.ports['management']}/models"
    keys = {kind: {"Authorization": f"Bearer {state.key(kind)}"} for kind in ("inference", "management")}
    asked = {"url": "busy.mar", "initial_workers": "1", "synchronous": "true"}
    requests.post(management, params=asked, headers=keys["management"], timeout=120).raise_for_status()
    stack.callback(lambda: requests.delete(f"{management}/busy", headers=keys["management"], timeout=60))
    url = f"http://127.0.0.1:{state.port}/predictions/busy"
    post = partial(requests.post, url, json={"seconds": 0.5}, headers=keys["inference"], timeout=60)
    return lambda: repeated(post)


LOOPS: dict[str, Neighbour] = {
    "a loop at nice 19": partial(loops, 1, 19),
    "a loop at nice 0": partial(loops, 1, 0),
    "two loops": partial(loops, 2, 0),
}


@contextmanager
def cgroup_of(cores: float) -> Iterator[None]:
    """Let this process and what it starts have so many cores' time.

    Raises:
        OSError: no cgroup (version 2) can be made here.
    """
    group = CGROUPS / "specserve-benchmark"
    group.mkdir(exist_ok=True)
    try:
        (group / "cpu.max").write_text(f"{cores * 1e5:.0f} 100000", encoding="ascii")
        (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        yield
    finally:
        for process in (group / "cgroup.procs").read_text(encoding="ascii").split():
            with contextlib.suppress(OSError):
                (CGROUPS / "cgroup.procs").write_text(process, encoding="ascii")
        with contextlib.suppress(OSError):
            group.rmdir()


# ---- measurement ----


def measure_pairs(quiet: Endpoint, beside: Endpoint, neighbour: Neighbour, prompts: list[str], tokens: int) -> Pairs:
    """Each prompt without and with the neighbour; the endpoints are one, unless the server itself is another."""
    pairs = []
    for prompt in prompts:
        for endpoint in (quiet, beside):
            # Both times the prompt is in the prefix cache, so that the same is computed.
            stream_for(endpoint, prompt, 1)
        alone = stream_for(quiet, prompt, tokens)
        with neighbour():
            time.sleep(SETTLE_SECONDS)
            pairs.append((alone, stream_for(beside, prompt, tokens)))
        time.sleep(SETTLE_SECONDS)
    return pairs


def measure_after(endpoint: Endpoint, seconds: float, prompts: list[str], tokens: int) -> Pairs:
    """Quiet before neighbours came, and ten seconds after they have gone; in between the server is kept busy."""
    before = [stream_for(endpoint, prompt, tokens) for prompt in prompts]
    for neighbour in LOOPS.values():
        until = perf_counter() + seconds / len(LOOPS)
        with neighbour():
            while perf_counter() < until:
                stream_for(endpoint, unique_prompts(1)[0], tokens)
    time.sleep(AFTER_SECONDS)
    return [(first, stream_for(endpoint, prompt, tokens)) for first, prompt in zip(before, prompts, strict=True)]


def summarise(neighbour: str, server: str, pairs: Pairs) -> Row:
    kept = [speed(beside) / speed(quiet) for quiet, beside in pairs]
    row: Row = {"neighbour": neighbour, "server": server, "requests": len(pairs)}
    row |= {"kept": round(median(kept), 3), "least": round(min(kept), 3), "most": round(max(kept), 3)}
    for name, index in (("quiet", 0), ("beside", 1)):
        answers = [pair[index] for pair in pairs]
        gaps = [gap for answer in answers for gap in answer.gaps]
        row[f"characters_{name}"] = round(median(map(speed, answers)), 1)
        row[f"gap_p99_{name}_s"] = percentile(gaps, 99) if gaps else None
    return row


@dataclass
class Comparison:
    """The servers, the prompts, and what was measured."""

    config: Path
    port: int
    ours: list[Endpoint]
    everyone: list[Endpoint]
    prompts: list[str]
    tokens: int  # of an answer
    after_seconds: float
    results: ResultsFile

    def rows(self, neighbour: str) -> Iterator[Row]:
        with ExitStack() as stack:
            endpoints, pairs = self._measurement(neighbour, stack)
            for endpoint in endpoints:
                key = [neighbour, endpoint.name]
                yield self.results.measured(key, lambda: summarise(neighbour, endpoint.name, pairs(endpoint)))  # noqa: B023

    def _measurement(self, name: str, stack: ExitStack) -> tuple[list[Endpoint], Callable[[Endpoint], Pairs]]:
        """The servers that are measured, and how; the stack ends what is started for it."""

        def pairs(neighbour: Neighbour, endpoint: Endpoint) -> Pairs:
            return measure_pairs(endpoint, endpoint, neighbour, self.prompts, self.tokens)

        if name in LOOPS:
            return self.everyone, partial(pairs, LOOPS[name])
        if name == MODEL:
            return self.ours, partial(pairs, busy_model(stack, self.port))
        if name == AFTER:
            return self.everyone, lambda server: measure_after(server, self.after_seconds, self.prompts, self.tokens)
        if name == CONTAINER:
            stack.enter_context(cgroup_of(1.5))
        other = start_specserve(stack, self.config, self.port + 5, with_tokens=True)

        def same(endpoint: Endpoint) -> Endpoint:
            return replace(endpoint, url=other.url, key=other.key)

        if name == SERVER:

            def busy(server: Endpoint) -> Neighbour:
                return partial(repeated, partial(stream_for, same(server), self.prompts[0], 4 * self.tokens))

            return self.ours, lambda server: pairs(busy(server), server)
        return self.ours, lambda server: measure_pairs(server, same(server), nullcontext, self.prompts, self.tokens)


def main() -> None:
    quick = "two prompts, and one minute of neighbours instead of ten"
    parser = argument_parser(__doc__, quick=quick, port=9800, resumable=True)
    names = [*LOOPS, *OTHERS]
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="NAME", default=names, help=f"of {', '.join(names)}"
    )
    parser.add_argument("--requests", type=int, help="prompts a server and neighbour (default: 8)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--ours", action="store_true", help="without llama-server")
    options = parser.parse_args()
    with server_stack() as stack:
        ours = specserve_modes(start_specserve(stack, options.config, options.port, with_tokens=True))
        peers, failures = start(stack, Job.of(options.config, SLOTS), () if options.ours else (PEER,))
        if failures:
            raise SystemExit(failures[0])
        comparison = Comparison(
            options.config,
            options.port,
            ours,
            [*ours, *peers],
            unique_prompts(options.requests or (2 if options.quick else 8)),
            options.max_tokens,
            60.0 if options.quick else 600.0,
            ResultsFile(options.results),
        )
        rows = [row for name in options.only for row in comparison.rows(name)]
    print_table("beside neighbours", rows)
    print_result("neighbours", served(options.config), rows, NOTES)


if __name__ == "__main__":
    main()
