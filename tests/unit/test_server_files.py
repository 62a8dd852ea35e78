"""The files, ports and processes of a server, without starting TorchServe."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import yaml

from specserve.cli import paths, server, torchserve_process
from specserve.cli.server import client_example, load_failure, summary, wait_until_ready
from specserve.cli.torchserve_process import Ports, State, escaped, java_home, properties, require_free, running
from specserve.errors import ConfigError, EnvironmentFailure, ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Iterator

KSERVE = "config.properties", "kserve/config.properties"
WORKER = "2026-11-21T05:41:48,756 [INFO ] W-9000-qwen_1.0-stdout MODEL_LOG - "


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    """The state of a server that is not running."""
    monkeypatch.setattr(paths, "STATE", tmp_path)
    own = State.of(18080)
    own.logs.mkdir(parents=True)
    return own


@pytest.fixture
def listener() -> Iterator[int]:
    """A port that something listens on, with room below it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def in_java(text: str) -> dict[str, str]:
    """Read properties as Java does."""
    pairs = (line.split("=", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {key: value.encode("ascii").decode("unicode_escape") for key, value in pairs}


def test_server_has_five_ports_and_a_directory(state: State) -> None:
    assert state.ports == (18080, 18081, 18082, 18083, 18084)
    assert state.directory == paths.STATE / "18080"


@pytest.mark.parametrize("port", [0, 80, 65532, 70000])
def test_port_outside_1024_to_65531_is_an_error(port: int) -> None:
    with pytest.raises(ConfigError, match=f"--port {port}: must lie between 1024 and 65531"):
        Ports.starting_at(port)


def test_error_names_the_port_in_use_and_its_process(listener: int) -> None:
    with pytest.raises(EnvironmentFailure) as failure:
        require_free(Ports.starting_at(listener - 2))
    assert f"port {listener} is taken by" in str(failure.value)
    assert f"(process {os.getpid()})" in str(failure.value)
    assert "choose another with --port" in str(failure.value)


def test_properties_add_the_servers_ports_to_the_projects_settings(state: State) -> None:
    settings = in_java(properties(state, with_tokens=True))
    assert settings["inference_address"] == "http://127.0.0.1:18080"
    assert settings["management_address"] == "http://127.0.0.1:18081"
    assert settings["metrics_address"] == "http://127.0.0.1:18082"
    assert (settings["grpc_inference_port"], settings["grpc_management_port"]) == ("18083", "18084")
    assert settings["grpc_inference_address"] == settings["grpc_management_address"] == "127.0.0.1"
    assert settings["model_store"] == str(state.model_store)
    assert settings["load_models"] == "qwen.mar"
    assert settings["enable_model_api"] == "true"
    assert settings["install_py_dep_per_model"] == "false"
    assert settings["disable_token_authorization"] == "false"


def test_no_auth_disables_tokens_and_model_registration(state: State) -> None:
    settings = in_java(properties(state, with_tokens=False))
    assert settings["disable_token_authorization"] == "true"
    assert settings["enable_model_api"] == "false"
    assert settings["allowed_urls"] == "nothing"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("/srv/models", "/srv/models"),
        ("/a b/#1=x:y!", "/a b/#1=x:y!"),
        ("C:\\new", "C:\\\\new"),
        (" leading", "\\ leading"),
        ("/für/世", "/f\\u00fcr/\\u4e16"),
        ("/🙂", "/\\ud83d\\ude42"),
        ("two\nlines", "two\\u000alines"),
    ],
)
def test_values_are_escaped_for_java_properties(value: str, written: str) -> None:
    assert escaped(value) == written


def test_long_path_moves_the_socket_out_of_the_project(state: State, tmp_path: Path) -> None:
    assert State(state.ports, Path("/srv/8080")).temporary == Path("/srv/8080/tmp")
    moved = State(state.ports, tmp_path / ("long" * 30)).temporary
    assert not moved.is_relative_to(tmp_path)
    assert moved != State(state.ports, tmp_path / ("gone" * 30)).temporary


