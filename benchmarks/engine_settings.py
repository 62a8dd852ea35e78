"""Which settings of llama.cpp are the fastest here, and which of them change what a text is?

For target and draft: threads, flash attention, the format of the cached values, and the rows of a prompt's chunk.
Every setting is an engine of its own over the same weights; their passes take turns. `exact` says whether a row's
logits were the same alone and among others, which greedy and seeded texts rely on.

    .venv/bin/python benchmarks/engine_settings.py [--config FILE] [--context N]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from machine import describe_machine
from specserve.config import usable_cores
from specserve.engine.base import Row
from specserve.engine.llama import EngineSettings, LlamaEngine, target_settings
from specserve.engine.llama_model import LlamaModel
from specserve.operations.archive import prepared_handler
from specserve.operations.places import DEFAULT_CONFIG

_ROWS = (1, 4, 8, 16, 64)
_REPETITIONS = 7
Half = Literal["f16", "bf16"]


@dataclass(frozen=True)
class Variant:
    """One way to run a model."""

    name: str
    settings: EngineSettings
    threads: int


def variants() -> Iterator[Variant]:
    """The target's default and, one at a time, what could be otherwise."""
    cores = usable_cores()
    default = target_settings()
    yield Variant("default", default, cores)
    for threads in sorted({max(1, cores // 2), cores - 1} - {0, cores}):
        yield Variant(f"{threads} threads", default, threads)
    half: tuple[Half, ...] = ("f16", "bf16")
    for flash, keys, values in product((True, False), half, half):
        settings = replace(default, type_k=keys, type_v=values, flash_attention=flash)
        if settings != default:
            kind = "flash attention" if flash else "no flash attention"
            yield Variant(f"{kind}, keys {keys.upper()}, values {values.upper()}", settings, cores)


class Bench:
    """An engine of one variant behind a context of so many tokens."""

    def __init__(self, model: LlamaModel, variant: Variant, context: int) -> None:
        self.variant = variant
        self._context = context
        self._engine = LlamaEngine(
            model, n_slots=1, context_length=context + 256, threads=variant.threads, max_rows=64, max_logits=64,
            settings=variant.settings,
        )  # fmt: skip
        for start in range(0, context, 64):
            self._engine.forward(self._rows(start, min(64, context - start), logits=False))
        self.seconds: dict[int, list[float]] = {rows: [] for rows in _ROWS}

    def _rows(self, start: int, count: int, *, logits: bool) -> list[Row]:
        width = self._engine.width
        return [Row((17 + 7919 * place) % width, 0, place, logits) for place in range(start, start + count)]

    def time(self, count: int) -> None:
        """One pass of so many rows; the logits of a prompt's chunk are not asked for."""
        rows = self._rows(self._context, count, logits=count < max(_ROWS))
        started = perf_counter()
        self._engine.forward(rows)
        self.seconds[count].append(perf_counter() - started)
        self._engine.cut(0, self._context)

    def exact(self) -> bool:
        """Whether rows give the same logits one by one and together."""
        together = self._engine.forward(self._rows(self._context, 8, logits=True)).copy()
        self._engine.cut(0, self._context)
        alone = [self._engine.forward(self._rows(self._context + i, 1, logits=True))[0].copy() for i in range(8)]
        self._engine.cut(0, self._context)
        return bool(np.array_equal(together, np.stack(alone)))

    def close(self) -> None:
        """Give the memory back."""
        self._engine.close()


def compare(role: str, path: Path, context: int) -> list[dict[str, Any]]:
    """Rows of the result for one model."""
    model = LlamaModel(path)
    benches = [Bench(model, variant, context) for variant in variants()]
    for turn in range(_REPETITIONS):
        print(f"{role} behind {context} tokens: turn {turn + 1} of {_REPETITIONS}", file=sys.stderr)
        for bench in benches:
            for rows in _ROWS:
                bench.time(rows)
    result = []
    for bench in benches:
        times = {f"{rows} rows, ms": round(1000 * median(bench.seconds[rows]), 1) for rows in _ROWS}
        name = bench.variant.name
        result.append({"model": role, "context": context, "setting": name, **times, "exact": bench.exact()})
        bench.close()
    model.close()
    return result


def main() -> None:
    """Compare all settings and print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="a model YAML")
    parser.add_argument("--context", nargs="+", type=int, default=[64, 768], help="tokens before the timed rows")
    options = parser.parse_args()
    config = prepared_handler(options.config)
    files = {"target": config.target.path, "draft": config.draft.path if config.draft else None}
    rows = []
    for context in options.context:
        for role, path in files.items():
            rows += compare(role, path, context) if path else []
    table = Table(title="one forward pass, median of turns")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=160).print(table)
    names = {role: path.name for role, path in files.items() if path}
    print(
        json.dumps(
            {"benchmark": "engine_settings", "machine": describe_machine(), "models": names, "rows": rows, "notes": []}
        )
    )


if __name__ == "__main__":
    main()
