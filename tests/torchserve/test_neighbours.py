"""Another model on the same TorchServe: both serve concurrent requests."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from server import PATIENCE_SECONDS, Server

pytestmark = pytest.mark.server

LONG = {"prompt": "The quick brown fox", "max_tokens": 150, "temperature": 0, "ignore_eos": True}

ECHO = '''
def handle(data, context):
    """Return the body of every request."""
    return [row.get("body") or row.get("data") for row in data or []]
'''


def archive_echo(store: Path, directory: Path) -> None:
    """Write echo.mar into a model store, with the stub of torch from our own archive in it."""
    handler, torch = directory / "echo.py", directory / "torch.py"
    handler.write_text(ECHO, encoding="utf-8")
    with zipfile.ZipFile(store / "qwen.mar") as ours:
        torch.write_bytes(ours.read("torch.py"))
    named: list[str | Path] = ["--model-name", "echo", "--version", "1.0", "--extra-files", torch]
    archiver = Path(sys.executable).parent / "torch-model-archiver"
    subprocess.run([archiver, *named, "--handler", handler, "--export-path", store, "--force"], check=True)


def echo(server: Server, text: str) -> requests.Response:
    headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "text/plain"}
    url = f"http://127.0.0.1:{server.port}/predictions/echo"
    return requests.post(url, data=text, headers=headers, timeout=PATIENCE_SECONDS)


@pytest.fixture
def neighbour(server: Server, tmp_path: Path) -> Iterator[None]:
    """Another model on this TorchServe; its archive has nothing of ours except the stub of torch."""
    archive_echo(server.state / "model_store", tmp_path)
    answer = server.manage("POST", "/models?url=echo.mar&initial_workers=1&synchronous=true")
    assert answer.ok, answer.text
    yield
    assert server.manage("DELETE", "/models/echo").ok


@pytest.mark.usefixtures("neighbour")
def test_another_model_and_ours_answer_concurrent_requests(server: Server) -> None:
    alone = server.post(LONG).json()["choices"][0]["text"]
    with ThreadPoolExecutor(4) as pool:
        completions = [pool.submit(server.post, LONG) for _ in range(4)]
        echoes = [echo(server, f"echo {number}") for number in range(30)]
        answers = [completion.result() for completion in completions]
    assert [answer.text for answer in echoes] == [f"echo {number}" for number in range(30)]
    assert [answer.json()["choices"][0]["text"] for answer in answers] == [alone] * 4