def test_keys_are_read_from_torchserves_file(state: State) -> None:
    assert state.key("inference") is None
    state.key_file.write_text('{"inference": {"key": "abc"}, "management": {"key": "def"}}', encoding="utf-8")
    assert (state.key("inference"), state.key("management")) == ("abc", "def")


def test_files_of_an_earlier_server_are_replaced(state: State) -> None:
    state.model_log.write_text("specserve cannot load: of the last time\n", encoding="utf-8")
    state.key_file.write_text("{}", encoding="utf-8")
    state.model_store.mkdir()
    (state.model_store / "qwen.mar").write_bytes(b"of the last time")
    server.write_state(state, {"minWorkers": 1, "handler": {"model_id": "new"}}, with_tokens=True)
    assert not state.model_log.exists()
    assert not state.key_file.exists()
    with zipfile.ZipFile(state.model_store / "qwen.mar") as archived:
        assert yaml.safe_load(archived.read("model.yaml"))["handler"] == {"model_id": "new"}
    assert state.properties.exists()


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


@contextlib.contextmanager
def sleeper(argument: str, program: str = SLEEP) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own that sleeps until it is killed."""
    command = [sys.executable, "-c", program, argument]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as started:
        assert started.stdout
        started.stdout.readline()
        yield started
        started.kill()


def test_stop_ends_the_processes_that_use_the_servers_files(state: State, capsys: pytest.CaptureFixture[str]) -> None:
    with sleeper(str(state.properties)) as started:
        state.pid_file.write_text(f"{started.pid}\n", encoding="ascii")
        assert torchserve_process.main(["--port", "18080"]) == 0
        assert started.poll() is not None
    assert capsys.readouterr().out == "stopped port 18080.\n"
    assert not running(state)


def test_stop_ends_what_a_process_starts_while_it_is_stopped(state: State) -> None:
    with sleeper(str(state.properties), SLEEP_AND_HAND_ON) as started:
        state.pid_file.write_text(f"{started.pid}\n", encoding="ascii")
        assert torchserve_process.stop(state)
        commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not any(str(state.properties) in command for command in commands)


def test_a_server_of_another_user_is_named_and_can_be_stopped_later(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    with sleeper(str(state.properties)) as started:
        state.pid_file.write_text(f"{started.pid}\n", encoding="ascii")
        with monkeypatch.context() as patch:
            patch.setattr(psutil.Process, "terminate", refuse)
            with pytest.raises(EnvironmentFailure, match="belongs to another user"):
                torchserve_process.stop(state)
        assert torchserve_process.stop(state)
        assert started.poll() is not None


def test_stop_does_not_end_an_unrelated_process_with_the_recorded_id(
    state: State, capsys: pytest.CaptureFixture[str]
) -> None:
    with sleeper("/somebody/elses/config.properties") as started:
        state.pid_file.write_text(f"{started.pid}\n", encoding="ascii")
        assert torchserve_process.main(["--port", "18080"]) == 0
        assert started.poll() is None
    assert capsys.readouterr().out == "no server of this directory runs on port 18080.\n"


def test_second_server_on_the_same_port_is_an_error(state: State) -> None:
    with sleeper(str(state.properties)) as started:
        state.pid_file.write_text(f"{started.pid}\n", encoding="ascii")
        with pytest.raises(EnvironmentFailure, match="a server runs on port 18080 already; stop it with"):
            server.require_stopped(state)


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("Torch worker started.\nmodel_name: qwen, batchSize: 12", None),
        ("specserve cannot load: /m.gguf: is no GGUF; fetch it again.", "/m.gguf: is no GGUF; fetch it again."),
        (
            "specserve cannot load: the sentence.\nBackend worker process died.\nValueError: other",
            "the sentence.",
        ),
        (
            "Backend worker process died.\nTraceback (most recent call last):\n  ...\nImportError: no llama_cpp",
            "the worker failed: ImportError: no llama_cpp",
        ),
        ("Backend worker process died.\nTraceback (most recent call last):", None),
    ],
)
def test_load_failure_is_read_from_the_workers_log(log: str, reason: str | None) -> None:
    assert load_failure("\n".join(WORKER + line for line in log.splitlines())) == reason


WORKER_LOG = """s_name_part0=/tmp/.ts.sock, s_name_part1=9000, pid=20212
Listening on port: /tmp/.ts.sock.9000
Successfully loaded /srv/metrics.yaml.
[PID]20212
Torch worker started.
Python runtime: 3.11.7
llama-vocab.cpp:2544: GGML_ASSERT(id != -1) failed
[Inferior 1 (process 20212) detached]"""


@pytest.mark.parametrize(("starts", "fails"), [(1, False), (3, False), (4, True)])
def test_load_fails_at_the_fourth_start_of_the_worker(starts: int, *, fails: bool) -> None:
    reason = load_failure("\n".join(WORKER + line for line in (WORKER_LOG.splitlines() * starts)))
    assert bool(reason) is fails
    assert not reason or reason.endswith("its last words: llama-vocab.cpp:2544: GGML_ASSERT(id != -1) failed")


def test_wait_until_ready_raises_the_workers_error(state: State) -> None:
    state.model_log.write_text(f"{WORKER}specserve cannot load: the draft is broken.\n", encoding="utf-8")
    with (
        sleeper("anything") as started,
        pytest.raises(ModelLoadError, match=r"^the draft is broken\. \(The worker's log: .*model_log\.log\)$"),
    ):
        wait_until_ready(state, started, 60)


def test_wait_until_ready_raises_when_torchserve_ends(state: State) -> None:
    state.console.write_text("Invalid configuration: no such port\n", encoding="utf-8")
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
        with pytest.raises(EnvironmentFailure, match="TorchServe ended while starting: Invalid configuration"):
            wait_until_ready(state, ended, 60)


def test_wait_until_ready_raises_after_the_timeout(state: State) -> None:
    with sleeper("anything") as started, pytest.raises(EnvironmentFailure, match="was not ready after 0 seconds"):
        wait_until_ready(state, started, 0)


def test_summary_shows_the_first_completion_its_speed_and_drafts() -> None:
    completion = {
        "choices": [{"text": "    return n\n"}],
        "usage": {"completion_tokens": 30},
        "speculation": {"drafted_tokens": 24, "accepted_tokens": 20, "mean_acceptance_length": 3.3},
    }
    assert summary(completion, 2.0) == (
        "def fibonacci(n):\n    return n\n\n"
        "30 tokens in 2.0 s: 15.0 tokens/s, 24 drafted, 20 of them accepted, 3.30 tokens a round"
    )


def test_client_example_is_valid_python_and_shell(state: State) -> None:
    lines = client_example(state, with_tokens=True).splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("import json"))
    compile("\n".join(lines[begin : lines.index("", begin)]), "printed", "exec")
    subprocess.run(["bash", "-n", "-c", "\n".join(lines[: begin - 1])], check=True)
    assert "Bearer $KEY" in lines[1]
    assert "Bearer" not in client_example(state, with_tokens=False)


def test_java_home_accepts_java_17_and_rejects_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    own = tmp_path / "bin" / "java"
    own.touch(mode=0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    own.write_text("#!/bin/sh\necho 'openjdk version \"17.0.2\"' >&2\n", encoding="utf-8")
    assert java_home() == str(tmp_path)
    own.write_text("#!/bin/sh\necho 'java version \"1.8.0_292\"' >&2\n", encoding="utf-8")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert java_home() not in {None, str(tmp_path)}


def test_kserves_settings_differ_from_the_projects_only_in_addresses_and_access() -> None:
    ours, theirs = (in_java((paths.CONFIG / file).read_text()) for file in KSERVE)
    changed = {key: theirs.get(key) for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    assert changed == {
        "inference_address": "http://0.0.0.0:8080",
        "metrics_address": "http://0.0.0.0:8082",
        "disable_token_authorization": "true",
        "enable_model_api": "false",
        "allowed_urls": "nothing",
    }
