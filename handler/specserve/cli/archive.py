"""`scripts/archive`: write a .mar with the handler, the package and the model YAML, but without the weights."""

import json
import os
import re
from argparse import Namespace
from datetime import datetime
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import yaml

from specserve.cli import paths
from specserve.config import HandlerConfig, load_yaml, parse_handler
from specserve.engine import kernel_library
from specserve.errors import ConfigError
from specserve.weights import files, models

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
# TorchServe's worker imports torch for one isinstance check; the archive comes first on its sys.path.
TORCH_STUB = '''"""Replaces PyTorch in TorchServe's worker."""


class Tensor:
    """A class without instances."""
'''


def prepared_document(config_file: Path, *, by_name: bool = True) -> dict[str, Any]:
    """Prepare the models, as `prepare`; returns the model YAML of an archive.

    Files of the models directory are in it `by_name`, and found so on another machine, too (weights/find.py).
    """
    document, config = load_yaml(config_file)
    handler = dict(document["handler"])
    for role, path in models.prepare(config_file).items():
        shown = path.name if by_name and path.parent == files.models_directory() else str(path)
        # An adapter is on this machine only.
        source = {"source": handler[role]} if "hub" in handler[role] and "adapter" not in handler[role] else {}
        handler[role] = {"path": shown, "sha256": files.sha256(path), **source}

    def absolute(path: Path) -> str:
        # A worker's current directory is one of TorchServe's.
        return str((config_file.absolute().parent / path.expanduser()).resolve())

    if config.trace:
        handler["trace"] = absolute(config.trace)
    if config.models_directory:
        handler["models_directory"] = absolute(config.models_directory)
    if corpus := config.speculation.corpus:
        handler["speculation"] = {**handler["speculation"], "corpus": [absolute(path) for path in corpus]}
    return {**document, "handler": handler}


def prepared_handler(config_file: Path) -> HandlerConfig:
    """Prepare the models, as `prepare`; returns the configuration of a worker, with their absolute paths."""
    return parse_handler(prepared_document(config_file, by_name=False)["handler"], str(config_file))


def pack(document: dict[str, Any], target: Path, name: str, version: str = paths.VERSION) -> Path:
    """Write an archive, with a document from `prepared_document`; returns its path."""
    for option, value in (("name", name), ("version", version)):
        if not _NAME.fullmatch(value):
            raise ConfigError(
                f"--{option} {value!r}: may hold letters, digits, dots, dashes and underscores only, "
                "and begins with a letter or a digit."
            )
    package = paths.SOURCE_ROOT / "specserve"
    entry, library = paths.SOURCE_ROOT / "speculative_handler.py", kernel_library.library_path()
    content: dict[str, str | Path] = {
        "model.yaml": yaml.safe_dump(document, sort_keys=False),
        "torch.py": TORCH_STUB,
        entry.name: entry,
    }
    for path in package.rglob("*"):
        if path.is_file() and not {"__pycache__", "cli"} & {*path.relative_to(package).parts}:
            content[str(path.relative_to(paths.SOURCE_ROOT))] = path
    if library.exists():
        content[f"specserve/engine/{library.name}"] = library
    model = {"modelName": name, "modelVersion": version, "handler": entry.name, "configFile": "model.yaml"}
    return write_mar(target, model, content)


def write_mar(target: Path, model: dict[str, str], content: dict[str, str | Path]) -> Path:
    """Write a model archive, which is replaced atomically: a zip file with a manifest, as TorchServe 0.12 reads it.

    `model` is what the manifest says of it; `content` has files to copy, or their texts, by their names in the archive.
    """
    created = datetime.now().astimezone().strftime("%d/%m/%Y %H:%M:%S")
    manifest = {"createdOn": created, "runtime": "python", "archiverVersion": "0.12.0", "model": model}
    target.parent.mkdir(exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with ZipFile(partial, "w", ZIP_DEFLATED) as mar:
            mar.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest, indent=2))
            for member, source in content.items():
                mar.writestr(member, source.read_bytes() if isinstance(source, Path) else source)
        return partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def run(options: Namespace) -> int:
    document = prepared_document(options.config)
    target = options.out or paths.MODEL_STORE / f"{options.name}.mar"
    print(pack(document, target, options.name, options.version), flush=True)
    return 0
