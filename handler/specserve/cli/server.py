"""`scripts/serve`: build the archive, start TorchServe, wait for the model, show a first completion."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import requests
from rich.console import Console

from specserve.cli import cli, files, paths, torchserve_process
from specserve.cli.archive import pack, prepared_document
from specserve.cli.paths import display
from specserve.cli.torchserve_process import State, properties, require_free
from specserve.config import TorchServeKeys
from specserve.errors import EnvironmentFailure, ModelLoadError

# Time for TorchServe's front end, beside `startupTimeout` for the worker.
_FRONT_END_SECONDS = 30
_POLL_SECONDS = 0.3
_FIRST_COMPLETION_SECONDS = 300
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FIRST_PROMPT = "def fibonacci(n):\n"

# Written by specserve where loading fails for a known reason.
_CANNOT_LOAD = "specserve cannot load: "
# Written by TorchServe's worker where a handler fails for any other reason, followed by a traceback.
_WORKER_FAILED = re.compile(r"Backend worker process died|Failed to load model|Load model \S+ cpu OOM")
_EXCEPTION = re.compile(r"(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b.*")
# A worker that is killed while it loads is restarted; after so many deaths the model is given up.
_MAX_DEATHS = 3
_WORKER_STARTED = "Torch worker started."
# Lines of a new worker before `_WORKER_STARTED`.
_WORKER_PREAMBLE = ("s_name_part0=", "Listening on port:", "Successfully loaded ", "[PID]")
_CRASH = re.compile(r"ASSERT|[Ee]rror|terminate|[Kk]illed")


def serve(config_file: Path, state: State, *, detach: bool, with_tokens: bool) -> int:
    """Run a server until it is stopped or, with `detach`, until it is ready.

    Raises:
        ConfigError: the configuration is wrong.
        EnvironmentFailure: a download, a port or TorchServe failed.
        ModelLoadError: the worker cannot load the model.
    """
    require_stopped(state)
    document = prepared_document(config_file)
    timeout_seconds = TorchServeKeys.model_validate(document).startupTimeout + _FRONT_END_SECONDS
    process: subprocess.Popen[bytes] | None = None
    try:
        with files.locked(state.lock, f"another server starts on port {state.ports.inference}"):
            require_stopped(state)
            write_state(state, document, with_tokens=with_tokens)
            with _interrupts_deferred():
                process = torchserve_process.start(state)
        wait_until_ready(state, process, timeout_seconds)
        cli.say(f"READY: {base_url(state)}\n")
        cli.say(first_completion(state))
        cli.say(f"\n{client_example(state, with_tokens=with_tokens)}")
        return 0 if detach else _wait_for_end(state, process)
    except BaseException:
        if process is not None:
            _stop_ignoring_signals(state)
        raise


def require_stopped(state: State) -> None:
    """Check that no server runs on these ports.

    Raises:
        EnvironmentFailure: this server runs already, or a port is taken.
    """
    port = state.ports.inference
    if torchserve_process.running(state):
        raise EnvironmentFailure(
            f"a server runs on port {port} already; stop it with `{cli.command('stop')} --port {port}`, "
            "or choose another port with --port."
        )
    require_free(state.ports)


def write_state(state: State, document: dict[str, Any], *, with_tokens: bool) -> None:
    """Write the archive and the settings that TorchServe starts with; files of an earlier server are removed."""
    for old in (state.logs, state.model_store, state.temporary):
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir(parents=True, mode=0o700)
    state.key_file.unlink(missing_ok=True)
    # The server's own archive: a later scripts/archive does not change what a restarted worker loads.
    pack(document, state.model_store)
    state.properties.write_text(properties(state, with_tokens=with_tokens), encoding="utf-8")


def _wait_for_end(state: State, process: subprocess.Popen[bytes]) -> int:
    try:
        cli.say("Ctrl-C stops the server.")
        process.wait()
    except KeyboardInterrupt:
        _stop_ignoring_signals(state)
        cli.say("stopped.")
        return 0
    if not state.pid_file.exists():
        cli.say(f"stopped by {cli.command('stop')}.")
        return 0
    raise EnvironmentFailure(
        f"TorchServe ended by itself; its last words are in {state.console}, "
        f"start it again with {cli.command('serve')}."
    )


def _stop_ignoring_signals(state: State) -> None:
    _handle_interrupts(signal.SIG_IGN)
    torchserve_process.stop(state)


def _handle_interrupts(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    for number in _INTERRUPTS:
        # nohup ignores SIGHUP, and a shell ignores SIGINT for what it starts in the background.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    # A closed terminal sends several: those that follow must not keep the server from being stopped.
    _handle_interrupts(signal.SIG_IGN)
    raise KeyboardInterrupt


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end instead: a process that has started but is not recorded cannot be stopped."""
    numbers: list[int] = []
    _handle_interrupts(lambda number, _: numbers.append(number))
    try:
        yield
    finally:
        _handle_interrupts(_interrupt)
    if numbers:
        _interrupt(numbers[0], None)


