"""Chooses the form of the draft that gives the most tokens a second with this target on this machine.

The target writes a few short texts; every form of the draft reads along and is timed. What a fixed number of drafts
a round would have given is then arithmetic. Forms differ in the formats of their weights; a draft with fewer layers
is a form too, and untried.
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
_TOKENS = 40
CONTEXT = 512
_CHUNK = 64
# Where the costs are taken: the prompts and answers are about this long.
_CELLS = 64
_MOST_ROWS = 16
_DRAFT_ROWS = 4
_TURNS = 4
# Goes up when something is measured or reckoned in another way.
_METHOD = 1


class Observed(NamedTuple):
    """What one form of the draft did along the target's texts: its hits in each of them, and its passes' cost."""

    hits: list[list[bool]]
    cost: Cost


class Fastest(NamedTuple):
    """Tokens a second with the number of drafts a round that gives the most."""

    tokens_per_second: float
    gamma: int


def seconds(hits: Sequence[bool], gamma: int, draft: Cost, target: Cost) -> float:
    """How long the rest of a text takes in rounds of `gamma` drafts, of which the run of hits is accepted.

    Args:
        hits: of each token, whether the draft would have written it too.
        gamma: drafts a round; fewer where the text ends sooner.
        draft: cost of the draft's passes; it has two tokens to read where all of its drafts were accepted.
        target: cost of the target's passes.
    """
    spent, place, unread = 0.0, 0, 1
    while place < len(hits):
        drafts = min(gamma, len(hits) - place - 1)
        accepted = 0
        while accepted < drafts and hits[place + accepted]:
            accepted += 1
        if drafts:
            spent += draft.seconds(unread, _CELLS) + (drafts - 1) * draft.seconds(1, _CELLS)
        spent += target.seconds(drafts + 1, _CELLS)
        unread = 2 if accepted == drafts else 1
        place += accepted + 1
    return spent


def fastest(observed: Observed, target: Cost, most: int) -> Fastest:
    """The speed of a form of the draft with the best number of drafts a round, from 1 to `most`."""
    tokens = sum(map(len, observed.hits))
    spent = {
        gamma: sum(seconds(hits, gamma, observed.cost, target) for hits in observed.hits)
        for gamma in range(1, most + 1)
    }
    gamma = min(spent, key=spent.__getitem__)
    return Fastest(tokens / spent[gamma], gamma)


def best_draft(target: Path, published: Path, pure: Path, *, threads: int, max_gamma: int) -> Path:
    """Return the faster of two forms of a draft, measured the first time and remembered; says which it is.

    Args:
        target: the file that will be drafted for.
        published: the draft as it was fetched.
        pure: the same as pure Q4_0.
        threads: compute threads.
        max_gamma: the most drafts of a round.

    Raises:
        EnvironmentFailure: a file cannot be read.
        ModelLoadError: a file cannot be loaded, or the draft does not fit the target.
    """
    models = paths.models_directory()
    forms = {"as published": published, "as pure Q4_0": pure}
    most = min(max_gamma, _MOST_ROWS - 1)
    note = _note(target, published, models)
    before = " (Measured before.)"
    with files.locked(note.with_suffix(".lock"), f"the form of {published.name} is being chosen"):
        facts = {
            "files": [[path.name, files.checked(path, models).sha256] for path in (target, *forms.values())],
            "max_gamma": most,
            "threads": threads,
            "processor": processor(),
            "llama_cpp_python": version("llama-cpp-python"),
            "kernels": kernels.identity(),
            "method": _METHOD,
        }
        known = files.read_json(note)
        if known.get("facts") != facts or known.get("chosen") not in forms:
            before = ""
            known = {"facts": facts, **_measured(target, forms, threads, most)}
            files.write_json(note, known)
    cli.say(f"{known['said']}{before}")
    return forms[known["chosen"]]


def _note(target: Path, draft: Path, models: Path) -> Path:
    pair = b"\0".join(os.fsencode(path.resolve()) for path in (target, draft))
    return models / f".{draft.name}.best-{hashlib.sha256(pair).hexdigest()[:16]}.json"


def _measured(target: Path, forms: Mapping[str, Path], threads: int, most: int) -> dict[str, Any]:
    """Which form is the fastest, what is said about it, and the numbers behind it."""
    cost, observed = _observe(target, forms, threads)
    speeds = {form: fastest(seen, cost, most) for form, seen in observed.items()}
    chosen = max(speeds, key=speeds.__getitem__)
    plain = 1 / cost.seconds(1, _CELLS)
    others = "".join(f"{form} {speed.tokens_per_second:.1f}, " for form, speed in speeds.items() if form != chosen)
    seldom = plain > speeds[chosen].tokens_per_second
    return {
        "chosen": chosen,
        "said": (
            f"The draft is {forms[chosen].name}: {speeds[chosen].tokens_per_second:.1f} tokens/s with this target, "
            f"{others}without a draft {plain:.1f}."
            + (" Drafts that do not pay, as most here, are not made." if seldom else "")
        ),
        "without_a_draft": plain,
        "forms": {
            form: {
                **speed._asdict(),
                "hit_rate": float(np.mean(np.concatenate(observed[form].hits))),
                "step_seconds": observed[form].cost.seconds(1, _CELLS),
            }
            for form, speed in speeds.items()
        },
    }


def _observe(target: Path, forms: Mapping[str, Path], threads: int) -> tuple[Cost, dict[str, Observed]]:
    """Load the target and one form of the draft after the other, and let them write and read."""
    status = Console(stderr=True).status(f"measuring which form of the draft suits {target.name}")
    with status, loaded(target, threads, _MOST_ROWS) as (model, engine):
        cost = _cost(engine)
        prompts = [model.encode(prompt) for prompt in PROMPTS]
        texts = [(prompt, write(engine, model, prompt)) for prompt in prompts]
        return cost, {form: _observe_draft(path, model, texts, threads) for form, path in forms.items()}


def _observe_draft(path: Path, target: LlamaModel, texts: list[tuple[list[int], list[int]]], threads: int) -> Observed:
    with loaded(path, threads, _DRAFT_ROWS) as (model, engine):
        check_same_vocabulary(target, model)
        return Observed([read_along(engine, *text, target.size) for text in texts], _cost(engine))


def one_slot(model: LlamaModel, threads: int, max_logits: int) -> LlamaEngine:
    """A context for one short text."""
    return LlamaEngine(
        model, n_slots=1, context_length=CONTEXT, threads=threads, max_rows=_CHUNK, max_logits=max_logits
    )


@contextlib.contextmanager
def loaded(path: Path, threads: int, max_logits: int) -> Iterator[tuple[LlamaModel, LlamaEngine]]:
    """A model and a context of it, given back in the end; a pass that fails inside is the model's fault."""
    with contextlib.ExitStack() as stack:
        model = LlamaModel(path)
        stack.callback(model.close)
        engine = one_slot(model, threads, max_logits)
        stack.callback(engine.close)
        try:
            yield model, engine
        except EngineError as error:
            raise ModelLoadError(f"{path}: cannot be measured: {error}") from error


