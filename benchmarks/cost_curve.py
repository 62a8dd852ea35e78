"""What does a forward pass of n rows cost, under llama.cpp's kernels and under ours, and how near is that to the roof?

The roof is what no kernel can beat: a pass reads all weights once and multiplies each of them once a row, so it takes
at least bytes / bandwidth and products / (0.7 x peak). Both are measured in between, and the best counts, since other
guests of the host take their share of its memory. Each engine is a process that works only in its turns, so that
changes in the machine's speed affect all alike.

    .venv/bin/python benchmarks/cost_curve.py [--quick] [--models FILE ...] [--formats] [--variant NAME] [--turns N]
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import NamedTuple

from gguf import GGUFReader

from common import MAX_INTERFERENCE, Row, argument_parser, print_result, print_table, with_interference
from peer_engines import PEERS
from perplexity import forms_of_the_target, in_all_formats, read_text, use_all_formats
from roof import Roof, measure_roof
from specserve.cli.paths import DEFAULT_CONFIG
from specserve.config import load_yaml
from specserve.engine import base, kernels
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from specserve.errors import EnvironmentFailure
from specserve.machine import usable_cores
from specserve.weights.models import fetch, requantise

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
# For the comparison of formats.
ROWS_OF_FORMATS = (1, 4, 8)
# Tokens in the cache before a pass, and rows of a prefill, which takes as long as 30 to 100 passes of one row.
CONTEXT, PREFILL, PREFILL_TURNS = 64, 512, 3
# Passes of a turn; the first one, with cold caches and sleeping threads, does not count.
PASSES_PER_TURN = 3
# Seconds before a turn: the threads of the engine before it spin for some milliseconds.
SETTLE_SECONDS = 0.02
# The share of the peak rate of dot products that remains after unpacking, loading and scaling. Our products alone
# reach 0.55 to 0.64 of the peak (260 to 300 of 470 billion a second, two cores of an AMD EPYC, Zen 4).
REACHABLE = 0.7


class Pass(NamedTuple):
    """A pass over `rows` tokens after the first `context` ones, with logits of the last `logits` rows."""

    context: int
    rows: int
    logits: int


def run(engine: LlamaEngine, tokens: list[int], asked: Pass) -> float:
    """Run a pass; returns its seconds."""
    end = asked.context + asked.rows
    rows = [
        base.Row(token, 0, position, wants_logits=position >= end - asked.logits)
        for position, token in enumerate(tokens[:end])
    ]
    if engine.cached_len(0) < asked.context:
        engine.truncate(0, 0)
        engine.forward([row._replace(wants_logits=False) for row in rows[: asked.context]])
    engine.truncate(0, asked.context)
    started = perf_counter()
    engine.forward(rows[asked.context :])
    return perf_counter() - started


def run_passes(parent: Connection, log: Path, path: Path, tokens: list[int], kernel: str | None) -> None:
    """Load an engine, say so, and run passes as they are asked for; the main function of a `Worker`'s process."""
    with log.open("w", encoding="utf-8") as errors:
        os.dup2(errors.fileno(), 2)
    if kernel == "off":
        kernels.use("off")
    else:
        use_all_formats(kernel)
    engine = LlamaEngine(
        LlamaModel(path),
        n_slots=1,
        context_length=2 * len(tokens),
        threads=usable_cores().threads,
        max_rows=len(tokens),
        max_logits=64,
    )
    parent.send(0.0)
    while True:
        parent.send(run(engine, tokens, parent.recv()))


class Worker:
    """An engine in a process of its own, since kernels are chosen once a process."""

    def __init__(self, stack: ExitStack, path: Path, tokens: list[int], kernel: str | None) -> None:
        self._log = PEERS / "logs" / f"passes-{kernel}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._process, theirs = get_context("spawn").Pipe()
        arguments = theirs, self._log, path, tokens, kernel
        process = get_context("spawn").Process(target=run_passes, args=arguments, daemon=True)
        process.start()
        stack.callback(process.kill)
        theirs.close()
        self._answer()

    def ask(self, asked: Pass) -> float:
        """The seconds of a pass.

        Raises:
            EnvironmentFailure: the process ended.
        """
        self._process.send(asked)
        return self._answer()

    def _answer(self) -> float:
        try:
            answer: float = self._process.recv()
        except (EOFError, OSError):
            output = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise EnvironmentFailure(f"it ended: {output[-1] if output else 'without a message'}") from None
        return answer


