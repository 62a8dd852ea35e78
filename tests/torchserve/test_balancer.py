"""Two servers behind config/nginx/specserve.conf, as OpenAI's client sees them. Needs nginx (Debian: nginx-light)."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from server import PATIENCE_SECONDS, PROJECT, Server, free_ports, running, stop, until

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
pytestmark = [pytest.mark.server, pytest.mark.skipif(NGINX is None, reason="no nginx is on PATH: apt install nginx")]

KEY = "sk-of.a+test"
LONG = "The quick brown fox jumps over the lazy dog. " * 6


@dataclass(frozen=True)
class Balancer:
    """The balancer's port."""

    port: int

    def client(self, prefix: str = "", key: str = KEY) -> openai.OpenAI:
        """OpenAI's own client, on OpenAI's own path."""
        headers = {"x-prefix-key": prefix} if prefix else None
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(
            base_url=url, api_key=key, default_headers=headers, max_retries=0, timeout=PATIENCE_SECONDS
        )

    def cached(self, prefix: str) -> int:
        """How many tokens of a long prompt were cached by the server to which this prefix key is routed."""
        answer = self.client(prefix).completions.create(model="qwen", prompt=LONG, max_tokens=2)
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0


@contextmanager
def balancing(first: int, second: int, directory: Path, max_connections: int = 64) -> Iterator[Balancer]:
    """nginx with our configuration, in which only the ports and the limit of requests per key are changed."""
    port = free_ports(1)
    text = (PROJECT / "config" / "nginx" / "specserve.conf").read_text()
    assert "limit_conn keys 64;" in text
    text = text.replace("limit_conn keys 64;", f"limit_conn keys {max_connections};")
    for old, new in (("8080", first), ("9080", second), ("8000", port)):
        assert f"127.0.0.1:{old}" in text
        text = text.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")
    (directory / "specserve.conf").write_text(text)
    (directory / "keys.map").write_text(f'"~^Bearer {re.escape(KEY)}$" 1;\n')
    command = [str(NGINX), "-p", str(directory), "-c", str(directory / "specserve.conf"), "-g", "daemon off;"]
    process = subprocess.Popen(command)
    try:
        until(lambda: _listens(port), "nginx answers")
        yield Balancer(port)
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_SECONDS)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    with running("--no-auth") as first, running("--no-auth") as second:
        yield first, second


