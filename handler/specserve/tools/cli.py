"""How every command starts and ends: its arguments, its one line on stderr, its exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from specserve.errors import ConfigError, EnvironmentFailure, SpecserveError

INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one sentence, like every other error of ours."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{self.prog}: {message}; `{self.prog} --help` lists what it takes.")


def say(line: str) -> None:
    """Print a line for the user at once, also through a pipe."""
    print(line, flush=True)


def _sentence(error: OSError) -> str:
    """What the system refused, and where."""
    what = error.strerror or str(error)
    return f"{error.filename}: {what}." if error.filename else f"{what}."


def run(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a command and exit with its code; a failure, ours or the system's, is one line on stderr."""
    try:
        code = main(sys.argv[1:])
    except SpecserveError as error:
        print(f"specserve: {error}", file=sys.stderr)
        code = error.exit_code
    except OSError as error:
        print(f"specserve: {_sentence(error)}", file=sys.stderr)
        code = EnvironmentFailure.exit_code
    except KeyboardInterrupt:
        print("specserve: interrupted.", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)
