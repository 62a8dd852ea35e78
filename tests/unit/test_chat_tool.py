"""`scripts/chat`: text coloured by its source, control characters replaced, the conversation, and the commands."""

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from requests import Session
from rich.console import Console

from specserve.cli.chat import Chat
from specserve.cli.server import summary
from specserve.cli.torchserve_process import State

USAGE = {"completion_tokens": 30}
SPECULATION = {"mode": "auto", "mean_acceptance_length": 2.5, "estimated_speedup": 2.0}
PIECES = [["def", "target"], [" f", "model"], ["()\x1b[2J\x07\x9b", "lookup"], ["\n\tß 世", "target"]]
LAST_CHUNK = {"choices": [], "usage": USAGE, "speculation": SPECULATION}
SHOWN = "def f()\ufffd[2J\ufffd\ufffd\n\tß 世"


class Response(contextlib.nullcontext[Any]):
    """A streaming response of these chunks; one that is an exception is raised."""

    ok = True

    def __init__(self, chunks: tuple[Any, ...]) -> None:
        super().__init__(self)
        self._chunks = chunks

    def iter_lines(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            if isinstance(chunk, BaseException):
                raise chunk
            if isinstance(chunk, bytes):
                yield chunk
                continue
            yield from (b"data: " + json.dumps(chunk).encode(), b"", b": ", b"")
        yield b"data: [DONE]"


def run_chat(monkeypatch: pytest.MonkeyPatch, lines: str, *chunks: Any, colours: bool = False) -> tuple[str, list[Any]]:
    """The output for these input lines if every response is these chunks, and the mode and messages of each request."""
    requests: list[Any] = []

    def request(_session: Session, _method: str, _url: str, *, json: Any, **_options: Any) -> Response:
        requests.append((json["speculation"]["mode"], [message["content"] for message in json["messages"]]))
        return Response(chunks)

    monkeypatch.setattr(Session, "request", request)
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    monkeypatch.delenv("NO_COLOR", raising=False)
    output = io.StringIO()
    console = Console(file=output, color_system="standard" if colours else None, width=120, highlight=False)
    Chat(State(21200), {}, console).run()
    return output.getvalue(), requests


def chunk(*pieces: list[str]) -> dict[str, Any]:
    return {"choices": [{"sources": list(pieces)}], "usage": None}


def test_text_is_coloured_by_source_without_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = run_chat(monkeypatch, "write\n", chunk(*PIECES), LAST_CHUNK)
    assert plain.startswith(f"{SHOWN}\n30 tokens")
    coloured, _ = run_chat(monkeypatch, "write\n", chunk(*PIECES), LAST_CHUNK, colours=True)
    assert coloured.startswith("def\x1b[32m f\x1b[0m\x1b[36m()\ufffd[2J\ufffd\ufffd\x1b[0m\n\tß 世\n")


def test_a_wait_for_the_first_text_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comment comes after a second without text, and between later texts, where it says nothing new."""
    shown, _ = run_chat(monkeypatch, "write\n", b": ", chunk(["text", "target"]), b": ", LAST_CHUNK)
    assert shown.startswith("waiting: for other requests, or for a long prompt to be read\ntext\n30 tokens")


def test_every_request_holds_the_conversation_until_new_clears_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "one\n/plain\n\n two\n/new\n/fast\n/etc/fstab has what?\n/help\n/quit\nfour\n"
    shown, requests = run_chat(monkeypatch, lines, chunk(["answer", "model"]), LAST_CHUNK)
    assert requests == [("auto", ["one"]), ("off", ["one", "answer", "two"]), ("auto", ["/etc/fstab has what?"])]
    assert "/quit" in shown


@pytest.mark.parametrize("error", [{"error": {"message": "The context is full."}}, KeyboardInterrupt()])
def test_chat_continues_after_an_error_or_an_interrupt(monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    shown, requests = run_chat(monkeypatch, "one\ntwo\n", chunk(["begun", "target"]), error)
    kept = ["one", "begun", "two"] if isinstance(error, KeyboardInterrupt) else ["two"]
    assert requests[1] == ("auto", kept)
    assert shown.count("begun\nstopped" if isinstance(error, KeyboardInterrupt) else "begun\nThe context is full.") == 2


def test_summary_states_the_estimated_speed_up() -> None:
    speed, tokens_a_round = "30 tokens in 10.00 s: 3.0 tokens/s", "2.50 tokens a round"
    times = "2.00 times as fast as without drafts by estimate"
    assert summary(USAGE, SPECULATION, 10.0) == f"{speed}, {tokens_a_round}, {times}"
    assert summary(USAGE, SPECULATION | {"mode": "off"}, 10.0) == f"{speed}, without drafts"
    assert summary(USAGE, SPECULATION | {"estimated_speedup": None}, 10.0).endswith("2.50 tokens a round")
