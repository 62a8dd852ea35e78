"""Where the project's files, the model files and the server's state are."""

from pathlib import Path

from specserve.config import cache_directory

PROJECT = Path(__file__).resolve().parents[3]
SOURCE_ROOT = PROJECT / "handler"
MODEL_STORE = PROJECT / "model_store"
CONFIG = PROJECT / "config"
DEFAULT_CONFIG = CONFIG / "qwen2.5-coder-0.5b-1.5b.yaml"
STATE = PROJECT / ".specserve"
# Default model name and version, as they appear in every URL.
NAME, VERSION = "qwen", "1.0"


def models_directory() -> Path:
    """Return the directory of downloaded and requantised models; it is created if missing."""
    directory = cache_directory() / "models"
    directory.mkdir(parents=True, exist_ok=True)
    return directory.resolve()
