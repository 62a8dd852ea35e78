"""The command `specserve`; `scripts/VERB` runs `specserve VERB`."""

import argparse
import os
import pkgutil
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

from specserve import __version__
from specserve.cli import paths
from specserve.errors import ConfigError, EnvironmentFailure, SpecserveError

# What a shell reports of a program that Ctrl-C, or a reader that leaves, has ended.
INTERRUPTED, READER_LEFT = 130, 141


class _Parser(argparse.ArgumentParser):
    """Reports a usage error in one line, as every other error is reported."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` lists what it takes.")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs; `run` of its result names the function that runs one."""
    specserve = _Parser(prog="specserve", description="Serve GGUF models on CPUs with speculative decoding.")
    specserve.add_argument("--version", action="version", version=f"specserve {__version__}")
    verbs = specserve.add_subparsers(metavar="VERB", required=True)

    def verb(
        name: str, function: str, sentence: str, *, config: bool = False, port: bool = False
    ) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, prog=f"scripts/{name}", help=sentence, description=sentence)
        added.set_defaults(run=f"specserve.cli.{function}")
        if config:
            default = paths.DEFAULT_CONFIG
            text = f"a model YAML (default: {default.relative_to(paths.PROJECT)})"
            added.add_argument("--config", type=Path, default=default, metavar="FILE", help=text)
        if port:
            added.add_argument("--port", type=int, default=8080, help="the first of five ports (default: 8080)")
        return added

    sentence = "Build the archive of a configuration and start TorchServe on it."
    serve = verb("serve", "server:run", sentence, config=True, port=True)
    serve.add_argument("--name", default=paths.NAME, help=f"the model's name in every URL (default: {paths.NAME})")
    serve.add_argument(
        "--host", default="127.0.0.1", help="the address that clients reach it at (default: %(default)s)"
    )
    serve.add_argument("--detach", action="store_true", help="return when the server is ready")
    # For scripts/serve, which compiles llama.cpp meanwhile.
    serve.add_argument("--fetch-only", action="store_true", help=argparse.SUPPRESS)
    serve.add_argument("--no-auth", action="store_true", help="ask for no token")
    verb("stop", "torchserve_process:run", "Stop a running server.", port=True)

    sentence = "Chat with a running server: who wrote each token, and what speculation gains."
    chat = verb("chat", "chat:run", sentence, port=True)
    chat.add_argument("--max-tokens", type=int, metavar="N", help="of an answer (default: the rest of the context)")

    fetch = verb("fetch_models", "models:run_fetch", "Download the model files of a configuration.")
    prepare = verb("prepare", "models:run_prepare", "Download and requantise the models of a configuration.")
    for command in (fetch, prepare):
        command.add_argument("config", type=Path, metavar="FILE", help="a model YAML, such as config/smollm2-135m.yaml")

    sentence = "Write a .mar with the handler and the model YAML, without the weights."
    archive = verb("archive", "archive:run", sentence, config=True)
    archive.add_argument("--name", default=paths.NAME, help=f"the model's name in every URL (default: {paths.NAME})")
    archive.add_argument(
        "--out", type=Path, metavar="FILE.mar", help="where to write it (default: model_store/NAME.mar)"
    )
    archive.add_argument("--version", default=paths.VERSION, help=f"its version (default: {paths.VERSION})")

    sentence = "Check the machine, the build and the models, and say what to change."
    doctor = verb("doctor", "doctor:run", sentence, config=True)
    text = "config.properties of a TorchServe with other models, to check, too"
    doctor.add_argument("--torchserve", type=Path, metavar="FILE", help=text)
    doctor.add_argument("--json", action="store_true", help="all findings with their numbers, as one JSON object")

    report = verb("report", "report:run", "Summarise traces: acceptance by prompt family and by draft length.")
    report.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="files that a server's `trace` wrote")
    report.add_argument("-o", "--out", type=Path, metavar="FILE.html", help="write the tables into a page, too")
    return specserve


def main(arguments: Sequence[str]) -> int:
    """Run a verb and return its exit code; an error is one line on stderr."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # What the locale cannot spell is a question mark.
            stream.reconfigure(errors="replace")
    try:
        options = parser().parse_args(arguments)
        # Imported only now: a verb may need packages that others do not.
        return int(pkgutil.resolve_name(options.run)(options))
    except SpecserveError as error:
        sentence, code = str(error), error.exit_code
    except ModuleNotFoundError as error:
        sentence = f"{sys.executable} does not have the package {error.name}; the commands in scripts/ install it."
        code = EnvironmentFailure.exit_code
    except BrokenPipeError:
        # Its reader has left, as in `scripts/doctor | head`; Python would say so when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_LEFT
    except OSError as error:
        sentence = f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror or error}."
        code = EnvironmentFailure.exit_code
    except KeyboardInterrupt:
        sentence, code = "interrupted.", INTERRUPTED
    print(f"specserve: {sentence}", file=sys.stderr)
    return code


def run() -> NoReturn:
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
