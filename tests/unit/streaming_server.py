"""A server that streams words of no model, for tests of benchmarks; as a program it streams prompt and options."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# Of every answer, whatever its pieces are.
TOKENS = 7


def server(pieces: Callable[[dict[str, Any]], list[str]], port: int = 0) -> ThreadingHTTPServer:
    """A server that streams what `pieces` makes of a body, and says that no sequences are live; no pieces: a 500."""

    class Client(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(b'{"sequences": {"live": 0}}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not (texts := pieces(body)):
                self.send_error(500)
            elif body.get("stream"):
                events: list[Any] = [{"choices": [{"text": text}]} for text in texts]
                events.append({"choices": [], "usage": {"completion_tokens": TOKENS}})
                self._send(b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events))
            else:
                self._send(b"{}")

        def _send(self, text: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    return ThreadingHTTPServer(("127.0.0.1", port), Client)


@contextmanager
def streaming_server(read: Callable[[dict[str, Any]], None]) -> Iterator[str]:
    """The URL of a server in this process that answers when `read`, which it gives each body, returns."""

    def pieces(body: dict[str, Any]) -> list[str]:
        read(body)
        return ["word"] * 5

    with server(pieces) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


if __name__ == "__main__":
    *options, _, port = sys.argv[1:]
    server(lambda body: [] if "broken" in options else [body["prompt"], " ", *options], int(port)).serve_forever()
