"""A target or a draft model that fails in the midst of streams: who hears of it, and who goes on."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from server import Server, running, until, worker
from streams import GREEDY, LONG, begin_streams

pytestmark = pytest.mark.server

ENTRY = "speculative_handler.py"
# Stands in the archive in place of our own entry: a model fails once when a file of its name is there.
FAULTY = '''
from pathlib import Path

from specserve.engine.llama import LlamaEngine
from specserve.errors import EngineError
from specserve.serving.torchserve import Handler

forward = LlamaEngine.forward


class FaultyHandler(Handler):
    """Fails when it is told to."""

    def start(self, config, load, served, send):
        def load_faulty(config):
            models = load(config)

            def attempt(engine, rows):
                fault = Path({faults!r}) / ("target" if engine is models.target else "draft")
                if fault.exists():
                    fault.unlink()
                    raise EngineError("It was told to fail.")
                return forward(engine, rows)

            LlamaEngine.forward = attempt
            return models

        super().start(config, load_faulty, served, send)
'''


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a file named `target` or `draft` makes that model fail."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def server(faults: Path) -> Iterator[Server]:
    """A server whose models can be told to fail."""
    with running() as server:
        archive = server.state / "model_store" / "qwen.mar"
        with zipfile.ZipFile(archive) as ours:
            held = {name: ours.read(name) for name in ours.namelist()}
        assert ENTRY in held
        held[ENTRY] = FAULTY.format(faults=str(faults)).encode()
        assert server.manage("DELETE", "/models/qwen/1.0").ok
        with zipfile.ZipFile(archive, "w") as theirs:
            for name, content in held.items():
                theirs.writestr(name, content)
        answer = server.manage("POST", "/models?url=qwen.mar&initial_workers=1&synchronous=true")
        assert answer.ok, answer.text
        yield server


def text(server: Server) -> str:
    """What the server says while all is well."""
    answer = server.post(GREEDY)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_a_target_that_fails_ends_the_streams_of_that_round_with_an_error_and_serves_the_next(
    server: Server, faults: Path
) -> None:
    before, process = text(server), worker(server.state).pid
    with ThreadPoolExecutor(3) as pool:
        streams = begin_streams(pool, server, 3)
        (faults / "target").touch()
        ends = [stream.result(timeout=60) for stream in streams]
    assert all(pieces for pieces, _ in ends)
    assert all("The model failed while it wrote this answer" in str(end) for _, end in ends)
    assert text(server) == before
    assert worker(server.state).pid == process


def test_a_draft_that_fails_costs_no_stream_anything_but_speed_and_is_told_of(server: Server, faults: Path) -> None:
    drafting = {**LONG, "speculation": {"mode": "fixed", "gamma": 3, "drafter": "model"}}
    before = server.post({**drafting, "stream": False}).json()["choices"][0]["text"]
    assert server.get("/v1/speculation").json()["draft_model_up"]
    assert up(server) == [1]
    with ThreadPoolExecutor(3) as pool:
        streams = begin_streams(pool, server, 3, drafting)
        (faults / "draft").touch()
        ends = [stream.result(timeout=60) for stream in streams]
    assert not (faults / "draft").exists()
    assert [("".join(pieces), end) for pieces, end in ends] == [(before, None)] * 3
    assert not server.get("/v1/speculation").json()["draft_model_up"]
    until(lambda: "Decoding goes on without it" in server.log(), "a sentence in the log", 10)
    until(lambda: up(server) == [0], "the metric", 10)


def up(server: Server) -> list[float]:
    """What Prometheus is told of the draft model."""
    return [value for name, value in server.metrics().items() if name.startswith("specserve_draft_model_up{")]
