"""Half an hour of mixed load while the worker is killed again and again.

`scripts/test --long tests/torchserve/test_soak.py` runs it and says what it saw.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from server import Server, running, tiny_but, until, worker
from streams import answers

pytestmark = [pytest.mark.server, pytest.mark.long]

CLIENTS = 6
KILLS = 8
SECONDS_BETWEEN_KILLS = 150
CALM_SECONDS = 600
# The tiny pair is loaded and measured anew in a second or two; beside that a worker is back within three.
BACK_WITHIN_SECONDS = 10
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@dataclass(frozen=True)
class Seen:
    """One request: its kind, when it was sent and answered, and whether it was answered as it should be."""

    kind: str
    begun: float
    ended: float
    fault: str | None


@dataclass
class Load:
    """Clients that ask one thing after the other, and remember."""

    server: Server
    seen: list[Seen] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def client(self, number: int) -> None:
        """Ask until it is over."""
        chance = random.Random(number)
        while not self.over.is_set():
            kind = chance.choice(list(KINDS))
            begun = time.monotonic()
            try:
                fault = KINDS[kind](self.server, chance)
            except requests.RequestException as error:
                fault = repr(error)
            self.seen.append(Seen(kind, begun, time.monotonic(), fault))


def _body(chance: random.Random, **more: Any) -> dict[str, Any]:
    """Half of them insist on drafts: the tiny draft is as slow as its target, so that the controller makes none."""
    prompt = f"The quick brown fox {chance.randrange(20)}"
    wish = {"speculation": {"mode": "fixed", "gamma": chance.randrange(1, 8)}} if chance.random() < 0.5 else {}
    sampling = {"max_tokens": chance.randrange(1, 120), "temperature": chance.choice([0, 0.8])}
    return {"prompt": prompt, **sampling, **wish, **more}


def _expect(answer: requests.Response, status: int = 200) -> str | None:
    return None if answer.status_code == status else f"{answer.status_code} {answer.text[:200]}"


def _whole(server: Server, chance: random.Random) -> str | None:
    return _expect(server.post(_body(chance)))


def _several(server: Server, chance: random.Random) -> str | None:
    return _expect(server.post(_body(chance, n=3)))


def _json(server: Server, chance: random.Random) -> str | None:
    return _expect(server.post(_body(chance, response_format=FORMAT)))


def _chat(server: Server, chance: random.Random) -> str | None:
    body = _body(chance)
    body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    return _expect(server.post(body, route="/v1/chat/completions"))


def _stream(server: Server, chance: random.Random) -> str | None:
    answer = server.post(_body(chance, stream=True))
    ended = answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text
    return _expect(answer) or (None if ended else "the stream stopped")


def _leaves(server: Server, chance: random.Random) -> str | None:
    with server.post(_body(chance, stream=True, ignore_eos=True), stream=True) as answer:
        return _expect(answer)


def _mistake(server: Server, chance: random.Random) -> str | None:
    return _expect(server.post(_body(chance, max_tokens=-1)), 400)


KINDS: dict[str, Callable[[Server, random.Random], str | None]] = {
    "whole": _whole,
    "several": _several,
    "json": _json,
    "chat": _chat,
    "stream": _stream,
    "leaves": _leaves,
    "mistake": _mistake,
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of its own, in which the controller decides."""
    with running(config=tiny_but(tmp_path, handler={"speculation": {"mode": "auto"}})) as server:
        yield server


@dataclass(frozen=True)
class Held:
    """What a process holds: bytes of memory, and open files."""

    memory: int
    files: int

    @classmethod
    def by(cls, process: psutil.Process) -> Held:
        """At this moment."""
        return cls(int(process.memory_info().rss), process.num_fds())


def test_nothing_is_lost_but_what_a_killed_worker_held_and_memory_stays(
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
            until(lambda: answers(server), "an answer of the next worker", BACK_WITHIN_SECONDS)
            gaps.append((killed, time.monotonic()))
        time.sleep(CALM_SECONDS / 5)
        last = worker(server.state)
        java = last.parent()
        assert java is not None
        before, front = Held.by(last), Held.by(java)
        time.sleep(CALM_SECONDS * 4 / 5)
        after, front_after = Held.by(last), Held.by(java)
    finally:
        load.over.set()
        for thread in threads:
            thread.join()
    counted = Counter(seen.kind for seen in load.seen)
    lost = [seen for seen in load.seen if seen.fault]
    away = ", ".join(f"{back - gone:.1f}" for gone, back in gaps)
    with capsys.disabled():
        sys.stdout.write(f"\n{len(load.seen)} requests, {dict(counted)}; {len(lost)} lost; away for {away} s; ")
        sys.stdout.write(f"worker {before}, then {after}; TorchServe {front}, then {front_after}\n")
    assert min(counted[kind] for kind in KINDS) > 50
    stray = [seen for seen in lost if not any(seen.begun < back and seen.ended > gone for gone, back in gaps)]
    assert not stray, f"{len(stray)} were lost while no worker was away ({gaps}): {stray[:3]}"
    assert after.memory < before.memory * 1.02
    # Java takes what it may have before it collects.
    assert front_after.memory < max(front.memory * 1.2, 1 << 30)
    # A client's connection is a file, and any of them may be between two.
    assert after.files <= before.files + 2
    assert front_after.files <= front.files + 2 * CLIENTS
    told = server.get("/v1/speculation").json()["sequences"]
    assert (told["live"], told["waiting"]) == (0, 0)
