"""benchmarks/peers.py: engines answer in turns, failures are reported, and the chart shows each one's best setting."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

import peer_engines
import streaming_server
from charts import best_settings
from common import Row, Task
from peer_engines import DRAFT, ENGINES, SETTINGS, Engine, Job
from peers import QUICK_SETTINGS, answer_in_turn, summarise
from servers import stream
from specserve.errors import EnvironmentFailure

TASK = Task("code", "hello", "Hello", 4)
JOB = Job(Path("target.gguf"), Path("draft.gguf"), threads=2, slots=1, context_length=64)


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An engine "fake" that streams its options; "dead" exits at once and "missing" cannot be built."""

    def missing() -> Path:
        raise EnvironmentFailure("cmake is not on PATH")

    def program(text: str) -> Callable[[], Path]:
        path = tmp_path / f"program{len([*tmp_path.iterdir()])}"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return lambda: path

    # Without the options that every server has: -m and four sizes.
    server = program(f'shift 10; exec "{sys.executable}" "{streaming_server.__file__}" "$@"')
    settings = {"plain": (), "draft 3": ("--draft", DRAFT), "broken": ("broken",)}
    monkeypatch.setitem(ENGINES, "fake", Engine(server, (), settings))
    monkeypatch.setitem(ENGINES, "dead", Engine(program("echo no such instruction; exit 1"), (), {"plain": ()}))
    monkeypatch.setitem(ENGINES, "missing", Engine(missing, (), {"plain": ()}))
    monkeypatch.setattr(peer_engines, "PEERS", tmp_path)


@pytest.mark.usefixtures("fake_engine")
def test_servers_answer_in_turns_and_those_that_fail_are_reported() -> None:
    names = ["missing plain", "fake plain", "dead plain", "fake draft 3", "fake broken"]
    with ExitStack() as stack:
        (plain, drafting, broken), failures = peer_engines.start(stack, JOB, names)
        answers = answer_in_turn([plain, drafting], TASK)
        streamed = stream(plain, "Hello", 4)
        with pytest.raises(SystemExit, match=r"fake broken.*500"):
            answer_in_turn([plain, broken], TASK)
    with pytest.raises(EnvironmentFailure, match="no draft model"):
        peer_engines.command(replace(JOB, draft=None), "fake draft 3")
    assert failures[0] == "missing plain did not run: cmake is not on PATH"
    assert "no such instruction" in failures[1]
    assert answers["fake plain"]["text"] == "Hello "
    assert answers["fake draft 3"]["text"] == "Hello --draftdraft.gguf"
    assert all(answer["tokens"] == streaming_server.TOKENS for answer in answers.values())
    assert all(0 < answer["prompt_seconds"] < 10 for answer in answers.values())
    assert (streamed.error, streamed.tokens, len(streamed.chunks)) == (None, streaming_server.TOKENS, 2)


def test_ratio_compares_answers_to_the_same_prompt() -> None:
    def answer(tokens: int, seconds: float, prompt_seconds: float, text: str) -> Row:
        return {"text": text, "tokens": tokens, "seconds": seconds, "prompt_seconds": prompt_seconds}

    first = answer(11, 1.0, 1.0, "a"), answer(21, 1.0, 2.0, "a")
    second = answer(21, 2.0, 1.0, "b"), answer(21, 1.0, 1.0, "c")
    row = summarise("code", "llama-server draft 3", [first, second])
    assert (row["ratio"], row["same_text"]) == (2.0, 1)
    # 21 / 3 to 11 / 2 tokens a second, and 21 / 2 to 21 / 3.
    assert row["ratio_with_prefill"] == pytest.approx((7 / 5.5 + 1.5) / 2, abs=0.001)


def test_chart_has_each_engines_best_setting_and_our_adaptive_mode() -> None:
    plain, draft_3 = "llama-server plain", "llama-server draft 3"
    ratios = {
        "code": {plain: 1.0, draft_3: 1.4, "specserve fixed 3": 2.5, "specserve adaptive": 2},
        "prose": {plain: 1.0, draft_3: 0.8},
    }
    rows = [{"family": family, "mode": mode, "ratio": n} for family in ratios for mode, n in ratios[family].items()]
    best = best_settings(rows)
    assert [(row["family"], row["mode"], row["ratio"]) for row in best] == [
        ("code", "specserve", 2.0),
        ("code", "llama-server, its best setting", 1.4),
        ("prose", "llama-server, its best setting", 1.0),
    ]


def test_compared_settings_exist_and_what_is_built_is_pinned() -> None:
    assert set(QUICK_SETTINGS) <= set(SETTINGS)
    for package in (peer_engines.LLAMA, peer_engines.IK):
        assert "--hash=sha256:" in peer_engines.locked(package)
