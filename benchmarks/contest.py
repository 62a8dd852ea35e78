"""Several engines answer one prompt side by side: each works only in its turns, and its clock stands still otherwise.

A shared machine may be twice as fast a minute later, so answers given one after the other say little of each other.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import requests

from decode import Lane, Task
from llama_server import Server
from specserve.errors import EnvironmentFailure
from specserve.serving.generation import Generation
from specserve.serving.scheduler import Scheduler

TURN_SECONDS = 1.0


@dataclass(frozen=True)
class Answer:
    """What one contestant did with one prompt; `seconds` begin behind the first token."""

    tokens: list[int]
    seconds: float
    prompt_seconds: float
    drafted: int
    accepted: int
    rounds: int

    @property
    def speed(self) -> float:
        """Tokens per second behind the first token."""
        return (len(self.tokens) - 1) / self.seconds

    @property
    def whole_speed(self) -> float:
        """Tokens per second, the prompt included."""
        return len(self.tokens) / (self.seconds + self.prompt_seconds)


class Contestant(Protocol):
    """An engine in one mode."""

    @property
    def name(self) -> str:
        """The mode's name."""

    @property
    def done(self) -> bool:
        """Whether the answer is complete."""

    @property
    def progress(self) -> tuple[int, float]:
        """Tokens so far, and the seconds that they took."""

    def begin(self, prompt: list[int], task: Task) -> None:
        """Take up a prompt; the work is done in turns."""

    def turn(self, seconds: float) -> None:
        """Work for about so long."""

    def answer(self) -> Answer:
        """The complete answer."""


def contest(contestants: list[Contestant], prompt: list[int], task: Task) -> dict[str, Answer]:
    """Let all answer a prompt; the one with the fewest tokens always has the next turn."""
    for contestant in contestants:
        contestant.begin(prompt, task)
    while running := [contestant for contestant in contestants if not contestant.done]:
        min(running, key=lambda contestant: contestant.progress).turn(TURN_SECONDS)
    return {contestant.name: contestant.answer() for contestant in contestants}


class Ours:
    """One mode of this engine."""

    def __init__(self, lane: Lane) -> None:
        self.name = f"specserve {lane.mode.name}"
        self._lane = lane
        self._running: tuple[Scheduler, Generation] | None = None
        self._seconds = 0.0

    @property
    def done(self) -> bool:
        """Whether the answer is complete."""
        return self._running is None or not self._running[0].busy

    @property
    def progress(self) -> tuple[int, float]:
        """Tokens so far, and the seconds that they took."""
        return self._running[1].generated if self._running else 0, self._seconds

    def begin(self, prompt: list[int], task: Task) -> None:
        """Take up a prompt."""
        del prompt
        self._running, self._seconds = self._lane.start(task, 0.0), 0.0

    def turn(self, seconds: float) -> None:
        """Work for about so long: whole rounds."""
        started = perf_counter()
        while self._running and not self.done and perf_counter() - started < seconds:
            self._running[0].step()
        self._seconds += perf_counter() - started

    def answer(self) -> Answer:
        """The complete answer."""
        if self._running is None or self._running[1].error:
            raise SystemExit(f"{self.name}: {self._running and self._running[1].error}")
        generation = self._running[1]
        stats = generation.stats
        return Answer(
            tokens=generation.answer,
            seconds=stats.decode_seconds,
            prompt_seconds=stats.prefill_seconds,
            drafted=stats.drafted,
            accepted=stats.accepted,
            rounds=stats.rounds,
        )


class Theirs:
    """A llama-server, which is stopped (the whole process) but for its turns."""

    def __init__(self, name: str, server: Server) -> None:
        self.name = name
        self._server = server
        self._thread = threading.Thread()
        self._tokens: list[int] = []
        self._times: list[float] = []
        self._since: float | None = None
        self._seconds = 0.0
        self._drafts = (0, 0)
        self._error: Exception | None = None
        server.pause()

    @property
    def done(self) -> bool:
        """Whether the answer is complete."""
        return not self._thread.is_alive()

    @property
    def progress(self) -> tuple[int, float]:
        """Tokens so far, and the seconds that they took."""
        return len(self._tokens), self._seconds

    def begin(self, prompt: list[int], task: Task) -> None:
        """Take up a prompt: the request waits for the process."""
        self._tokens, self._times, self._seconds, self._error = [], [], 0.0, None
        self._thread = threading.Thread(target=self._read, args=(prompt, task.max_tokens), daemon=True)
        self._thread.start()

    def turn(self, seconds: float) -> None:
        """Let the process run for so long, or until it is done."""
        self._since = perf_counter()
        self._server.resume()
        self._thread.join(seconds)
        self._server.pause()
        self._seconds, self._since = self._clock(), None

    def answer(self) -> Answer:
        """The complete answer."""
        if self._error or not self._times:
            raise SystemExit(f"{self.name}: {self._error or 'no answer'}")
        drafted, accepted = self._drafts
        return Answer(
            tokens=self._tokens,
            seconds=self._times[-1] - self._times[0],
            prompt_seconds=self._times[0],
            drafted=drafted,
            accepted=accepted,
            rounds=len(self._tokens) - 1 - accepted,
        )

    def _clock(self) -> float:
        """Seconds that the process has run for this prompt."""
        return self._seconds + (perf_counter() - self._since if self._since is not None else 0.0)

    def _read(self, prompt: list[int], max_tokens: int) -> None:
        try:
            for event in self._server.stream(prompt, max_tokens):
                if event["tokens"]:
                    self._tokens += event["tokens"]
                    self._times.append(self._clock())
                timings = event.get("timings", {})
                self._drafts = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        except (EnvironmentFailure, requests.RequestException, KeyError, ValueError) as error:
            self._error = error