def wait_until_ready(state: State, process: subprocess.Popen[bytes], timeout_seconds: float) -> None:
    """Return when a worker has loaded the model.

    Raises:
        ModelLoadError: the worker cannot load the model, or died.
        EnvironmentFailure: the front end ended, or the timeout has passed.
    """
    deadline = time.monotonic() + timeout_seconds
    with Console(stderr=True).status("starting TorchServe") as status:
        while not is_ready(state):
            if reason := load_failure(_read(state.model_log)):
                raise ModelLoadError(f"{reason.rstrip('. ')}. (The worker's log: {display(state.model_log)})")
            if process.poll() is not None:
                exceptions = [line for line in _read(state.console).splitlines() if _EXCEPTION.fullmatch(line)]
                cause = exceptions[-1] if exceptions else _last_line(state.console)
                raise EnvironmentFailure(f"TorchServe ended while starting: {cause} ({display(state.console)}).")
            if time.monotonic() > deadline:
                raise EnvironmentFailure(
                    f"the model was not ready after {timeout_seconds:.0f} seconds; {display(state.model_log)} "
                    "says how far the worker came, `startupTimeout:` in the configuration gives it longer."
                )
            status.update(f"loading the model: {_last_line(state.model_log)}")
            time.sleep(_POLL_SECONDS)


def is_ready(state: State) -> bool:
    """Ask TorchServe's management API whether a worker has loaded the model."""
    url = f"http://127.0.0.1:{state.ports.management}/models/{paths.NAME}"
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


def load_failure(log: str) -> str | None:
    """Return why the model could not be loaded, from the worker's log; None if nothing has failed yet."""
    lines = [_message(line) for line in log.splitlines()]
    for line in lines:
        if _CANNOT_LOAD in line:
            return line.partition(_CANNOT_LOAD)[2].strip()
    failed = next((number for number, line in enumerate(lines) if _WORKER_FAILED.search(line)), None)
    if failed is not None and (exceptions := [line for line in lines[failed:] if _EXCEPTION.fullmatch(line)]):
        return f"the worker failed: {exceptions[-1]}"
    starts = [number for number, line in enumerate(lines) if line == _WORKER_STARTED]
    if len(starts) > _MAX_DEATHS:
        last_life = [line for line in lines[starts[-2] : starts[-1]] if not line.startswith(_WORKER_PREAMBLE)]
        # If gdb is installed, ggml runs it after a failed assertion, and its output comes last.
        last = next((line for line in reversed(last_life) if _CRASH.search(line)), last_life[-1])
        return f"the worker died {_MAX_DEATHS} times while it loaded the model, its last words: {last}"
    return None


def _message(line: str) -> str:
    """Remove TorchServe's time, level and thread from a line of its log."""
    return line.partition(" MODEL_LOG - ")[2] or line


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _last_line(path: Path) -> str:
    lines = _read(path).strip().splitlines()
    return _message(lines[-1]).strip() if lines else "nothing said yet"


