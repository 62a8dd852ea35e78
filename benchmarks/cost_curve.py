"""What does a forward pass of n rows cost on this machine, for every GGUF at hand, and what is it that limits it?

A pass reads all weights once, whatever its rows, and computes with each of them once a row: while the bytes a second
come near to what the memory gives, rows are free, and beyond that they are not.

    .venv/bin/python benchmarks/cost_curve.py [FILE.gguf ...]
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from machine import describe_machine
from specserve.config import load_yaml, usable_cores
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from specserve.operations.places import DEFAULT_CONFIG, models_directory
from specserve.operations.prepare import prepare
from specserve.speculation.measurement import measure

_BLOCK = 2**28
# A pass that reads its weights at this share of the memory's speed is waiting for them, and not computing.
_MEMORY_BOUND = 0.6


def memory_speed(cores: int) -> float:
    """Bytes a second that all cores together can read from memory: the best of a few sums over large arrays."""
    arrays = [np.ones(_BLOCK // 8) for _ in range(cores)]
    with ThreadPoolExecutor(cores) as pool:
        best = 0.0
        for _ in range(5):
            started = perf_counter()
            list(pool.map(np.sum, arrays))
            best = max(best, cores * _BLOCK / (perf_counter() - started))
    return best


def measure_file(path: Path, speed: float) -> list[dict[str, Any]]:
    """Rows of the result for one file."""
    model = LlamaModel(path)
    engine = LlamaEngine(model, n_slots=1, context_length=1024, threads=usable_cores(), max_rows=64, max_logits=64)
    table = measure(engine)
    count, size = model.weights
    rows = []
    for place, number in enumerate(table.rows):
        near, far = (seconds[place] for seconds in table.seconds)
        rows.append(
            {
                "file": path.name,
                "rows": number,
                "ms": round(1000 * near, 2),
                "v": round(near / table.seconds[0][0], 3),
                f"ms_behind_{table.cells[1]}": round(1000 * far, 2),
                f"v_behind_{table.cells[1]}": round(far / table.seconds[1][0], 3),
                "gigabytes_a_second": round(size / near / 1e9, 2),
                "giga_operations_a_second": round(2 * count * number / near / 1e9, 1),
                "bound_by": "memory" if size / near > _MEMORY_BOUND * speed else "compute",
            }
        )
    engine.close()
    model.close()
    return rows


def files_at_hand() -> list[Path]:
    """The default configuration's files, as published and as they are served."""
    prepare(DEFAULT_CONFIG)
    _, config = load_yaml(DEFAULT_CONFIG)
    stems = [Path(model.file).stem for model in (config.target, config.draft) if model and model.file]
    return sorted(path for stem in stems for path in models_directory().glob(f"{stem}*.gguf"))


def main() -> None:
    """Measure all files and print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="default: all of the default configuration")
    options = parser.parse_args()
    speed = memory_speed(usable_cores())
    rows = [row for path in options.files or files_at_hand() for row in measure_file(path, speed)]
    table = Table(title=f"one forward pass by rows; the memory gives {speed / 1e9:.1f} GB/s")
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=200).print(table)
    notes = [f"memory read by all cores: {speed / 1e9:.2f} GB/s"]
    print(
        json.dumps(
            {"benchmark": "cost_curve", "machine": describe_machine(), "models": {}, "rows": rows, "notes": notes}
        )
    )


if __name__ == "__main__":
    main()