@dataclass(frozen=True)
class Products:
    """The matrix products of a pass."""

    size: int  # bytes of all matrices but experts', in the file's own formats
    body: int  # weights of the layers, each multiplied once a row
    head: int  # weights of the output layer, multiplied once a row whose logits are wanted
    experts: int  # bytes of experts' matrices
    asked: float  # the share of its experts that a row asks

    @classmethod
    def of(cls, path: Path) -> Products:
        """Read a GGUF file; without an output layer of its own the embeddings serve as one."""
        file = GGUFReader(path)
        tensors = {tensor.name: tensor for tensor in file.tensors}
        head = "output.weight" if "output.weight" in tensors else "token_embd.weight"
        layers = [tensor for name, tensor in tensors.items() if re.match(r"blk\.", name) and len(tensor.shape) > 1]
        experts = [tensor for tensor in layers if "_exps." in tensor.name]
        others = [tensor for tensor in layers if "_exps." not in tensor.name]
        asked = 0.0
        if experts:
            architecture = file.fields["general.architecture"].contents()
            used, count = (file.fields[f"{architecture}.expert_{name}"].contents() for name in ("used_count", "count"))
            asked = used / count
        weights = sum(tensor.n_elements for tensor in others) + asked * sum(tensor.n_elements for tensor in experts)
        return cls(
            size=int(sum(tensor.n_bytes for tensor in [*others, tensors[head]])),
            body=int(weights),
            head=int(tensors[head].n_elements),
            experts=int(sum(tensor.n_bytes for tensor in experts)),
            asked=asked,
        )

    def roof_seconds(self, roof: Roof, rows: int, logits: int) -> float:
        """The least time that the products of a pass can take; rows choose their experts evenly."""
        size = self.size + self.experts * (1 - (1 - self.asked) ** rows)
        products = self.body * rows + self.head * logits
        return max(size / roof.bytes_per_second, products / (REACHABLE * roof.products_per_second))


@dataclass
class Measurement:
    # Of passes, by engine and number of rows, PREFILL rows being prefill.
    seconds: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(
        default_factory=dict
    )  # why an engine could not be measured, or not every pass of it
    roof: Roof = field(default_factory=lambda: Roof(0, 0))  # the best bandwidth and the best rate of products seen

    def turn(self, name: str, worker: Worker, asked: Pass) -> None:
        """Let a worker run its passes of one kind."""
        sleep(SETTLE_SECONDS)
        prefill = asked.rows == PREFILL
        try:
            for number in range(1 if prefill else PASSES_PER_TURN):
                seconds = worker.ask(asked)
                if prefill or number:
                    self.seconds.setdefault((name, asked.rows), []).append(seconds)
        except EnvironmentFailure as reason:
            self.failures[name] = str(reason)

    def rows(self, path: Path) -> list[Row]:
        """Rows of the result; `v` is the cost relative to one row of the same engine."""
        products = Products.of(path)
        result = []
        for (name, rows), seconds in sorted(self.seconds.items()):
            limit = products.roof_seconds(self.roof, rows, 1 if rows == PREFILL else rows)
            result.append(
                {
                    "file": path.name,
                    "engine": name,
                    "rows": rows,
                    "prefill": rows == PREFILL,
                    "ms": round(1000 * median(seconds), 2),
                    "ms_per_row": round(1000 * median(seconds) / rows, 3),
                    "v": round(median(seconds) / median(self.seconds[name, 1]), 3)
                    if (name, 1) in self.seconds
                    else None,
                    "roof_ms": round(1000 * limit, 2),
                    "times_roof": round(median(seconds) / limit, 3),
                    "best_times_roof": round(min(seconds) / limit, 3),
                    "passes": len(seconds),
                }
            )
        return result


