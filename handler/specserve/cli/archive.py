"""`scripts/archive`: write a .mar with the handler, the package and the model YAML, but without the weights."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from specserve.cli import cli, files, paths
from specserve.cli.models import Prepared, prepare
from specserve.config import HandlerConfig, TorchServeKeys, load_yaml, parse_handler
from specserve.engine import kernel_library
from specserve.errors import ConfigError, EnvironmentFailure

ENTRY_POINT = paths.SOURCE_ROOT / "speculative_handler.py"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
# TorchServe's worker imports torch for one isinstance check.
_TORCH_STUB = '''"""Replaces PyTorch in TorchServe's worker."""


class Tensor:
    """A class without instances."""
'''


def archive(config_file: Path, name: str = paths.NAME, version: str = paths.VERSION) -> Path:
    """Prepare the models and write `model_store/NAME.mar`; returns its path.

    Raises:
        ConfigError: the configuration, the name or the version is wrong.
        EnvironmentFailure: a model is not available, or the archive cannot be written.
        ModelLoadError: a model cannot be requantised.
    """
    for option, value in (("name", name), ("version", version)):
        if not _NAME.fullmatch(value):
            raise ConfigError(
                f"--{option} {value!r}: may hold letters, digits, dots, dashes and underscores only, "
                "and begins with a letter or a digit."
            )
    return pack(prepared_document(config_file), paths.MODEL_STORE, name, version)


def prepared_document(config_file: Path) -> dict[str, Any]:
    """Prepare the models; returns the content of the archive's model YAML.

    Raises:
        ConfigError: the configuration is wrong.
        EnvironmentFailure: a model is not available.
        ModelLoadError: a model cannot be requantised.
    """
    document, _ = load_yaml(config_file)
    if document.get("continuousBatching") is not True:
        raise ConfigError(f"{config_file}: `continuousBatching: true` is missing; the handler needs it.")
    keys = TorchServeKeys.model_validate(document)
    for key, workers in (("minWorkers", keys.minWorkers), ("maxWorkers", keys.maxWorkers)):
        # TorchServe's idle workers hold the queue's lock while they wait, which stops the busy ones.
        if workers > 1:
            raise ConfigError(
                f"{config_file}: `{key}: {workers}` would hang: TorchServe's continuous batching serves a model "
                "with one worker only; archive it again under a second name for a second one."
            )
    return resolve(document, prepare(config_file), config_file)


def prepared_handler(config_file: Path) -> HandlerConfig:
    """Prepare the models; returns the configuration of a worker. Raises what `prepare` and `handler_of` raise."""
    return handler_of(config_file, prepare(config_file))


def handler_of(config_file: Path, prepared: Prepared) -> HandlerConfig:
    """Return the configuration of a worker with prepared models.

    Raises:
        ConfigError: the configuration is wrong.
        EnvironmentFailure: a model cannot be read.
    """
    document, _ = load_yaml(config_file)
    return parse_handler(resolve(document, prepared, config_file)["handler"], str(config_file))


def pack(document: dict[str, Any], store: Path, name: str = paths.NAME, version: str = paths.VERSION) -> Path:
    """Write `NAME.mar` into a model store; returns its path.

    Args:
        document: content of the model YAML, from `prepared_document`.
        store: the model store's directory.
        name: the model's name, as in every URL.
        version: the model's version.

    Raises:
        EnvironmentFailure: it cannot be written.
    """
    store.mkdir(exist_ok=True)
    # In the model store, so that the finished archive can be moved into place atomically.
    with tempfile.TemporaryDirectory(dir=store, prefix=".building-") as directory:
        building = Path(directory)
        stage(building, document)
        built = _run_archiver(building, name, version)
        return built.replace(store / built.name)


def resolve(document: dict[str, Any], prepared: Prepared, config_file: Path) -> dict[str, Any]:
    """Return the model YAML with absolute paths of the files to load instead of their sources."""
    handler = {key: value for key, value in document["handler"].items() if key != "models_directory"}
    for role, path in (("target", prepared.target), ("draft", prepared.draft)):
        if path:
            handler[role] = {"path": str(path), "sha256": files.hashed(path).sha256}
    # A worker's current directory is one of TorchServe's.
    beside = config_file.absolute().parent
    for section, keys in (("trace", ("directory",)), ("speculation", ("corpus",))):
        if handler.get(section):
            handler[section] = handler[section] | _absolute(handler[section], beside, *keys)
    return {**document, "handler": handler}


def _absolute(section: dict[str, Any], beside: Path, *keys: str) -> dict[str, Any]:
    """Return those of these keys that a section has, with their path or paths below `beside` unless absolute."""

    def absolute(path: str) -> str:
        return str((beside / Path(path).expanduser()).resolve())

    found = {key: section[key] for key in keys if section.get(key)}
    return {key: [*map(absolute, path)] if isinstance(path, list) else absolute(path) for key, path in found.items()}


def stage(building: Path, document: dict[str, Any]) -> None:
    """Write the archiver's input below `building`: `model.yaml`, and the extra files in `extra/`."""
    (building / "model.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    shutil.copytree(
        paths.SOURCE_ROOT / "specserve",
        building / "extra" / "specserve",
        ignore=shutil.ignore_patterns("__pycache__", "tools"),
    )
    if kernel_library.library_path().exists():
        shutil.copy(kernel_library.library_path(), building / "extra" / "specserve" / "engine")
    # The model directory is first on the worker's sys.path, so this also shadows an installed torch.
    (building / "extra" / "torch.py").write_text(_TORCH_STUB, encoding="utf-8")


def _run_archiver(building: Path, name: str, version: str) -> Path:
    # The archiver deletes TMPDIR/NAME, so it gets a TMPDIR of its own. It splits paths at commas and expands
    # brackets, so it gets relative paths.
    temporary = building / "tmp"
    temporary.mkdir()
    shutil.copy(ENTRY_POINT, building)
    options = ["--handler", ENTRY_POINT.name, "--config-file", "model.yaml", "--extra-files", "extra"]
    archiver = [sys.executable, "-m", "model_archiver.model_packaging", "--export-path", "."]
    outcome = subprocess.run(
        [*archiver, "--model-name", name, "--version", version, *options],
        cwd=building,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    built = building / f"{name}.mar"
    if outcome.returncode or not built.is_file():
        reason = (outcome.stderr.strip() or "no reason given").splitlines()[-1]
        raise EnvironmentFailure(f"torch-model-archiver could not write {name}.mar ({reason}).")
    return built


def main(arguments: Sequence[str]) -> int:
    """Write an archive and print its path."""
    parser = cli.Parser("archive")
    parser.add_config()
    parser.add_argument("--name", default=paths.NAME, help=f"the model's name in every URL (default: {paths.NAME})")
    parser.add_argument("--version", default=paths.VERSION, help=f"its version (default: {paths.VERSION})")
    options = parser.parse_args(arguments)
    cli.say(str(archive(options.config, options.name, options.version)))
    return 0
