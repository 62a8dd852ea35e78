"""Where the project's files and the server's state are."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[3]
SOURCE_ROOT = PROJECT / "handler"
MODEL_STORE = PROJECT / "model_store"
CONFIG = PROJECT / "config"
DEFAULT_CONFIG = CONFIG / "qwen2.5-coder-0.5b-1.5b.yaml"
STATE = PROJECT / ".specserve"
# Default model name and version, as they appear in every URL.
NAME, VERSION = "qwen", "1.0"
