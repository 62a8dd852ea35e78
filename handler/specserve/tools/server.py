"""`scripts/serve`: build the archive, start TorchServe on it, show a first completion, stay until Ctrl-C."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from specserve.config import TorchServeKeys
from specserve.errors import EnvironmentFailure
from specserve.tools import cli, files
from specserve.tools import process as processes
from specserve.tools.archive import add_config, pack, prepared_document
from specserve.tools.greeting import base_url, greet, how_to_go_on
from specserve.tools.state import State, properties, require_free
from specserve.tools.wait_ready import wait_until_ready

_FRONT_END_SECONDS = 30


def serve(config_file: Path, state: State, *, detach: bool, with_tokens: bool) -> int:
    """Run a server until it is stopped, or, with `detach`, until it is READY.

    Raises:
        ConfigError: the configuration is wrong.
        EnvironmentFailure: a download, a port or TorchServe failed.
        ModelLoadError: the worker cannot load the model.
    """
    require_stopped(state)
    document = prepared_document(config_file)
    startup = TorchServeKeys.model_validate(document).startupTimeout + _FRONT_END_SECONDS
    with files.locked(state.lock, f"another server starts on port {state.ports.inference}"):
        require_stopped(state)
        lay_out(state, document, with_tokens=with_tokens)
        process = processes.start(state)
    try:
        wait_until_ready(state, process, startup)
        cli.say(f"READY: {base_url(state)}\n")
        greet(state)
        cli.say(f"\n{how_to_go_on(state, with_tokens=with_tokens)}")
    except BaseException:
        _stop_undisturbed(state)
        raise
    return 0 if detach else _stay(state, process)


def require_stopped(state: State) -> None:
    """Check that the way is free for a server on these ports.

    Raises:
        EnvironmentFailure: this server runs already, or a port is taken.
    """
    port = state.ports.inference
    if processes.running(state):
        raise EnvironmentFailure(
            f"a server runs on port {port} already; stop it with `scripts/stop --port {port}`, "
            "or choose another port with --port."
        )
    require_free(state.ports)


def lay_out(state: State, document: dict[str, Any], *, with_tokens: bool) -> None:
    """Write what TorchServe starts from; what an earlier server on this port left is removed."""
    for old in (state.logs, state.model_store, state.temporary):
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir(parents=True, mode=0o700)
    state.key_file.unlink(missing_ok=True)
    # An archive of its own: no other one changes what this server loads when a worker restarts.
    pack(document, state.model_store)
    state.properties.write_text(properties(state, with_tokens=with_tokens), encoding="utf-8")


def _stay(state: State, process: subprocess.Popen[bytes]) -> int:
    cli.say("Ctrl-C stops the server.")
    try:
        process.wait()
    except KeyboardInterrupt:
        _stop_undisturbed(state)
        cli.say("stopped.")
        return 0
    if not state.pid_file.exists():
        cli.say("stopped by scripts/stop.")
        return 0
    _stop_undisturbed(state)
    raise EnvironmentFailure(
        f"TorchServe ended by itself; its last words are in {state.console}, start it again with scripts/serve."
    )


def _stop_undisturbed(state: State) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    processes.stop(state)


def _interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main(arguments: Sequence[str]) -> int:
    """Serve one configuration."""
    parser = cli.Parser(prog="serve", description=__doc__)
    add_config(parser)
    parser.add_argument("--port", type=int, default=8080, help="the first of five ports (default: 8080)")
    parser.add_argument("--detach", action="store_true", help="return when the server is ready")
    parser.add_argument("--no-auth", action="store_true", help="ask for no token")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, _interrupt)
    state = State.of(options.port)
    return serve(options.config, state, detach=options.detach, with_tokens=not options.no_auth)


if __name__ == "__main__":
    cli.run(main)
