"""One engine as a process that runs single forward passes for cost_curve.py, and idles in between.

    python pass_worker.py auto|off [VARIANT of our kernels]

The first line of input is a `Setting`, every further line a `Pass`, as JSON. An answer is a line that begins with MARK;
other output of the engine is ignored.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from perplexity import use_all_formats
from specserve.engine import kernels
from specserve.engine.base import Row
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel

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


def run(engine: LlamaEngine, tokens: list[int], asked: Pass) -> dict[str, Any]:
    """Run a pass; returns its seconds, and the argmax of its last row."""
    end = asked.context + asked.rows
    rows = [
        Row(token, 0, position, wants_logits=position >= end - asked.logits)
        for position, token in enumerate(tokens[:end])
    ]
    if engine.cached_len(0) < asked.context:
        engine.truncate(0, 0)
        engine.forward([row._replace(wants_logits=False) for row in rows[: asked.context]])
    engine.truncate(0, asked.context)
    started = perf_counter()
    logits = engine.forward(rows[asked.context :])
    return {"seconds": perf_counter() - started, "token": int(logits[-1].argmax())}


def main() -> None:
    """Load the engine that the command line names, then answer every line of input."""
    mode, *variant = sys.argv[1:]
    if mode == "auto":
        use_all_formats(*variant)
    else:
        kernels.use("off")
    setting = Setting(**json.loads(sys.stdin.readline()))
    engine = LlamaEngine(
        LlamaModel(Path(setting.file)),
        n_slots=1,
        context_length=2 * len(setting.tokens),
        threads=setting.threads,
        max_rows=min(len(setting.tokens), MOST_ROWS),
        max_logits=64,
    )
    print(f"{MARK}{{}}", flush=True)
    for line in sys.stdin:
        print(f"{MARK}{json.dumps(run(engine, setting.tokens, Pass(*json.loads(line))))}", flush=True)


if __name__ == "__main__":
    main()
