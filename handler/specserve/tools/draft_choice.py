"""Measures which variant of a draft is faster for a target on this machine: as published or as pure Q4_0.

The target generates a few short answers. For every token of them it is recorded whether the draft's argmax is the
same, and the forward passes of both models are timed. The speed with a fixed gamma is then computed by replay.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from specserve.config import processor
from specserve.engine import kernels
from specserve.engine.base import Engine, FloatArray, Row, Vocabulary
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel, check_same_vocabulary
from specserve.errors import EngineError, ModelLoadError
from specserve.speculation.cost import Cost, CostTable, row_counts, typical
from specserve.speculation.passes import read, timed
from specserve.tools import cli, files, paths

PROMPTS = (
    "def quicksort(items: list[int]) -> list[int]:\n",
    '[\n  {"name": "Ada Lovelace", "born": 1815, "country": "England"},\n  {"name": "Alan Turing", ',
    "The lighthouse keeper climbed the stairs once more, since",
)
CONTEXT = 512
# Longest answer to each prompt, in tokens.
_TOKENS = 40
_MAX_ROWS = 64
# KV length at which passes are timed: about that of the prompts and answers.
KV_LEN = 64
_MAX_TARGET_LOGITS = 16
_MAX_DRAFT_LOGITS = 4
_REPETITIONS = 4
# Version of the measurement; results of another version are not reused.
_METHOD = 1
# Prompt and answer, as tokens.
Answer = tuple[list[int], list[int]]


class Observed(NamedTuple):
    """Agreement of a draft with the target's answers, one list of matches an answer, and the cost of its passes."""

    matches: list[list[bool]]
    cost: Cost


class Fastest(NamedTuple):
    """Highest speed over all gammas, and the gamma that reaches it."""

    tokens_per_second: float
    gamma: int


def replay_seconds(matches: Sequence[bool], gamma: int, draft: Cost, target: Cost) -> float:
    """Return the seconds that a greedy answer takes in rounds of `gamma` drafts.

    Args:
        matches: for each token, whether the draft's argmax is the target's.
        gamma: drafts a round; fewer at the end of the answer.
        draft: cost of the draft's passes; its first pass of a round has two rows if all drafts of the last round
            were accepted.
        target: cost of the target's passes.
    """
    spent, position, pending = 0.0, 0, 1
    while position < len(matches):
        drafts = min(gamma, len(matches) - position - 1)
        accepted = 0
        while accepted < drafts and matches[position + accepted]:
            accepted += 1
        if drafts:
            spent += draft.seconds(pending, KV_LEN) + (drafts - 1) * draft.seconds(1, KV_LEN)
        spent += target.seconds(drafts + 1, KV_LEN)
        pending = 2 if accepted == drafts else 1
        position += accepted + 1
    return spent


def fastest(observed: Observed, target: Cost, max_gamma: int) -> Fastest:
    """Return the speed of a draft with its best gamma, from 1 to `max_gamma`."""
    tokens = sum(map(len, observed.matches))
    spent = {
        gamma: sum(replay_seconds(matches, gamma, observed.cost, target) for matches in observed.matches)
        for gamma in range(1, max_gamma + 1)
    }
    gamma = min(spent, key=spent.__getitem__)
    return Fastest(tokens / spent[gamma], gamma)


def fastest_draft(target: Path, published: Path, pure: Path, *, threads: int, max_gamma: int) -> Path:
    """Return the faster of two variants of a draft and print the speeds; the result is cached.

    Args:
        target: the target's file.
        published: the draft as it was downloaded.
        pure: the draft as pure Q4_0.
        threads: compute threads.
        max_gamma: the operator's cap of drafts a round.

    Raises:
        EnvironmentFailure: a file cannot be read.
        ModelLoadError: a file cannot be loaded, or the draft does not fit the target.
    """
    variants = {"as published": published, "as pure Q4_0": pure}
    max_gamma = min(max_gamma, _MAX_TARGET_LOGITS - 1)
    cache = _cache_file(target, published)
    suffix = " (Measured before.)"
    with files.locked(cache.with_suffix(".lock"), f"the variant of {published.name} is being chosen"):
        key = {
            "files": [[path.name, files.hashed(path).sha256] for path in (target, *variants.values())],
            "max_gamma": max_gamma,
            "threads": threads,
            "processor": processor(),
            "llama_cpp_python": version("llama-cpp-python"),
            "kernels": kernels.identity(),
            "method": _METHOD,
        }
        result = files.read_json(cache)
        if result.get("facts") != key or result.get("chosen") not in variants:
            suffix = ""
            result = {"facts": key, **_compare(target, variants, threads, max_gamma)}
            files.write_json(cache, result)
    cli.say(f"{result['said']}{suffix}")
    return variants[result["chosen"]]


def _cache_file(target: Path, draft: Path) -> Path:
    pair = b"\0".join(os.fsencode(path.resolve()) for path in (target, draft))
    return paths.models_directory() / f".{draft.name}.best-{hashlib.sha256(pair).hexdigest()[:16]}.json"


