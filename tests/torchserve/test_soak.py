"""Half an hour of mixed load while the worker is killed repeatedly.

`scripts/test --long tests/torchserve/test_soak.py` runs it and prints the measurements.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import requests

from server import Server, running, until, worker
from streams import is_serving
from tiny_config import tiny_config

pytestmark = [pytest.mark.server, pytest.mark.long]

CLIENTS = 6
KILLS = 8
SECONDS_BETWEEN_KILLS = 150
SECONDS_WITHOUT_KILLS = 600
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


class Record(NamedTuple):
    """One request, and when it was sent and answered."""

    kind: str
    started: float
    ended: float
    fault: str | None


@dataclass
class Load:
    """Clients that send one request after the other, and the records of all requests."""

    server: Server
    records: list[Record] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def client(self, number: int) -> None:
        """Send requests until the load is over."""
        rng = random.Random(number)
        while not self.over.is_set():
            kind = rng.choice(list(KINDS))
            started = time.monotonic()
            try:
                fault = _fault(self.server, kind, rng)
            except requests.RequestException as error:
                fault = repr(error)
            self.records.append(Record(kind, started, time.monotonic(), fault))


def _body(rng: random.Random, **more: Any) -> dict[str, Any]:
    """A random body, half of them in mode fixed: the tiny draft is as slow as its target, so that no draft pays."""
    prompt = f"The quick brown fox {rng.randrange(20)}"
    speculation = {"speculation": {"mode": "fixed", "gamma": rng.randrange(1, 8)}} if rng.random() < 0.5 else {}
    sampling = {"max_tokens": rng.randrange(1, 120), "temperature": rng.choice([0, 0.8])}
    return {"prompt": prompt, **sampling, **speculation, **more}


def _fault(server: Server, kind: str, rng: random.Random) -> str | None:
    """What is wrong with the answer to a request of this kind."""
    body, route = _body(rng, **KINDS[kind]), "/v1/completions"
    if kind == "chat":
        body["messages"], route = [{"role": "user", "content": body.pop("prompt")}], "/v1/chat/completions"
    with server.post(body, route=route, stream=kind == "leaves") as answer:
        if answer.status_code != (400 if kind == "mistake" else 200):
            return f"{answer.status_code} {answer.text[:200]}"
        if kind == "stream" and ('"error"' in answer.text or not answer.text.endswith("data: [DONE]\n\n")):
            return "the stream stopped"
    return None


KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "several": {"n": 3},
    "json": {"response_format": FORMAT},
    "chat": {},
    "stream": {"stream": True},
    "leaves": {"stream": True, "ignore_eos": True},
    "mistake": {"max_tokens": -1},
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server in adaptive mode."""
    with running(config=tiny_config(tmp_path, handler={"speculation": {"mode": "auto"}})) as server:
        yield server


class Usage(NamedTuple):
    """The resident bytes and the open files of a process."""

    memory: int
    files: int


def usage(process: psutil.Process) -> Usage:
    return Usage(process.memory_info().rss, process.num_fds())


def test_only_requests_of_killed_workers_fail_and_memory_does_not_grow(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    load = Load(server)
    threads = [threading.Thread(target=load.client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    gaps: list[tuple[float, float]] = []
    try:
        for _ in range(KILLS):
            time.sleep(SECONDS_BETWEEN_KILLS)
            killed = time.monotonic()
            worker(server.state).kill()
            until(lambda: is_serving(server), "an answer of the next worker")
            gaps.append((killed, time.monotonic()))
        time.sleep(SECONDS_WITHOUT_KILLS / 5)
        last = worker(server.state)
        java = last.parent()
        assert java is not None
        before, front = usage(last), usage(java)
        time.sleep(SECONDS_WITHOUT_KILLS * 4 / 5)
        after, front_after = usage(last), usage(java)
    finally:
        load.over.set()
        for thread in threads:
            thread.join()
    counted = Counter(record.kind for record in load.records)
    failed = [record for record in load.records if record.fault]
    away = ", ".join(f"{back - killed:.1f}" for killed, back in gaps)
    with capsys.disabled():
        sys.stdout.write(f"\n{len(load.records)} requests, {dict(counted)}; {len(failed)} lost; away for {away} s; ")
        sys.stdout.write(f"worker {before}, then {after}; TorchServe {front}, then {front_after}\n")
    assert min(counted[kind] for kind in KINDS) > 50
    unexplained = [
        record for record in failed if not any(record.started < back and record.ended > killed for killed, back in gaps)
    ]
    assert not unexplained, f"{len(unexplained)} failed while there was a worker ({gaps}): {unexplained[:3]}"
    assert after.memory < before.memory * 1.02
    # Java uses the memory that it may have before it collects garbage.
    assert front_after.memory < max(front.memory * 1.2, 1 << 30)
    # Every connection of a client is an open file, and there may have been none at the first measurement.
    assert after.files <= before.files + 2
    assert front_after.files <= front.files + 2 * CLIENTS
    counts = server.get("/v1/speculation").json()["sequences"]
    assert (counts["live"], counts["waiting"]) == (0, 0)
