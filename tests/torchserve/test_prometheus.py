"""A real Prometheus reads the server and answers every query of the dashboard (Debian: prometheus)."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import requests
import yaml

from server import PROJECT, Server, free_ports, running, tiny_but, until

PROMETHEUS = shutil.which("prometheus")
pytestmark = [pytest.mark.server, pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed")]

DASHBOARD = json.loads((PROJECT / "config" / "grafana" / "specserve.json").read_text())
QUERIES = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]
[*_, SCALER] = yaml.safe_load_all((PROJECT / "config" / "kserve" / "inference-service.yaml").read_text())


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus and its port."""

    port: int

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The series that a query gives now, as Grafana would send it for a panel of some minutes."""
        expression = query.replace("$__rate_interval", "10m").replace("$model", "qwen").replace("$family", ".*")
        url = f"http://127.0.0.1:{self.port}/api/v1/query"
        answer = requests.get(url, params={"query": expression}, timeout=10).json()
        assert answer["status"] == "success", answer
        return list(answer["data"]["result"])

    def knows(self, query: str) -> bool:
        """Whether a query has an answer yet."""
        # Before it listens, or is ready, its answer is none, or no JSON.
        with contextlib.suppress(requests.RequestException):
            return bool(self.ask(query))
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that holds half of its requests back, so that few of them show what speculation brings."""
    held_back = {"speculation": {"mode": "auto", "holdback": 0.5}}
    with running(config=tiny_but(tmp_path_factory.mktemp("held_back"), handler=held_back)) as server:
        yield server


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Reads the server every second, and has seen some work of it."""
    directory = tmp_path_factory.mktemp("prometheus")
    scrape = {"job_name": "specserve", "static_configs": [{"targets": [f"127.0.0.1:{server.port + 2}"]}]}
    (directory / "prometheus.yml").write_text(
        yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]})
    )
    port = free_ports(1)
    command = [
        str(PROMETHEUS),
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    process = subprocess.Popen(command)
    try:
        found = Prometheus(port)
        _work(server, 1)
        _wait_for(found, "specserve_slots")
        # Each group has its 30 texts but for one time in 40,000.
        _work(server, 150)
        _wait_for(found, 'specserve_holdback_speedup{bound="low"}')
        yield found
    finally:
        process.terminate()
        process.wait(timeout=30)


def _work(server: Server, count: int) -> None:
    """So many short answers, a few at a time."""

    def ask(number: int) -> None:
        body = {"prompt": f"Fox {number % 7}", "max_tokens": 16, "ignore_eos": True, "temperature": number % 2}
        # The tiny pair never drafts by itself, since its draft is as slow as its target; every third request insists.
        extra = {"speculation": {"mode": "fixed", "gamma": 3}} if number % 3 == 0 else {}
        answer = server.post({**body, **extra, "metadata": {"prompt_family": "fox"}})
        assert answer.ok, answer.text

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(count)))


def _wait_for(prometheus: Prometheus, query: str) -> None:
    until(lambda: prometheus.knows(query), f"Prometheus knows {query}")


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[f"{title}: {query[:40]}" for title, query in QUERIES])
def test_every_query_of_the_dashboard_has_an_answer(prometheus: Prometheus, title: str, query: str) -> None:
    series = prometheus.ask(query)
    assert series, f"The panel '{title}' would be empty."
    numbers = [float(number) for _, number in (one["value"] for one in series)]
    assert any(map(math.isfinite, numbers)), f"The panel '{title}' would show no number."


def test_the_scalers_query_has_an_answer(server: Server, prometheus: Prometheus) -> None:
    """As soon as Prometheus has seen that no text is live any more, after some work."""
    [trigger] = SCALER["spec"]["triggers"]
    _work(server, 8)

    def idle() -> bool:
        return [float(series["value"][1]) for series in prometheus.ask(trigger["metadata"]["query"])] == [0]

    until(idle, "a server that works and has no live text")


def test_a_query_for_what_is_not_there_has_none(prometheus: Prometheus) -> None:
    assert not prometheus.ask("specserve_unheard_of")


def test_the_control_group_is_told_from_the_others(prometheus: Prometheus) -> None:
    groups = {str(series["metric"]) for series in prometheus.ask("sum by (group) (specserve_texts_total)")}
    assert groups == {"{'group': 'auto'}", "{'group': 'holdback'}", "{'group': 'fixed'}"}
