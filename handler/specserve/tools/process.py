"""The processes of one server: started as a session of their own, found again, stopped together."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys

import psutil

from specserve.tools import paths
from specserve.tools.java import java_home
from specserve.tools.state import State

_STOPS_WITHIN_SECONDS = 15


def start(state: State) -> subprocess.Popen[bytes]:
    """Start TorchServe on what `state` holds; everything it starts belongs to the same session."""
    own = ("PYTHONPATH", "JAVA_HOME", "LOG_LOCATION", "METRICS_LOCATION")
    environment = {key: value for key, value in os.environ.items() if key not in own and not key.startswith("TS_")}
    environment |= {
        "LOG_LOCATION": str(state.logs),
        "METRICS_LOCATION": str(state.logs),
        # Java's temporary directory is moved by TEMP, the launcher's by TMPDIR.
        "TEMP": str(state.temporary),
        "TMPDIR": str(state.temporary),
        # In another locale Java cannot open a path that has letters outside ASCII.
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
    """Return the server's processes; an empty list when it does not run.

    The processes of the noted session are this server's only if one of them was started on its
    files, so that a number used anew by somebody else is never taken for it.
    """
    try:
        session = int(state.pid_file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return []
    members = [process for process in psutil.process_iter() if _session(process) == session]
    return members if any(_works_on(process, state) for process in members) else []


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None


def _works_on(process: psutil.Process, state: State) -> bool:
    # The front end names the settings file on its command line, a worker the socket it listens on.
    own = (str(state.properties), f"{state.temporary}{os.sep}")
    try:
        return any(argument.startswith(own) for argument in process.cmdline())
    except psutil.Error:
        return False


def stop(state: State) -> bool:
    """Stop the server, its workers included, and remove what it leaves; False when none ran."""
    members = running(state)
    # Gone before the processes are: so a waiting scripts/serve knows that this is no accident.
    state.pid_file.unlink(missing_ok=True)
    for process in members:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(members, timeout=_STOPS_WITHIN_SECONDS)
    for process in alive:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=_STOPS_WITHIN_SECONDS)
    state.key_file.unlink(missing_ok=True)
    shutil.rmtree(state.temporary, ignore_errors=True)
    return bool(members)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