@pytest.fixture(scope="module")
def balancer(servers: tuple[Server, Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Balancer]:
    with balancing(servers[0].port, servers[1].port, tmp_path_factory.mktemp("nginx")) as balancer:
        yield balancer


def test_openais_path_is_routed_to_a_server(balancer: Balancer) -> None:
    client = balancer.client()
    assert [model.id for model in client.models.list()][-1] == "qwen"
    answer = client.chat.completions.create(model="qwen", messages=[{"role": "user", "content": "Hi"}], max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_a_stream_has_the_text_of_the_whole_response(balancer: Balancer) -> None:
    body: dict[str, Any] = {"model": "qwen", "prompt": "One", "max_tokens": 60, "temperature": 0}
    completions = balancer.client().completions
    streamed = "".join(chunk.choices[0].text for chunk in completions.create(**body, stream=True))
    assert streamed == completions.create(**body).choices[0].text


CHUNKS = [*(b'data: {"choices": [{"index": 0, "text": "%d"}]}' % number for number in range(5)), b"data: [DONE]"]


class FakeServer(BaseHTTPRequestHandler):
    """A fake of our server."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def balancing_fake(handler: type[FakeServer], directory: Path) -> Iterator[partial[requests.Response]]:
    """A balancer whose two servers are one fake; yields a function that posts an empty completion to it."""
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with balancing(server.server_port, server.server_port, directory) as balancer:
                url, headers = f"http://127.0.0.1:{balancer.port}/v1/completions", {"Authorization": f"Bearer {KEY}"}
                yield partial(requests.post, url, json={}, headers=headers, timeout=PATIENCE_SECONDS)
        finally:
            server.shutdown()


class OneChunkAtATime(FakeServer):
    """Sends each chunk of a stream only after the client has received the one before."""

    received = threading.Semaphore(0)

    def do_POST(self) -> None:
        """Send all chunks, as long as each is received."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in CHUNKS:
            self._send(chunk + b"\n\n")
            if not self.received.acquire(timeout=PATIENCE_SECONDS):
                break
        self._send(b"")

    def _send(self, chunk: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))


def test_stream_chunks_are_passed_on_one_by_one(tmp_path: Path) -> None:
    lines = []
    with balancing_fake(OneChunkAtATime, tmp_path) as post, post(stream=True) as answer:
        for line in filter(None, answer.iter_lines(chunk_size=1)):
            lines.append(line)
            OneChunkAtATime.received.release()
    assert lines == CHUNKS


class FullTwice(FakeServer):
    """Its queue is full for the first two requests."""

    refused = 0

    def do_POST(self) -> None:
        """Respond with TorchServe's 503, or with 200."""
        self.rfile.read(int(self.headers["Content-Length"]))
        full = FullTwice.refused < 2
        FullTwice.refused += full
        body = b'{"code": 503, "type": "ServiceUnavailableException"}' if full else b"{}"
        self.send_response(503 if full else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_full_queues_are_openais_503_and_do_not_block_the_next_request(tmp_path: Path) -> None:
    with balancing_fake(FullTwice, tmp_path) as post:
        answers = [post() for _ in range(2)]
    assert [answer.status_code for answer in answers] == [503, 200]
    assert answers[0].json()["error"]["code"] == "service_unavailable"


def test_concurrent_requests_of_a_key_are_limited(servers: tuple[Server, Server], tmp_path: Path) -> None:
    with balancing(servers[0].port, servers[1].port, tmp_path, max_connections=1) as balancer:
        completions = balancer.client().completions
        body: dict[str, Any] = {"model": "qwen", "prompt": "One", "extra_body": {"ignore_eos": True}}
        # 64 answers of 480 tokens do not end before the second request arrives.
        with completions.create(**body, max_tokens=480, n=64, stream=True) as stream:
            next(stream)
            with pytest.raises(openai.RateLimitError) as refusal:
                completions.create(**body, max_tokens=1)
        assert refusal.value.code == "rate_limit_exceeded"
        until(lambda: _accepts(balancer), "the next request is accepted")


def _accepts(balancer: Balancer) -> bool:
    try:
        balancer.client().models.list()
    except openai.RateLimitError:
        return False
    return True


def test_a_wrong_key_is_openais_authentication_error(balancer: Balancer) -> None:
    for key in ("sk-of-somebody", KEY.upper(), KEY + "s", KEY.replace(".", "x")):
        with pytest.raises(openai.AuthenticationError) as refusal:
            balancer.client(key=key).models.list()
        assert refusal.value.code == "invalid_api_key"


def test_a_body_that_is_too_large_is_openais_413_error(balancer: Balancer) -> None:
    with pytest.raises(openai.APIStatusError) as refusal:
        balancer.client().completions.create(model="qwen", prompt="x" * (1 << 20), max_tokens=1)
    assert refusal.value.status_code == 413
    assert refusal.value.code == "request_too_large"


def test_requests_with_one_prefix_key_reach_the_same_server_and_its_cache(balancer: Balancer) -> None:
    keys = [f"conversation {number}" for number in range(8)]
    # The first request to a server prefills the prompt; eight keys reach both, except with probability 1 in 128.
    first = [balancer.cached(key) for key in keys]
    assert first.count(0) <= 2
    assert all(balancer.cached(key) > 100 for key in keys)


def test_a_stopped_server_is_skipped_and_two_are_a_503(balancer: Balancer, servers: tuple[Server, Server]) -> None:
    stop(servers[0])
    for number in range(6):
        balancer.client(f"after {number}").completions.create(model="qwen", prompt="Two", max_tokens=2)
    stop(servers[1])
    with pytest.raises(openai.InternalServerError) as failure:
        balancer.client().completions.create(model="qwen", prompt="Two", max_tokens=2)
    assert failure.value.status_code == 503
    assert failure.value.code == "service_unavailable"
