"""The files, ports and processes of a server, without starting TorchServe."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from specserve.cli import __main__ as specserve
from specserve.cli import paths, server, torchserve_process
from specserve.cli.server import client_example, load_failure, wait_until_ready, warnings
from specserve.cli.torchserve_process import State, properties, require_stopped, running
from specserve.errors import ConfigError, EnvironmentFailure, ModelLoadError

WORKER = "2026-11-21T05:41:48,756 [INFO ] W-9000-qwen_1.0-stdout MODEL_LOG - "
SLEEP = "import time; print(flush=True); time.sleep(600)"
# Starts a sleeping process as it is terminated.
SLEEP_AND_HAND_ON = f"""
import signal, subprocess, sys

def hand_on(*_):
    subprocess.Popen([sys.executable, "-c", {SLEEP!r}, sys.argv[1]])
    sys.exit()

signal.signal(signal.SIGTERM, hand_on)
{SLEEP}
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    monkeypatch.setattr(paths, "STATE", tmp_path)
    own = State(18080)
    own.logs.mkdir(parents=True)
    return own


@contextlib.contextmanager
def sleeper(argument: Path | str, program: str = SLEEP) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own that sleeps until it is killed."""
    command = [sys.executable, "-c", program, str(argument)]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as started:
        assert started.stdout
        started.stdout.readline()
        try:
            yield started
        finally:
            started.kill()


def in_java(text: str) -> dict[str, str]:
    """Read properties as Java does."""
    pairs = (line.split("=", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {key: value.encode("ascii").decode("unicode_escape") for key, value in pairs}


def test_a_port_in_use_is_named_with_what_to_do(state: State) -> None:
    require_stopped(state)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", state.ports["metrics"]))
        taken.listen()
        with pytest.raises(EnvironmentFailure, match=r"port 18082 is taken .* --port \(this .* 18080 to 18084\)"):
            require_stopped(state)


def test_properties_add_the_servers_ports_to_the_projects_settings(state: State) -> None:
    names = ("inference_address", "management_address", "metrics_address")
    settings = {name: f"http://127.0.0.1:{18080 + n}" for n, name in enumerate(names)}
    settings |= {"grpc_inference_port": "18083", "grpc_management_port": "18084"}
    settings |= {"grpc_inference_address": "127.0.0.1", "grpc_management_address": "127.0.0.1"}
    settings |= {"model_store": str(state.model_store), "load_models": "qwen.mar"}
    closed = settings | {"enable_model_api": "true", "disable_token_authorization": "false"}
    assert closed.items() <= in_java(properties(state, "qwen", with_tokens=True)).items()
    # Without tokens nobody may register a model, which is code.
    access = {"enable_model_api": "false", "disable_token_authorization": "true", "allowed_urls": "nothing"}
    assert (settings | access).items() <= in_java(properties(state, "qwen", with_tokens=False)).items()
    ours, theirs = (in_java((paths.CONFIG / place / "config.properties").read_text()) for place in (".", "kserve"))
    changed = {key: theirs.get(key) for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    addresses = {"inference_address": "http://0.0.0.0:8080", "metrics_address": "http://0.0.0.0:8082"}
    assert changed == addresses | access, "KServe's differ in addresses and access"


def test_paths_are_escaped_for_java_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    for directory, written in (
        ("/a b/#1=x:y!", "/a b/#1=x:y!"),
        ("/back\\slash\n/für/世🙂", "/back\\\\slash\\n/f\\u00fcr/\\u4e16\\ud83d\\ude42"),
    ):
        monkeypatch.setattr(paths, "STATE", Path(directory))
        assert f"\nmodel_store={written}/18080/model_store\n" in properties(State(18080), "qwen", with_tokens=True)


def test_a_long_path_moves_the_socket_out_of_the_project(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    assert state.temporary == state.directory / "tmp"
    project, moved = paths.STATE, list[Path]()
    for name in ("long", "gone"):
        monkeypatch.setattr(paths, "STATE", project / (name * 30))
        moved.append(State(18080).temporary)
        assert not moved[-1].is_relative_to(project)
    assert moved[0] != moved[1]


def test_files_of_an_earlier_server_are_replaced(state: State) -> None:
    state.model_log.write_text("specserve cannot load: of the last time\n", encoding="utf-8")
    state.key_file.write_text('{"inference": {"key": "abc"}}', encoding="utf-8")
    assert (state.key("inference"), state.key("management")) == ("abc", None)
    server.write_state(state, {"minWorkers": 1, "handler": {"model_id": "new"}}, "mine", with_tokens=True)
    assert not state.model_log.exists()
    assert state.key("inference") is None
    assert (state.model_store / "mine.mar").exists()
    assert server.base_url(state) == "http://127.0.0.1:18080/predictions/mine/1.0/v1"
    assert state.properties.exists()


def test_another_host_is_for_clients_only_and_needs_keys(state: State) -> None:
    document = {"minWorkers": 1, "handler": {"model_id": "new"}}
    for host, url in (("0.0.0.0", "http://127.0.0.1:18080"), ("10.0.0.7", "http://10.0.0.7:18080")):
        server.write_state(state, document, "qwen", host=host, with_tokens=True)
        settings = in_java(state.properties.read_text(encoding="utf-8"))
        assert settings["inference_address"] == f"http://{host}:18080"
        assert {settings[f"{api}_address"].rpartition(":")[0] for api in ("management", "metrics")} == {
            "http://127.0.0.1"
        }
        assert server.base_url(state).startswith(url)
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0: needs keys, so leave --no-auth out\."):
        server.write_state(state, document, "qwen", host="0.0.0.0", with_tokens=False)


def test_stop_ends_the_servers_processes_and_no_others(state: State, capsys: pytest.CaptureFixture[str]) -> None:
    with sleeper("/somebody/elses/config.properties") as other:
        assert specserve.main(["stop", "--port", "18080"]) == 0
        assert capsys.readouterr().out == "no server of this directory runs on port 18080.\n"
        # The front end has the settings on its command line, a worker its socket.
        with sleeper(state.properties, SLEEP_AND_HAND_ON) as front_end, sleeper(state.temporary / ".ts.sock") as worker:
            with pytest.raises(EnvironmentFailure, match="a server runs on port 18080 already; stop it with"):
                require_stopped(state)
            assert specserve.main(["stop", "--port", "18080"]) == 0
            assert None not in {front_end.poll(), worker.poll()}
        assert other.poll() is None
    assert capsys.readouterr().out == "stopped port 18080.\n"
    # Not even what a process has started while it was stopped.
    assert not running(state)


def test_a_server_of_another_user_is_named(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "terminate", refuse)
    with sleeper(state.properties) as started, pytest.raises(EnvironmentFailure, match=f"{started.pid} .*another user"):
        torchserve_process.stop(state)


def test_why_a_model_cannot_be_loaded_is_read_from_the_workers_log() -> None:
    crash = ["Torch worker started.", "llama-vocab.cpp:2544: GGML_ASSERT(id != -1) failed", "[Inferior 1 detached]"]
    died = "the worker died while it loaded the model: "
    for lines, reason in (
        (["Torch worker started.", "model_name: qwen, batchSize: 12"], None),
        (["specserve cannot load: m.gguf: is no GGUF."], "m.gguf: is no GGUF."),
        (["specserve cannot load: a sentence.", "Backend worker process died.", "ValueError: other"], "a sentence."),
        (["Backend worker process died.", "ImportError: no module"], f"{died}ImportError: no module"),
        (crash * 3, None),
        (crash * 4, f"{died}llama-vocab.cpp:2544: GGML_ASSERT(id != -1) failed"),
        (
            ["Torch worker started."] * 4,
            f"{died}it was killed, probably because memory ran out: give it more, or choose a smaller model",
        ),
    ):
        assert load_failure(lines) == reason


def test_what_the_worker_warns_of_is_told() -> None:
    lines = [
        "specserve: all is well",
        "WARNING specserve: `threads: 9`",
        "ERROR specserve: no draft.",
        "WARNING: torch",
    ]
    assert warnings(lines) == ["`threads: 9`", "no draft."]


def test_waiting_ends_with_the_workers_error_torchserves_end_or_the_timeout(state: State) -> None:
    with sleeper("anything") as started:
        with pytest.raises(EnvironmentFailure, match="was not ready after 0 seconds"):
            wait_until_ready(state, started, 0)
        state.model_log.write_text(f"{WORKER}specserve cannot load: the draft is broken.\n", encoding="utf-8")
        with pytest.raises(ModelLoadError, match=r"^the draft is broken\. \(The worker's log: .*model_log\.log\)$"):
            wait_until_ready(state, started, 60)
    state.model_log.unlink()
    state.console.write_text("Invalid configuration: no such port\n\n", encoding="utf-8")
    with pytest.raises(EnvironmentFailure, match="TorchServe ended while starting: Invalid configuration"):
        wait_until_ready(state, started, 60)


def test_client_example_can_be_pasted_into_a_shell(state: State) -> None:
    example = client_example(state, with_tokens=True)
    subprocess.run(["bash", "-n", "-c", example.partition("\n\n")[0]], check=True)
    state.key_file.write_text('{"inference": {"key": "abc"}}', encoding="utf-8")
    command = f"{example.splitlines()[0]}; echo $KEY"
    assert subprocess.check_output(["bash", "-c", command], text=True) == "abc\n"
    assert "Bearer $KEY" in example
    assert "Bearer" not in client_example(state, with_tokens=False)
