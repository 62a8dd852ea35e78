"""`scripts/doctor`: checks the machine, the installation and the pair of models, and says what to change."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console

import specserve
from specserve.cli import cli, files, torchserve_process
from specserve.cli.models import Prepared, prepare
from specserve.cli.torchserve_process import State
from specserve.config import HandlerConfig, load_yaml, processor
from specserve.engine import kernel_trial, kernels
from specserve.engine.invariance import Invariance, probe
from specserve.engine.kv_cache import KVCache
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel, build_description, check_same_vocabulary
from specserve.errors import EngineError, EnvironmentFailure, ModelLoadError
from specserve.machine import usable_cores
from specserve.sequence import SamplingParams, SpeculationParams
from specserve.sequence import Sequence as TokenSequence
from specserve.speculation.costs import PassCosts
from specserve.speculation.draft_model import DraftModel
from specserve.speculation.drafters import Drafters
from specserve.speculation.measure import measure, prefill, timed
from specserve.speculation.policy import Controller
from specserve.speculation.round import run_round
from specserve.speculation.step import Step

# Tokens of a context, and rows of a pass.
_CONTEXT_LENGTH, _MAX_ROWS = 512, 64
# Tokens in the KV cache when passes are timed, about as many as the prompt and the answer below have; and timings.
KV_LEN, _TIMINGS = 64, 3
# The greedy answer: its prompt, its length in tokens, and draft tokens a round.
_PROMPT, _ANSWER_TOKENS, _GAMMA = "def quicksort(items: list[int]) -> list[int]:\n", 40, 3
# Speed ratio above measurement noise.
_FASTER = 1.05
# Free memory that the weights need, as a multiple of their files.
_MEMORY_FACTOR = 1.5
# Share of a target's step above which a draft's step hardly pays.
_MAX_DRAFT_SHARE = 0.5
# Vector instructions for products of 8-bit integers, fastest first.
_INSTRUCTIONS = ("amx_int8", "avx512_vnni", "avx_vnni", "avx512f", "avx2", "i8mm", "asimddp", "neon")
_PACKAGES = ("llama-cpp-python", "llguidance", "numpy", "torchserve")


@dataclass(frozen=True)
class Finding:
    """What a check has found.

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


def examine(handler: HandlerConfig, prepared: Prepared, state: State) -> Iterator[Finding]:
    """Yield all findings, those of the fast checks first.

    Raises:
        EnvironmentFailure: a model file cannot be read.
        ModelLoadError: a model cannot be loaded or measured, or the draft does not fit the target.
    """
    threads = usable_cores(handler.cores, handler.threads).threads
    yield check_machine(handler.threads or threads, prepared)
    yield check_software()
    yield check_port(state)
    yield check_kernels(handler.kernels, threads)
    yield check_files(prepared)
    with ExitStack() as stack:
        model, target = stack.enter_context(_loaded(prepared.target, threads))
        invariance = probe(target)
        yield Finding("repeating", f"{invariance.sentence}.", facts=invariance._asdict())
        target_cost = PassCosts(measure(target))
        if prepared.draft is None:
            yield check_costs(target_cost, None)
            yield check_threads(model, threads)
            return
        draft_model, draft = stack.enter_context(_loaded(prepared.draft, threads))
        check_same_vocabulary(model, draft_model)
        yield Finding("pair", f"Target and draft have one vocabulary, of {model.size} tokens.")
        draft_cost = PassCosts(measure(draft))
        yield check_costs(target_cost, draft_cost)
        yield check_threads(model, threads)
        drafting = DraftModel(
            KVCache(draft),
            draft_cost,
            window=_CONTEXT_LENGTH // 2,
            max_rows=_MAX_ROWS,
            vocabulary=target.width,
            context_length=_CONTEXT_LENGTH,
        )
        controller = Controller(target_cost, draft_cost)
        drafters = Drafters(controller, model=drafting, vocabulary=target.width, end_tokens=())
        cache, prompt = KVCache(target), model.encode(_PROMPT)
        plain, drafted = (greedy_answer(cache, drafters, prompt, gamma) for gamma in (0, _GAMMA))
        yield check_greedy(plain, drafted, invariance)


