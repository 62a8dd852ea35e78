"""What does a forward pass of n rows cost, under llama.cpp's kernels and under ours, and how near is that to the roof?

Both are loaded from the same file into one process and take turns pass by pass, so that a moment when the machine is
slow meets both alike. The roof is what no kernel can beat: a pass reads all weights once, and multiplies each of them
once a row, so it takes at least bytes / bandwidth, and products / (0.7 x peak). Both are measured in between, too, and
the best counts, since neighbours on the machine take their share of its memory.

    .venv/bin/python benchmarks/cost_curve.py [--models FILE.gguf ...] [--variant NAME] [--passes N]
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from gguf import GGUFReader
from rich.console import Console
from rich.table import Table

from machine import describe_machine
from perplexity import forms_of_the_target, use_all_formats
from quiet import ALLOWED, watched
from specserve.config import load_yaml, usable_cores
from specserve.engine import kernels
from specserve.engine.base import Row
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from specserve.tools.download import fetch
from specserve.tools.models import requantise
from specserve.tools.paths import DEFAULT_CONFIG

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
# Tokens that all passes but those of prefill come after.
CONTEXT = 64
PREFILL = 512
# Passes of prefill: each takes as long as 30 to 100 of a few rows.
PREFILL_PASSES = 3
# The share of the peak of dot products that is left after unpacking, loading and scaling. The products of our own
# kernels reach 0.55 to 0.64 of it by themselves (260 to 300 of 470 billion a second, two cores of an AMD EPYC, Zen 4).
REACHABLE = 0.7
KERNELS = ("stock", "ours")
# Rounds of passes between two measurements of the roof, which take half a second each.
ROOF_EVERY = 4


@dataclass(frozen=True)
class Products:
    """The matrix products of a pass.

    Args:
        size: bytes of all matrices, in the file's own formats.
        body: weights of the layers, each multiplied once a row.
        head: weights of the output layer, multiplied once a row whose logits are wanted.
    """

    size: int
    body: int
    head: int

    @classmethod
    def of(cls, path: Path) -> Products:
        """What a GGUF file holds; without an output layer of its own the embeddings are that, too."""
        tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
        head = "output.weight" if "output.weight" in tensors else "token_embd.weight"
        layers = [tensor for name, tensor in tensors.items() if re.match(r"blk\.", name) and len(tensor.shape) > 1]
        return cls(
            size=int(sum(tensor.n_bytes for tensor in [*layers, tensors[head]])),
            body=int(sum(tensor.n_elements for tensor in layers)),
            head=int(tensors[head].n_elements),
        )

    def roof_seconds(self, roof: kernels.Roof, rows: int, logits: int) -> float:
        """The least time that the products of a pass can take."""
        products = self.body * rows + self.head * logits
        return max(self.size / roof.bytes_per_second, products / (REACHABLE * roof.products_per_second))


class Lane:
    """A file under one kind of kernels."""

    def __init__(self, path: Path, *, ours: bool, variant: str | None) -> None:
        if ours:
            use_all_formats(variant)
        else:
            kernels.use("off")
        # Attention goes by what is taken when a pass runs, and not by what was when the model was loaded.
        self._taken = (1 << len(kernels.FORMATS)) - 1 if ours else 0
        self._model = LlamaModel(path)
        self._engine = LlamaEngine(
            self._model,
            n_slots=1,
            context_length=2 * PREFILL,
            threads=usable_cores(),
            max_rows=PREFILL,
            max_logits=max(ROWS),
        )

    def run(self, first: int, rows: int, logits: int) -> float:
        """Seconds of a pass of `rows` rows from position `first` on, of which the last give `logits` logits."""
        kernels.library().specserve_take(self._taken)
        self._engine.truncate(0, first)
        # Any tokens do, but for those of a few bytes, which come first.
        batch = [Row(1000 + at, 0, at, wants_logits=at >= first + rows - logits) for at in range(first, first + rows)]
        started = perf_counter()
        self._engine.forward(batch)
        return perf_counter() - started

    def close(self) -> None:
        """Give the memory back."""
        self._engine.close()
        self._model.close()


@dataclass
class Roofs:
    """The best that the machine has shown."""

    best: kernels.Roof = field(default_factory=lambda: kernels.Roof(0, 0))

    def measure(self) -> None:
        """Measure once more."""
        now = kernels.roof(usable_cores())
        self.best = kernels.Roof(*map(max, self.best, now))


def _turns(lanes: dict[str, Lane], passes: int, roofs: Roofs) -> Iterator[tuple[str, int, float]]:
    """(kernels, rows, seconds) of all passes; `PREFILL` rows are prefill."""
    for number in range(PREFILL_PASSES + 1):
        for name, lane in lanes.items():
            seconds = lane.run(0, PREFILL, 1)
            if number:  # the first one warms up
                yield name, PREFILL, seconds
    for number in range(passes):
        if number % ROOF_EVERY == 0:
            roofs.measure()
        for rows in ROWS:
            for name, lane in lanes.items():
                yield name, rows, lane.run(CONTEXT, rows, rows)


def measure_file(path: Path, roofs: Roofs, passes: int, variant: str | None) -> list[dict[str, Any]]:
    """Rows of the result for one file."""
    lanes = {name: Lane(path, ours=name == "ours", variant=variant) for name in KERNELS}
    times: dict[tuple[str, int], list[float]] = {}
    for name, rows, seconds in _turns(lanes, passes, roofs):
        times.setdefault((name, rows), []).append(seconds)
    for lane in lanes.values():
        lane.close()
    products = Products.of(path)
    result = []
    for name in KERNELS:
        single = median(times[name, 1])
        for rows in (*ROWS, PREFILL):
            seconds = median(times[name, rows])
            limit = products.roof_seconds(roofs.best, rows, 1 if rows == PREFILL else rows)
            result.append(
                {
                    "file": path.name,
                    "kernels": name,
                    "rows": rows,
                    "prefill": rows == PREFILL,
                    "ms": round(1000 * seconds, 2),
                    "ms_per_row": round(1000 * seconds / rows, 3),
                    "v": round(seconds / single, 3),
                    "roof_ms": round(1000 * limit, 2),
                    "times_roof": round(seconds / limit, 3),
                    "best_times_roof": round(min(times[name, rows]) / limit, 3),
                }
            )
    return result


def show(path: Path, rows: list[dict[str, Any]]) -> None:
    """One file's rows as a table for people, both kernels side by side; prefill in milliseconds a row."""
    table = Table(title=path.name)
    pairs = ("stock ms", "ours ms", "ours / stock", "stock v(n)", "ours v(n)")
    for column in ("rows", *pairs, "roof ms", "ours / roof", "its best / roof"):
        table.add_column(column, justify="right")
    stock, ours = ([row for row in rows if row["kernels"] == name] for name in KERNELS)
    for theirs, own in zip(stock, ours, strict=True):
        ratio = f"{own['ms'] / theirs['ms']:.2f}"
        of_roof = [f"{own['times_roof']:.2f}", f"{own['best_times_roof']:.2f}"]
        if own["prefill"]:
            roof = f"{own['roof_ms'] / own['rows']:.2f}"
            kv_len = [f"{theirs['ms_per_row']:.2f}", f"{own['ms_per_row']:.2f}", ratio, "", "", roof, *of_roof]
            table.add_row(f"prefill of {PREFILL}, a row", *kv_len)
        else:
            kv_len = [f"{theirs['ms']:.1f}", f"{own['ms']:.1f}", ratio, f"{theirs['v']:.2f}", f"{own['v']:.2f}"]
            table.add_row(str(own["rows"]), *kv_len, f"{own['roof_ms']:.1f}", *of_roof)
    Console(width=200).print(table)


