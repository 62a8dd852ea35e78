"""A target or a draft model that fails during streams: which requests end, and where the failure is reported."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from server import PATIENCE_SECONDS, Server, running, until, worker
from streams import GREEDY, LONG, begin_streams

pytestmark = pytest.mark.server

ENTRY = "speculative_handler.py"
# Replaces the handler file in the archive: a model fails one pass if a file with its name exists.
FAULTY = '''
from pathlib import Path

from specserve.engine.llama import LlamaEngine
from specserve.errors import EngineError
from specserve.torchserve.handler import Handler

forward = LlamaEngine.forward


class FaultyHandler(Handler):
    """Fails when it is told to."""

    def start(self, config, load, served, send):
        def load_faulty(config):
            models = load(config)

            def attempt(engine, rows):
                fault = Path({faults!r}) / ("target" if engine is models.target.engine else "draft")
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
    """The directory in which a file named `target` or `draft` makes that model fail once."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def server(faults: Path) -> Iterator[Server]:
    """A server whose models can be made to fail."""
    with running() as server:
        archive = server.state / "model_store" / "qwen.mar"
        with zipfile.ZipFile(archive) as ours:
            files = {name: ours.read(name) for name in ours.namelist()}
        assert ENTRY in files
        files[ENTRY] = FAULTY.format(faults=str(faults)).encode()
        assert server.manage("DELETE", "/models/qwen/1.0").ok
        with zipfile.ZipFile(archive, "w") as theirs:
            for name, content in files.items():
                theirs.writestr(name, content)
        answer = server.manage("POST", "/models?url=qwen.mar&initial_workers=1&synchronous=true")
        assert answer.ok, answer.text
        yield server


def greedy_text(server: Server) -> str:
    """The text of the greedy request."""
    answer = server.post(GREEDY)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_a_failed_target_pass_ends_its_streams_and_the_worker_serves_the_next(server: Server, faults: Path) -> None:
    before, process = greedy_text(server), worker(server.state).pid
    with ThreadPoolExecutor(3) as pool:
        streams = begin_streams(pool, server, 3)
        (faults / "target").touch()
        results = [stream.result(timeout=PATIENCE_SECONDS) for stream in streams]
    assert all(pieces for pieces, _ in results)
    assert all("The model failed while it wrote this answer" in str(error) for _, error in results)
    assert greedy_text(server) == before
    assert worker(server.state).pid == process


def test_a_failed_draft_pass_changes_no_stream_and_is_reported(server: Server, faults: Path) -> None:
    drafting = {**LONG, "speculation": {"mode": "fixed", "gamma": 3, "drafter": "model"}}
    before = server.post({**drafting, "stream": False}).json()["choices"][0]["text"]
    assert server.get("/v1/speculation").json()["draft_model_up"]
    assert draft_model_up(server) == [1]
    with ThreadPoolExecutor(3) as pool:
        streams = begin_streams(pool, server, 3, drafting)
        (faults / "draft").touch()
        results = [stream.result(timeout=PATIENCE_SECONDS) for stream in streams]
    assert not (faults / "draft").exists()
    assert [("".join(pieces), error) for pieces, error in results] == [(before, None)] * 3
    assert not server.get("/v1/speculation").json()["draft_model_up"]
    until(lambda: "Decoding goes on without it" in server.log(), "a sentence in the log")
    until(lambda: draft_model_up(server) == [0], "the metric")


def draft_model_up(server: Server) -> list[float]:
    """The values of the metric of the draft model's state."""
    return [value for name, value in server.metrics().items() if name.startswith("specserve_draft_model_up{")]
