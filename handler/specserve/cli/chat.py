"""`scripts/chat`: a chat in the terminal that shows who wrote each token, and what speculation gains."""

import contextlib
import json
import sys
import time
from argparse import Namespace
from collections.abc import Generator, Iterator
from typing import Any

import requests
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from specserve.cli.server import base_url, session, summary
from specserve.cli.torchserve_process import State
from specserve.errors import EnvironmentFailure, RequestError

_TIMEOUT_SECONDS = (10, 300)  # to connect, and between two pieces of text
# By the source of a piece in the API's field `sources`.
_COLOURS = {"model": "green", "lookup": "cyan", "prediction": "magenta", "grammar": "yellow", "target": None}
_STYLES = {source: Style(color=colour) for source, colour in _COLOURS.items()}
_LEGEND = Text.assemble(("draft model", "green"), ", ", ("lookup", "cyan"), ", target; /help lists the commands")
_MODES = {"/fast": "auto", "/plain": "off"}
_HELP = """\
/fast     speculate, as the server is configured
/plain    decode without drafts
/new      forget the conversation
/quit     end, as Ctrl-D does; Ctrl-C stops an answer"""
# A model may write control characters, which a terminal would obey.
_VISIBLE = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Chat:
    """A conversation with a server; every request has `fields`."""

    def __init__(self, state: State, fields: dict[str, object], console: Console) -> None:
        self._url = base_url(state)
        self._session = session(state.key("inference"))
        self._fields = fields
        self._console = console
        self._messages: list[dict[str, str]] = []
        self._mode = "/fast"

    def greeting(self) -> Text:
        """Return the server's model, and what the colours mean."""
        try:
            with self._answered("GET", "models") as answer:
                return Text.assemble(answer.json()["data"][0]["id"], ": ", _LEGEND)
        except RequestError as error:
            raise EnvironmentFailure(f"{self._url}: {error}") from error

    def run(self) -> None:
        """Read questions and commands until the input or the user ends it."""
        while True:
            try:
                line = input(f"{self._mode[1:]}> " if sys.stdin.isatty() else "").strip()
                if line == "/quit":
                    return
                self._obey(line)
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print()
            except RequestError as error:
                self._console.print(f"\n{error}", style="red", markup=False)

    def _obey(self, line: str) -> None:
        if line in _MODES:
            self._mode = line
        elif line == "/new":
            self._messages.clear()
        elif line.startswith("/") and len(line.split()) == 1:
            self._console.print(_HELP)
        elif line:
            self._ask(line)

    def _ask(self, question: str) -> None:
        """Print an answer, coloured by source, and its figures; Ctrl-C ends it, and what came is kept."""
        messages = [*self._messages, {"role": "user", "content": question}]
        text, figures = "", "stopped"
        begun = time.monotonic()
        with contextlib.suppress(KeyboardInterrupt), contextlib.closing(self._chunks(messages)) as chunks:
            for chunk in chunks:
                if chunk.get("usage"):
                    figures = summary(chunk["usage"], chunk["speculation"], time.monotonic() - begun)
                for piece, source in (pair for choice in chunk["choices"] for pair in choice["sources"]):
                    segment = Segment(piece.translate(_VISIBLE), _STYLES[source])
                    text += segment.text
                    self._console.print(Segments([segment]), end="", soft_wrap=True)
        self._messages = [*messages, {"role": "assistant", "content": text}]
        self._console.print(f"\n{figures}\n", style="dim", soft_wrap=True)

    def _chunks(self, messages: list[dict[str, str]]) -> Generator[dict[str, Any], None, None]:
        speculation = {"mode": _MODES[self._mode], "sources": True}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        body = {**self._fields, **streamed, "messages": messages, "speculation": speculation}
        with self._answered("POST", "chat/completions", json=body, stream=True) as answer:
            began = False
            for line in answer.iter_lines():
                kind, _, data = line.partition(b": ")
                if kind != b"data":
                    # Others are empty, or comments, which keep the connection alive.
                    if line.startswith(b":") and not began:
                        self._console.print("waiting: for other requests, or for a long prompt to be read", style="dim")
                    continue
                began = True
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise RequestError(event["error"]["message"])
                yield event
        raise EnvironmentFailure("the server ended in the middle of an answer; start it again with scripts/serve.")

    @contextlib.contextmanager
    def _answered(self, method: str, route: str, **options: Any) -> Iterator[requests.Response]:
        """Yield the response; leaving it early closes the connection, and so ends the answer on the server."""
        try:
            with self._session.request(method, f"{self._url}/{route}", timeout=_TIMEOUT_SECONDS, **options) as answer:
                if not answer.ok:
                    raise RequestError(_reason(answer))
                yield answer
        except requests.RequestException as error:
            advice = "start a server with scripts/serve, or name the port of another one with --port"
            raise EnvironmentFailure(f"nothing answers at {self._url}; {advice}.") from error


def _reason(answer: requests.Response) -> str:
    """Return why a request is refused, in the words of the handler or of TorchServe's front end."""
    try:
        body = answer.json()
        return str(body.get("error", body)["message"])
    except (LookupError, TypeError, AttributeError, ValueError):
        return f"status {answer.status_code}."


def run(options: Namespace) -> int:
    console = Console(highlight=False)
    # Greedy, so that /fast and /plain give the same text.
    chat = Chat(State(options.port), {"max_tokens": options.max_tokens, "temperature": 0}, console)
    greeting = chat.greeting()
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: PLC0415 - editing and history for input()

            # What is pasted is one question, however many lines it has.
            readline.parse_and_bind("set enable-bracketed-paste on")
        console.print(greeting)
    chat.run()
    return 0
