"""This project's engine as a worker of peers.py: `peer_ours.py auto` with our kernels, `off` with llama.cpp's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np

from pass_worker import Outcome, Pass, Setting, serve
from perplexity import use_all_formats
from specserve.engine import kernels
from specserve.engine.base import Row
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel


def load(setting: Setting) -> Callable[[Pass], Outcome]:
    """Load the file under the kernels that the command line names."""
    if sys.argv[1] == "auto":
        use_all_formats()
    else:
        kernels.use("off")
    most = len(setting.tokens)
    engine = LlamaEngine(
        LlamaModel(Path(setting.file)),
        n_slots=1,
        context_length=2 * most,
        threads=setting.threads,
        max_rows=most,
        max_logits=64,
    )
    held: list[int] = []

    def run(wanted: Pass) -> Outcome:
        end = wanted.context + wanted.rows
        rows = [
            Row(token, 0, at, wants_logits=at >= end - wanted.logits) for at, token in enumerate(setting.tokens[:end])
        ]
        if len(held) < wanted.context:
            engine.truncate(0, 0)
            engine.forward([row._replace(wants_logits=False) for row in rows[: wanted.context]])
        engine.truncate(0, wanted.context)
        held[:] = setting.tokens[:end]
        started = perf_counter()
        logits = engine.forward(rows[wanted.context :])
        return Outcome([perf_counter() - started], int(np.argmax(logits[-1])))

    return run


if __name__ == "__main__":
    serve(load)
