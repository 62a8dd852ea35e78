"""Streams of a server with the tiny pair, read to their end or error, and the state of that server."""

import contextlib
import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import requests

from server import PATIENCE_SECONDS, Server

PROMPT = "The quick brown fox"
GREEDY = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
LONG = {**GREEDY, "max_tokens": 480, "stream": True}
# A request of one token that has no answer by then is taken for lost, and sent again.
LOST_AFTER_SECONDS = 10


def greedy_text(server: Server) -> str:
    answer = server.post(GREEDY)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def is_serving(server: Server) -> bool:
    """Whether a request is answered; one that TorchServe hands to a worker that has just died may never be."""
    with contextlib.suppress(requests.RequestException):
        return server.post({**GREEDY, "max_tokens": 1}, timeout=LOST_AFTER_SECONDS).status_code == 200
    return False


def sequences(server: Server) -> tuple[int, int]:
    counts = server.get("/v1/speculation").json()["sequences"]
    return counts["live"], counts["waiting"]


def read(server: Server, body: dict[str, Any], begun: threading.Event | None = None) -> tuple[list[str], str | None]:
    """The text pieces of a stream, and its error unless it ended with [DONE]; sets `begun` at its first text or end."""
    pieces: list[str] = []
    try:
        with server.post(body, stream=True) as response:
            if response.status_code != 200:
                return pieces, response.text
            for line in response.iter_lines():
                event = line.decode().removeprefix("data: ")
                if event == "[DONE]":
                    return pieces, None
                if event.startswith("{"):
                    found = json.loads(event)
                    if "error" in found:
                        return pieces, str(found["error"])
                    pieces += [choice["text"] for choice in found["choices"]]
                    if begun and any(pieces):
                        begun.set()
    except requests.RequestException as error:
        return pieces, str(error)
    finally:
        if begun:
            begun.set()
    return pieces, "the stream stopped"


def begin_streams(
    pool: ThreadPoolExecutor, server: Server, count: int, body: dict[str, Any] = LONG
) -> list[Future[tuple[list[str], str | None]]]:
    """Start streams, and return when each has sent text and none has ended; start them again if one has."""
    for _ in range(20):
        begun = [threading.Event() for _ in range(count)]
        streams = [pool.submit(read, server, body, event) for event in begun]
        assert all(event.wait(PATIENCE_SECONDS) for event in begun)
        if not any(stream.done() for stream in streams):
            return streams
        wait(streams, PATIENCE_SECONDS)
    raise AssertionError(f"Of {count} streams some always end before all have begun: {[s.result() for s in streams]}")
