"""A TorchServe model that keeps one core busy as long as a request tells: a neighbour for benchmarks/neighbours.py."""

import time
from typing import Any


class Busy:
    """Computes nothing, for `seconds` of each request."""

    def initialize(self, context: object) -> None:
        """Load nothing."""

    def handle(self, data: list[dict[str, Any]], context: object) -> list[str]:
        """Keep a core busy."""
        del context
        body = data[0].get("body") or {}
        until = time.monotonic() + float(body["seconds"])
        while time.monotonic() < until:
            pass
        return ["done"] * len(data)
