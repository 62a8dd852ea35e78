"""Somebody else's model on the same TorchServe: both serve concurrent requests."""

import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from server import PATIENCE_SECONDS, Server, registered
from streams import GREEDY

pytestmark = pytest.mark.server

LONG = {**GREEDY, "max_tokens": 150}
ECHO = '''
def handle(data, context):
    """Return the body of every request."""
    return [row.get("body") or row.get("data") for row in data or []]
'''


def archive_echo(store: Path, directory: Path) -> None:
    """Write echo.mar into a model store; it has nothing of ours except the stub of torch."""
    handler, torch = directory / "echo.py", directory / "torch.py"
    handler.write_text(ECHO, encoding="utf-8")
    with zipfile.ZipFile(store / "qwen.mar") as ours:
        torch.write_bytes(ours.read("torch.py"))
    named: list[str | Path] = ["--model-name", "echo", "--version", "1.0", "--extra-files", torch]
    archiver = Path(sys.executable).parent / "torch-model-archiver"
    subprocess.run([archiver, *named, "--handler", handler, "--export-path", store, "--force"], check=True)


def test_another_model_and_ours_answer_concurrent_requests(server: Server, tmp_path: Path) -> None:
    archive_echo(server.state / "model_store", tmp_path)
    headers = {**server.authorization(), "Content-Type": "text/plain"}
    with registered(server, "echo") as echo, ThreadPoolExecutor(4) as pool:
        alone = server.post(LONG).json()["choices"][0]["text"]
        completions = [pool.submit(server.post, LONG) for _ in range(4)]
        for text in map(str, range(30)):
            assert requests.post(echo.url, data=text, headers=headers, timeout=PATIENCE_SECONDS).text == text
        assert [completion.result().json()["choices"][0]["text"] for completion in completions] == [alone] * 4
