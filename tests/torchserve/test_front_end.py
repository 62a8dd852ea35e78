"""TorchServe's front end without tokens: nothing that comes in changes other answers, and keys tell clients apart."""

import contextlib
import json
import random
import socket
import string
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import requests

from server import PATIENCE_SECONDS, Server, running, worker

pytestmark = pytest.mark.server

SEED, FUZZ_SECONDS = 54, 10
VICTIM = {"prompt": "The quick brown fox", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
# Those that mean something to TorchServe or to the handler, and those that mean nothing.
NAMES = ["authorization", "Authorization", "x-api-key", "body", "data", "url_path", "explain", "host", "content-type"]
NAMES += ["ts_stream_next", "ts_request_sequence_id", "x-request-id", "model_name", "é", ""]
VALUES = ["", "x", "{}", "[]", "null", "v1/models", "true", "a" * 3000, "é€", "%00%ED%A0%80", '{"prompt": "a", "n": 2}']
ROUTES = ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/models", "", "/%0d%0aa: b", "/é/%ff"]
SERVICE = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/"


@pytest.fixture(scope="module")
def open_server() -> Iterator[Server]:
    """A server that takes any Authorization, or none; its worker must not be restarted."""
    with running("--no-auth") as server:
        before = worker(server.state).pid
        yield server
        assert worker(server.state).pid == before, "the worker was restarted"


def text_of(server: Server, *, stream: bool) -> str:
    answer = requests.post(f"{server.url}/v1/completions", json=VICTIM | {"stream": stream}, timeout=PATIENCE_SECONDS)
    assert answer.status_code == 200, answer.text
    if not stream:
        return str(answer.json()["choices"][0]["text"])
    *events, end = [event.removeprefix("data: ") for event in answer.text.split("\n\n")[:-1]]
    assert end == "[DONE]", answer.text
    return "".join(json.loads(event)["choices"][0]["text"] for event in events if not event.startswith(":"))


def form(server: Server, draw: random.Random) -> None:
    fields = [(draw.choice(NAMES), draw.choice(VALUES)) for _ in range(draw.randint(1, 4))]
    requests.post(server.url + draw.choice(ROUTES), data=fields, timeout=PATIENCE_SECONDS)


def multipart(server: Server, draw: random.Random) -> None:
    kinds = [None, "application/json", "text/plain", "é"]
    parts: Any = [
        (draw.choice(NAMES), (draw.choice([None, "a.json"]), draw.choice(VALUES).encode(), draw.choice(kinds)))
        for _ in range(draw.randint(1, 4))
    ]
    with contextlib.suppress(UnicodeEncodeError):
        requests.post(server.url + draw.choice(ROUTES), files=parts, timeout=PATIENCE_SECONDS)


def raw(server: Server, draw: random.Random) -> None:
    """A request as bytes, with header names and values, query strings and versions that no library sends."""
    others = ["/invocations", "/qwen/predict", "/predictions/qwen", "/explanations/qwen"]
    base = draw.choice([f"/predictions/qwen/1.0{draw.choice(ROUTES)}", *others])
    query = "&".join(f"{draw.choice(NAMES)}={draw.choice(VALUES)[:99]}" for _ in range(draw.randint(0, 3)))
    lines = [f"{draw.choice(['POST', 'GET', 'PUT'])} {base}?{query} HTTP/1.{draw.choice('01')}"]
    for _ in range(draw.randint(0, 4)):
        name = draw.choice(NAMES) or "".join(draw.choices(string.printable, k=5))
        lines.append(f"{draw.choice([name, name.upper(), name.title()])}: {draw.choice(VALUES)}")
    body = draw.choice(VALUES).encode()
    head = "\r\n".join([*lines, "Host: a", f"Content-Length: {len(body)}", "Connection: close"])
    with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", server.port), 5) as connection:
        connection.sendall(head.encode("utf-8", "replace") + b"\r\n\r\n" + body)
        with contextlib.suppress(TimeoutError):
            while connection.recv(65536):
                pass


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def field(number: int, content: bytes) -> bytes:
    """A field of a protobuf message: a string, bytes or a message in it."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def prediction(inputs: dict[str, bytes], *, model: bytes = b"qwen", version: bytes = b"") -> bytes:
    entries = [field(3, field(1, name.encode()) + field(2, value)) for name, value in inputs.items()]
    return field(1, model) + field(2, version) + b"".join(entries)


def predict(server: Server, request: bytes, *, stream: bool) -> list[bytes]:
    """The messages of a reply by gRPC, without those of protobuf around them."""
    with grpc.insecure_channel(f"127.0.0.1:{server.port + 3}") as channel:
        # Both without serializers: a request is bytes, and so is a reply.
        streaming: Any = channel.unary_stream(f"{SERVICE}StreamPredictions")
        unary: Any = channel.unary_unary(f"{SERVICE}Predictions")
        if stream:
            return list(streaming(request, timeout=PATIENCE_SECONDS))
        return [unary(request, timeout=PATIENCE_SECONDS)]


def by_grpc(server: Server, draw: random.Random) -> None:
    inputs = {draw.choice(NAMES): draw.choice(VALUES).encode() for _ in range(draw.randint(0, 3))}
    with contextlib.suppress(grpc.RpcError):
        predict(server, prediction(inputs, model=draw.choice([b"qwen", b"qwen", b"no"])), stream=draw.random() < 0.5)


def test_a_request_by_grpc_is_refused_with_a_sentence(open_server: Server) -> None:
    for stream in (False, True):
        for fields in ({}, {"stream": True}, {"max_tokens": 480, "n": 60}):
            request = prediction({"body": json.dumps(VICTIM | fields).encode()})
            [message] = predict(open_server, request, stream=stream)
            assert "send the request as JSON by HTTP" in message.decode(errors="replace")


def test_nothing_that_comes_in_changes_the_answers_beside_it(open_server: Server) -> None:
    """Two victims ask for the same again and again while the fuzz goes on."""
    expected = text_of(open_server, stream=False)
    ended = threading.Event()

    def victim(*, stream: bool) -> int:
        answers = 0
        while not ended.is_set():
            assert text_of(open_server, stream=stream) == expected
            answers += 1
        return answers

    kinds: list[Callable[[Server, random.Random], None]] = [form, multipart, raw, by_grpc]
    draw = random.Random(SEED)
    with ThreadPoolExecutor(2) as pool:
        victims = [pool.submit(victim, stream=stream) for stream in (False, True)]
        end = time.monotonic() + FUZZ_SECONDS
        try:
            while time.monotonic() < end and not any(future.done() for future in victims):
                with contextlib.suppress(requests.RequestException):
                    draw.choice(kinds)(open_server, draw)
        finally:
            ended.set()
        assert all(future.result() > 0 for future in victims)


def test_a_prefix_is_reused_for_the_same_key_alone_however_its_header_is_spelt(open_server: Server) -> None:
    for number, spelling in enumerate(("Authorization", "authorization", "AUTHORIZATION")):
        body = {"prompt": f"What only the first of them knows, {number}: " * 3, "max_tokens": 1}
        cached = []
        for name, key in (("Authorization", "mine"), (spelling, "other"), (spelling, "mine")):
            headers = {name: f"Bearer {key}-{number}"}
            url = f"{open_server.url}/v1/completions"
            usage = requests.post(url, json=body, headers=headers, timeout=PATIENCE_SECONDS).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 0, usage["prompt_tokens"] - 1]