def _compare(target: Path, variants: Mapping[str, Path], threads: int, max_gamma: int) -> dict[str, Any]:
    """Return the fastest variant, the sentence to print, and the measured numbers."""
    cost, observed = _observe(target, variants, threads)
    speeds = {name: fastest(one, cost, max_gamma) for name, one in observed.items()}
    chosen = max(speeds, key=speeds.__getitem__)
    plain = 1 / cost.seconds(1, KV_LEN)
    others = "".join(f"{name} {speed.tokens_per_second:.1f}, " for name, speed in speeds.items() if name != chosen)
    slower = plain > speeds[chosen].tokens_per_second
    return {
        "chosen": chosen,
        "said": (
            f"The draft is {variants[chosen].name}: {speeds[chosen].tokens_per_second:.1f} tokens/s with this target, "
            f"{others}without a draft {plain:.1f}."
            + (" With `mode: auto` a draft that does not pay is rarely used." if slower else "")
        ),
        "without_a_draft": plain,
        "variants": {
            name: {**speed._asdict(), "match_rate": float(np.mean(np.concatenate(observed[name].matches)))}
            for name, speed in speeds.items()
        },
    }


def _observe(target: Path, variants: Mapping[str, Path], threads: int) -> tuple[Cost, dict[str, Observed]]:
    """Load the target and the variants one after the other; return the target's cost and what was observed."""
    status = Console(stderr=True).status(f"measuring which variant of the draft suits {target.name}")
    with status, loaded(target, threads, _MAX_TARGET_LOGITS) as (model, engine):
        cost = _measured_cost(engine)
        prompts = [model.encode(prompt) for prompt in PROMPTS]
        answers = [(prompt, greedy_answer(engine, model, prompt)) for prompt in prompts]
        return cost, {name: _observe_draft(path, model, answers, threads) for name, path in variants.items()}


def _observe_draft(
    path: Path, target: LlamaModel, answers: list[tuple[list[int], list[int]]], threads: int
) -> Observed:
    with loaded(path, threads, _MAX_DRAFT_LOGITS) as (model, engine):
        check_same_vocabulary(target, model)
        matches = [argmax_matches(engine, *answer, target.size) for answer in answers]
        return Observed(matches, _measured_cost(engine))


def one_slot_engine(model: LlamaModel, threads: int, max_logits: int) -> LlamaEngine:
    """Return a context for one short sequence."""
    return LlamaEngine(
        model, n_slots=1, context_length=CONTEXT, threads=threads, max_rows=_MAX_ROWS, max_logits=max_logits
    )


@contextlib.contextmanager
def loaded(path: Path, threads: int, max_logits: int) -> Iterator[tuple[LlamaModel, LlamaEngine]]:
    """Load a model and a context of it, and close both at the end.

    Raises:
        ModelLoadError: the model cannot be loaded, or a forward pass failed.
    """
    with contextlib.ExitStack() as stack:
        model = LlamaModel(path)
        stack.callback(model.close)
        engine = one_slot_engine(model, threads, max_logits)
        stack.callback(engine.close)
        try:
            yield model, engine
        except EngineError as error:
            raise ModelLoadError(f"{path}: cannot be measured: {error}") from error


def _measured_cost(engine: Engine) -> Cost:
    """Return the cost of passes at one KV length: coarser than a server's measurement, but faster."""
    counts = row_counts(min(engine.max_rows, engine.max_logits))
    engine.truncate(0, 0)
    read(engine, [position % engine.width for position in range(KV_LEN)])
    timed(engine, KV_LEN, counts[-1])
    # All numbers of rows take turns, so that a disturbance of the machine affects all of them.
    turns = [[timed(engine, KV_LEN, count) for count in counts] for _ in range(_REPETITIONS)]
    took = tuple(typical(list(times)) for times in zip(*turns, strict=True))
    return Cost(CostTable(counts, (KV_LEN, 2 * KV_LEN), (took, took)), most=counts[-1])


def greedy_answer(engine: Engine, vocabulary: Vocabulary, prompt: list[int]) -> list[int]:
    """Return the model's greedy answer, at most a few dozen tokens."""
    tokens = list(prompt)
    engine.truncate(0, 0)
    read(engine, prompt[:-1])
    while len(tokens) < len(prompt) + _TOKENS:
        [logits] = engine.forward([Row(tokens[-1], 0, len(tokens) - 1, wants_logits=True)])
        tokens.append(int(np.argmax(logits)))
        if vocabulary.is_end_token(tokens[-1]):
            break
    return tokens[len(prompt) :]


def argmax_matches(engine: Engine, prompt: list[int], answer: list[int], width: int) -> list[bool]:
    """For each token of an answer, whether it is the model's argmax; `width` is the size of the target's vocabulary."""
    rows = answer_logits(engine, prompt, answer)
    return [int(np.argmax(row[:width])) == token for row, token in zip(rows, answer, strict=True)]


def answer_logits(engine: Engine, prompt: list[int], answer: list[int]) -> Iterator[FloatArray]:
    """Yield the logits that precede each token of an answer; each row is overwritten by a later pass."""
    tokens = [*prompt, *answer]
    step = min(engine.max_rows, engine.max_logits)
    engine.truncate(0, 0)
    read(engine, prompt[:-1])
    for first in range(len(prompt) - 1, len(tokens) - 1, step):
        positions = range(first, min(first + step, len(tokens) - 1))
        yield from engine.forward([Row(tokens[position], 0, position, wants_logits=True) for position in positions])
