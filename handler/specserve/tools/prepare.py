"""`scripts/prepare`: fetch the models of a configuration, requantise those that ask for it, choose a draft's form."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from specserve.config import HandlerConfig, ModelConfig, load_yaml, usable_cores
from specserve.engine import kernels
from specserve.errors import ModelLoadError
from specserve.tools import cli, files, paths
from specserve.tools.choose import best_draft
from specserve.tools.fetch import fetch
from specserve.tools.files import ModelFile

TARGET_CHANGED = (
    "The target is requantised to pure Q4_0: it decodes faster, and it is a slightly coarser model than the "
    "published file; remove `requantise:` below `target:` to serve the published one."
)


@dataclass(frozen=True)
class Prepared:
    """The files that a worker loads, and the target as it was fetched."""

    target: Path
    draft: Path | None
    published: Path


def prepare(config_file: Path) -> Prepared:
    """Fetch and requantise what a configuration names; what is already there is used as it is.

    Raises:
        ConfigError: the configuration is wrong.
        EnvironmentFailure: a file cannot be had.
        ModelLoadError: a file is not a GGUF that can be requantised, or the draft to be chosen does not fit.
    """
    _, handler = load_yaml(config_file)
    source = fetch(handler.target, config_file, handler.models_directory)
    target = _as_wanted(handler.target, source)
    if handler.target.requantise:
        cli.say(TARGET_CHANGED)
    return Prepared(target, _draft(handler, config_file, target), source.path)


def _draft(handler: HandlerConfig, config_file: Path, target: Path) -> Path | None:
    model = handler.draft
    if model is None:
        return None
    published = fetch(model, config_file, handler.models_directory)
    if model.requantise != "best":
        return _as_wanted(model, published)
    kernels.use(handler.kernels, threads=handler.threads or usable_cores())
    return best_draft(
        target,
        published.path,
        requantise(published),
        threads=handler.threads or usable_cores(),
        max_gamma=handler.speculation.max_gamma,
    )


def _as_wanted(model: ModelConfig, source: ModelFile) -> Path:
    return source.path if model.requantise is None else requantise(source)


def requantise(source: ModelFile) -> Path:
    """Return the pure Q4_0 version of a file, written into the models directory the first time.

    Raises:
        EnvironmentFailure: the disk is too small.
        ModelLoadError: llama.cpp cannot requantise the file.
    """
    models = paths.models_directory()
    # Two files of one name in two directories of the user's stay apart.
    mark = "" if source.path.parent == models else f".{source.sha256[:8]}"
    target = models / f"{source.path.stem}{mark}.pure-q4_0.gguf"
    note = target.with_name(f".{target.name}.json")
    with files.locked(models / f".{target.name}.lock", f"{target.name} is being written"):
        if target.is_file() and files.read_json(note).get("source_sha256") == source.sha256:
            return target
        files.require_space(models, source.path.stat().st_size, target.name)
        _run(source.path, target)
        files.write_json(note, {"source_sha256": source.sha256})
    return target


def _run(source: Path, target: Path) -> None:
    partial = target.with_name(target.name + ".partial")
    work = [sys.executable, "-m", "specserve.tools.quantise", str(source), str(partial)]
    try:
        with Console(stderr=True).status(f"requantising {source.name} to Q4_0"):
            outcome = subprocess.run(work, capture_output=True, check=False)
        if outcome.returncode:
            said = [line for line in outcome.stderr.decode(errors="replace").splitlines() if "failed" in line]
            reason = said[-1].strip() if said else "llama.cpp refused"
            raise ModelLoadError(
                f"{source}: cannot be requantised to Q4_0 ({reason}); "
                "check that it is a complete GGUF file, or remove `requantise:`."
            )
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def main(arguments: Sequence[str]) -> int:
    """Prepare the models of one configuration and say where they are."""
    parser = cli.Parser(prog="prepare", description=__doc__)
    parser.add_argument("config", type=Path, metavar="FILE", help="a model YAML, for example config/tiny.yaml")
    prepared = prepare(parser.parse_args(arguments).config)
    cli.say(f"target: {prepared.target}")
    if prepared.draft:
        cli.say(f"draft:  {prepared.draft}")
    return 0


if __name__ == "__main__":
    cli.run(main)
