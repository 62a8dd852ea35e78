"""A server in this process for tests of benchmarks: streams words of no model."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# Pieces of a stream.
PIECES = 5


@contextmanager
def streaming_server(read: Callable[[dict[str, Any]], None]) -> Iterator[str]:
    """The URL of a server that answers when `read`, which it gives each body, returns; it has no live sequences."""

    class Client(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(b'{"sequences": {"live": 0}}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            read(body)
            self._send(b'data: {"choices": [{"text": "word"}]}\n\n' * PIECES if body.get("stream") else b"{}")

        def _send(self, text: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Client) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
