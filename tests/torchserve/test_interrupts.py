"""Ctrl-C, or a closed terminal, at any moment of `scripts/serve`: no process is left."""

import subprocess
import sys

import pytest

from server import PATIENCE_SECONDS, PROJECT, Server, free_ports, processes, tiny

pytestmark = pytest.mark.server

# `scripts/serve`, with signals to itself before the first call that has these words in its arguments returns.
PROGRAM = """
import builtins, os, signal, sys
# `server` annotates with Popen[bytes], which a function in its place is not.
from specserve.cli import __main__, server, torchserve_process

words, names = sys.argv.pop(1), sys.argv.pop(1)
# A shell ignores it for what it starts in the background, such as these tests.
signal.signal(signal.SIGINT, signal.default_int_handler)

def interrupting(call):
    def interrupted(*arguments, **options):
        result = call(*arguments, **options)
        if words in str(arguments):
            for name in names.split():
                os.kill(os.getpid(), getattr(signal, name))
        return result
    return interrupted

torchserve_process.subprocess.Popen = interrupting(torchserve_process.subprocess.Popen)
builtins.print = interrupting(print)
__main__.run()
"""


def test_an_interrupted_start_leaves_no_process() -> None:
    port = free_ports()
    for words, signals, code in (("ts.model_server", "SIGINT", 130), ("Ctrl-C stops", "SIGHUP SIGTERM SIGINT", 0)):
        command = [sys.executable, "-c", PROGRAM, words, signals, "serve", "--config", str(tiny()), "--port", str(port)]
        try:
            outcome = subprocess.run(
                command, cwd=PROJECT, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
            )
            assert outcome.returncode == code, outcome.stderr
            assert not processes(Server(port).state)
        finally:
            for process in processes(Server(port).state):
                process.kill()
