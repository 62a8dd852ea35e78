"""Runs commands: it parses arguments, prints errors in a line on stderr, and sets exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import NamedTuple, NoReturn

from specserve.cli import paths
from specserve.errors import ConfigError, EnvironmentFailure, SpecserveError

INTERRUPTED = 130


class Verb(NamedTuple):
    """A command: the module of this package with its `main(arguments)`, and a sentence for its users."""

    module: str
    sentence: str


# As `specserve VERB` and as `scripts/VERB`, in the order in which a user meets them.
VERBS = {
    "serve": Verb("server", "Build the archive of a configuration, start TorchServe on it, show a first completion."),
    "chat": Verb("chat", "Chat with a running server: who wrote each token, and what speculation gains."),
    "stop": Verb("torchserve_process", "Stop a running server."),
    "fetch_models": Verb("download", "Download the model files of a configuration into the models directory."),
    "prepare": Verb("models", "Download the models of a configuration and requantise those that ask for it."),
    "archive": Verb("archive", "Write a .mar with the handler, the package and the model YAML, without the weights."),
    "doctor": Verb("doctor", "Check the machine, the build and the pair of models, and say what to change."),
    "report": Verb("report", "Summarise traces in one self-contained HTML page."),
}


def command(verb: str) -> str:
    """Return how to call a verb, in the way in which the user has called this one."""
    return f"specserve {verb}" if Path(sys.argv[0]).name == "specserve" else f"scripts/{verb}"


class Parser(argparse.ArgumentParser):
    """The argument parser of a verb; it reports a usage error in one line, as every other error is reported."""

    def __init__(self, verb: str) -> None:
        super().__init__(prog=command(verb), description=VERBS[verb].sentence)
        self._verb = verb

    def error(self, message: str) -> NoReturn:
        """Refuse the command line.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{self._verb}: {message}; `{self.prog} --help` lists what it takes.")

    def add_config(self) -> None:
        """Add the option --config."""
        default = paths.DEFAULT_CONFIG.relative_to(paths.PROJECT)
        self.add_argument(
            "--config",
            type=Path,
            default=paths.DEFAULT_CONFIG,
            metavar="FILE",
            help=f"a model YAML (default: {default})",
        )


def say(line: str) -> None:
    """Print a line and flush it, so that it also passes through a pipe at once."""
    print(line, flush=True)


def run(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a command and exit with its code; report an error as one line on stderr."""
    if sys.getfilesystemencoding() == "ascii":
        # With LC_ALL=C and PYTHONUTF8=0 other characters of a path cannot be written into any file.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONUTF8": "1"})  # noqa: S606
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # What the locale cannot spell is a question mark.
            stream.reconfigure(errors="replace")
    try:
        code = main(sys.argv[1:])
    except SpecserveError as error:
        print(f"specserve: {error}", file=sys.stderr)
        code = error.exit_code
    except OSError as error:
        reason = error.strerror or str(error)
        print(f"specserve: {error.filename}: {reason}." if error.filename else f"specserve: {reason}.", file=sys.stderr)
        code = EnvironmentFailure.exit_code
    except KeyboardInterrupt:
        print("specserve: interrupted.", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)
