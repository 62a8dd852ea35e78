"""The files of one server: where its state lies, its ports, its TorchServe settings, its keys."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from specserve.errors import ConfigError, EnvironmentFailure
from specserve.tools import files, paths

# A pattern that no URL fits; the model store's own archives are named without one.
_NOTHING = "nothing"
_YEAR_MINUTES = 365 * 24 * 60
# What a Unix socket's path may be long at most, on the strictest system, less TorchServe's own name for it.
_SOCKET_DIRECTORY_BYTES = 103 - len("/.ts.sock.9999")


@dataclass(frozen=True)
class Ports:
    """A server's five ports on the loopback address."""

    inference: int

    def __post_init__(self) -> None:
        """Refuse what leaves no room for the other four.

        Raises:
            ConfigError: a port would be below 1024 or beyond 65535.
        """
        if not 1024 <= self.inference <= 65531:
            raise ConfigError(f"--port {self.inference}: must lie between 1024 and 65531 (four more follow it).")

    @property
    def management(self) -> int:
        """Where models are listed, registered and scaled."""
        return self.inference + 1

    @property
    def metrics(self) -> int:
        """Where Prometheus reads."""
        return self.inference + 2

    @property
    def grpc_inference(self) -> int:
        """Where gRPC requests go."""
        return self.inference + 3

    @property
    def grpc_management(self) -> int:
        """Where models are managed by gRPC."""
        return self.inference + 4


@dataclass(frozen=True)
class State:
    """The directory `.specserve/PORT/` and what lies in it."""

    ports: Ports
    directory: Path

    @classmethod
    def of(cls, port: int) -> State:
        """Return the state of the server on this port, whether or not it runs."""
        return cls(Ports(port), paths.STATE / str(port))

    @property
    def logs(self) -> Path:
        """TorchServe's and the worker's logs."""
        return self.directory / "logs"

    @property
    def console(self) -> Path:
        """What the front end prints."""
        return self.logs / "console.log"

    @property
    def model_log(self) -> Path:
        """What the worker prints."""
        return self.logs / "model_log.log"

    @property
    def properties(self) -> Path:
        """The TorchServe settings of this server."""
        return self.directory / "config.properties"

    @property
    def model_store(self) -> Path:
        """This server's own copy of its archive."""
        return self.directory / "model_store"

    @property
    def key_file(self) -> Path:
        """The tokens that TorchServe makes at each start."""
        return self.directory / "key_file.json"

    @property
    def pid_file(self) -> Path:
        """The process, and session, that this server's processes belong to."""
        return self.directory / "pid"

    @property
    def lock(self) -> Path:
        """Held while a server starts."""
        return self.directory / "lock"

    @property
    def temporary(self) -> Path:
        """TorchServe's temporary directory; it holds a Unix socket, whose path may not be long."""
        inside = self.directory / "tmp"
        if len(bytes(inside)) <= _SOCKET_DIRECTORY_BYTES:
            return inside
        mark = hashlib.sha256(bytes(inside)).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"specserve-{getpass.getuser()}-{mark}"

    def key(self, kind: str) -> str | None:
        """Return the `inference` or `management` token; None while there is none."""
        entry = files.read_json(self.key_file).get(kind)
        return entry.get("key") if isinstance(entry, dict) else None


def properties(state: State, *, with_tokens: bool) -> str:
    """Return the project's TorchServe settings with this server's own after them (the last one counts)."""
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
        # A server for development: its keys end with it, not after an hour.
        "token_expiration_min": str(_YEAR_MINUTES),
    }
    if not with_tokens:
        # To register a model or a workflow is to run its code: nobody may who needs no token for it.
        own |= {"enable_model_api": "false", "allowed_urls": _NOTHING}
    lines = (f"{key}={escaped(value)}" for key, value in own.items())
    base = (paths.CONFIG / "config.properties").read_text(encoding="utf-8")
    heading = f"# This server's own, written by scripts/serve --port {ports.inference}:"
    return "\n".join([base, heading, *lines, ""])


def escaped(value: str) -> str:
    r"""Write a value for a Java properties file: backslashes doubled, \uXXXX outside ASCII."""
    units = value.replace("\\", "\\\\").encode("utf-16-be")
    codes = (int.from_bytes(units[i : i + 2], "big") for i in range(0, len(units), 2))
    text = "".join(chr(code) if 0x20 <= code < 0x7F else f"\\u{code:04x}" for code in codes)
    return "\\" + text if text.startswith(" ") else text


def require_free(ports: Ports) -> None:
    """Check that nothing listens on any of the five ports.

    Raises:
        EnvironmentFailure: something does.
    """
    for port in range(ports.inference, ports.grpc_management + 1):
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
    # Whose a port is may be known to the superuser only.
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            here = connection.laddr and connection.laddr.port == port
            if here and connection.status == psutil.CONN_LISTEN and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return "another process"
