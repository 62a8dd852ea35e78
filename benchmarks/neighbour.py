"""What does another model of the same TorchServe feel of this one, while it is idle and while it decodes?

A handler that gives back its body is asked one request after the other: without this project's model, beside it, and
beside eight streams of it, in turns on one server (the model is taken off and registered again).

    .venv/bin/python benchmarks/neighbour.py [--config FILE] [--requests N]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from clients import Endpoint, ask, prompts
from load import percentile
from machine import describe_machine
from servers import start_ours
from specserve.config import load_yaml
from specserve.tools.paths import DEFAULT_CONFIG
from specserve.tools.server import session
from specserve.tools.torchserve_process import State

ECHO = '''
def handle(data, context):
    """Give every row its body back."""
    return [row.get("body") or row.get("data") for row in data or []]
'''
STREAMS = 8
STREAMED = 64


def archive_echo(store: Path) -> None:
    """Write echo.mar into a server's model store; what stands for torch in our own archive comes with it."""
    with tempfile.TemporaryDirectory() as directory, zipfile.ZipFile(store / "qwen.mar") as ours:
        handler, torch = Path(directory) / "echo.py", Path(directory) / "torch.py"
        handler.write_text(ECHO, encoding="utf-8")
        torch.write_bytes(ours.read("torch.py"))
        named: list[str | Path] = ["--model-name", "echo", "--version", "1.0", "--extra-files", torch]
        archiver = Path(sys.executable).parent / "torch-model-archiver"
        subprocess.run([archiver, *named, "--handler", handler, "--export-path", store, "--force"], check=True)


class Neighbours:
    """A TorchServe with an echo and, at times, this project's model."""

    def __init__(self, state: State) -> None:
        self._inference = f"http://127.0.0.1:{state.ports.inference}"
        self._models = f"http://127.0.0.1:{state.ports.management}/models"
        self._manager, self._client = session(state.key("management")), session(state.key("inference"))
        archive_echo(state.model_store)
        self._register("echo")

    def _register(self, name: str) -> None:
        answer = self._manager.post(f"{self._models}?url={name}.mar&initial_workers=1&synchronous=true", timeout=600)
        answer.raise_for_status()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Without this project's model."""
        self._manager.delete(f"{self._models}/qwen/1.0", timeout=60).raise_for_status()
        try:
            yield
        finally:
            self._register("qwen")

    def milliseconds(self, number: int) -> list[float]:
        """What the echo takes, request by request."""
        taken = []
        for count in range(number):
            begun = time.perf_counter()
            answer = self._client.post(f"{self._inference}/predictions/echo", data=f"echo {count}", timeout=60)
            taken.append(1000 * (time.perf_counter() - begun))
            if answer.text != f"echo {count}":
                raise SystemExit(f"The echo answered {answer.status_code}: {answer.text}")
        return taken


@contextmanager
def streaming(endpoint: Endpoint) -> Iterator[None]:
    """Eight clients that ask again and again."""
    over = threading.Event()

    def client() -> None:
        while not over.is_set():
            ask(endpoint, prompts(1)[0], STREAMED)

    clients = [threading.Thread(target=client) for _ in range(STREAMS)]
    for thread in clients:
        thread.start()
    # Until all of them write.
    time.sleep(30)
    try:
        yield
    finally:
        over.set()
        for thread in clients:
            thread.join()


def main() -> None:
    """Start a server, ask the echo, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="a model YAML")
    parser.add_argument("--port", type=int, default=9600, help="the first of five free ports")
    parser.add_argument("--requests", type=int, default=300, help="of the echo in each turn")
    parser.add_argument("--turns", type=int, default=3, help="without and beside this project's model")
    options = parser.parse_args()
    taken: dict[str, list[float]] = {"alone": [], "beside, idle": [], "beside eight streams": []}
    with ExitStack() as stack:
        ours = start_ours(stack, options.config, options.port, with_tokens=True)
        neighbours = Neighbours(State.of(options.port))
        neighbours.milliseconds(options.requests)
        for _ in range(options.turns):
            taken["beside, idle"] += neighbours.milliseconds(options.requests)
            with neighbours.alone():
                taken["alone"] += neighbours.milliseconds(options.requests)
        with streaming(ours):
            taken["beside eight streams"] = neighbours.milliseconds(options.requests)
    rows: list[dict[str, Any]] = [
        {"echo": case, "ms": round(median(found), 2), "p95_ms": percentile(found, 95), "p99_ms": percentile(found, 99)}
        for case, found in taken.items()
    ]
    for row in rows:
        print(f"{row['echo']:22} median {row['ms']:7.2f} ms, p95 {row['p95_ms']:7.2f}, p99 {row['p99_ms']:7.2f}")
    _, handler = load_yaml(options.config)
    result = {"benchmark": "neighbour", "machine": describe_machine(), "models": {"target": handler.model_id}}
    print(json.dumps({**result, "rows": rows}))


if __name__ == "__main__":
    main()
