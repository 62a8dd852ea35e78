"""Where things are: the project, its archives, the models, the state of a server."""

from __future__ import annotations

from pathlib import Path

from specserve.config import cache_directory

PROJECT = Path(__file__).resolve().parents[3]
SOURCE_ROOT = PROJECT / "handler"
MODEL_STORE = PROJECT / "model_store"
CONFIG = PROJECT / "config"
DEFAULT_CONFIG = CONFIG / "qwen2.5-coder-0.5b-1.5b.yaml"
# Writes the generated models of config/tiny.yaml.
TINY_MODELS = PROJECT / "tests" / "support" / "tiny_models.py"
STATE = PROJECT / ".specserve"
# Of the model, in every URL, unless told otherwise.
NAME, VERSION = "qwen", "1.0"


def models_directory() -> Path:
    """Return the directory that holds fetched and prepared models; it is created."""
    directory = cache_directory() / "models"
    directory.mkdir(parents=True, exist_ok=True)
    return directory.resolve()


def shown(path: Path) -> str:
    """Write a path as briefly as the current directory allows."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
