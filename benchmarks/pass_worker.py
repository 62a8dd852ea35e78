"""One CPU engine as a process that runs single forward passes for cost_curve.py, and idles in between.

    python pass_worker.py ours|stock [VARIANT of our kernels]

The first line of input is a `Setting`, every further line a `Pass`, as JSON. An answer is a line that begins with MARK;
other output of an engine is ignored.
"""
# ruff: noqa: PLC0415

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

MARK = "pass: "
# Maximum rows of a pass.
MOST_ROWS = 512


class Setting(NamedTuple):
    """The GGUF file, the number of threads, and the tokens that passes run over."""

    file: str
    threads: int
    tokens: list[int]


class Pass(NamedTuple):
    """A pass over `rows` tokens after the first `context` ones, with logits of the last `logits` rows."""

    context: int
    rows: int
    logits: int


class Outcome(NamedTuple):
    """Seconds of one or more passes, and the argmax of the last row (None if the engine does not return it)."""

    seconds: list[float]
    token: int | None


Runner = Callable[[Pass], Outcome]


def load_llama(kernels_mode: str, setting: Setting) -> Runner:
    """llama.cpp through our engine, with our kernels ("auto") or its own ("off")."""
    from perplexity import use_all_formats
    from specserve.engine import kernels
    from specserve.engine.base import Row
    from specserve.engine.llama import LlamaEngine
    from specserve.engine.llama_model import LlamaModel

    if kernels_mode == "auto":
        use_all_formats(*sys.argv[2:])
    else:
        kernels.use("off")
    most = len(setting.tokens)
    engine = LlamaEngine(
        LlamaModel(Path(setting.file)),
        n_slots=1,
        context_length=2 * most,
        threads=setting.threads,
        max_rows=min(most, MOST_ROWS),
        max_logits=64,
    )

    def fill(context: int) -> None:
        """Cache so many tokens: where the engine can copy them, those of the first pass again and again."""
        engine.truncate(0, 0)
        for first in range(0, context, engine.max_rows):
            positions = range(first, min(context, first + engine.max_rows))
            if first and engine.token_bytes is not None:
                engine.load(0, engine.save(0, 0, len(positions)))
            else:
                engine.forward([Row(setting.tokens[position], 0, position, False) for position in positions])

    def run(asked: Pass) -> Outcome:
        end = asked.context + asked.rows
        rows = [
            Row(token, 0, position, wants_logits=position >= end - asked.logits)
            for position, token in enumerate(setting.tokens[:end])
        ]
        if engine.cached_len(0) < asked.context:
            fill(asked.context)
        engine.truncate(0, asked.context)
        started = perf_counter()
        logits = engine.forward(rows[asked.context :])
        return Outcome([perf_counter() - started], int(logits[-1].argmax()))

    return run


LOADERS: dict[str, Callable[[Setting], Runner]] = {
    "ours": partial(load_llama, "auto"),
    "stock": partial(load_llama, "off"),
}


def _answer(fields: dict[str, Any]) -> None:
    print(f"{MARK}{json.dumps(fields)}", flush=True)


def main() -> None:
    """Load the engine that the command line names, then answer every line of input."""
    run = LOADERS[sys.argv[1]](Setting(**json.loads(sys.stdin.readline())))
    _answer({"ready": True})
    for line in sys.stdin:
        try:
            _answer(run(Pass(*json.loads(line)))._asdict())
        except NotImplementedError as reason:
            _answer({"error": str(reason)})


if __name__ == "__main__":
    main()
