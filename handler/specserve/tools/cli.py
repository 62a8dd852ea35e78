"""Runs commands: it parses arguments, prints errors in a line on stderr, and sets exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from specserve.errors import ConfigError, EnvironmentFailure, SpecserveError
from specserve.tools import paths

INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a usage error in a line, as every other error is reported."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{self.prog}: {message}; `{self.prog} --help` lists what it takes.")

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
