"""An operator's own TorchServe: the archive alone, in an environment that does not have this project installed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import requests

from server import PATIENCE_SECONDS, PROJECT, free_ports, tiny, until
from specserve.cli.torchserve_process import java_home
from tiny_config import tiny_config

pytestmark = pytest.mark.server


@dataclass(frozen=True)
class Operator:
    """Plain `torchserve` on free ports, started in a directory of its own."""

    port: int
    directory: Path

    def token(self, kind: str) -> str:
        return str(json.loads((self.directory / "key_file.json").read_text())[kind]["key"])

    def manage(self, method: str, path: str) -> requests.Response:
        """A call of TorchServe's management API."""
        headers = {"Authorization": f"Bearer {self.token('management')}"}
        return requests.request(
            method, f"http://127.0.0.1:{self.port + 1}{path}", headers=headers, timeout=PATIENCE_SECONDS
        )

    def workers(self) -> list[Any]:
        """TorchServe's list of the model's workers."""
        answer = self.manage("GET", "/models/qwen")
        return list(answer.json()[0]["workers"]) if answer.ok else []

    def is_ready(self) -> bool:
        # Until TorchServe has written its whole key file and listens, there is nothing to ask.
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError, requests.ConnectionError):
            return any(worker["status"] == "READY" for worker in self.workers())
        return False

    def wait_until_ready(self) -> None:
        until(self.is_ready, f"a worker is ready, as {self.directory / 'console.log'} says")

    def complete(self, version: str = "1.0", **extra: Any) -> str:
        return str(self.answer(version, **extra).choices[0].text)

    def answer(self, version: str, **extra: Any) -> Any:
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/predictions/qwen/{version}/v1",
            api_key=self.token("inference"),
            max_retries=0,
            timeout=PATIENCE_SECONDS,
        )
        return client.completions.create(
            model="tiny", prompt="The quick", max_tokens=8, temperature=0, extra_body=extra or None
        )


