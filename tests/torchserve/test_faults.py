"""A target or a draft model that fails during streams: which requests end, and where the failure is reported."""

import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from server import PATIENCE_SECONDS, Server, registered, until
from streams import GREEDY, LONG, begin_streams

pytestmark = pytest.mark.server

# Stands at the end of the archive's handler file: a model fails one pass if a file with its name exists.
FAULTY = """
from pathlib import Path

from specserve.engine.llama import LlamaEngine
from specserve.errors import EngineError

forward, start = LlamaEngine.forward, Handler.start


def start_faulty(handler, config, load, served, send):
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

    start(handler, config, load_faulty, served, send)


SpeculativeHandler.start = start_faulty
"""


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which a file named `target` or `draft` makes that model fail once."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def faulty(server: Server, archive: Callable[..., Path], faults: Path) -> Iterator[Server]:
    mar = archive("faulty")
    with zipfile.ZipFile(mar) as ours:
        files = {name: ours.read(name) for name in ours.namelist()}
    files["speculative_handler.py"] += FAULTY.format(faults=str(faults)).encode()
    with zipfile.ZipFile(mar, "w") as theirs:
        for name, content in files.items():
            theirs.writestr(name, content)
    with registered(server, "faulty") as faulty:
        yield faulty


def test_a_failed_target_pass_ends_its_streams_and_the_worker_serves_the_next(faulty: Server, faults: Path) -> None:
    before, process = faulty.post(GREEDY).json()["choices"], faulty.worker().pid
    with ThreadPoolExecutor(3) as pool:
        streams = begin_streams(pool, faulty, 3)
        (faults / "target").touch()
        results = [stream.result(timeout=PATIENCE_SECONDS) for stream in streams]
    assert all(pieces for pieces, _ in results)
    assert all("The model failed while it wrote this answer" in str(error) for _, error in results)
    assert faulty.post(GREEDY).json()["choices"] == before
    assert faulty.worker().pid == process


def test_a_failed_draft_pass_changes_no_stream_and_is_reported(faulty: Server, faults: Path) -> None:
    drafting = {**LONG, "speculation": {"mode": "fixed", "gamma": 3, "drafter": "model"}}
    before = faulty.post({**drafting, "stream": False}).json()["choices"][0]["text"]
    assert faulty.get("/v1/speculation").json()["draft_model_up"]
    assert faulty.metric("draft_model_up") == 1
    with ThreadPoolExecutor(3) as pool:
        streams = begin_streams(pool, faulty, 3, drafting)
        (faults / "draft").touch()
        results = [stream.result(timeout=PATIENCE_SECONDS) for stream in streams]
    assert not (faults / "draft").exists()
    assert [("".join(pieces), error) for pieces, error in results] == [(before, None)] * 3
    assert not faulty.get("/v1/speculation").json()["draft_model_up"]
    until(lambda: "Decoding goes on without it" in faulty.log(), "a sentence in the log")
    [line] = [line for line in faulty.log().splitlines() if "Decoding goes on without it" in line]
    assert "[ERROR]" in line
    assert "ERROR specserve: The draft model failed" in line
    until(lambda: faulty.metric("draft_model_up") == 0, "the metric")
