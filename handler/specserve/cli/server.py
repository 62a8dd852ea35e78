"""`scripts/serve`: build the archive, start TorchServe, wait for the model, show a first completion."""

import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import requests
from rich.console import Console

from specserve.cli import paths, torchserve_process
from specserve.cli.archive import pack, prepared_document
from specserve.cli.models import run_fetch
from specserve.cli.torchserve_process import State, properties, require_stopped
from specserve.config import TorchServeKeys
from specserve.errors import EnvironmentFailure, ModelLoadError
from specserve.weights import files

# Time for TorchServe's front end, beside `startupTimeout` for the worker.
_FRONT_END_SECONDS = 30
_POLL_SECONDS = 0.1
_FIRST_COMPLETION_SECONDS = 300
_FIRST_PROMPT = "def fibonacci(n):\n"

# Written by specserve where loading fails for a known reason.
_CANNOT_LOAD = "specserve cannot load: "
# Written by specserve for what the operator should know.
_WARNING = re.compile(r"(?:WARNING|ERROR) specserve: (.*)")
# Written by TorchServe where a handler fails for another reason.
_WORKER_DIED = "Backend worker process died"
# Written by TorchServe at each start of a worker. One that is killed while it loads is restarted; after so many deaths
# the model is given up.
_WORKER_STARTED, _MAX_DEATHS = "Torch worker started.", 3
# The last words of a process: an exception, or what llama.cpp or the system prints.
_LAST_WORDS = re.compile(
    r"(\w+\.)*\w*(Error|Exception|Exit)\b.*|.*(ASSERT|terminate called|Fatal Python error|Killed).*"
)


def run(options: Namespace) -> int:
    """Run a server until it is stopped or, with --detach, until it is ready."""
    if options.fetch_only:
        return run_fetch(options)
    _handle_interrupts(_interrupt)
    state, with_tokens = State(options.port), not options.no_auth
    require_stopped(state)
    document = prepared_document(options.config)
    timeout_seconds = TorchServeKeys.model_validate(document).startupTimeout + _FRONT_END_SECONDS
    with files.locked(state.lock, f"another server starts on port {state.port}"):
        require_stopped(state)
        try:
            write_state(state, document, options.name, host=options.host, with_tokens=with_tokens)
            process = torchserve_process.start(state)
        except BaseException:
            _stop(state)
            raise
    try:
        wait_until_ready(state, process, timeout_seconds)
        print(f"READY: {base_url(state)}\n\n{first_completion(state)}\n", flush=True)
        for warning in warnings(worker_lines(state)):
            print(f"Note: {warning}", flush=True)
        print(client_example(state, with_tokens=with_tokens), flush=True)
        return 0 if options.detach else _wait_for_end(state, process)
    except BaseException:
        _stop(state)
        raise


def write_state(
    state: State, document: dict[str, Any], name: str, *, host: str = torchserve_process.LOOPBACK, with_tokens: bool
) -> None:
    """Write the archive and the settings that TorchServe starts with; files of an earlier server are removed."""
    for old in (state.logs, state.model_store, state.temporary):
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir(parents=True, mode=0o700)
    state.key_file.unlink(missing_ok=True)
    # The server's own archive: a later scripts/archive does not change what a restarted worker loads.
    pack(document, state.model_store / f"{name}.mar", name)
    state.properties.write_text(properties(state, name, host=host, with_tokens=with_tokens), encoding="utf-8")


def _wait_for_end(state: State, process: subprocess.Popen[bytes]) -> int:
    try:
        print("Ctrl-C stops the server.", flush=True)
        process.wait()
    except KeyboardInterrupt:
        _stop(state)
        print("stopped.", flush=True)
        return 0
    if process.returncode == -signal.SIGTERM:
        print("stopped by scripts/stop.", flush=True)
        return 0
    raise EnvironmentFailure(
        f"TorchServe ended by itself; its last words are in {state.console}, start it again with scripts/serve."
    )


def _stop(state: State) -> None:
    _handle_interrupts(signal.SIG_IGN)
    torchserve_process.stop(state)


