"""A real Prometheus scrapes the server and answers every query of the dashboard (Debian: prometheus)."""

import contextlib
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from server import PATIENCE_SECONDS, PROJECT, Server, free_ports, registered, until
from specserve.observability.metrics import ALL

PROMETHEUS = shutil.which("prometheus")
needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus is on PATH: apt install prometheus")
pytestmark = [pytest.mark.server, needs_prometheus]

ALERTS = PROJECT / "config" / "alerts.yml"
DASHBOARD = json.loads((PROJECT / "config" / "grafana" / "specserve.json").read_text())
TEXTS = 'sum by (group) (specserve_texts_total{model="watched"})'
QUERIES = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]
[*_, SCALER] = yaml.safe_load_all((PROJECT / "config" / "kserve" / "inference-service.yaml").read_text())


@dataclass(frozen=True)
class Prometheus:
    port: int

    def evaluate(self, query: str) -> list[dict[str, Any]]:
        """The current series of a query, with values for Grafana's variables."""
        expression = query.replace("$__rate_interval", "10m").replace("$model", "watched").replace("$family", ".*")
        url = f"http://127.0.0.1:{self.port}/api/v1/query"
        answer = requests.get(url, params={"query": expression}, timeout=PATIENCE_SECONDS).json()
        assert answer["status"] == "success", answer
        return list(answer["data"]["result"])

    def has_result(self, query: str) -> bool:
        # Until it is ready there is no response, or one without JSON.
        with contextlib.suppress(requests.RequestException):
            return bool(self.evaluate(query))
        return False


@pytest.fixture(scope="module")
def watched(server: Server, archive: Callable[..., Path]) -> Iterator[Server]:
    """A pair with half of its requests in the holdback group, so that few are enough to measure the speed-up."""
    archive("watched", handler={"speculation": {"mode": "auto", "holdback": 0.5}})
    with registered(server, "watched") as watched:
        yield watched


@pytest.fixture(scope="module")
def prometheus(watched: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the server every second, after some requests."""
    directory = tmp_path_factory.mktemp("prometheus")
    scrape = {"job_name": "specserve", "static_configs": [{"targets": [f"127.0.0.1:{watched.port + 2}"]}]}
    settings, data = directory / "prometheus.yml", directory / "data"
    settings.write_text(yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}))
    port = free_ports(1)
    options = ["--log.level=error", f"--web.listen-address=127.0.0.1:{port}"]
    options += [f"--config.file={settings}", f"--storage.tsdb.path={data}"]
    process = subprocess.Popen([str(PROMETHEUS), *options])
    try:
        found = Prometheus(port)
        # A rate needs a counter twice; all are there unless all 18 in mode auto are in the holdback group.
        _send_requests(watched, 20)
        until(lambda: found.has_result('specserve_slots{model="watched"}'), "a first scrape")
        # Each group has the 30 requests that it needs, except with probability 1 in 40,000.
        _send_requests(watched, 110)
        until(lambda: found.has_result('specserve_holdback_speedup{model="watched", bound="low"}'), "the speed-up")
        yield found
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_SECONDS)


def _send_requests(server: Server, count: int) -> None:
    def send(number: int) -> None:
        body = {"prompt": f"Fox {number % 7}", "max_tokens": 12, "ignore_eos": True, "temperature": number % 2}
        # The tiny draft is as slow as its target, so that no draft pays; every tenth request is in mode fixed.
        extra = {"speculation": {"mode": "fixed", "gamma": 3}} if number % 10 == 0 else {}
        answer = server.post({**body, **extra, "metadata": {"prompt_family": "fox"}})
        assert answer.ok, answer.text

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(send, range(count)))


def test_every_query_of_the_dashboard_has_a_finite_result_and_texts_have_a_group(prometheus: Prometheus) -> None:
    labels = {label for metric in ALL for label in metric.labels} | {"le"}
    for title, query in QUERIES:
        assert {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")} <= labels
        series = prometheus.evaluate(query)
        assert series, f"The panel '{title}' would be empty: {query}"
        numbers = [float(number) for _, number in (sample["value"] for sample in series)]
        assert any(map(math.isfinite, numbers)), f"The panel '{title}' would show no number: {query}"
    assert {series["metric"]["group"] for series in prometheus.evaluate(TEXTS)} == {"auto", "holdback", "fixed"}


def test_each_alert_fires_while_tokens_are_written_and_never_in_an_idle_server(tmp_path: Path) -> None:
    """By promtool, which comes with Prometheus."""
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    gauges = {"draft_model_up": 0, "own_kernels": 0, "waiting_sequences": 2}
    names = [rule["alert"] for rule in group["rules"]]
    labels = '{instance="here", model="qwen", version="1.0"}'

    def case(tokens: str, values: list[int], firing: list[str]) -> dict[str, Any]:
        series = dict(zip(gauges, values, strict=True))
        inputs = {f"specserve_{name}{labels}": f"{value}x20" for name, value in series.items()}
        inputs[f'specserve_emitted_tokens_total{labels[:-1]}, group="auto"}}'] = tokens
        return {
            "interval": "1m",
            "input_series": [{"series": series, "values": values} for series, values in inputs.items()],
            "promql_expr_test": [
                {"expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)', "eval_time": "15m"}
                | {"exp_samples": [{"labels": "{}", "value": int(name in firing)}]}
                for name in names
            ],
        }

    well = [1, 1, 0]
    cases = [case("0+60x20", well, []), case("7x20", list(gauges.values()), [])]
    for index, name in enumerate(names):
        values = [*well[:index], list(gauges.values())[index], *well[index + 1 :]]
        cases.append(case("0+60x20", values, [name]))
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": cases}))
    promtool = Path(str(PROMETHEUS)).with_name("promtool")
    outcome = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_the_autoscalers_query_has_a_result(watched: Server, prometheus: Prometheus) -> None:
    """Its result is 0 as soon as Prometheus has scraped a server without live sequences, after some requests."""
    [trigger] = SCALER["spec"]["triggers"]
    _send_requests(watched, 8)

    def idle() -> bool:
        return [float(series["value"][1]) for series in prometheus.evaluate(trigger["metadata"]["query"])] == [0]

    until(idle, "a result of 0")
