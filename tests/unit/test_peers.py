"""benchmarks/peers.py: engines answer in turns, failures are reported, and the chart shows each one's best setting."""

from __future__ import annotations

import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import peer_engines
from charts import best_settings
from common import Row, Task
from peer_engines import DRAFT, ENGINES, SETTINGS, Engine, Job
from peers import QUICK_SETTINGS, answer_in_turn, summarise
from servers import ServerProcess, stream
from specserve.errors import EnvironmentFailure

TASK = Task("code", "hello", "Hello", 4)
# Streams the prompt and its own last options, one word per chunk.
SERVER = """
    import json, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(500 if "broken" in sys.argv else 200)
            self.end_headers()
            for word in [body["prompt"], " ", *sys.argv[1:-2]]:
                self.wfile.write(b"data: " + json.dumps({"choices": [{"text": word}]}).encode() + b"\\n\\n")
            last = {"choices": [], "usage": {"completion_tokens": 7}}
            self.wfile.write(b"data: " + json.dumps(last).encode() + b"\\n\\n")

        def log_message(self, *_):
            pass

    HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An engine "fake" whose settings are options of SERVER; "dead" exits at once and "missing" cannot be built."""

    def missing(_: Job) -> list[str | Path]:
        raise EnvironmentFailure("cmake is not on PATH")

    server: list[str | Path] = [sys.executable, "-c", textwrap.dedent(SERVER)]
    settings = {"plain": (), "draft 3": ("--draft", DRAFT), "broken": ("broken",)}
    monkeypatch.setitem(ENGINES, "fake", Engine(lambda _: server, settings))
    dead: list[str | Path] = [sys.executable, "-c", "raise SystemExit('no such instruction')"]
    monkeypatch.setitem(ENGINES, "dead", Engine(lambda _: dead, {"plain": ()}))
    monkeypatch.setitem(ENGINES, "missing", Engine(missing, {"plain": ()}))
    monkeypatch.setattr(peer_engines, "PEERS", tmp_path)


def job(draft: str | None = "draft.gguf") -> Job:
    return Job(Path("target.gguf"), Path(draft) if draft else None, threads=2, slots=1, context_length=64)


@pytest.mark.usefixtures("fake_engine")
def test_engines_that_cannot_be_built_or_started_are_reported() -> None:
    with ExitStack() as stack:
        names = ["missing plain", "fake plain", "dead plain"]
        processes, failures = peer_engines.start(stack, job(), names)
        assert list(processes) == ["fake plain"]
        assert failures["missing plain"] == "cmake is not on PATH"
        assert "no such instruction" in failures["dead plain"]


@pytest.mark.usefixtures("fake_engine")
def test_draft_models_path_is_inserted_into_the_options() -> None:
    assert peer_engines.command(job(), "fake draft 3")[-2:] == ["--draft", "draft.gguf"]
    with pytest.raises(EnvironmentFailure, match="no draft model"):
        peer_engines.command(job(draft=None), "fake draft 3")


@pytest.mark.usefixtures("fake_engine")
def test_servers_answer_in_turns_and_a_failing_one_ends_the_run() -> None:
    with ExitStack() as stack:
        processes, failures = peer_engines.start(stack, job(), ["fake plain", "fake draft 3", "fake broken"])
        assert not failures
        plain, drafting, broken = (process.endpoint(name) for name, process in processes.items())
        answers = answer_in_turn([plain, drafting], TASK)
        with pytest.raises(SystemExit, match=r"fake broken.*500"):
            answer_in_turn([plain, broken], TASK)
    assert answers["fake plain"]["text"] == "Hello "
    assert answers["fake draft 3"]["text"] == "Hello --draftdraft.gguf"
    for answer in answers.values():
        assert answer["tokens"] == 7
        assert 0 < answer["prompt_seconds"] < 10


def test_last_chunk_gives_the_number_of_tokens() -> None:
    with ExitStack() as stack:
        arguments: list[str | Path] = [sys.executable, "-c", textwrap.dedent(SERVER), "one", "two"]
        process = ServerProcess(arguments, Path("/dev/null"))
        stack.callback(process.stop)
        process.wait_ready()
        answer = stream(process.endpoint("fake"), "Hello", 4)
    assert answer.error is None
    assert (answer.text, answer.tokens, len(answer.chunks)) == ("Hello onetwo", 7, 4)


def a_result(tokens: int, seconds: float, prompt_seconds: float, text: str) -> Row:
    return {
        "text": text,
        "tokens": tokens,
        "seconds": seconds,
        "prompt_seconds": prompt_seconds,
    }


def test_ratio_compares_answers_to_the_same_prompt() -> None:
    pairs = [
        (a_result(11, 1.0, 1.0, "a"), a_result(21, 1.0, 2.0, "a")),
        (a_result(21, 2.0, 1.0, "b"), a_result(21, 1.0, 1.0, "c")),
    ]
    row = summarise("code", "llama-server draft 3", pairs)
    assert (row["ratio"], row["same_text"]) == (2.0, 1)
    # 21 / 3 to 11 / 2 tokens a second, and 21 / 2 to 21 / 3.
    assert row["ratio_with_prefill"] == pytest.approx((7 / 5.5 + 1.5) / 2, abs=0.001)


def test_chart_has_each_engines_best_setting_and_our_adaptive_mode() -> None:
    def row(family: str, mode: str, ratio: float) -> dict[str, Any]:
        return {"family": family, "mode": mode, "ratio": ratio}

    rows = [
        row("code", "llama-server plain", 1.0),
        row("code", "llama-server draft 3", 1.4),
        row("prose", "llama-server plain", 1.0),
        row("prose", "llama-server draft 3", 0.8),
        row("code", "specserve fixed 3", 2.5),
        row("code", "specserve adaptive", 2.0),
    ]
    assert [(row["family"], row["mode"], row["ratio"]) for row in best_settings(rows)] == [
        ("code", "specserve", 2.0),
        ("code", "llama-server, its best setting", 1.4),
        ("prose", "llama-server, its best setting", 1.0),
    ]


def test_compared_settings_exist() -> None:
    assert set(QUICK_SETTINGS) <= set(SETTINGS)


def test_built_packages_are_pinned_with_hashes() -> None:
    for name in (peer_engines.LLAMA, peer_engines.IK):
        (entry,) = [entry for entry in peer_engines._locked_packages() if entry.startswith(f"{name}==")]
        assert "--hash=sha256:" in entry
