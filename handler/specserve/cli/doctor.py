"""`scripts/doctor`: checks the machine, the installation and the pair of models, and says what to change."""

import json
import logging
import platform
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import chain
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

from rich.console import Console

import specserve
from specserve.cli import torchserve_process
from specserve.cli.archive import prepared_handler
from specserve.config import HandlerConfig
from specserve.core.loading import load_models
from specserve.engine import kernel_trial, kernels
from specserve.engine.llama_model import build_description
from specserve.errors import ModelLoadError
from specserve.machine import usable_cores
from specserve.speculation.costs import PassCosts

# Warnings of a start that are told.
_MAX_WARNINGS = 100
# Tokens in the KV cache of the passes whose costs are shown.
KV_LEN = 64
# Share of a target's step above which a draft's step hardly pays.
_MAX_DRAFT_SHARE = 0.5
# What a TorchServe with other models needs in its config.properties, and why; numbers are the least.
_SETTINGS = {
    "metrics_mode": ("prometheus", "Prometheus gets no metrics"),
    "model_metrics_auto_detect": ("true", "Prometheus gets no metrics of ours"),
    "max_response_size": ("268435456", "log-probabilities of several answers end the worker"),
    "enable_model_api": ("true", "models cannot be registered while it runs"),
    "token_expiration_min": ("525600", "keys end after an hour"),
}
_PACKAGES = ("llama-cpp-python", "llguidance", "numpy", "torchserve")


@dataclass(frozen=True)
class Finding:
    topic: str
    sentence: str  # the result, and what to do if it is not well
    well: bool = True  # False if something should be done
    facts: dict[str, Any] = field(default_factory=dict)  # the numbers from which the sentence was written


def examine(handler: HandlerConfig) -> Iterator[Finding]:
    """Yield all findings, those of the fast checks first."""
    threads = usable_cores(handler.cores, handler.threads).threads
    yield check_cores(handler.threads or threads)
    yield check_software()
    yield check_kernels(handler.kernels, threads)
    yield from check_start(handler)


def check_start(handler: HandlerConfig) -> Iterator[Finding]:
    """Load the models as a worker does, and tell what it warns of; its errors are what should be mended."""
    logger, warned = logging.getLogger("specserve"), BufferingHandler(_MAX_WARNINGS)
    warned.setLevel(logging.WARNING)
    logger.addHandler(warned)
    try:
        models = load_models(handler)
    except ModelLoadError as error:
        yield Finding("start", str(error), well=False)
        return
    finally:
        logger.removeHandler(warned)
    sentences = {record.getMessage().removeprefix("specserve: "): record.levelno for record in warned.buffer}
    sentences.pop(models.left.sentence, None)  # is told below
    for sentence, level in sentences.items():
        yield Finding("start", sentence, level < logging.ERROR)
    taken, cache_tokens = models.memory_bytes, models.config.cache_tokens
    sentence = f"A worker takes {taken / 2**20:,.0f} MiB at most, with a KV cache of {cache_tokens} tokens."
    yield Finding("memory", sentence, facts={"bytes": taken, "cache_tokens": cache_tokens})
    yield Finding("repeating", f"{models.left.sentence}.")
    yield check_costs(models.drafters.controller.target_cost, models.drafters.controller.draft_cost)


def check_cores(threads: int) -> Finding:
    """Compare the threads with the cores."""
    cores = usable_cores().threads
    advice = f": set `threads` to {cores} or leave it out" * (threads > cores)
    sentence = f"{cores} cores may be used, {threads} threads compute{advice}."
    return Finding("cores", sentence, not advice, {"cores": cores, "threads": threads})


