"""Wait for a started server: until its model is READY, or until it is known that it will not be."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import requests
from rich.console import Console

from specserve.errors import EnvironmentFailure, ModelLoadError
from specserve.tools import paths
from specserve.tools.paths import shown
from specserve.tools.state import State

_POLL_SECONDS = 0.3
_CANNOT_LOAD = "specserve cannot load: "
# What TorchServe's worker writes when a handler fails in any other way; a traceback follows.
_DIED = re.compile(r"Backend worker process died|Failed to load model|Load model \S+ cpu OOM")
# What each worker says first. One that is killed while it loads is started again, and may come to its end then.
_STARTED = "Torch worker started."
_OF_THE_NEXT = ("s_name_part0=", "Listening on port:", "Successfully loaded ", "[PID]")
_FAILED = re.compile(r"ASSERT|[Ee]rror|terminate|[Kk]illed")
_MOST_DEATHS = 3
_RAISED = re.compile(r"(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b.*")


def wait_until_ready(state: State, process: subprocess.Popen[bytes], timeout_seconds: float) -> None:
    """Return when the model answers.

    Raises:
        ModelLoadError: the worker says that it cannot load the model, or it died.
        EnvironmentFailure: the front end ended, or the time is over.
    """
    deadline = time.monotonic() + timeout_seconds
    with Console(stderr=True).status("starting TorchServe") as status:
        while not is_ready(state):
            if reason := load_failure(_read(state.model_log)):
                raise ModelLoadError(f"{reason.rstrip('. ')}. (The worker's log: {shown(state.model_log)})")
            if process.poll() is not None:
                raise EnvironmentFailure(
                    f"TorchServe ended while starting: {_cause(state.console)} ({shown(state.console)})."
                )
            if time.monotonic() > deadline:
                raise EnvironmentFailure(
                    f"the model was not ready after {timeout_seconds:.0f} seconds; {shown(state.model_log)} "
                    "says how far the worker came, `startupTimeout:` in the configuration gives it longer."
                )
            status.update(f"loading the model: {_last_line(state.model_log)}")
            time.sleep(_POLL_SECONDS)


def is_ready(state: State) -> bool:
    """Ask TorchServe's management port whether a worker has the model loaded."""
    try:
        answer = session(state.key("management")).get(
            f"http://127.0.0.1:{state.ports.management}/models/{paths.NAME}", timeout=5
        )
        models: Any = answer.json()
    except (requests.RequestException, ValueError):
        return False
    workers = [worker for model in models for worker in model["workers"]] if answer.ok else []
    return any(worker["status"] == "READY" for worker in workers)


def session(key: str | None) -> requests.Session:
    """Return an HTTP session for this machine: no proxy, and the key as a bearer token."""
    own = requests.Session()
    own.trust_env = False
    if key:
        own.headers["Authorization"] = f"Bearer {key}"
    return own


def load_failure(log: str) -> str | None:
    """Find in a worker's log why the model could not be loaded; None when nothing failed so far."""
    lines = [_message(line) for line in log.splitlines()]
    for line in lines:
        if _CANNOT_LOAD in line:
            return line.partition(_CANNOT_LOAD)[2].strip()
    died = next((number for number, line in enumerate(lines) if _DIED.search(line)), None)
    if died is not None and (raised := [line for line in lines[died:] if _RAISED.fullmatch(line)]):
        return f"the worker failed: {raised[-1]}"
    starts = [number for number, line in enumerate(lines) if line == _STARTED]
    if len(starts) > _MOST_DEATHS:
        words = [line for line in lines[starts[-2] : starts[-1]] if not line.startswith(_OF_THE_NEXT)]
        # A debugger that is installed has the very last word, and says nothing by it.
        last = next((line for line in reversed(words) if _FAILED.search(line)), words[-1])
        return f"the worker died {_MOST_DEATHS} times while it loaded the model, its last words: {last}"
    return None


def _message(line: str) -> str:
    """Take TorchServe's time, level and thread off a line of its log."""
    return line.partition(" MODEL_LOG - ")[2] or line


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _cause(path: Path) -> str:
    raised = [line for line in _read(path).splitlines() if _RAISED.fullmatch(line)]
    return raised[-1] if raised else _last_line(path)


def _last_line(path: Path) -> str:
    lines = _read(path).strip().splitlines()
    return _message(lines[-1]).strip() if lines else "nothing said yet"
