"""Another server in a process of its own, stopped between its turns."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import requests

from specserve.errors import EnvironmentFailure

LOADED_WITHIN_SECONDS = 300


class Peer:
    """A server that `command` starts on a free port, at `url`; `ready` is a route that answers when it is loaded."""

    def __init__(self, command: Callable[[int], list[str | Path]], log: Path, *, ready: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._ready = ready
        with log.open("w", encoding="utf-8") as output:
            self._process = subprocess.Popen(command(port), stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def wait(self) -> None:
        """Wait until the models are loaded.

        Raises:
            EnvironmentFailure: the server ended, or takes too long.
        """
        until = time.monotonic() + LOADED_WITHIN_SECONDS
        while self._process.poll() is None and time.monotonic() < until:
            try:
                if requests.get(self.url + self._ready, timeout=5).ok:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.1)
        self.stop()
        raise EnvironmentFailure(f"The server to compare with did not come up; see {self._log}.")

    def pause(self) -> None:
        """Stop the process where it is; it uses no core until it is resumed."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the process go on."""
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the process, which has nothing to save; a second time is harmless."""
        self._process.kill()
        self._process.wait()