def check_machine(threads: int, prepared: Prepared) -> Finding:
    """Compare the threads with the cores, and the weights with the free memory."""
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
    if free < _MEMORY_FACTOR * needed:
        memory = f"{files.megabytes(free)} of memory are free and the weights take {files.megabytes(needed)}"
        return Finding("machine", f"{found}; {memory}: free some, or choose smaller models.", False, facts)
    return Finding("machine", f"{found}; {files.megabytes(free)} of memory are free.", facts=facts)


def check_software() -> Finding:
    """Tell the versions that are installed, and which Java TorchServe would run on."""
    home = torchserve_process.java_home()
    java = str(shutil.which("java") if home is None else Path(home) / "bin" / "java")
    java_version = torchserve_process.java_version(java)
    facts: dict[str, Any] = {"specserve": specserve.__version__, "python": platform.python_version()}
    facts |= {name: version(name) for name in _PACKAGES}
    shown = ", ".join(f"{name} {installed}" for name, installed in facts.items())
    facts |= {"java": java, "java_version": java_version}
    if java_version is None:
        advice = f"{java} does not run: set JAVA_HOME to a Java of 17 or later"
        return Finding("software", f"{shown}; {advice}.", False, facts)
    return Finding("software", f"{shown}, Java {java_version} ({java}).", facts=facts)


def check_port(state: State) -> Finding:
    """Tell whether a server could start, runs, or finds its ports taken."""
    first, *_, last = state.ports
    if torchserve_process.running(state):
        return Finding("port", f"A server runs on ports {first} to {last}; it slows what is measured below.")
    try:
        torchserve_process.require_free(state.ports)
    except EnvironmentFailure as taken:
        return Finding("port", str(taken), False)
    return Finding("port", f"Ports {first} to {last} are free.")


def check_kernels(mode: kernels.Mode, threads: int) -> Finding:
    """Tell which kernels are in use, and their speed relative to llama.cpp's."""
    chosen = kernels.use(mode)
    facts: dict[str, Any] = {"llama.cpp": build_description(), **chosen._asdict()}
    if chosen.variant is None:
        # With `kernels: off` llama.cpp's kernels are what the operator asked for.
        return Finding("kernels", f"{chosen.sentence}.", mode == "off", facts)
    facts["times_stock"] = speeds = {name: round(kernel_trial.speed(name, threads), 2) for name in chosen.formats}
    shown = ", ".join(f"{name} {ratio:.1f}" for name, ratio in speeds.items())
    return Finding(
        "kernels", f"{chosen.sentence}; products of 1, 4 and 8 rows, times llama.cpp's speed: {shown}.", facts=facts
    )


def check_files(prepared: Prepared) -> Finding:
    """Tell the names and checksums of the models."""
    roles = {"target": prepared.target, "draft": prepared.draft}
    hashed = {role: files.hashed(path) for role, path in roles.items() if path}
    facts = {role: {"file": str(file.path), "sha256": file.sha256} for role, file in hashed.items()}
    shown = ", ".join(f"{role} {file.path.name} ({file.sha256[:12]})" for role, file in hashed.items())
    return Finding("models", f"{shown}.", facts=facts)


def check_costs(target: PassCosts, draft: PassCosts | None) -> Finding:
    """Compare passes of several rows, and the draft's passes, with a step of the target."""
    step = target.seconds(1, KV_LEN)
    curve = {rows: target.seconds(rows, KV_LEN) / step for rows in target.table.rows}
    facts: dict[str, Any] = {"target_ms": 1000 * step, "v": {rows: round(v, 2) for rows, v in curve.items()}}
    shown = ", ".join(f"{rows}: {curve[rows]:.1f}" for rows in (4, 8, 16) if rows in curve)
    sentence = f"A step of the target takes {1000 * step:.0f} ms; more rows at once cost, in steps: {shown}"
    if draft is None:
        return Finding("costs", f"{sentence}. There is no draft model.", facts=facts)
    share = draft.seconds(1, KV_LEN) / step
    facts["draft_share"] = share
    sentence += f". A step of the draft takes {share:.2f} of one of the target"
    if share > _MAX_DRAFT_SHARE:
        return Finding("costs", f"{sentence}: choose a smaller draft, this one will hardly pay.", False, facts)
    return Finding("costs", f"{sentence}.", facts=facts)