def base_url(state: State, host: str = "127.0.0.1") -> str:
    """Return the base URL for an OpenAI client."""
    return f"http://{host}:{state.ports.inference}/predictions/{paths.NAME}/{paths.VERSION}/v1"


def first_completion(state: State) -> str:
    """Request a completion, and return its text and its speed.

    Raises:
        EnvironmentFailure: the server does not answer as it should.
    """
    # An explicit mode, so that the request never is in the control group.
    body = {"prompt": _FIRST_PROMPT, "max_tokens": 64, "temperature": 0, "speculation": {"mode": "auto"}}
    begun = time.monotonic()
    try:
        answer = session(state.key("inference")).post(
            f"{base_url(state)}/completions", json=body, timeout=_FIRST_COMPLETION_SECONDS
        )
    except requests.RequestException as error:
        raise EnvironmentFailure(f"the server is ready but did not answer a completion ({error}).") from error
    if not answer.ok:
        raise EnvironmentFailure(
            f"the server is ready but answered a completion with {answer.status_code} "
            f"({' '.join(answer.text.split())[:300]}); {display(state.model_log)} may say more."
        )
    return summary(answer.json(), time.monotonic() - begun)


def summary(completion: dict[str, Any], seconds: float) -> str:
    """Return the prompt with its completion, and a line of figures."""
    text = completion["choices"][0]["text"]
    tokens = completion["usage"]["completion_tokens"]
    figures = [f"{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.1f} tokens/s"]
    speculation = completion.get("speculation") or {}
    if drafted := speculation.get("drafted_tokens"):
        figures.append(f"{drafted} drafted, {speculation['accepted_tokens']} of them accepted")
        figures.append(f"{speculation['mean_acceptance_length']:.2f} tokens a round")
    elif speculation:
        figures.append("nothing was drafted")
    return f"{_FIRST_PROMPT}{text.rstrip()}\n\n{', '.join(figures)}"


def client_example(state: State, *, with_tokens: bool) -> str:
    """Return a request by curl and by OpenAI's client, ready to copy, and where keys and logs are."""
    port = state.ports.inference
    load_key = f"json.load(open({str(state.key_file)!r}))['inference']['key']"
    lines = []
    if with_tokens:
        lines.append(f'KEY=$({shlex.quote(sys.executable)} -c "import json; print({load_key})")')
    bearer = '-H "Authorization: Bearer $KEY" ' if with_tokens else ""
    api_key = load_key if with_tokens else '"none"'
    lines += [
        f"curl {base_url(state)}/completions {bearer}\\",
        """  -H 'Content-Type: application/json' -d '{"prompt": "def add(a, b):", "max_tokens": 64}'""",
        "",
        "import json, openai  # pip install openai",
        f'client = openai.OpenAI(base_url="{base_url(state)}",',
        f"                       api_key={api_key})",
        "model = client.models.list().data[0].id",
        'answer = client.completions.create(model=model, prompt="def add(a, b):", max_tokens=64)',
        "print(answer.choices[0].text)",
        "",
    ]
    if with_tokens:
        lines.append(f"keys: {display(state.key_file)} (new at each start)")
    stop = cli.command("stop") + ("" if port == 8080 else f" --port {port}")
    return "\n".join([*lines, f"logs: {display(state.logs)}    stop it: {stop}"])


def main(arguments: Sequence[str]) -> int:
    """Serve one configuration."""
    parser = cli.Parser("serve")
    parser.add_config()
    parser.add_argument("--port", type=int, default=8080, help="the first of five ports (default: 8080)")
    parser.add_argument("--detach", action="store_true", help="return when the server is ready")
    parser.add_argument("--no-auth", action="store_true", help="ask for no token")
    options = parser.parse_args(arguments)
    _handle_interrupts(_interrupt)
    state = State.of(options.port)
    return serve(options.config, state, detach=options.detach, with_tokens=not options.no_auth)
