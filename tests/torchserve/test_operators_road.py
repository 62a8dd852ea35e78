"""An operator's own TorchServe: the archive and the models, in an environment that does not have this project."""

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

from nginx import balancing, needs_nginx, switch
from server import PATIENCE_SECONDS, PROJECT, Server, free_ports, openai_client, tiny, until
from specserve.cli import __main__ as specserve
from specserve.cli import paths
from specserve.cli.torchserve_process import java_home
from specserve.weights.models import prepare
from tiny_config import tiny_config

pytestmark = pytest.mark.server

TORCH = PROJECT / ".venv-train" / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
BODY: Any = {"prompt": "The quick", "max_tokens": 8, "temperature": 0}


@dataclass(frozen=True)
class Operator(Server):
    """Plain `torchserve` on free ports, started in a directory of its own."""

    directory: Path = Path()

    @property
    def state(self) -> Path:
        return self.directory

    def is_ready(self) -> bool:
        # Until TorchServe has written its whole key file and listens, there is nothing to ask.
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError, requests.ConnectionError):
            answer = self.manage("GET", "/models/qwen")
            return answer.ok and any(worker["status"] == "READY" for worker in answer.json()[0]["workers"])
        return False

    def complete(self, version: str = "1.0") -> str:
        return str(self.answer(version).choices[0].text)

    def answer(self, version: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/predictions/qwen/{version}/v1"
        return openai_client(url, self.token("inference")).completions.create(model="tiny", **BODY)

    def scale(self, workers: int, version: str = "1.0") -> None:
        path = f"/models/qwen/{version}?min_worker={workers}&max_worker={workers}&synchronous=true"
        assert self.manage("PUT", path).ok


@pytest.fixture(scope="module")
def foreign_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with this environment's libraries, but without this project and without torch."""
    directory = tmp_path_factory.mktemp("foreign")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    # A directory in a .pth file is searched for packages, but the .pth files in it (ours among them) are not read.
    [site_packages] = directory.glob("lib/python*/site-packages")
    (site_packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    python = directory / "bin" / "python"
    names = ("specserve", "torch", "llama_cpp", "ts")
    code = f"from importlib.util import find_spec; print(*(bool(find_spec(name)) for name in {names}))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found == "False False True True\n"
    return python


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model store: version 1.0 of the tiny pair and, as config/README.md describes, 1.1 without speculation."""
    store = tmp_path_factory.mktemp("store")
    canary = tiny_config(tmp_path_factory.mktemp("canary"), handler={"speculation": {"mode": "off"}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "MODEL_STORE", store)
        for config, version in ((tiny(), "1.0"), (canary, "1.1")):
            out = ["--out", str(store / f"qwen-{version}.mar")]
            assert specserve.main(["archive", "--config", str(config), "--version", version, *out]) == 0
    return store


@pytest.fixture(scope="module")
def operator(store: Path, foreign_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    directory = tmp_path_factory.mktemp("operator")
    port = free_ports()
    # The operator's own settings, which here are ports, and what the guide adds to them.
    [added] = re.findall(r"```properties\n(.*?)```", (PROJECT / "config" / "README.md").read_text(), re.DOTALL)
    addresses = {"inference": port, "management": port + 1, "metrics": port + 2}
    own_settings = [f"{name}_address=http://127.0.0.1:{number}" for name, number in addresses.items()]
    own_settings += [f"grpc_inference_port={port + 3}", f"grpc_management_port={port + 4}"]
    (directory / "config.properties").write_text("\n".join([*own_settings, added]))
    # As the operator's guide says, so that another TorchServe may run.
    (directory / "tmp").mkdir(mode=0o700)
    own = {"TEMP": str(directory / "tmp"), "TMPDIR": str(directory / "tmp"), "JAVA_HOME": java_home()}
    # The models are in another directory than where the archives were built.
    (directory / "models").mkdir()
    for path in prepare(tiny()).values():
        shutil.copy(path, directory / "models")
    own |= {"SPECSERVE_MODELS": str(directory / "models"), "SPECSERVE_CACHE": str(directory / "cache")}
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | own
    options = ["--start", "--ncs", "--foreground", "--models", "qwen=qwen-1.0.mar", "--ts-config", "config.properties"]
    command: list[str | Path] = [foreign_python, "-m", "ts.model_server", *options, "--model-store", store]
    with (directory / "console.log").open("wb") as console:
        process = subprocess.Popen(command, cwd=directory, env=environment, stdout=console, stderr=console)
    operator = Operator(port, directory=directory)
    try:
        until(operator.is_ready, f"a worker is ready, as {directory / 'console.log'} says")
        yield operator
    finally:
        for child in reversed(psutil.Process(process.pid).children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait(timeout=PATIENCE_SECONDS)


def test_the_archive_serves_in_250_mb_without_this_project_or_torch(operator: Operator, foreign_python: Path) -> None:
    assert len(operator.complete()) > 0
    worker = operator.worker()
    assert str(foreign_python.parent) in " ".join(worker.cmdline())
    assert worker.memory_info().rss < 250e6


def test_the_api_key_renews_the_inference_key(operator: Operator) -> None:
    old = operator.key
    refused, renewed = (operator.manage("GET", "/token?type=inference", key=kind) for kind in ("management", "API"))
    assert (refused.status_code, renewed.status_code) == (400, 200)
    assert operator.key != old
    assert operator.complete()


NET = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(x)
"""
NET_HANDLER = """
import torch
from ts.torch_handler.base_handler import BaseHandler


class NetHandler(BaseHandler):
    def preprocess(self, data):
        return torch.tensor([row["body"] for row in data], dtype=torch.float32)

    def postprocess(self, output):
        return output.tolist()
"""
WRITE_NET = f"import sys; sys.path[:0] = ['.', {str(TORCH)!r}]; import torch; from net import Net; m = Net(); "
WRITE_NET += "torch.save(m.state_dict(), 'net.pt'); print(m(torch.ones(1, 4)).tolist()[0])"


@pytest.fixture
def _torch(foreign_python: Path) -> Iterator[None]:
    """The operator's environment has torch; other tests want it without."""
    [site_packages] = foreign_python.parents[1].glob("lib/python*/site-packages")
    added = site_packages / "torch.pth"
    added.write_text(str(TORCH))
    yield
    added.unlink()


@pytest.mark.skipif(not TORCH.exists(), reason="no torch is in .venv-train: scripts/train_draft --help installs it")
@pytest.mark.usefixtures("_torch")
def test_a_pytorch_model_and_ours_serve_scale_and_are_registered_beside_each_other(
    operator: Operator, store: Path, tmp_path: Path
) -> None:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "handler.py").write_text(NET_HANDLER)
    written = subprocess.run(
        [sys.executable, "-c", WRITE_NET], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    archiver = Path(sys.executable).with_name("torch-model-archiver")
    named = ["--model-name", "net", "--version", "1.0", "--model-file", "net.py", "--serialized-file", "net.pt"]
    command: list[str | Path] = [archiver, *named, "--handler", "handler.py", "--export-path", store, "--force"]
    subprocess.run(command, cwd=tmp_path, check=True)
    text, url = operator.complete(), f"http://127.0.0.1:{operator.port}/predictions/net"

    def net() -> list[float]:
        answer = requests.post(url, json=[1, 1, 1, 1], headers=operator.authorization(), timeout=PATIENCE_SECONDS)
        return [float(number) for number in answer.json()]

    operator.register("net.mar")
    assert net() == pytest.approx(json.loads(written.stdout))
    assert operator.manage("PUT", "/models/net?min_worker=2&synchronous=true").ok
    operator.scale(0)
    assert net() == pytest.approx(json.loads(written.stdout))
    operator.scale(1)
    assert operator.complete() == text
    assert operator.manage("DELETE", "/models/net").ok
    assert operator.complete() == text


@needs_nginx
def test_behind_nginx_clients_keep_url_and_streams_when_the_version_changes(operator: Operator, tmp_path: Path) -> None:
    """New requests reach 1.1, which drafts nothing; streams that run on 1.0 meanwhile end there, whole."""
    body: Any = {**BODY, "max_tokens": 480, "extra_body": {"ignore_eos": True}}
    operator.register("qwen-1.1.mar")
    with balancing(operator.port, operator.port, tmp_path, operator.key) as url:
        client = openai_client(url, operator.key)
        whole = client.completions.create(model="tiny", **body).choices[0].text
        streams = [client.completions.create(model="tiny", **body, stream=True) for _ in range(4)]
        begun = [next(stream).choices[0].text for stream in streams]
        switch(tmp_path, "1.0", "1.1")

        def is_new() -> bool:
            answer: Any = client.completions.create(model="tiny", **BODY)
            return bool(answer.speculation["drafted_tokens"] == 0)

        until(is_new, "new requests reach 1.1")
        texts = [
            first + "".join(c.choices[0].text for c in stream) for first, stream in zip(begun, streams, strict=True)
        ]
        assert texts == [whole] * 4
    operator.scale(0, "1.1")
    assert operator.manage("DELETE", "/models/qwen/1.1").ok


def test_a_canary_can_be_removed_registered_again_and_made_the_default(operator: Operator) -> None:
    text = operator.complete()
    operator.register("qwen-1.1.mar")
    stable, canary = operator.answer("1.0"), operator.answer("1.1")
    assert stable.choices[0].text == canary.choices[0].text == text
    assert stable.speculation["drafted_tokens"] > 0
    assert canary.speculation["drafted_tokens"] == 0
    shown = "".join(operator.metrics())
    assert all(f'specserve_slots{{model="qwen",version="{version}"' in shown for version in ("1.0", "1.1"))
    # As the guide removes one: TorchServe answers for a version without workers until it is gone, so nobody waits.
    operator.scale(0, "1.1")
    with pytest.raises(openai.InternalServerError, match="no worker"):
        operator.complete("1.1")
    assert operator.manage("DELETE", "/models/qwen/1.1").ok
    with pytest.raises(openai.NotFoundError):
        operator.complete("1.1")
    assert operator.complete() == text
    operator.register("qwen-1.1.mar")
    assert operator.manage("PUT", "/models/qwen/1.1/set-default").ok
    operator.scale(0)
    assert operator.manage("DELETE", "/models/qwen/1.0").ok
    assert operator.complete("1.1") == text
    url = f"http://127.0.0.1:{operator.port}/predictions/qwen"
    bare = requests.post(url, json=BODY, headers=operator.authorization(), timeout=PATIENCE_SECONDS)
    assert bare.json()["choices"][0]["text"] == text
