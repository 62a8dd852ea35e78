"""`scripts/chat` in a terminal, with a server of the tiny pair."""

import os
import pty
import re
import select
import subprocess
import time

import pytest

from server import PATIENCE_SECONDS, PROJECT, Server, free_ports, until
from streams import sequences

pytestmark = pytest.mark.server

# The last line of an answer and what follows it.
ENDED = r"(stopped|tokens/s)[^>]*"
FIGURES = r"\d+ tokens in \d+\.\d\d s: \d+\.\d tokens/s, "
GAIN = r"\d\.\d\d tokens a round, \d+\.\d\d times as fast as without drafts by estimate"


class Terminal:
    def __init__(self, *command: str) -> None:
        self._output = b""
        self._terminal, program = pty.openpty()
        environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        environment |= {"TERM": "xterm-256color", "COLUMNS": "160"}
        # The pseudo-terminal becomes the controlling one of a new session, so that Ctrl-C reaches the command.
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command], cwd=PROJECT, env=environment, stdin=program, stdout=program, stderr=program
        )
        os.close(program)

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def read_until(self, pattern: str) -> str:
        """The output that no call has returned yet, up to a match of the pattern."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not (match := re.search(pattern.encode(), self._output)):
            assert time.monotonic() < end, f"{pattern} not in {self._output!r}"
            if select.select([self._terminal], [], [], 0.1)[0]:
                self._output += os.read(self._terminal, 65536)
        text, self._output = self._output[: match.end()], self._output[match.end() :]
        return text.decode(errors="replace")


def test_a_terminal_has_colours_prompts_and_figures_and_handles_ctrl_c_and_ctrl_d(server: Server) -> None:
    terminal = Terminal("scripts/chat", "--port", str(server.port))
    greeting = terminal.read_until("fast> ")
    assert "tiny: \x1b[32mdraft model\x1b[0m" in greeting
    terminal.type("Hello\n")
    terminal.read_until("\x1b\\[32m")
    terminal.type("\x03")
    terminal.read_until(f"{ENDED}fast> ")
    until(lambda: sequences(server) == (0, 0), "the answer ends on the server")
    # The answer before Ctrl-C may nearly fill the context of the tiny pair; a Ctrl-C that came after it discards the
    # next line.
    for _ in range(2):
        terminal.type("/new\n")
        terminal.read_until("fast> ")
    terminal.type("Hello\n")
    terminal.read_until(f"{FIGURES}{GAIN}[^>]*fast> ")
    for keys in ("/new\n", "/plain\n"):
        terminal.type(keys)
        terminal.read_until("(fast|plain)> ")
    terminal.type("Hello\n")
    assert "\x1b[32m" not in terminal.read_until(f"{FIGURES}without drafts[^>]*plain> ")
    terminal.type("\x04")
    assert terminal.process.wait(PATIENCE_SECONDS) == 0


def test_a_missing_server_and_a_wrong_key_are_one_line_errors(server: Server) -> None:
    keys = server.state / "key_file.json"
    right = keys.read_text()
    keys.write_text(right.replace(server.key, "wrong"))
    try:
        for port, sentence in (
            (free_ports(), "nothing answers at .* scripts/serve.*"),
            (server.port, "http://.*: Token Authorization failed.*"),
        ):
            command = ["scripts/chat", "--port", str(port)]
            outcome = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
            assert (outcome.returncode, outcome.stdout) == (1, "")
            assert re.fullmatch(f"specserve: {sentence}\n", outcome.stderr)
    finally:
        keys.write_text(right)
