"""Preparing models, and the contents of the archive that TorchServe loads."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import pytest
import yaml

from specserve.cli import archive as archiving
from specserve.cli import cli, files, models, paths
from specserve.cli.archive import archive
from specserve.cli.tiny_models import write_tiny
from specserve.engine import kernel_library
from specserve.errors import ConfigError, EnvironmentFailure, ModelLoadError

NUMBERS = ["minWorkers", "maxWorkers", "startupTimeout"]


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models directory, empty."""
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "cache"))
    return paths.models_directory()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A small GGUF of the operator's own."""
    path = tmp_path / "mine.gguf"
    write_tiny(path, "qwen2", "target")
    return path


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model store, and a stub for the handler's entry point."""
    monkeypatch.setattr(paths, "MODEL_STORE", tmp_path / "model_store")
    entry_point = tmp_path / "speculative_handler.py"
    entry_point.write_text('"""Nothing yet."""\n', encoding="utf-8")
    monkeypatch.setattr(archiving, "ENTRY_POINT", entry_point)
    return tmp_path / "model_store"


def config(directory: Path, target: dict[str, Any], **torchserve: Any) -> Path:
    path = directory / "model.yaml"
    document = {
        "batchSize": 12,
        "continuousBatching": True,
        **torchserve,
        "handler": {"model_id": "m", "target": target, "models_directory": "elsewhere", "sequences": 8},
    }
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def test_model_without_requantise_is_used_unchanged(weights: Path, directory: Path) -> None:
    prepared = models.prepare(config(weights.parent, {"path": str(weights)}))
    assert prepared == models.Prepared(weights, None)
    assert not list(directory.glob("*.gguf"))


def test_requantise_writes_every_matrix_as_q4_0(weights: Path, directory: Path) -> None:
    written = models.requantise(files.hashed(weights))
    assert written.parent == directory
    tensors = gguf.GGUFReader(written).tensors
    kinds = {tensor.tensor_type.name for tensor in tensors if len([n for n in tensor.shape if n > 1]) > 1}
    assert kinds == {"Q4_0"}
    assert not list(directory.glob("*.partial"))


def test_source_is_requantised_once_and_again_after_a_change(weights: Path, directory: Path) -> None:
    fetched = directory / "fetched.gguf"
    weights.rename(fetched)
    written = models.requantise(files.hashed(fetched))
    assert written == directory / "fetched.pure-q4_0.gguf"
    before = written.stat().st_ino
    assert models.requantise(files.hashed(fetched)) == written
    assert written.stat().st_ino == before
    write_tiny(fetched, "qwen2", "draft")
    assert models.requantise(files.hashed(fetched)) == written
    assert written.stat().st_ino != before


def test_checksum_that_cannot_be_cached_is_a_one_line_error(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files, "write_json", refuse)
    with pytest.raises(EnvironmentFailure, match=r"\.json: cannot be written \(Permission denied\)"):
        files.hashed(weights)


