"""How much of its speed does a server keep while other processes compute on the same machine, and after they have gone?

One client streams completions. Each setting of a server is measured quiet and beside each neighbour, in turns: quiet,
then with the neighbour, request by request. Neighbours run in sessions of their own, as services do, where Linux
divides the time by sessions and nice values count for nothing between them. A server that is not being measured is
idle.

    .venv/bin/python benchmarks/neighbours.py [--quick] [--config FILE] [--only NAME ...] [--ours] [--results FILE]
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import requests

from common import ResultsFile, Row, argument_parser, print_result, print_table
from load import checked, percentile, specserve_modes
from peer_engines import Job, start
from servers import Answer, Endpoint, start_specserve, stream, unique_prompts
from specserve.cli.archive import TORCH_STUB, write_mar
from specserve.cli.torchserve_process import State
from specserve.config import load_yaml

SLOTS = 8
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
    write_mar(state.model_store / "busy.mar", "1.0", handler.name, {handler.name: handler, "torch.py": TORCH_STUB})
    management = f"http://127.0.0.1:{state.ports.management}/models"
    keys = {kind: {"Authorization": f"Bearer {state.key(kind)}"} for kind in ("inference", "management")}
    asked = {"url": "busy.mar", "initial_workers": "1", "synchronous": "true"}
    requests.post(management, params=asked, headers=keys["management"], timeout=120).raise_for_status()
    stack.callback(lambda: requests.delete(f"{management}/busy", headers=keys["management"], timeout=60))
    url = f"http://127.0.0.1:{state.ports.inference}/predictions/busy"
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
        OSError: no cgroup can be made here.
    """
    if (CGROUPS / "cpu").is_dir():
        parent, limits = CGROUPS / "cpu", {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": f"{cores * 1e5:.0f}"}
    else:
        parent, limits = CGROUPS, {"cpu.max": f"{cores * 1e5:.0f} 100000"}
    group = parent / "specserve-benchmark"
    group.mkdir(exist_ok=True)
    try:
        for name, value in limits.items():
            (group / name).write_text(value, encoding="ascii")
        (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        yield
    finally:
        (parent / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        for process in (group / "cgroup.procs").read_text(encoding="ascii").split():
            with contextlib.suppress(OSError):
                (parent / "cgroup.procs").write_text(process, encoding="ascii")
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
    """One row of the result."""
    kept = [speed(beside) / speed(quiet) for quiet, beside in pairs]
    row: Row = {"neighbour": neighbour, "server": server, "requests": len(pairs)}
    row |= {"kept": round(median(kept), 3), "least": round(min(kept), 3), "most": round(max(kept), 3)}
    for name, index in (("quiet", 0), ("beside", 1)):
        answers = [pair[index] for pair in pairs]
        gaps = [gap for answer in answers for gap in answer.gaps]
        row[f"characters_{name}"] = round(median(map(speed, answers)), 1)
        row[f"gap_p99_{name}_s"] = percentile(gaps, 99) if gaps else None
    return row


class Comparison:
    """The servers, the prompts, and what was measured.

    Args:
        stack: stops the servers.
        options: of the command line.
    """

    def __init__(self, stack: ExitStack, options: Namespace) -> None:
        self._stack = stack
        self._config: Path = options.config
        self._port: int = options.port
        self._tokens: int = options.max_tokens
        self._after_seconds = 60.0 if options.quick else 600.0
        self._prompts = unique_prompts(options.requests or (2 if options.quick else 8))
        self._results = ResultsFile(options.results)
        self._ours = specserve_modes(start_specserve(stack, self._config, self._port, with_tokens=True))
        processes, failures = start(stack, Job.of(self._config, SLOTS), () if options.ours else (PEER,))
        for name, reason in failures.items():
            raise SystemExit(f"{name} did not run: {reason}")
        self._everyone = [*self._ours, *(process.endpoint(name) for name, process in processes.items())]

    def rows(self, names: list[str]) -> Iterator[Row]:
        """A row for each of these neighbours and each server."""
        others = {
            MODEL: self._beside_a_model,
            AFTER: self._after_neighbours,
            SERVER: self._beside_a_server,
            CONTAINER: self._in_a_container,
        }
        for name in names:
            yield from others[name]() if name in others else self._beside(name, LOOPS[name], self._everyone)

    def _rows(self, name: str, endpoints: list[Endpoint], pairs: Callable[[Endpoint], Pairs]) -> Iterator[Row]:
        for endpoint in endpoints:
            if (key := [name, endpoint.name]) not in self._results:
                self._results.add(key, summarise(name, endpoint.name, pairs(endpoint)))
            yield self._results[key]

    def _beside(self, name: str, neighbour: Neighbour, endpoints: list[Endpoint]) -> Iterator[Row]:
        return self._rows(name, endpoints, lambda server: self._pairs(server, server, neighbour))

    def _pairs(self, quiet: Endpoint, beside: Endpoint, neighbour: Neighbour) -> Pairs:
        return measure_pairs(quiet, beside, neighbour, self._prompts, self._tokens)

    def _beside_a_model(self) -> Iterator[Row]:
        return self._beside(MODEL, busy_model(self._stack, self._port), self._ours)

    def _after_neighbours(self) -> Iterator[Row]:
        return self._rows(
            AFTER,
            self._everyone,
            lambda server: measure_after(server, self._after_seconds, self._prompts, self._tokens),
        )

    def _beside_a_server(self) -> Iterator[Row]:
        with ExitStack() as stack:
            other = start_specserve(stack, self._config, self._port + 5, with_tokens=True)

            def pairs(server: Endpoint) -> Pairs:
                same = replace(server, url=other.url, key=other.key)
                busy = partial(stream_for, same, self._prompts[0], 4 * self._tokens)
                return self._pairs(server, server, lambda: repeated(busy))

            yield from self._rows(SERVER, self._ours, pairs)

    def _in_a_container(self) -> Iterator[Row]:
        with ExitStack() as stack, cgroup_of(1.5):
            other = start_specserve(stack, self._config, self._port + 5, with_tokens=True)

            def pairs(server: Endpoint) -> Pairs:
                return self._pairs(server, replace(server, url=other.url, key=other.key), contextlib.nullcontext)

            yield from self._rows(CONTAINER, self._ours, pairs)


def main() -> None:
    """Start the servers, measure beside each neighbour, and print a table and one JSON object."""
    parser = argument_parser(__doc__, quick="two prompts, and one minute of neighbours instead of ten")
    parser.add_argument("--port", type=int, default=9800, help="the first of ten free ports")
    names = [*LOOPS, *OTHERS]
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="NAME", default=names, help=f"of {', '.join(names)}"
    )
    parser.add_argument("--requests", type=int, help="prompts a server and neighbour (default: 8)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--ours", action="store_true", help="without llama-server")
    parser.add_argument("--results", type=Path, help="file that keeps every row, from which a run is resumed")
    options = parser.parse_args()
    # Without this a terminated run would leave the servers running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as stack:
        rows = list(Comparison(stack, options).rows(options.only))
    print_table("beside neighbours", rows)
    _, handler = load_yaml(options.config)
    print_result("neighbours", {"target": handler.model_id}, rows, NOTES)


if __name__ == "__main__":
    main()
