"""Streams of a server with the tiny pair, read to whatever end they find."""

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


def answers(server: Server) -> bool:
    """Whether a request is answered; one that is handed to a worker that just died may be left hanging."""
    with contextlib.suppress(requests.RequestException):
        return server.post({**GREEDY, "max_tokens": 1}).status_code == 200
    return False


def sequences(server: Server) -> tuple[int, int]:
    """How many live, and how many wait."""
    told = server.get("/v1/speculation").json()["sequences"]
    return told["live"], told["waiting"]


def ended(server: Server, reason: str) -> float:
    """How many sequences have ended so, as Prometheus is told a moment later."""
    series = server.metrics().items()
    return sum(value for name, value in series if "texts_total" in name and f'reason="{reason}"' in name)


def read(server: Server, body: dict[str, Any]) -> tuple[list[str], str | None]:
    """The pieces of a stream, and how it ended if not well."""
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
    """Streams that are being written."""
    streams = [pool.submit(read, server, body) for _ in range(count)]
    until(lambda: sequences(server)[0] == count, f"{count} live streams")
    return streams
