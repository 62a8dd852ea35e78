"""`scripts/doctor`: checks the machine, the build and the pair of models, and says what to change."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import psutil
from rich.console import Console

from specserve.config import HandlerConfig, load_yaml, processor
from specserve.cores import usable_cores
from specserve.engine import kernels
from specserve.engine.invariance import probe
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel, build_description, check_same_vocabulary
from specserve.speculation.cost import Cost
from specserve.speculation.measure import measure, prefill, timed
from specserve.tools import cli, files
from specserve.tools.doctor_checks import (
    PROMPTS,
    Answer,
    answer_distributions,
    binned,
    first_difference,
    greedy_answer,
    greedy_with_drafts,
    is_wrong,
    largest_deviations,
    loaded,
    one_slot_engine,
)
from specserve.tools.models import Prepared, prepare

_MAX_ROWS = 64
# KV length at which passes are timed: about that of the prompts and answers.
KV_LEN = 64
_REPETITIONS = 3
# Rounds of each rule at each position, and positions of each answer, for the test of the distribution.
_TRIALS = 5000
_POSITIONS = 4
# Logits further apart than this are not reordered by a kernel's rounding.
_MAX_TIE = 1.0
# Speed ratio above measurement noise.
_FASTER = 1.05
# Vector instructions for products of 8-bit integers, fastest first.
_INSTRUCTIONS = ("amx_int8", "avx512_vnni", "avx_vnni", "avx512f", "avx2", "i8mm", "asimddp", "neon")


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
        topic: what was checked.
        sentence: the result, and what to do if it is not well.
        well: False if something should be done.
        facts: the numbers from which the sentence was written.
    """

    topic: str
    sentence: str
    well: bool = True
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    """Target and draft, each with a context of one slot, and the costs of their passes."""

    vocabulary: LlamaModel
    target: LlamaEngine
    draft: LlamaEngine
    costs: tuple[Cost, Cost]


def examine(handler: HandlerConfig, prepared: Prepared) -> Iterator[Finding]:
    """Yield all findings, those of the fast checks first.

    Raises:
        EnvironmentFailure: a model file cannot be read.
        ModelLoadError: a model cannot be loaded, or the draft does not fit the target.
    """
    threads = usable_cores(handler.cores, handler.threads).threads
    yield check_machine(handler.threads or threads, prepared)
    yield check_kernels(handler.kernels, threads)
    yield check_files(prepared)
    with ExitStack() as stack:
        model, target = stack.enter_context(loaded(prepared.target, threads, _MAX_ROWS))
        yield check_invariance(target)
        target_cost = Cost(measure(target))
        if prepared.draft is None:
            yield check_costs(target_cost, None)
            yield check_threads(model, threads)
        else:
            draft_model, draft = stack.enter_context(loaded(prepared.draft, threads, _MAX_ROWS))
            check_same_vocabulary(model, draft_model)
            yield Finding("pair", f"Target and draft have one vocabulary, of {model.size} tokens.")
            pair = Pair(model, target, draft, (target_cost, Cost(measure(draft))))
            yield check_costs(*pair.costs)
            yield check_threads(model, threads)
            prompts = [model.encode(prompt) for prompt in PROMPTS]
            answers = [(prompt, greedy_answer(target, model, prompt)) for prompt in prompts]
            target.truncate(0, 0)
            yield check_greedy(pair, answers)
            yield check_distributions(pair, answers)


def check_machine(threads: int, prepared: Prepared) -> Finding:
    """Cores, instructions and memory."""
    lines = processor().splitlines()
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    best = next((name for name in _INSTRUCTIONS if name in flags), "none known")
    needed = sum(path.stat().st_size for path in (prepared.target, prepared.draft) if path)
    free = psutil.virtual_memory().available
    cores = usable_cores().threads
    facts = {"cores": cores, "threads": threads, "instructions": best, "available_bytes": free}
    found = f"{cores} cores may be used, {threads} threads compute, with {best}"
    if threads > cores:
        return Finding("machine", f"{found}: set `threads` to {cores} or leave it out.", False, facts)
    if free < 1.5 * needed:
        memory = f"{files.megabytes(free)} of memory are free and the weights take {files.megabytes(needed)}"
        return Finding("machine", f"{found}; {memory}: free some, or choose smaller models.", False, facts)
    return Finding("machine", f"{found}; {files.megabytes(free)} of memory are free.", facts=facts)


