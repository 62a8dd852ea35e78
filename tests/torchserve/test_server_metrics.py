"""What operators see of a running server: metrics, v1/speculation, and traces."""

from __future__ import annotations

import json
import re
from pathlib import Path

import psutil
import pytest

from server import PROJECT, Server, until
from specserve.observability.metrics import ALL
from streams import GREEDY

pytestmark = pytest.mark.server

BODY = {"prompt": "The quick brown fox", "max_tokens": 40, "ignore_eos": True, "metadata": {"prompt_family": "fox"}}
TRACE = "qwen-1.0.jsonl"
DASHBOARD = json.loads((PROJECT / "config" / "grafana" / "specserve.json").read_text())


def value(server: Server, name: str, *labels: str) -> float:
    """The sum of all series of a name that have these labels."""
    return sum(
        number
        for series, number in server.metrics().items()
        if series.split("{")[0] == name and all(label in series for label in labels)
    )


def wait_for(server: Server, name: str, least: float, *labels: str) -> None:
    """Wait for a metric: TorchServe reads the worker's values a moment later."""
    until(lambda: value(server, name, *labels) >= least, f"{name} is {least}")


def test_metrics_count_tokens_drafts_and_time(server: Server) -> None:
    before = value(server, "specserve_emitted_tokens_total", 'family="fox"')
    statistics = server.post(BODY).json()["speculation"]
    wait_for(server, "specserve_emitted_tokens_total", before + 40, 'family="fox"')
    assert value(server, "specserve_draft_tokens_total", 'family="fox"') >= statistics["drafted_tokens"]
    assert value(server, "specserve_target_seconds_total", 'family="fox"') > 0
    assert value(server, "specserve_time_to_first_token_seconds_count", 'family="fox"') >= 1
    assert value(server, "specserve_slots") == 8
    assert value(server, "specserve_live_sequences") == 0
    assert value(server, "specserve_draft_model_up") == 1


def test_the_dashboard_uses_only_metrics_and_labels_that_exist() -> None:
    known = {metric.name for metric in ALL}
    parts = ("bucket", "sum", "count")
    known |= {f"{metric.name}_{part}" for metric in ALL if metric.kind == "histogram" for part in parts}
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    named = {name for query in queries for name in re.findall(r"specserve_\w+", query)}
    assert named <= known
    labels = {label for metric in ALL for label in metric.labels} | {"le"}
    used = {label for query in queries for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
    assert used <= labels


def test_v1_speculation_reports_models_costs_and_limits(server: Server) -> None:
    answer = server.get("/v1/speculation")
    assert answer.status_code == 200
    status = answer.json()
    assert status["models"]["target"]["file"].endswith(".gguf")
    assert len(status["models"]["target"]["sha256"]) == 64
    assert status["costs"]["target"]["rows"][0] == 1
    assert status["sequences"] == {"live": 0, "waiting": 0, "slots": 8}
    assert status["limits"]["max_wait_ms"] >= 250


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
    before = server.post(GREEDY).json()["choices"][0]["text"]
    size = file.stat().st_size
    assert size > 0
    # From here on the operating system lets the worker extend no file, as if the disk were full.
    full = server.worker()
    full.rlimit(psutil.RLIMIT_FSIZE, (size, psutil.RLIM_INFINITY))
    for _ in range(3):
        answer = server.post(GREEDY)
        assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, before)
    full.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
    assert file.stat().st_size == size
    until(lambda: server.log().count("qwen-1.0.jsonl stops:") == 1, "one sentence in the log")
    assert "Traceback" not in server.log()
