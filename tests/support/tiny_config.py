"""Writes the configuration of a tiny pair, in whatever environment a test runs."""

import os
import subprocess
from pathlib import Path
from typing import Any

import yaml

PROJECT = Path(__file__).parents[2]
# Other people's clients are tested in environments without the packages that write models.
PYTHON = PROJECT / ".venv" / "bin" / "python"
# All configurations have these models, so that they are written and requantised once.
MODELS = PROJECT / ".specserve" / "tiny"
TORCHSERVE = {"minWorkers": 1, "maxWorkers": 1, "batchSize": 12, "maxBatchDelay": 1, "continuousBatching": True}
TORCHSERVE |= {"responseTimeout": 30, "startupTimeout": 300, "maxRetryTimeoutInSec": 86400, "jobQueueSize": 100}


def tiny_config(directory: Path, architecture: str = "qwen2", **changes: Any) -> Path:
    """Write a model YAML that names a pair of models, with some values changed; dicts are merged."""
    models: dict[str, Any] = {}
    for role in ("target", "draft"):
        path = MODELS / f"tiny-{architecture}-{role}.gguf"
        writer = Path(__file__).with_name("tiny_models.py")
        if not path.exists() or path.stat().st_mtime < writer.stat().st_mtime:
            subprocess.run([PYTHON, writer, path, architecture, role], check=True)
        # Batch-invariant, which single precision is not.
        models[role] = {"path": str(path), "requantise": "q4_0"}
    # A second thread costs more than it brings: matrices this small are waiting for each other.
    handler = {"model_id": "tiny", **models, "threads": 1, "sequences": 8, "context_length": 512}
    # With `auto` the controller would not draft: the draft is as slow as its target.
    handler["speculation"] = {"mode": "fixed", "gamma": 3}

    def merged(document: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        return document | {
            key: merged(document.get(key) or {}, value) if isinstance(value, dict) else value
            for key, value in changes.items()
        }

    config = directory / "tiny.yaml"
    partial = config.with_name(f"{config.name}.{os.getpid()}")
    partial.write_text(yaml.safe_dump(merged({**TORCHSERVE, "handler": handler}, changes)), encoding="utf-8")
    return partial.replace(config)