def check_kernels(mode: kernels.Mode, threads: int) -> Finding:
    """Which kernels are in use, and their speed relative to llama.cpp's."""
    chosen = kernels.use(mode, threads=threads)
    facts: dict[str, Any] = {"llama.cpp": build_description(), **chosen._asdict()}
    if chosen.variant is None:
        # With `kernels: off` llama.cpp's kernels are what the operator asked for.
        return Finding("kernels", f"{chosen.sentence}.", mode == "off", facts)
    facts["times_stock"] = speeds = {name: round(kernels.speed(name, threads), 2) for name in chosen.formats}
    shown = ", ".join(f"{name} {ratio:.1f}" for name, ratio in speeds.items())
    return Finding(
        "kernels", f"{chosen.sentence}; products of 1, 4 and 8 rows, times llama.cpp's speed: {shown}.", facts=facts
    )


def check_files(prepared: Prepared) -> Finding:
    """Names and checksums of the models."""
    roles = {"target": prepared.target, "draft": prepared.draft}
    hashed = {role: files.hashed(path) for role, path in roles.items() if path}
    facts = {role: {"file": str(file.path), "sha256": file.sha256} for role, file in hashed.items()}
    shown = ", ".join(f"{role} {file.path.name} ({file.sha256[:12]})" for role, file in hashed.items())
    return Finding("models", f"{shown}.", facts=facts)


def check_invariance(target: LlamaEngine) -> Finding:
    """Whether logits are batch-invariant, so that greedy and seeded answers repeat."""
    invariance = probe(target, thorough=True)
    facts = invariance._asdict()
    if invariance.single_sequence:
        sentence = "The target gives the same logits for any number of rows: greedy and seeded answers repeat exactly."
    else:
        sentence = (
            f"The target's logits moved by {invariance.largest:.2g} with the number of rows in a short trial, "
            "so near-ties may turn."
        )
    return Finding("repeating", sentence, facts=facts)


def check_costs(target: Cost, draft: Cost | None) -> Finding:
    """Cost of passes of several rows, and of the draft's relative to the target's."""
    one = target.seconds(1, KV_LEN)
    curve = {rows: target.seconds(rows, KV_LEN) / one for rows in target.table.rows}
    facts: dict[str, Any] = {"target_ms": 1000 * one, "v": {rows: round(v, 2) for rows, v in curve.items()}}
    shown = ", ".join(f"{rows}: {curve[rows]:.1f}" for rows in (4, 8, 16) if rows in curve)
    sentence = f"A step of the target takes {1000 * one:.0f} ms; more rows at once cost, in steps: {shown}"
    if draft is None:
        return Finding("costs", f"{sentence}. There is no draft model.", facts=facts)
    share = draft.seconds(1, KV_LEN) / one
    facts["draft_share"] = share
    sentence += f". A step of the draft takes {share:.2f} of one of the target"
    if share > 0.5:
        return Finding("costs", f"{sentence}: choose a smaller draft, this one will hardly pay.", False, facts)
    return Finding("costs", f"{sentence}.", facts=facts)


