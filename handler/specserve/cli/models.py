"""`scripts/prepare`: download the models of a configuration and requantise those that ask for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from specserve.cli import cli, files, paths
from specserve.cli.download import fetch
from specserve.cli.files import ModelFile
from specserve.config import ModelConfig, load_yaml
from specserve.errors import ModelLoadError

TARGET_CHANGED = (
    "The target is requantised to pure Q4_0: it decodes faster, and it is a slightly coarser model than the "
    "published file; remove `requantise:` below `target:` to serve the published one."
)
# Runs in a process of its own: that can be interrupted at once, and llama.cpp's messages can be captured.
_REQUANTISE = """
import sys
from pathlib import Path
from specserve.engine.llama_model import write_pure_q4_0
sys.exit(not write_pure_q4_0(Path(sys.argv[1]), Path(sys.argv[2])))
"""


@dataclass(frozen=True)
class Prepared:
    """The files that a worker loads: a target, and a draft if there is one."""

    target: Path
    draft: Path | None


def prepare(config_file: Path) -> Prepared:
    """Download and requantise the models of a configuration; files that exist already are reused.

    Raises:
        ConfigError: the configuration is wrong.
        EnvironmentFailure: a file is not available.
        ModelLoadError: a file cannot be requantised.
    """
    _, handler = load_yaml(config_file)

    def prepared(model: ModelConfig) -> Path:
        source = fetch(model, config_file, handler.models_directory)
        return source.path if model.requantise is None else requantise(source)

    target = prepared(handler.target)
    draft = None if handler.draft is None else prepared(handler.draft)
    if handler.target.requantise:
        cli.say(TARGET_CHANGED)
    return Prepared(target, draft)


def requantise(source: ModelFile) -> Path:
    """Return the pure Q4_0 version of a file; it is written into the models directory once.

    Raises:
        EnvironmentFailure: the disk is too small.
        ModelLoadError: llama.cpp cannot requantise the file.
    """
    models = paths.models_directory()
    # Files of the same name from two directories of the operator get different names.
    suffix = "" if source.path.parent == models else f".{source.sha256[:8]}"
    target = models / f"{source.path.stem}{suffix}.pure-q4_0.gguf"
    record = target.with_name(f".{target.name}.json")

    def is_written() -> bool:
        return target.is_file() and files.read_json(record).get("source_sha256") == source.sha256

    # Before the lock: the models directory may be another user's.
    if is_written():
        return target
    with files.locked(models / f".{target.name}.lock", f"{target.name} is being written"):
        if is_written():
            return target
        files.require_space(models, source.path.stat().st_size, target.name)
        _run_requantise(source.path, target)
        files.write_json(record, {"source_sha256": source.sha256})
    return target


def _run_requantise(source: Path, target: Path) -> None:
    partial = target.with_name(target.name + ".partial")
    command = [sys.executable, "-c", _REQUANTISE, str(source), str(partial)]
    try:
        with Console(stderr=True).status(f"requantising {source.name} to Q4_0"):
            outcome = subprocess.run(command, capture_output=True, check=False)
        if outcome.returncode:
            messages = [line for line in outcome.stderr.decode(errors="replace").splitlines() if "failed" in line]
            reason = messages[-1].strip() if messages else "llama.cpp refused"
            raise ModelLoadError(
                f"{source}: cannot be requantised to Q4_0 ({reason}); "
                "check that it is a complete GGUF file, or remove `requantise:`."
            )
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def main(arguments: Sequence[str]) -> int:
    """Prepare the models of a configuration and print their paths."""
    parser = cli.Parser("prepare")
    parser.add_argument("config", type=Path, metavar="FILE", help="a model YAML, for example config/tiny.yaml")
    prepared = prepare(parser.parse_args(arguments).config)
    cli.say(f"target: {prepared.target}")
    if prepared.draft:
        cli.say(f"draft:  {prepared.draft}")
    return 0