def check_torchserve(file: Path) -> Finding:
    """Tell which settings an operator's TorchServe lacks."""
    pairs = (line.partition("=") for line in file.read_text(encoding="utf-8").splitlines())
    given = {key.strip(): value.strip() for key, _, value in pairs}

    def suffices(key: str, wanted: str) -> bool:
        value = given.get(key, "")
        return value == wanted or (wanted.isdecimal() and value.isdecimal() and int(value) >= int(wanted))

    missing = {key: value for key, value in _SETTINGS.items() if not suffices(key, value[0])}
    lines = "; ".join(f"{key}={wanted} (otherwise {why})" for key, (wanted, why) in missing.items())
    sentence = f"{file}: add {lines}." if missing else f"{file} has all that specserve needs."
    return Finding("torchserve", sentence, not missing, {"missing": sorted(missing)})


def check_software() -> Finding:
    """Tell the versions that are installed, and whether the Java that TorchServe needs runs."""
    facts: dict[str, Any] = {"specserve": specserve.__version__, "python": platform.python_version()}
    facts |= {name: version(name) for name in _PACKAGES}
    shown = ", ".join(f"{name} {installed}" for name, installed in facts.items())
    java = Path(torchserve_process.java_home()) / "bin" / "java"
    try:
        subprocess.run([java, "-version"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        advice = f"{java} does not run: set JAVA_HOME to a Java of 17 or later, or unset it"
        return Finding("software", f"{shown}; {advice}.", False, facts)
    return Finding("software", f"{shown}, Java in {java}.", facts=facts)


def check_kernels(mode: kernels.Mode, threads: int) -> Finding:
    """Tell which kernels are in use, and their speed relative to llama.cpp's."""
    chosen = kernels.use(mode)
    facts: dict[str, Any] = {"llama.cpp": build_description(), **chosen._asdict()}
    if chosen.variant is None:
        # With `kernels: off` llama.cpp's kernels are what the operator asked for.
        return Finding("kernels", f"{chosen.sentence}.", mode == "off", facts)
    facts["times_stock"] = speeds = {name: round(kernel_trial.speed(name, threads), 2) for name in chosen.formats}
    shown = ", ".join(f"{name} {ratio:.1f}" for name, ratio in speeds.items())
    sentence = f"{chosen.sentence}; products of 1, 4 and 8 rows, times llama.cpp's speed: {shown}."
    return Finding("kernels", sentence, facts=facts)


def check_costs(target: PassCosts, draft: PassCosts | None) -> Finding:
    """Compare passes of several rows, and the draft's passes, with a step of the target."""
    step = target.seconds(1, KV_LEN)
    curve = {rows: round(target.seconds(rows, KV_LEN) / step, 2) for rows in target.table.rows}
    facts: dict[str, Any] = {"target_ms": 1000 * step, "v": curve}
    shown = ", ".join(f"{rows}: {curve[rows]:.1f}" for rows in (4, 8, 16) if rows in curve)
    sentence = f"A step of the target takes {1000 * step:.0f} ms; more rows at once cost, in steps: {shown}"
    if draft is None:
        return Finding("costs", f"{sentence}. There is no draft model.", facts=facts)
    share = draft.seconds(1, KV_LEN) / step
    facts["draft_share"] = share
    sentence += f". A step of the draft takes {share:.2f} of one of the target"
    advice = ": choose a smaller draft, this one will hardly pay" * (share > _MAX_DRAFT_SHARE)
    return Finding("costs", f"{sentence}{advice}.", not advice, facts)


def run(options: Namespace) -> int:
    findings = []
    # With --json, stdout is for the JSON object only.
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        handler = prepared_handler(options.config)
    with Console(stderr=True).status("looking; this takes a minute or two"):
        of_torchserve = [check_torchserve(options.torchserve)] if options.torchserve else []
        for finding in chain(of_torchserve, examine(handler)):
            findings.append(finding)
            if not options.json:
                print(f"{'ok  ' if finding.well else 'TODO'}  {finding.topic}: {finding.sentence}", flush=True)
    if options.json:
        models = {str(model.path): model.sha256 for model in (handler.target, handler.draft) if model}
        shown = [asdict(finding) for finding in findings]
        print(json.dumps({"config": str(options.config), "models": models, "findings": shown}, indent=1), flush=True)
    return 0 if all(finding.well for finding in findings) else 1
