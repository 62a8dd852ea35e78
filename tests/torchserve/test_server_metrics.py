"""What operators see of a running server: metrics and traces."""

import json
from pathlib import Path

import psutil
import pytest

from server import Server, until
from streams import greedy_text

pytestmark = pytest.mark.server

BODY = {"prompt": "The quick brown fox", "max_tokens": 40, "ignore_eos": True, "metadata": {"prompt_family": "fox"}}
TRACE = "qwen-1.0.jsonl"


def test_metrics_count_tokens_drafts_and_time(server: Server) -> None:
    fox = 'family="fox"'
    expected = server.metric("emitted_tokens_total", fox) + 40
    statistics = server.post(BODY).json()["speculation"]
    # TorchServe reads the worker's values a moment later.
    until(lambda: server.metric("emitted_tokens_total", fox) >= expected, "40 more tokens")
    assert server.metric("draft_tokens_total", fox) >= statistics["drafted_tokens"]
    assert server.metric("target_seconds_total", fox) > 0
    assert server.metric("time_to_first_token_seconds_count", fox) >= 1
    assert [server.metric(name) for name in ("slots", "live_sequences", "draft_model_up")] == [8, 0, 1]


def test_a_trace_has_every_round_of_an_answer_and_its_accepted_drafts(server: Server, traces: Path) -> None:
    answer = server.post(BODY | {"metadata": {"prompt_family": "traced"}}).json()
    lines = [json.loads(line) for line in (traces / TRACE).read_text().splitlines()]
    rounds = [line for line in lines if line["event"] == "round" and line["family"] == "traced"]
    assert sum(line["tokens"] for line in rounds) == answer["usage"]["completion_tokens"]
    # The trace has the round that ends the prefill; `rounds` counts decode rounds only.
    assert len(rounds) == answer["speculation"]["rounds"] + 1
    assert sum(line["accepted"] for line in rounds) == answer["speculation"]["accepted_tokens"]
    assert [line["reason"] for line in lines if line["event"] == "end" and line["family"] == "traced"] == ["length"]


def test_a_full_disk_ends_the_trace_and_changes_no_answer(server: Server, traces: Path) -> None:
    file = traces / TRACE
    before = greedy_text(server)
    size = file.stat().st_size
    assert size > 0
    # From here on the operating system lets the worker extend no file, as if the disk were full.
    full = server.worker()
    full.rlimit(psutil.RLIMIT_FSIZE, (size, psutil.RLIM_INFINITY))
    assert [greedy_text(server) for _ in range(3)] == [before] * 3
    full.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
    assert file.stat().st_size == size
    until(lambda: server.log().count(f"{file} (NOTSET)> is incomplete from now on") == 1, "one sentence in the log")
    assert "ERROR specserve: <" in server.log(), "TorchServe logs all else as information"