def check_threads(model: LlamaModel, threads: int) -> Finding:
    """Compare the speed of other numbers of threads."""
    seconds = {}
    for count in sorted({max(1, threads // 2), threads, usable_cores().threads}):
        with closing(one_slot_engine(model, count)) as engine:
            seconds[count] = pass_seconds(engine)
    best = min(seconds, key=seconds.__getitem__)
    shown = ", ".join(f"{count}: {1000 * took:.0f}" for count, took in seconds.items())
    sentence = f"Four rows take, in milliseconds by threads, {shown}"
    facts = {"milliseconds": {count: 1000 * took for count, took in seconds.items()}}
    if seconds[threads] > _FASTER * seconds[best]:
        return Finding("threads", f"{sentence}: set `threads: {best}`.", False, facts)
    return Finding("threads", f"{sentence}; {threads} is right.", facts=facts)


def pass_seconds(engine: LlamaEngine) -> float:
    """Return the median seconds of a pass of four rows."""
    prefill(engine, [position % engine.width for position in range(KV_LEN)])
    timed(engine, KV_LEN, 4)
    return median(timed(engine, KV_LEN, 4) for _ in range(_TIMINGS))


def check_greedy(plain: list[int], drafted: list[int], invariance: Invariance) -> Finding:
    """Compare a greedy answer that was decoded without drafts to the same with drafts."""
    position = next((i for i, (ours, theirs) in enumerate(zip(plain, drafted, strict=True)) if ours != theirs), None)
    facts = {"tokens": len(plain), "first_difference": position}
    if position is None:
        sentence = f"A greedy answer of {len(plain)} tokens is the same with and without drafts."
        return Finding("greedy", sentence, facts=facts)
    sentence = f"A greedy answer with drafts differs from that without at its token {position + 1}"
    if invariance.alone == 0:
        return Finding("greedy", f"{sentence}, though logits repeat: please report this.", False, facts)
    return Finding("greedy", f"{sentence}: a near-tie, which the number of rows decides (see repeating).", facts=facts)


def greedy_answer(target: KVCache, drafters: Drafters, prompt: list[int], gamma: int) -> list[int]:
    """Return the first tokens of the target's greedy answer, decoded in rounds of `gamma` drafts."""
    params = SamplingParams(temperature=0), SpeculationParams(gamma, "token")
    sequence = TokenSequence(prompt, *params, max_tokens=_ANSWER_TOKENS)
    sequence.slot = 0
    target.truncate(0, 0)
    while sequence.remaining > 0:
        rows = min(len(sequence.tokens) - target.end(0), target.engine.max_rows - gamma)
        max_drafts = min(gamma, sequence.remaining - 1) if sequence.generated else 0
        run_round(target, drafters, [Step(sequence, target.end(0), rows, max_drafts)])
    return sequence.answer


@contextmanager
def _loaded(path: Path, threads: int) -> Iterator[tuple[LlamaModel, LlamaEngine]]:
    """Load a model and a context of it, and close both at the end.

    Raises:
        ModelLoadError: the model cannot be loaded, or a forward pass failed.
    """
    with closing(LlamaModel(path)) as model, closing(one_slot_engine(model, threads)) as engine:
        try:
            yield model, engine
        except EngineError as error:
            raise ModelLoadError(f"{path}: cannot be measured: {error}") from error


def one_slot_engine(model: LlamaModel, threads: int) -> LlamaEngine:
    """Return a context for one short sequence."""
    return LlamaEngine(
        model, n_slots=1, context_length=_CONTEXT_LENGTH, threads=threads, max_rows=_MAX_ROWS, max_logits=_MAX_ROWS
    )


def main(arguments: Sequence[str]) -> int:
    """Print all findings; return 1 if something should be done."""
    parser = cli.Parser("doctor")
    parser.add_config()
    parser.add_argument("--port", type=int, default=8080, help="the first of the server's five ports (default: 8080)")
    parser.add_argument("--json", action="store_true", help="all findings with their numbers, as one JSON object")
    options = parser.parse_args(arguments)
    state = State.of(options.port)
    _, handler = load_yaml(options.config)
    findings = []
    # With --json, stdout is for the JSON object only.
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        prepared = prepare(options.config)
    with Console(stderr=True).status("looking; this takes a minute or two") as status:
        for finding in examine(handler, prepared, state):
            findings.append(finding)
            status.update(f"{finding.topic} is done")
            if not options.json:
                cli.say(f"{'ok  ' if finding.well else 'TODO'}  {finding.topic}: {finding.sentence}")
    if options.json:
        report = {"config": str(options.config), "findings": [asdict(finding) for finding in findings]}
        cli.say(json.dumps(report, indent=1))
    return 0 if all(finding.well for finding in findings) else 1
