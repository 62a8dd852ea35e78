"""One TorchServe, several models and several workers: none stands in another's way."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests

from server import Server

pytestmark = pytest.mark.server

ECHO = '''
def handle(data, context):
    """Give every row its body back."""
    return [row.get("body") or row.get("data") for row in data or []]
'''
LONG = {"prompt": "The quick brown fox", "max_tokens": 150, "temperature": 0, "ignore_eos": True}


def manage(server: Server, method: str, path: str) -> requests.Response:
    """A call of TorchServe's management API."""
    headers = {"Authorization": f"Bearer {server.token('management')}"}
    return requests.request(method, f"http://127.0.0.1:{server.port + 1}{path}", headers=headers, timeout=120)


def echo(server: Server, text: str) -> requests.Response:
    headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "text/plain"}
    url = f"http://127.0.0.1:{server.port}/predictions/echo"
    return requests.post(url, data=text, headers=headers, timeout=60)


@pytest.fixture
def neighbour(server: Server, tmp_path: Path) -> Iterator[None]:
    """Another model of this TorchServe, with a handler that has nothing of ours."""
    handler = tmp_path / "echo.py"
    handler.write_text(ECHO)
    archiver = Path(sys.executable).parent / "torch-model-archiver"
    store = server.state / "model_store"
    named = ["--model-name", "echo", "--version", "1.0"]
    subprocess.run([archiver, *named, "--handler", handler, "--export-path", store, "--force"], check=True)
    try:
        answer = manage(server, "POST", "/models?url=echo.mar&initial_workers=1&synchronous=true")
        assert answer.ok, answer.text
        yield
        assert manage(server, "DELETE", "/models/echo").ok
    finally:
        (store / "echo.mar").unlink()


@pytest.mark.usefixtures("neighbour")
def test_another_model_and_ours_answer_side_by_side(server: Server) -> None:
    alone = server.post(LONG).json()["choices"][0]["text"]
    with ThreadPoolExecutor(4) as pool:
        texts = [pool.submit(server.post, LONG) for _ in range(4)]
        echoes = [echo(server, f"echo {number}") for number in range(30)]
        answers = [text.result() for text in texts]
    assert [answer.text for answer in echoes] == [f"echo {number}" for number in range(30)]
    assert [answer.json()["choices"][0]["text"] for answer in answers] == [alone] * 4


def workers(server: Server) -> list[psutil.Process]:
    """The processes that hold our models."""
    state = str(server.state)
    return [
        process
        for process in psutil.process_iter()
        if "model_service_worker" in (command := " ".join(process.cmdline())) and state in command
    ]


def test_two_workers_share_the_requests_and_one_is_left_when_asked(server: Server) -> None:
    alone = server.post(LONG).json()["choices"][0]["text"]
    assert len(workers(server)) == 1
    try:
        assert manage(server, "PUT", "/models/qwen?min_worker=2&max_worker=2&synchronous=true").ok
        both = workers(server)
        assert len(both) == 2
        before = [sum(process.cpu_times()[:2]) for process in both]
        with ThreadPoolExecutor(24) as pool:
            answers = [text.result() for text in [pool.submit(server.post, LONG) for _ in range(24)]]
        assert [answer.json()["choices"][0]["text"] for answer in answers] == [alone] * 24
        assert all(sum(process.cpu_times()[:2]) > spent for process, spent in zip(both, before, strict=True))
    finally:
        manage(server, "PUT", "/models/qwen?min_worker=1&max_worker=1&synchronous=true")
    assert server.post(LONG).json()["choices"][0]["text"] == alone
    assert len(workers(server)) == 1
