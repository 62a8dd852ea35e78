"""The command `specserve`, which the commands in `scripts/` run too: calls the tool of a verb."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from specserve import __version__
from specserve.cli import cli, paths
from specserve.errors import ConfigError, EnvironmentFailure


def main(arguments: Sequence[str]) -> int:
    """Call the tool of a verb with the arguments after it; returns its exit code.

    Raises:
        ConfigError: there is no such verb, or its arguments or its configuration are wrong.
        EnvironmentFailure: the project or a package is not there, or the tool has failed.
        ModelLoadError: a model cannot be used.
    """
    verb, *rest = arguments or ["--help"]
    if verb in {"-h", "--help"}:
        cli.say(overview())
        return 0
    if verb == "--version":
        cli.say(f"specserve {__version__}")
        return 0
    if verb not in cli.VERBS:
        raise ConfigError(f"there is no command {verb!r}; `specserve --help` lists them.")
    # config/, the handler's entry point and the server's state are in the project and not in the package.
    if not paths.DEFAULT_CONFIG.is_file():
        raise EnvironmentFailure(
            f"{paths.PROJECT} is no clone of specserve's repository, whose files the commands need; "
            "make one, and install it with `pip install --editable`."
        )
    try:
        tool = importlib.import_module(f"specserve.cli.{cli.VERBS[verb].module}")
    except ModuleNotFoundError as error:
        raise EnvironmentFailure(
            f"{verb} needs the package {error.name}, which {sys.executable} does not have; "
            f"{paths.PROJECT}/scripts/{verb} installs what it needs."
        ) from error
    return int(tool.main(rest))


def overview() -> str:
    """Return the usage, with a line for each verb."""
    width = max(map(len, cli.VERBS))
    verbs = (f"  {name:{width}}  {verb.sentence}" for name, verb in cli.VERBS.items())
    usage = "usage: specserve [--help | --version] VERB [ARGUMENT ...]"
    return "\n".join([usage, "", *verbs, "", "`specserve VERB --help` lists what a verb takes."])


def run() -> NoReturn:
    """Run the command line of this process."""
    cli.run(main)


if __name__ == "__main__":
    run()