def default_files() -> list[Path]:
    """The default configuration's target, published and in pure Q4_0, and the draft in pure Q4_0."""
    _, config = load_yaml(DEFAULT_CONFIG)
    draft = [requantise(fetch(config.draft, DEFAULT_CONFIG, config.models_directory))] if config.draft else []
    return [*forms_of_the_target(), *draft]


def main() -> None:
    """Measure all files and print a table for each and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", type=Path, help="default: the default target, its pure Q4_0, the draft")
    parser.add_argument("--variant", choices=kernels.VARIANTS, help="of our kernels; default: the best one")
    parser.add_argument("--passes", type=int, default=15, help="of each number of rows; the median counts (default 15)")
    options = parser.parse_args()
    chosen = use_all_formats(options.variant)
    notes = [
        chosen.sentence,
        f"passes of a few rows come after {CONTEXT} tokens and all give logits; prefill is {PREFILL} rows from none on",
    ]
    print(*notes, sep="\n")
    rows = []
    for path in options.models or default_files():
        roofs = Roofs()
        measured, others = watched(partial(measure_file, path, roofs, options.passes, options.variant))
        show(path, measured)
        bandwidth, peak = roofs.best.bytes_per_second / 1e9, roofs.best.products_per_second / 1e9
        notes.append(
            f"{path.name}: roof of {bandwidth:.1f} GB/s and {REACHABLE} x {peak:.0f} billion products a second"
        )
        print(notes[-1])
        if others > ALLOWED:
            notes.append(f"{path.name}: other processes used {others:.0%} of a core meanwhile")
            print(notes[-1])
        rows += measured
    print(
        json.dumps(
            {
                "benchmark": "cost_curve",
                "machine": describe_machine(),
                "models": {},
                "rows": rows,
                "notes": notes,
            }
        )
    )


if __name__ == "__main__":
    main()