def test_equal_names_in_two_directories_are_requantised_to_two_files(weights: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "mine.gguf"
    other.parent.mkdir()
    write_tiny(other, "qwen2", "draft")
    written = {models.requantise(files.hashed(path)) for path in (weights, other)}
    assert len(written) == 2


def test_requantising_the_target_prints_that_it_is_coarser(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models.prepare(config(weights.parent, {"path": str(weights), "requantise": "q4_0"}))
    assert "a slightly coarser model than the published file" in capsys.readouterr().out


def test_requantising_a_file_that_is_no_gguf_is_a_one_line_error(tmp_path: Path, directory: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF, or so it says")
    with pytest.raises(ModelLoadError, match=r"broken\.gguf: cannot be requantised to Q4_0 \(.+\); check that"):
        models.requantise(files.hashed(broken))
    assert not list(directory.glob("broken*"))


def test_archive_holds_the_handler_the_package_and_the_model_yaml(weights: Path, store: Path) -> None:
    written = archive(config(weights.parent, {"path": "mine.gguf"}, maxBatchDelay=1), "mine", "2.0")
    assert written == store / "mine.mar"
    with zipfile.ZipFile(written) as content:
        names = content.namelist()
        document = yaml.safe_load(content.read("model.yaml"))
        manifest = json.loads(content.read("MAR-INF/MANIFEST.json"))["model"]
    assert {"speculative_handler.py", "torch.py", "model.yaml", "specserve/config.py"} < set(names)
    assert "specserve/engine/llama.py" in names
    assert not [name for name in names if "/tools/" in name or "__pycache__" in name or "gguf" in name]
    assert document == {
        "batchSize": 12,
        "continuousBatching": True,
        "maxBatchDelay": 1,
        "handler": {
            "model_id": "m",
            "target": {"path": str(weights), "sha256": hashlib.sha256(weights.read_bytes()).hexdigest()},
            "sequences": 8,
        },
    }
    assert (manifest["modelName"], manifest["modelVersion"]) == ("mine", "2.0")
    assert (manifest["handler"], manifest["configFile"]) == ("speculative_handler.py", "model.yaml")


def test_relative_paths_are_resolved(weights: Path, directory: Path) -> None:
    target = {"path": str(weights), "requantise": "q4_0"}
    file = config(weights.parent, target)
    document = yaml.safe_load(file.read_text())
    document["handler"] |= {
        "trace": {"directory": "traces"},
        "speculation": {"corpus": ["docs.txt", "/srv/docs.txt", "~/docs.txt"]},
    }
    file.write_text(yaml.safe_dump(document))
    handler = archiving.prepared_handler(file)
    assert handler.trace
    assert handler.trace.directory == weights.parent / "traces"
    assert handler.speculation.corpus == [
        weights.parent / "docs.txt",
        Path("/srv/docs.txt"),
        Path("~/docs.txt").expanduser(),
    ]
    assert handler.target.path
    assert handler.target.path.parent == directory


def test_archive_is_replaced_and_no_temporary_file_remains(weights: Path, store: Path) -> None:
    file = config(weights.parent, {"path": str(weights)})
    assert archive(file) == archive(file)
    assert [path.name for path in store.iterdir()] == ["qwen.mar"]


@pytest.mark.parametrize(
    ("keys", "names", "reason"),
    [
        *(({key: "2"}, (), f"`{key}`: Input should be a valid integer") for key in NUMBERS),
        ({"startupTimeout": None}, (), "`startupTimeout`: Input should be a valid integer"),
        ({"startupTimeout": "10m"}, (), "`startupTimeout`: Input should be a valid integer"),
        # TorchServe would hang with a second worker.
        ({"minWorkers": 2}, (), "`minWorkers: 2` would hang"),
        ({"maxWorkers": 2}, (), "`maxWorkers: 2` would hang"),
        ({"continuousBatching": False}, (), "`continuousBatching: true` is missing"),
        # These cannot be part of a URL.
        ({}, ("a b", "1.0"), "--name 'a b': may hold letters, digits"),
        ({}, ("a", "1/0"), "--version '1/0': may hold letters, digits"),
    ],
)
def test_archive_that_torchserve_cannot_serve_is_a_one_line_error(
    weights: Path, keys: dict[str, Any], names: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        archive(config(weights.parent, {"path": str(weights)}, **keys), *names)


def test_operating_system_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def refused(_arguments: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/somewhere")

    with pytest.raises(SystemExit) as ended:
        cli.run(refused)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "specserve: /somewhere: Permission denied.\n"


def printed_by_worker(program: str, weights: Path, store: Path, worker: Path) -> list[str]:
    """The words that a program prints with the unpacked archive as its PYTHONPATH."""
    with zipfile.ZipFile(archive(config(weights.parent, {"path": str(weights)}))) as content:
        content.extractall(worker)
    command = [sys.executable, "-c", program]
    outcome = subprocess.run(
        command, env={"PYTHONPATH": str(worker)}, cwd=store, capture_output=True, text=True, check=True
    )
    return outcome.stdout.split()


def test_archived_package_imports_without_the_project(weights: Path, store: Path, tmp_path: Path) -> None:
    program = "import specserve.config, torch; print(specserve.config.__file__, isinstance(1, torch.Tensor))"
    worker = tmp_path / "worker"
    assert printed_by_worker(program, weights, store, worker) == [str(worker / "specserve" / "config.py"), "False"]


def test_archive_contains_the_kernels(weights: Path, store: Path, tmp_path: Path) -> None:
    program = (
        "from specserve.engine import kernel_library, kernel_trial, kernels\n"
        "kernel_trial._MAX_TRIALS = 40\n"
        "print(kernel_library.library_path()); print(kernels.use('auto').variant is not None)"
    )
    worker = tmp_path / "worker"
    library = worker / "specserve" / "engine" / kernel_library.FILE
    assert printed_by_worker(program, weights, store, worker) == [str(library), "True"]


MODEL_YAMLS = [path for path in sorted(paths.CONFIG.glob("*.yaml")) if "\nhandler:" in path.read_text(encoding="utf-8")]


def test_there_are_four_model_configurations() -> None:
    pairs = ["qwen2.5-0.5b-3b.yaml", "qwen2.5-coder-0.5b-1.5b.yaml", "smollm2-135m.yaml", "tiny.yaml"]
    assert [path.name for path in MODEL_YAMLS] == pairs


@pytest.mark.parametrize("path", MODEL_YAMLS, ids=lambda path: path.name)
def test_batch_size_of_each_configuration_exceeds_its_sequences(path: Path) -> None:
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert document["batchSize"] > document["handler"]["sequences"]
    assert document["continuousBatching"] is True
    assert document["maxBatchDelay"] == 1
