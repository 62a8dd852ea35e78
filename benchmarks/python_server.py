"""llama-cpp-python's own servers, which need its extra `server` (in the dependency group `peer`).

The one it installs, `python -m llama_cpp.server`, answers one request after the other; the one among its examples
decodes several sequences together. Neither takes a draft model of the Qwen2.5 family.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from peer import Peer


def one_by_one(model: Path, log: Path, *, threads: int, context_length: int) -> Peer:
    """The installed server; a new request waits for the last one, which by default it would cut off."""
    settings = {"model": model, "n_threads": threads, "n_ctx": context_length, "interrupt_requests": False}
    flags = [str(part) for name, value in settings.items() for part in (f"--{name}", value)]
    return Peer(
        lambda port: [sys.executable, "-m", "llama_cpp.server", "--port", str(port), *flags], log, ready="/v1/models"
    )


def batching(script: Path, model: Path, log: Path, *, threads: int, context_length: int, slots: int) -> Peer:
    """The example, `script`, with so many sequences at a time and a context for each."""
    options = {
        "path": str(model),
        "n_ctx": context_length * slots,
        "max_seq_len": context_length,
        "n_seq_max": slots,
        "threads": threads,
        "threads_batch": threads,
        "store_logits": False,
    }
    config = log.with_suffix(".json")

    def command(port: int) -> list[str | Path]:
        config.write_text(json.dumps({"server": {"host": "127.0.0.1", "port": port}, "model": options}))
        return [sys.executable, script, "-C", config]

    return Peer(command, log, ready="/v1/models")
