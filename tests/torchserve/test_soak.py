"""Half an hour of mixed load while the worker is killed repeatedly.

`scripts/test --long tests/torchserve/test_soak.py` runs it and prints the measurements.
"""

import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import requests

from server import Server, running, until
from streams import is_serving, sequences
from tiny_config import tiny_config

pytestmark = [pytest.mark.server, pytest.mark.long]

CLIENTS = 6
KILLS = 8
SECONDS_BETWEEN_KILLS = 150
SECONDS_BEFORE_MEASURING, SECONDS_MEASURED = 120, 480
REQUESTS_OF_A_KIND = 50
KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "several": {"n": 3},
    "json": {"response_format": {"type": "json_object"}},
    "chat": {},
    "stream": {"stream": True},
    "leaves": {"stream": True, "ignore_eos": True},
    "mistake": {"temperature": 9},
}


class Record(NamedTuple):
    kind: str
    started: float
    ended: float
    fault: str | None  # what was wrong with the answer


def send(server: Server, kind: str, rng: random.Random) -> str | None:
    """Send a random request of this kind, half of them in mode fixed: no draft of the tiny pair pays."""
    body: dict[str, Any] = {"max_tokens": rng.randrange(1, 120), "temperature": rng.choice([0, 0.8]), **KINDS[kind]}
    if rng.random() < 0.5:
        body["speculation"] = {"mode": "fixed", "gamma": rng.randrange(1, 8)}
    prompt, route = f"The quick brown fox {rng.randrange(20)}", "/v1/completions"
    if kind == "chat":
        body["messages"], route = [{"role": "user", "content": prompt}], "/v1/chat/completions"
    else:
        body["prompt"] = prompt
    with server.post(body, route=route, stream=kind == "leaves") as answer:
        if answer.status_code != (400 if kind == "mistake" else 200):
            return f"{answer.status_code} {answer.text[:200]}"
        if kind == "stream" and ('"error"' in answer.text or not answer.text.endswith("data: [DONE]\n\n")):
            return "the stream stopped"
    return None


def load(server: Server, number: int, over: threading.Event) -> list[Record]:
    rng, records = random.Random(number), []
    while not over.is_set():
        kind, started = rng.choice(list(KINDS)), time.monotonic()
        try:
            fault = send(server, kind, rng)
        except requests.RequestException as error:
            fault = repr(error)
        records.append(Record(kind, started, time.monotonic(), fault))
    return records


def usage(process: psutil.Process | None) -> tuple[int, int]:
    """The resident bytes and the open files of a process."""
    assert process is not None
    return process.memory_info().rss, process.num_fds()


def test_only_requests_of_killed_workers_fail_and_memory_does_not_grow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gaps: list[tuple[float, float]] = []
    over = threading.Event()
    with (
        running(config=tiny_config(tmp_path, handler={"speculation": {"mode": "auto"}})) as server,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        clients = [pool.submit(load, server, number, over) for number in range(CLIENTS)]
        try:
            for _ in range(KILLS):
                time.sleep(SECONDS_BETWEEN_KILLS)
                killed = time.monotonic()
                server.worker().kill()
                until(lambda: is_serving(server), "an answer of the next worker")
                gaps.append((killed, time.monotonic()))
            time.sleep(SECONDS_BEFORE_MEASURING)
            worker = server.worker()
            before, front = usage(worker), usage(worker.parent())
            time.sleep(SECONDS_MEASURED)
            after, front_after = usage(worker), usage(worker.parent())
        finally:
            over.set()
        records = [record for client in clients for record in client.result()]
        until(lambda: sequences(server) == (0, 0), "an idle server")
    counted, failed = Counter(record.kind for record in records), [record for record in records if record.fault]
    with capsys.disabled():
        away = ", ".join(f"{back - killed:.1f}" for killed, back in gaps)
        sys.stdout.write(f"\n{len(records)} requests, {dict(counted)}; {len(failed)} lost; away for {away} s; ")
        sys.stdout.write(f"worker {before}, then {after}; TorchServe {front}, then {front_after}\n")
    assert min(counted[kind] for kind in KINDS) > REQUESTS_OF_A_KIND
    unexplained = [
        record for record in failed if not any(record.started < back and record.ended > killed for killed, back in gaps)
    ]
    assert not unexplained, f"{len(unexplained)} failed while there was a worker ({gaps}): {unexplained[:3]}"
    assert after[0] < before[0] * 1.02
    # Java uses the memory that it may have before it collects garbage.
    assert front_after[0] < max(front[0] * 1.2, 1 << 30)
    # Every connection of a client is an open file, and there may have been none at the first measurement.
    assert after[1] <= before[1] + 2
    assert front_after[1] <= front[1] + 2 * CLIENTS