def check_threads(model: LlamaModel, threads: int) -> Finding:
    """Whether another number of threads is faster."""
    seconds: dict[int, float] = {}
    for count in sorted({max(1, threads // 2), threads, usable_cores().threads}):
        engine = one_slot_engine(model, count, _MAX_ROWS)
        [(_, seconds[count])] = time_passes([engine])
        engine.close()
    best = min(seconds, key=seconds.__getitem__)
    shown = ", ".join(f"{count}: {1000 * took:.0f}" for count, took in seconds.items())
    sentence = f"Four rows take, in milliseconds by threads, {shown}"
    facts = {"milliseconds": {count: 1000 * took for count, took in seconds.items()}}
    if seconds[threads] > _FASTER * seconds[best]:
        return Finding("threads", f"{sentence}: set `threads: {best}`.", False, facts)
    return Finding("threads", f"{sentence}; {threads} is right.", facts=facts)


def check_greedy(pair: Pair, answers: list[Answer]) -> Finding:
    """Whether greedy answers are the same with and without drafts."""
    gaps = []
    for prompt, plain in answers:
        drafted = greedy_with_drafts(pair.target, pair.draft, pair.costs, prompt, len(plain))
        if difference := first_difference(pair.target, prompt, plain, drafted):
            gaps.append(difference.gap)
    facts = {"answers": len(answers), "differing": len(gaps), "gaps": gaps}
    if not gaps:
        sentence = f"{len(answers)} of {len(answers)} greedy answers are the same with and without drafts."
        return Finding("greedy", sentence, facts=facts)
    sentence = (
        f"{len(gaps)} of {len(answers)} greedy answers differ, where two logits are {max(gaps):.2g} apart at most"
    )
    if max(gaps) >= _MAX_TIE:
        return Finding("greedy", f"{sentence}, too far for rounding: please report this.", False, facts)
    return Finding("greedy", f"{sentence}: near-ties, which the number of rows decides (see repeating).", facts=facts)


def check_distributions(pair: Pair, answers: list[Answer]) -> Finding:
    """Whether the rules preserve the target's distribution on this pair's own distributions."""
    pairs = []
    for prompt, answer in answers:
        start, width = answer[: _POSITIONS + 1], pair.vocabulary.size
        p_rows = answer_distributions(pair.target, prompt, start, width)
        q_rows = answer_distributions(pair.draft, prompt, start, width)
        for i in range(min(_POSITIONS, len(p_rows) - 1)):
            p, q = binned(p_rows[i], q_rows[i])
            next_p, _ = binned(p_rows[i + 1], q_rows[i + 1])
            pairs.append(([p, next_p], [q]))
    deviations = largest_deviations(pairs, _TRIALS)
    facts = {"positions": len(pairs), "trials": _TRIALS, "standard_deviations": deviations}
    if wrong := [name for name, deviation in deviations.items() if is_wrong(deviation)]:
        sentence = f"The rules {', '.join(wrong)} do not keep the target's distribution: please report this."
        return Finding("sampling", sentence, False, facts)
    sentence = (
        f"{_TRIALS} rounds of every rule at each of {len(pairs)} positions of real answers kept the target's "
        f"distribution (largest deviation {max(deviations.values()):.1f} standard deviations)."
    )
    return Finding("sampling", sentence, facts=facts)


def time_passes(engines: Sequence[LlamaEngine]) -> list[tuple[float, float]]:
    """Return the median seconds of passes of one row and of four for each engine; the engines take turns."""
    for engine in engines:
        engine.truncate(0, 0)
        prefill(engine, [position % engine.width for position in range(KV_LEN)])
        timed(engine, KV_LEN, 4)
    turns = [[(timed(engine, KV_LEN, 1), timed(engine, KV_LEN, 4)) for engine in engines] for _ in range(_REPETITIONS)]
    for engine in engines:
        engine.truncate(0, 0)
    return [(float(one), float(four)) for one, four in np.median(turns, axis=0)]


def main(arguments: Sequence[str]) -> int:
    """Print all findings; return 1 if something should be done."""
    parser = cli.Parser("doctor")
    parser.add_config()
    parser.add_argument("--json", action="store_true", help="all findings with their numbers, as one JSON object")
    options = parser.parse_args(arguments)
    _, handler = load_yaml(options.config)
    findings = []
    # With --json, stdout is for the JSON object only.
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        prepared = prepare(options.config)
    with Console(stderr=True).status("looking; this takes a minute or two") as status:
        for finding in examine(handler, prepared):
            findings.append(finding)
            status.update(f"{finding.topic} is done")
            if not options.json:
                cli.say(f"{'ok  ' if finding.well else 'TODO'}  {finding.topic}: {finding.sentence}")
    if options.json:
        report = {"config": str(options.config), "findings": [asdict(finding) for finding in findings]}
        cli.say(json.dumps(report, indent=1))
    return 0 if all(finding.well for finding in findings) else 1
