"""A proxy between a client and the server that keeps what they said, and checks it against the protocols' rules."""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jsonschema
import requests

Json = dict[str, Any]

# The last event of a stream, by the end of its route.
_LAST_EVENTS = {
    "/chat/completions": ("[DONE]",),
    "/responses": ("response.completed", "response.incomplete"),
    "/messages": ("message_stop",),
}
# How long an answer may say nothing: 20,000 tokens of a prompt are read meanwhile, beside what else the machine does.
SILENCE_SECONDS = 1200
# Of the connection itself, and not of what is sent over it.
_HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


@dataclass
class Exchange:
    method: str
    path: str
    request: Json
    status: int = 0
    reply: bytes = b""
    is_whole: bool = False  # not while the answer is written, nor if one of the two ended it early

    @property
    def events(self) -> list[Json]:
        """The events of a stream as far as they came, or the one body; OpenAI's `[DONE]` is {"type": "[DONE]"}."""
        text = self.reply.decode(errors="replace")
        lines = text.splitlines() if self.is_whole else text.splitlines()[:-1]
        data = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
        if not data and self.is_whole and text:
            data = [text]
        return [{"type": "[DONE]"} if piece == "[DONE]" else json.loads(piece) for piece in data]

    @property
    def tools(self) -> dict[str, Json]:
        functions = [tool.get("function") or tool for tool in self.request.get("tools") or []]
        return {
            tool["name"]: tool.get("parameters") or tool.get("input_schema") or {}
            for tool in functions
            if "name" in tool
        }

    @property
    def results(self) -> int:
        turns = self.request.get("messages") or self.request.get("input") or []
        parts = [part for turn in turns if isinstance(turn, dict) for part in (turn, *_dicts(turn.get("content")))]
        kinds = [part.get("type") if part.get("role") != "tool" else "tool" for part in parts]
        return sum(kind in {"tool", "function_call_output", "tool_result"} for kind in kinds)

    @property
    def calls(self) -> list[tuple[str, str]]:
        calls: dict[Any, list[str]] = {}
        for event in self.events:
            self._read_call(event, calls)
        return [(name, "".join(arguments)) for name, *arguments in calls.values()]

    @property
    def prompt_tokens(self) -> tuple[int, int]:
        """The tokens of the prompt, and those of them that were cached, as the answer counts them; 0 if it does not."""
        parts = [part for event in self.events for part in (event, event.get("response"), event.get("message"))]
        usages = [part["usage"] for part in parts if isinstance(part, dict) and part.get("usage")]
        return max(map(_prompt_tokens, usages), default=(0, 0))

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended at a limit of tokens, and so possibly within a call."""
        return any(f'"{sign}"' in self.reply.decode() for sign in ("length", "max_tokens", "response.incomplete"))

    @staticmethod
    def _read_call(event: Json, calls: dict[Any, list[str]]) -> None:
        """Add what an event, or a whole answer, says about calls."""
        for choice in event.get("choices") or []:
            message = choice.get("delta") or choice.get("message") or {}
            for place, call in enumerate(message.get("tool_calls") or []):
                function = call["function"]
                pieces = calls.setdefault((choice["index"], call.get("index", place)), [function.get("name", "")])
                pieces.append(function.get("arguments") or "")
        answer = event.get("response") or event
        for item in answer.get("output") or []:
            if item["type"] == "function_call":
                calls[item["call_id"]] = [item["name"], item["arguments"]]
        blocks = [(event.get("index"), event.get("content_block")), *enumerate(_dicts(event.get("content")))]
        for index, block in blocks:
            if block is not None and block["type"] == "tool_use":
                calls[index] = [block["name"], json.dumps(block["input"]) if block["input"] else ""]
        if event.get("type") == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            calls[event["index"]].append(event["delta"]["partial_json"])


def _prompt_tokens(usage: Json) -> tuple[int, int]:
    for protocol in ("prompt_tokens", "input_tokens"):
        if details := usage.get(f"{protocol}_details"):
            return usage[protocol], details["cached_tokens"]
    # Anthropic's are without those that were cached.
    cached = usage.get("cache_read_input_tokens", 0)
    return usage.get("input_tokens", 0) + cached, cached


def _dicts(content: Any) -> list[Json]:
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


@dataclass
class Wire:
    """The exchanges of one client with a server."""

    upstream: str  # the server's URL, without a path
    url: str  # below which the client finds the routes
    key: str
    exchanges: list[Exchange] = field(default_factory=list)

    @property
    def called(self) -> list[str]:
        return [name for exchange in self.exchanges for name, _ in exchange.calls]

    @property
    def results(self) -> int:
        """How many results of tools the client has sent in one request, at most."""
        return max((exchange.results for exchange in self.exchanges), default=0)

    @property
    def refused(self) -> list[str]:
        """The requests that the server did not serve, with its answers."""
        failed = [exchange for exchange in self.exchanges if exchange.status >= requests.codes.bad_request]
        return [
            f"{exchange.method} {exchange.path}: {exchange.status} {exchange.reply.decode()}" for exchange in failed
        ]

    def check(self) -> None:
        """Assert that every request was served, every stream ended as its protocol says, and every call is valid."""
        assert self.refused == []
        for exchange in self.exchanges:
            if exchange.is_whole and exchange.request.get("stream"):
                route = exchange.path.partition("?")[0]
                [expected] = [names for end, names in _LAST_EVENTS.items() if route.endswith(end)]
                assert exchange.events[-1].get("type") in expected
            if exchange.is_whole and not exchange.is_cut:
                for name, arguments in exchange.calls:
                    jsonschema.validate(json.loads(arguments or "{}"), exchange.tools[name])


@contextlib.contextmanager
def recording(upstream: str, path: str, key: str) -> Iterator[Wire]:
    """Run a proxy for the server at the URL `upstream`, whose routes are below a path."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def _forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            exchange = Exchange(self.command, self.path, json.loads(body or b"{}"))
            wire.exchanges.append(exchange)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
            # The server's answers are not compressed, so that their bytes are readable here.
            headers["Accept-Encoding"] = "identity"
            with requests.request(
                self.command, upstream + self.path, data=body, headers=headers, stream=True, timeout=SILENCE_SECONDS
            ) as answer:
                exchange.status = answer.status_code
                self.send_response(answer.status_code)
                for name, value in answer.headers.items():
                    if name.lower() not in _HOP_BY_HOP:
                        self.send_header(name, value)
                self.send_header("Connection", "close")
                self.end_headers()
                # Ends where the client has gone: the server then sees its connection closed, as without a proxy.
                with contextlib.suppress(ConnectionError):
                    for piece in answer.raw.stream(None, decode_content=False):
                        exchange.reply += piece
                        self.wfile.write(piece)
                        self.wfile.flush()
                    exchange.is_whole = True
            self.close_connection = True

        do_GET = do_HEAD = do_POST = do_DELETE = _forward  # noqa: N815

    class Proxy(ThreadingHTTPServer):
        daemon_threads = True

    with Proxy(("127.0.0.1", 0), Handler) as proxy:
        wire = Wire(upstream, f"http://127.0.0.1:{proxy.server_port}{path}", key)
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            yield wire
        finally:
            proxy.shutdown()
