"""Clients that stream answers from any server that speaks OpenAI's completions, one by one or many at once.

Closed loop: each asks again as soon as it is answered. Open loop: requests come at random at a rate, answered or not.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter, sleep
from typing import Any, NamedTuple

import requests

from decode import read_tasks
from llama_server import events

FAMILIES = ("code", "json", "prose", "chat")
ANSWERED_WITHIN_SECONDS = 600


class Queued(NamedTuple):
    """How long all requests of a server have waited for their turn so far, and how many they were."""

    seconds: float = 0.0
    requests: float = 0.0


@dataclass(frozen=True)
class Endpoint:
    """A server, what is asked of it beside the prompt, the mebibytes it holds, and its queue and key if it has any."""

    name: str
    url: str
    extra: dict[str, Any] = field(default_factory=dict)
    memory: Callable[[], int] = lambda: 0
    queued: Callable[[], Queued] = Queued
    key: str | None = None


@dataclass
class Answer:
    """What a client saw: when it asked, when each piece of text came, how many tokens it was, and our own account."""

    asked: float
    pieces: list[float] = field(default_factory=list)
    tokens: int = 0
    account: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def first(self) -> float:
        """Seconds until the first text."""
        return self.pieces[0] - self.asked

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces."""
        return [after - before for before, after in zip(self.pieces, self.pieces[1:], strict=False)]

    @property
    def pace(self) -> float:
        """Seconds a token behind the first."""
        return (self.pieces[-1] - self.pieces[0]) / max(1, self.tokens - 1)


def prompts(number: int) -> list[str]:
    """The same prompts of all families in turn, none like an earlier one from its first word on."""
    texts = [task.text for texts in zip(*map(read_tasks, FAMILIES), strict=False) for task in texts]
    return [f"{secrets.token_hex(5)}\n{texts[place % len(texts)]}" for place in range(number)]


def ask(endpoint: Endpoint, prompt: str, longest: int) -> Answer:
    """One streamed answer; what goes wrong is in it."""
    body = {
        "prompt": prompt,
        "max_tokens": longest,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer(perf_counter())
    try:
        headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
        with requests.post(
            f"{endpoint.url}/v1/completions",
            json=body | endpoint.extra,
            headers=headers,
            stream=True,
            timeout=ANSWERED_WITHIN_SECONDS,
        ) as response:
            response.raise_for_status()
            for event in events(response):
                if any(choice.get("text") for choice in event.get("choices", ())):
                    answer.pieces.append(perf_counter())
                if event.get("usage"):
                    answer.tokens = event["usage"]["completion_tokens"]
                    answer.account = event.get("speculation", {})
        answer.tokens = answer.tokens or len(answer.pieces)
    except (requests.RequestException, ValueError, KeyError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if not answer.error and not answer.pieces:
        answer.error = "no text"
    return answer


def closed(endpoint: Endpoint, clients: int, number: int, longest: int) -> list[Answer]:
    """So many clients share so many requests, each asking again when it is answered."""
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda prompt: ask(endpoint, prompt, longest), prompts(number)))


def opened(endpoint: Endpoint, rate: float, number: int, longest: int) -> list[Answer]:
    """Requests come at `rate` a second, at random, whether or not earlier ones are answered."""
    waits = random.Random(0)
    moments = accumulate(waits.expovariate(rate) for _ in range(number))

    def client(prompt: str, moment: float) -> Answer:
        sleep(moment)
        return ask(endpoint, prompt, longest)

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(client, prompts(number), moments))