@pytest.fixture(scope="module")
def foreign_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with this environment's libraries, but without this project and without torch."""
    directory = tmp_path_factory.mktemp("foreign")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    # A directory in a .pth file is searched for packages, but the .pth files in it (ours among them) are not read.
    [site_packages] = directory.glob("lib/python*/site-packages")
    (site_packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    python = directory / "bin" / "python"
    for module, found in (("specserve", False), ("torch", False), ("llama_cpp", True), ("ts", True)):
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        assert (subprocess.run([python, "-c", code], check=False).returncode == 0) is found, module
    return python


@pytest.fixture(scope="module")
def archived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The tiny pair's archive in the project's model store; one that was there before is restored."""
    archive, backup = PROJECT / "model_store" / "qwen.mar", tmp_path_factory.mktemp("aside") / "qwen.mar"
    if archive.exists():
        shutil.copy2(archive, backup)
    try:
        subprocess.run(["scripts/archive", "--config", str(tiny())], cwd=PROJECT, check=True, timeout=PATIENCE_SECONDS)
        yield
    finally:
        archive.unlink(missing_ok=True)
        if backup.exists():
            shutil.move(backup, archive)


@pytest.fixture(scope="module")
def operator(archived: None, foreign_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    del archived  # requested so that the archive exists first
    directory = tmp_path_factory.mktemp("operator")
    port = free_ports()
    settings = (PROJECT / "config" / "config.properties").read_text()
    for default, port_in_use in {8080: port, 8081: port + 1, 8082: port + 2, 7070: port + 3, 7071: port + 4}.items():
        settings = re.sub(rf"\b{default}\b", str(port_in_use), settings)
    (directory / "config.properties").write_text(settings)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    # As the operator's guide says, so that another TorchServe may run.
    (directory / "tmp").mkdir(mode=0o700)
    environment |= {"TEMP": str(directory / "tmp"), "TMPDIR": str(directory / "tmp")}
    if home := java_home():
        environment["JAVA_HOME"] = home
    store = ["--model-store", str(PROJECT / "model_store"), "--models", "qwen=qwen.mar"]
    command = [str(foreign_python), "-m", "ts.model_server", "--start", "--ncs", "--foreground", *store]
    command += ["--ts-config", "config.properties"]
    with (directory / "console.log").open("wb") as console:
        process = subprocess.Popen(command, cwd=directory, env=environment, stdout=console, stderr=console)
    operator = Operator(port, directory)
    try:
        operator.wait_until_ready()
        yield operator
    finally:
        pids = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        for pid in reversed(pids):
            if psutil.pid_exists(pid):
                psutil.Process(pid).terminate()
        process.wait(timeout=PATIENCE_SECONDS)


def test_the_archive_serves_without_this_project_and_without_torch(operator: Operator, foreign_python: Path) -> None:
    assert len(operator.complete()) > 0
    [worker] = operator.workers()
    assert str(foreign_python.parent) in " ".join(psutil.Process(worker["pid"]).cmdline())


def test_a_worker_without_torch_needs_less_than_250_mb(operator: Operator) -> None:
    [worker] = operator.workers()
    assert psutil.Process(worker["pid"]).memory_info().rss < 250e6


def test_the_model_is_scaled_unregistered_and_registered_again(operator: Operator) -> None:
    text = operator.complete()
    assert operator.manage("PUT", "/models/qwen?min_worker=0&max_worker=0&synchronous=true").ok
    assert operator.workers() == []
    assert operator.manage("PUT", "/models/qwen?min_worker=1&max_worker=1&synchronous=true").ok
    assert operator.complete() == text
    assert operator.manage("DELETE", "/models/qwen/1.0").ok
    with pytest.raises(openai.NotFoundError):
        operator.complete()
    assert operator.manage("POST", "/models?url=qwen.mar&initial_workers=1&synchronous=true").ok
    operator.wait_until_ready()
    assert operator.complete() == text


def test_the_api_key_renews_the_inference_key(operator: Operator) -> None:
    url = f"http://127.0.0.1:{operator.port + 1}/token?type=inference"
    old = operator.token("inference")
    refused, renewed = (
        requests.get(url, headers={"Authorization": f"Bearer {operator.token(kind)}"}, timeout=PATIENCE_SECONDS)
        for kind in ("management", "API")
    )
    assert (refused.status_code, renewed.status_code) == (400, 200)
    assert operator.token("inference") != old
    assert operator.complete()


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[None]:
    """Version 1.1 in an archive of its own, without speculation, as config/README.md describes; removed afterwards."""
    store = PROJECT / "model_store"
    config = tiny_config(tmp_path, handler={"speculation": {"mode": "off"}})
    stable = (store / "qwen.mar").rename(store / "qwen-1.0.mar")
    command = ["scripts/archive", "--config", str(config), "--version", "1.1"]
    try:
        subprocess.run(command, cwd=PROJECT, check=True, timeout=PATIENCE_SECONDS)
        (store / "qwen.mar").rename(store / "qwen-1.1.mar")
    finally:
        stable.rename(store / "qwen.mar")
    yield
    (store / "qwen-1.1.mar").unlink()


@pytest.mark.usefixtures("canary")
def test_a_version_that_is_scaled_to_0_lets_no_client_wait(operator: Operator) -> None:
    """As the guide removes one: TorchServe answers for it until it is gone, so no request is left behind."""
    assert operator.manage("POST", "/models?url=qwen-1.1.mar&initial_workers=1&synchronous=true").ok
    assert operator.complete("1.1")
    assert operator.manage("PUT", "/models/qwen/1.1?min_worker=0&max_worker=0&synchronous=true").ok
    with pytest.raises(openai.InternalServerError, match="no worker"):
        operator.complete("1.1")
    assert operator.manage("DELETE", "/models/qwen/1.1").ok
    with pytest.raises(openai.NotFoundError):
        operator.complete("1.1")
    assert operator.complete()


@pytest.mark.usefixtures("canary")
def test_a_canary_version_can_be_removed_registered_again_and_made_the_default(operator: Operator) -> None:
    text = operator.complete()
    assert operator.manage("POST", "/models?url=qwen-1.1.mar&initial_workers=1&synchronous=true").ok
    assert operator.manage("PUT", "/models/qwen/1.1?min_worker=0&max_worker=0&synchronous=true").ok
    assert operator.manage("DELETE", "/models/qwen/1.1").ok
    assert operator.complete() == text
    assert operator.manage("POST", "/models?url=qwen-1.1.mar&initial_workers=1&synchronous=true").ok
    stable, canary = operator.answer("1.0"), operator.answer("1.1")
    assert stable.choices[0].text == canary.choices[0].text == text
    assert stable.speculation["drafted_tokens"] > 0
    assert canary.speculation["drafted_tokens"] == 0
    metrics = requests.get(f"http://127.0.0.1:{operator.port + 2}/metrics", timeout=PATIENCE_SECONDS).text
    assert all(f'specserve_slots{{model="qwen",version="{version}"' in metrics for version in ("1.0", "1.1"))
    assert operator.manage("PUT", "/models/qwen/1.1/set-default").ok
    assert operator.manage("PUT", "/models/qwen/1.0?min_worker=0&max_worker=0&synchronous=true").ok
    assert operator.manage("DELETE", "/models/qwen/1.0").ok
    assert operator.complete("1.1") == text
    bare = requests.post(
        f"http://127.0.0.1:{operator.port}/predictions/qwen",
        json={"prompt": "The quick", "max_tokens": 8, "temperature": 0},
        headers={"Authorization": f"Bearer {operator.token('inference')}"},
        timeout=PATIENCE_SECONDS,
    )
    assert bare.json()["choices"][0]["text"] == text