def _handle_interrupts(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # nohup ignores SIGHUP, and a shell ignores SIGINT for what it starts in the background.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    # A closed terminal sends several: those that follow must not keep the server from being stopped.
    _handle_interrupts(signal.SIG_IGN)
    raise KeyboardInterrupt


def wait_until_ready(state: State, process: subprocess.Popen[bytes], timeout_seconds: float) -> None:
    """Return when a worker has loaded the model; raise ModelLoadError or EnvironmentFailure if none will."""
    deadline = time.monotonic() + timeout_seconds
    with Console(stderr=True).status("starting TorchServe") as status:
        while not is_ready(state):
            lines = worker_lines(state)
            if failure := load_failure(lines):
                raise ModelLoadError(f"{failure} (The worker's log: {state.model_log})")
            if process.poll() is not None:
                said = list(filter(str.strip, _lines(state.console)))
                cause = _last_words(said) or (said or ["nothing said"])[-1]
                raise EnvironmentFailure(f"TorchServe ended while starting: {cause} ({state.console}).")
            if time.monotonic() > deadline:
                raise EnvironmentFailure(
                    f"the model was not ready after {timeout_seconds:.0f} seconds; {state.model_log} says how far the "
                    "worker came, `startupTimeout:` in the configuration gives it longer."
                )
            status.update(f"loading the model: {lines[-1] if lines else ''}")
            time.sleep(_POLL_SECONDS)


def worker_lines(state: State) -> list[str]:
    """Return what the worker wrote, without the time and the name that TorchServe puts before each line."""
    return [line.rpartition("MODEL_LOG - ")[2] for line in _lines(state.model_log)]


def warnings(lines: list[str]) -> list[str]:
    """Return the sentences of warnings and errors in a worker's log."""
    return [match[1] for match in map(_WARNING.fullmatch, lines) if match]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def _last_words(lines: list[str]) -> str | None:
    return next(filter(_LAST_WORDS.fullmatch, reversed(lines)), None)


def load_failure(lines: list[str]) -> str | None:
    """Return why the model could not be loaded, from the worker's log; None if nothing has failed yet."""
    for line in lines:
        if _CANNOT_LOAD in line:
            return line.partition(_CANNOT_LOAD)[2].strip()
    last_words = _last_words(lines)
    if lines.count(_WORKER_STARTED) > _MAX_DEATHS or (last_words and any(_WORKER_DIED in line for line in lines)):
        killed = "it was killed, probably because memory ran out: give it more, or choose a smaller model"
        return f"the worker died while it loaded the model: {last_words or killed}"
    return None


def is_ready(state: State) -> bool:
    """Ask TorchServe's management API whether a worker has loaded the model."""
    url = f"http://127.0.0.1:{state.ports['management']}/models/{state.name}"
    try:
        answer = session(state.key("management")).get(url, timeout=5)
        models: Any = answer.json()
    except (requests.RequestException, ValueError):
        return False
    return answer.ok and any(worker["status"] == "READY" for model in models for worker in model["workers"])


def session(key: str | None) -> requests.Session:
    """Return an HTTP session without proxies that sends the key as a bearer token."""
    local = requests.Session()
    local.trust_env = False
    if key:
        local.headers["Authorization"] = f"Bearer {key}"
    return local


def base_url(state: State) -> str:
    return f"{state.url}/predictions/{state.name}/{paths.VERSION}/v1"


def first_completion(state: State) -> str:
    # An explicit mode, so that the request never is in the control group.
    body = {"prompt": _FIRST_PROMPT, "max_tokens": 64, "temperature": 0, "speculation": {"mode": "auto"}}
    begun = time.monotonic()
    try:
        answer = session(state.key("inference")).post(
            f"{base_url(state)}/completions", json=body, timeout=_FIRST_COMPLETION_SECONDS
        )
        answer.raise_for_status()
    except requests.RequestException as error:
        raise EnvironmentFailure(
            f"the server is ready but did not answer a completion ({error}); {state.model_log} may say more."
        ) from error
    seconds, completion = time.monotonic() - begun, answer.json()
    figures = summary(completion["usage"], completion["speculation"], seconds)
    return f"{_FIRST_PROMPT}{completion['choices'][0]['text'].rstrip()}\n\n{figures}"


def summary(usage: dict[str, Any], account: dict[str, Any], seconds: float) -> str:
    """Return tokens a second, tokens a round, and the estimated speed-up of decoding, as a sentence."""
    tokens, speedup = usage["completion_tokens"], account["estimated_speedup"]
    figures = f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s"
    if account["mode"] == "off":
        return f"{figures}, without drafts"
    figures += f", {account['mean_acceptance_length']:.2f} tokens a round"
    return figures + (f", {speedup:.2f} times as fast as without drafts by estimate" if speedup else "")


def client_example(state: State, *, with_tokens: bool) -> str:
    """Return a request by curl, ready to copy, and where keys and logs are."""
    load_key, header, keys = "", "", ""
    if with_tokens:
        program = f"import json; print(json.load(open({str(state.key_file)!r}))['inference']['key'])"
        load_key = f"KEY=$({shlex.quote(sys.executable)} -c {shlex.quote(program)})\n"
        header = ' -H "Authorization: Bearer $KEY"'
        keys = f"\nkeys: {state.key_file} (new at each start; a client's api_key)"
    return (
        f"{load_key}curl {base_url(state)}/completions{header} -H 'Content-Type: application/json' \\\n"
        f"""  -d '{{"prompt": "def add(a, b):", "max_tokens": 64}}'\n{keys}\n"""
        f"logs: {state.logs}    stop it: scripts/stop{'' if state.port == 8080 else f' --port {state.port}'}"
    )
