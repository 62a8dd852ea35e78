"""What the doctor finds of a machine, a build, and the files that a server would load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from specserve.config import processor, usable_cores
from specserve.engine import kernels
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel, build_description
from specserve.errors import SpecserveError
from specserve.speculation.cost import Cost
from specserve.speculation.passes import read, timed
from specserve.tools import files, paths
from specserve.tools.choose import loaded, one_slot
from specserve.tools.prepare import Prepared, requantise

MOST_ROWS = 64
CELLS = 64
_TURNS = 3
# What makes vector instructions for 8-bit products, best first.
_INSTRUCTIONS = ("amx_int8", "avx512_vnni", "avx_vnni", "avx512f", "avx2", "i8mm", "asimddp", "neon")
# A difference that is no noise of measuring.
_BETTER = 1.05


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        topic: what.
        sentence: what was found, and what to do if it is not well.
        well: False where something should be done.
        facts: the numbers behind it.
    """

    topic: str
    sentence: str
    well: bool = True
    facts: dict[str, Any] = field(default_factory=dict)


def machine(threads: int, prepared: Prepared) -> Finding:
    """Cores, instructions and memory."""
    described = processor()
    flags = next((line.split(":", 1)[1].split() for line in described.splitlines() if line.startswith("flags")), [])
    best = next((name for name in _INSTRUCTIONS if name in flags), "none known")
    needed = sum(path.stat().st_size for path in (prepared.target, prepared.draft) if path)
    free = psutil.virtual_memory().available
    facts = {"cores": usable_cores(), "threads": threads, "instructions": best, "available_bytes": free}
    found = f"{usable_cores()} cores may be used, {threads} threads compute, with {best}"
    if threads > usable_cores():
        return Finding(
            "machine", f"{found}: set `threads` to {usable_cores()} or leave it out, or all will wait.", False, facts
        )
    if free < 1.5 * needed:
        said = f"{files.megabytes(free)} of memory are free and the weights take {files.megabytes(needed)}"
        return Finding("machine", f"{found}; {said}: free some, or choose smaller models.", False, facts)
    return Finding("machine", f"{found}; {files.megabytes(free)} of memory are free.", facts=facts)


def computing(mode: kernels.Mode, threads: int) -> Finding:
    """Which kernels compute, and what they bring."""
    chosen = kernels.use(mode, threads=threads)
    facts: dict[str, Any] = {"llama.cpp": build_description(), **chosen._asdict()}
    if chosen.variant is None:
        # `off` was the operator's choice, and the sentence says so.
        return Finding("kernels", f"{chosen.sentence}.", mode == "off", facts)
    facts["times_stock"] = gains = {name: round(kernels.speed(name, threads), 2) for name in chosen.formats}
    shown = ", ".join(f"{name} {gain:.1f}" for name, gain in gains.items())
    return Finding(
        "kernels", f"{chosen.sentence}; products of 1, 4 and 8 rows, times llama.cpp's speed: {shown}.", facts=facts
    )


def model_files(prepared: Prepared) -> Finding:
    """What is loaded."""
    roles = {"target": prepared.target, "draft": prepared.draft}
    known = {role: _checked(path) for role, path in roles.items() if path}
    facts = {role: {"file": str(file.path), "sha256": file.sha256} for role, file in known.items()}
    said = ", ".join(f"{role} {file.path.name} ({file.sha256[:12]})" for role, file in known.items())
    return Finding("models", f"{said}.", facts=facts)


def costs(target: Cost, draft: Cost | None) -> Finding:
    """What passes take."""
    one = target.exactly(1, CELLS)
    curve = {rows: target.exactly(rows, CELLS) / one for rows in target.table.rows}
    facts: dict[str, Any] = {"target_ms": 1000 * one, "v": {rows: round(v, 2) for rows, v in curve.items()}}
    shown = ", ".join(f"{rows}: {curve[rows]:.1f}" for rows in (4, 8, 16) if rows in curve)
    said = f"A step of the target takes {1000 * one:.0f} ms; more rows at once cost, in steps: {shown}"
    if draft is None:
        return Finding("costs", f"{said}. There is no draft model.", facts=facts)
    share = draft.exactly(1, CELLS) / one
    facts["draft_share"] = share
    said += f". A step of the draft takes {share:.2f} of one of the target"
    if share > 0.5:
        return Finding("costs", f"{said}: choose a smaller draft, this one will hardly pay.", False, facts)
    return Finding("costs", f"{said}.", facts=facts)


def thread_count(model: LlamaModel, threads: int) -> Finding:
    """Whether another number of threads is faster."""
    tried = sorted({max(1, threads // 2), threads, usable_cores()})
    took: dict[int, float] = {}
    for count in tried:
        one = one_slot(model, count, MOST_ROWS)
        [(_, took[count])] = steps([one])
        one.close()
    best = min(took, key=took.__getitem__)
    shown = ", ".join(f"{count}: {1000 * seconds:.0f}" for count, seconds in took.items())
    said = f"Four rows take, in milliseconds by threads, {shown}"
    facts = {"milliseconds": {count: 1000 * seconds for count, seconds in took.items()}}
    if took[threads] > _BETTER * took[best]:
        return Finding("threads", f"{said}: set `threads: {best}`.", False, facts)
    return Finding("threads", f"{said}; {threads} is right.", facts=facts)


def forms(prepared: Prepared, threads: int) -> Finding:
    """Whether the target is faster as published or as pure Q4_0; what is not there yet is made for it."""
    is_pure = prepared.target != prepared.published
    served, other = ("pure Q4_0", "published") if is_pure else ("published", "pure Q4_0")
    try:
        file = prepared.published if is_pure else requantise(_checked(prepared.published))
        with loaded(prepared.target, threads, MOST_ROWS) as (_, one), loaded(file, threads, MOST_ROWS) as (_, two):
            took = dict(zip((served, other), steps([one, two]), strict=True))
    except SpecserveError as error:
        return Finding("quantisation", f"The target's other form, {other}, could not be tried: {error}")
    shown = ", ".join(f"{form} {1000 * row:.0f} and {1000 * four:.0f}" for form, (row, four) in took.items())
    said = f"One row and four take, in milliseconds by form of the target, {shown}"
    facts = {form: {"row_ms": 1000 * row, "four_rows_ms": 1000 * four} for form, (row, four) in took.items()}
    if is_pure and took[served][0] * _BETTER > took[other][0]:
        advice = "remove `requantise:` below `target:`, the published file is the better model and no slower"
        return Finding("quantisation", f"{said}: {advice}.", False, facts)
    return Finding("quantisation", f"{said}; pure Q4_0 is the coarser model (benchmarks/perplexity.py).", facts=facts)


def steps(engines: Sequence[LlamaEngine]) -> list[tuple[float, float]]:
    """Seconds of passes of one row and of four, by engine, which take turns; medians."""
    for engine in engines:
        engine.truncate(0, 0)
        read(engine, [place % engine.width for place in range(CELLS)])
        timed(engine, CELLS, 4)
    turns = [[(timed(engine, CELLS, 1), timed(engine, CELLS, 4)) for engine in engines] for _ in range(_TURNS)]
    for engine in engines:
        engine.truncate(0, 0)
    return [(float(one), float(four)) for one, four in np.median(turns, axis=0)]


def _checked(path: Path) -> files.ModelFile:
    return files.checked(path, paths.models_directory())