def _cost(engine: Engine) -> Cost:
    """What passes cost behind a text of the usual length; rougher than what a server measures, and sooner."""
    counts = row_counts(min(engine.max_rows, engine.max_logits))
    engine.truncate(0, 0)
    read(engine, [place % engine.width for place in range(_CELLS)])
    timed(engine, _CELLS, counts[-1])
    # The repetitions of all numbers of rows take turns, so that a slow moment meets each once.
    turns = [[timed(engine, _CELLS, count) for count in counts] for _ in range(_TURNS)]
    took = tuple(typical(list(times)) for times in zip(*turns, strict=True))
    return Cost(CostTable(counts, (_CELLS, 2 * _CELLS), (took, took)), most=counts[-1])


def write(engine: Engine, vocabulary: Vocabulary, prompt: list[int]) -> list[int]:
    """The target's own greedy answer, to its end or a few dozen tokens long."""
    text = list(prompt)
    engine.truncate(0, 0)
    read(engine, prompt[:-1])
    while len(text) < len(prompt) + _TOKENS:
        [logits] = engine.forward([Row(text[-1], 0, len(text) - 1, wants_logits=True)])
        text.append(int(np.argmax(logits)))
        if vocabulary.ends_text(text[-1]):
            break
    return text[len(prompt) :]


def read_along(engine: Engine, prompt: list[int], answer: list[int], width: int) -> list[bool]:
    """Of each token of an answer, whether the draft has it for the likeliest; `width` is the target's vocabulary."""
    rows = logits_along(engine, prompt, answer)
    return [int(np.argmax(row[:width])) == token for row, token in zip(rows, answer, strict=True)]


def logits_along(engine: Engine, prompt: list[int], answer: list[int]) -> Iterator[FloatArray]:
    """The logits before each token of an answer; a row is overwritten when others are asked for."""
    text = [*prompt, *answer]
    step = min(engine.max_rows, engine.max_logits)
    engine.truncate(0, 0)
    read(engine, prompt[:-1])
    for first in range(len(prompt) - 1, len(text) - 1, step):
        positions = range(first, min(first + step, len(text) - 1))
        yield from engine.forward([Row(text[place], 0, place, wants_logits=True) for place in positions])