def measure_file(path: Path, turns: int, chosen: str | None, variant: str, counts: Sequence[int] = ROWS) -> Measurement:
    """Let all engines take turns on one file; the roof is that of `variant`, which `chosen` or the processor gives."""
    tokenizer = LlamaModel(path)
    tokens = tokenizer.encode(read_text("code"))[:PREFILL]
    tokenizer.close()
    measurement = Measurement()
    with ExitStack() as stack:
        workers = {}
        for name, kernel in {"ours": chosen, "llama.cpp": "off"}.items():
            try:
                workers[name] = Worker(stack, path, tokens, kernel)
            except EnvironmentFailure as reason:
                measurement.failures[name] = str(reason)
        for turn in range(turns):
            measurement.roof = Roof(*map(max, measurement.roof, measure_roof(usable_cores().threads, variant)))
            passes = [Pass(CONTEXT, rows, rows) for rows in counts]
            if turn < PREFILL_TURNS and counts == ROWS:
                passes.insert(0, Pass(0, PREFILL, 1))
            for asked in passes:
                for name, worker in workers.items():
                    measurement.turn(name, worker, asked)
    return measurement


def show(path: Path, rows: list[Row]) -> None:
    """Print one file's rows, the engines side by side."""
    by_rows: dict[int, Row] = {}
    for row in rows:
        label = f"prefill of {PREFILL}, a row" if row["prefill"] else str(row["rows"])
        line = by_rows.setdefault(row["rows"], {"rows": label})
        line[f"{row['engine']}, ms"] = row["ms_per_row"] if row["prefill"] else row["ms"]
        if row["engine"] == "ours":
            line |= {"ours, v(n)": row["v"], "ours / roof": row["times_roof"], "best / roof": row["best_times_roof"]}
    print_table(path.name, [by_rows[count] for count in sorted(by_rows)])


def default_files() -> list[Path]:
    """The default configuration's target, published and in pure Q4_0, and the draft in pure Q4_0."""
    _, config = load_yaml(DEFAULT_CONFIG)
    draft = [requantise(fetch(config.draft, DEFAULT_CONFIG))] if config.draft else []
    return [*forms_of_the_target(), *draft]


def main() -> None:
    parser = argument_parser(__doc__, quick="one file, two turns", config=None)
    parser.add_argument("--models", nargs="+", type=Path, help="default: the default target, its pure Q4_0, the draft")
    parser.add_argument("--formats", action="store_true", help="the default target in all formats; 1, 4 and 8 rows")
    parser.add_argument("--variant", choices=kernels.VARIANTS, help="of our kernels; default: the best one")
    parser.add_argument("--turns", type=int, help=f"of {PASSES_PER_TURN} passes of each number of rows (default: 5)")
    options = parser.parse_args()
    ours = use_all_formats(options.variant)
    notes = [
        ours.sentence,
        f"passes of a few rows come after {CONTEXT} tokens, all rows with logits; prefill is {PREFILL} rows after none",
    ]
    turns = options.turns or (2 if options.quick else 5)
    rows, counts = [], ROWS_OF_FORMATS if options.formats else ROWS
    with TemporaryDirectory() as directory:
        files: Iterable[Path] = options.models or default_files()[: 1 if options.quick else None]
        if options.formats:
            files = in_all_formats(Path(directory))
        for path in files:
            measure = partial(measure_file, path, turns, options.variant, str(ours.variant), counts)
            found, others = with_interference(measure)
            measured = found.rows(path)
            show(path, measured)
            rows += measured
            bandwidth, peak = found.roof.bytes_per_second / 1e9, found.roof.products_per_second / 1e9
            notes += [
                f"{path.name}: roof of {bandwidth:.1f} GB/s and {REACHABLE} x {peak:.0f} billion products a second",
                *(f"{path.name}: {name}: {reason}" for name, reason in found.failures.items()),
            ]
            if others > MAX_INTERFERENCE:
                notes.append(f"{path.name}: other processes used {others:.0%} of a core meanwhile")
    print(*notes, sep="\n")
    print_result("formats" if options.formats else "cost_curve", {}, rows, notes)


if __name__ == "__main__":
    main()
