"""config/nginx/specserve.conf before a server, as OpenAI's client sees it. Needs nginx (Debian: nginx-light)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest
import requests

from nginx import KEY, balancing, needs_nginx
from server import PATIENCE_SECONDS, Server, openai_client, until

pytestmark = [pytest.mark.server, needs_nginx]


@pytest.fixture(scope="module")
def balancer(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A balancer before one server, whose key nginx knows and forwards."""
    with balancing(server.port, server.port, tmp_path_factory.mktemp("nginx"), server.key) as url:
        yield url


def test_openais_path_reaches_a_server_and_a_large_body_is_openais_413_error(balancer: str, server: Server) -> None:
    client = openai_client(balancer, server.key)
    assert [model.id for model in client.models.list()][-1] == "qwen"
    body: dict[str, Any] = {"model": "qwen", "prompt": "One", "max_tokens": 60, "temperature": 0}
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**body, stream=True))
    assert streamed == client.completions.create(**body).choices[0].text
    with pytest.raises(openai.APIStatusError) as refusal:
        client.completions.create(model="qwen", prompt="x" * (1 << 20), max_tokens=1)
    assert (refusal.value.status_code, refusal.value.code) == (413, "request_too_large")


def test_concurrent_requests_of_a_key_are_limited(server: Server, tmp_path: Path) -> None:
    with balancing(server.port, server.port, tmp_path, server.key, max_connections=1) as url:
        client = openai_client(url, server.key)
        body: dict[str, Any] = {"model": "qwen", "prompt": "One", "extra_body": {"ignore_eos": True}}
        # 64 answers of 480 tokens do not end before the second request arrives.
        with client.completions.create(**body, max_tokens=480, n=64, stream=True) as stream:
            next(stream)
            with pytest.raises(openai.RateLimitError) as refusal:
                client.completions.create(**body, max_tokens=1)
        assert refusal.value.code == "rate_limit_exceeded"
        models = partial(requests.get, f"{url}/models", headers=server.authorization(), timeout=PATIENCE_SECONDS)
        until(lambda: models().ok, "the next request is accepted")


def test_a_wrong_key_is_openais_authentication_error(balancer: str) -> None:
    for key in ("sk-of-somebody", KEY.upper(), KEY + "s", KEY.replace(".", "x")):
        with pytest.raises(openai.AuthenticationError) as refusal:
            openai_client(balancer, key).models.list()
        assert refusal.value.code == "invalid_api_key"


class Fake(BaseHTTPRequestHandler):
    """A server whose `answer` is called for each request, and may send what it likes."""

    protocol_version = "HTTP/1.1"
    answer: ClassVar[Callable[[Fake], None]]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).answer(self)

    def send(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        # nginx keeps no connection, which would outlive the server.
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def fake(answer: Callable[[Fake], None]) -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), type("Server", (Fake,), {"answer": answer})) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


def post(url: str, *, prefix: str = "", stream: bool = False) -> requests.Response:
    headers = {"Authorization": f"Bearer {KEY}"} | ({"x-prefix-key": prefix} if prefix else {})
    return requests.post(f"{url}/completions", json={}, headers=headers, timeout=PATIENCE_SECONDS, stream=stream)


def test_stream_chunks_are_passed_on_one_by_one(tmp_path: Path) -> None:
    chunks = [*(b'data: {"choices": [{"index": 0, "text": "%d"}]}' % number for number in range(5)), b"data: [DONE]"]
    received = threading.Semaphore(0)

    def one_at_a_time(fake: Fake) -> None:
        """Send each chunk only after the client has received the one before."""
        fake.send_response(200)
        fake.send_header("Content-Type", "text/event-stream")
        fake.send_header("Transfer-Encoding", "chunked")
        fake.end_headers()
        for chunk in chunks:
            fake.wfile.write(b"%x\r\n%s\n\n\r\n" % (len(chunk) + 2, chunk))
            if not received.acquire(timeout=PATIENCE_SECONDS):
                break
        fake.wfile.write(b"0\r\n\r\n")

    lines = []
    with fake(one_at_a_time) as server, balancing(server.server_port, server.server_port, tmp_path) as url:
        for line in filter(None, post(url, stream=True).iter_lines(chunk_size=1)):
            lines.append(line)
            received.release()
    assert lines == chunks


def test_full_queues_are_openais_503_and_do_not_block_the_next_request(tmp_path: Path) -> None:
    # TorchServe's, for the first request, which nginx sends to both.
    statuses = [503, 503, 200]
    with (
        fake(lambda fake: fake.send(b'{"code": 503}', statuses.pop(0))) as server,
        balancing(server.server_port, server.server_port, tmp_path) as url,
    ):
        answers = [post(url) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [503, 200]
    assert answers[0].json()["error"]["code"] == "service_unavailable"


def test_a_prefix_key_always_reaches_one_server_and_a_stopped_server_is_skipped(tmp_path: Path) -> None:
    prefixes = [f"conversation {number}" for number in range(16)]
    with (
        fake(lambda fake: fake.send(b"first")) as first,
        fake(lambda fake: fake.send(b"second")) as second,
        balancing(first.server_port, second.server_port, tmp_path) as url,
    ):
        reached = [post(url, prefix=prefix).text for prefix in prefixes]
        # All 16 reach one server with probability 1 in 32,768.
        assert {*reached} == {"first", "second"}
        assert [post(url, prefix=prefix).text for prefix in prefixes] == reached
        second.shutdown()
        second.server_close()
        assert {post(url, prefix=prefix).text for prefix in prefixes} == {"first"}
        first.shutdown()
        first.server_close()
        away = post(url)
    assert (away.status_code, away.json()["error"]["code"]) == (503, "service_unavailable")
