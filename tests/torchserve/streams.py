"""Streams of a server with the tiny pair, read to their end or error, and the state of that server."""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import requests

from server import Server, until

PROMPT = "The quick brown fox"
GREEDY = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
LONG = {**GREEDY, "max_tokens": 480, "stream": True}


def is_serving(server: Server) -> bool:
    """Whether a request is answered; one that TorchServe hands to a worker that has just died may never be."""
    with contextlib.suppress(requests.RequestException):
        return server.post({**GREEDY, "max_tokens": 1}).status_code == 200
    return False


def sequences(server: Server) -> tuple[int, int]:
    """The numbers of live and of waiting sequences."""
    counts = server.get("/v1/speculation").json()["sequences"]
    return counts["live"], counts["waiting"]


def ended_sequences(server: Server, reason: str) -> float:
    """How many sequences have ended for this reason, by the metrics, which are updated a moment later."""
    series = server.metrics().items()
    return sum(value for name, value in series if "texts_total" in name and f'reason="{reason}"' in name)


def read(server: Server, body: dict[str, Any]) -> tuple[list[str], str | None]:
    """The text pieces of a stream, and its error if it did not end with [DONE]."""
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
    except requests.RequestException as error:
        return pieces, str(error)
    return pieces, "the stream stopped"


def begin_streams(
    pool: ThreadPoolExecutor, server: Server, count: int, body: dict[str, Any] = LONG
) -> list[Future[tuple[list[str], str | None]]]:
    """Start streams, and wait until all are live."""
    streams = [pool.submit(read, server, body) for _ in range(count)]
    until(lambda: sequences(server)[0] == count, f"{count} live streams")
    return streams
