"""Records what a real pair does along its own texts, so that simulate.py can replay any policy on them.

The target writes the answer to each prompt of prompts/ alone. Then the draft reads along (it is teacher-forced) and
says at every place what it would have written: by the coupled rule's noise above temperature 0, so that whether it
hits is a fact of the recording and not a matter of chance.

    .venv/bin/python benchmarks/record.py FILE [--config FILE] [--temperatures T ...]
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from decode import FAMILIES, Task, read_tasks
from specserve.config import usable_cores
from specserve.engine.base import FloatArray, Row
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from specserve.sampling.distribution import confidence, race, to_distribution
from specserve.sampling.noise import Noise
from specserve.sequence import SamplingParams
from specserve.speculation.passes import read
from specserve.tools.archive import prepared_handler
from specserve.tools.paths import DEFAULT_CONFIG

# Without a schema or a prediction a text of theirs is one of another family again.
RECORDED = [family for family, (file, extra) in FAMILIES.items() if extra is None and file != "long"]
_CHUNK = 64
_DIGITS = 4
_SEED = 1


def choose(logits: FloatArray, place: int, sampling: SamplingParams) -> int:
    """The token that wins at a place of the answer."""
    p = to_distribution(logits, sampling)
    return race(p, partial(Noise(_SEED, 0, 0, 0).exponentials, place)) if sampling.temperature else int(np.argmax(p))


def record(
    engines: tuple[LlamaEngine, LlamaEngine], window: int, model: LlamaModel, task: Task, sampling: SamplingParams
) -> dict[str, Any]:
    """One line of the file, see `simulate.Recording`; the draft reads the last `window` tokens of the prompt."""
    target, draft = engines
    prompt = model.encode(task.text, special=True)
    answer: list[int] = []
    sure = []
    target.truncate(0, 0)
    read(target, prompt[:-1])
    while len(answer) < task.max_tokens and not (answer and model.is_end_token(answer[-1])):
        tokens = [*prompt, *answer]
        [logits] = target.forward([Row(tokens[-1], 0, len(tokens) - 1, wants_logits=True)])
        sure.append(round(confidence(logits), _DIGITS))
        answer.append(choose(logits, len(answer), sampling))
    hit, draft_sure = follow(draft, prompt[-window:], answer, target.width, sampling)
    return {
        "family": task.family,
        "name": task.name,
        "temperature": sampling.temperature,
        "prompt": prompt,
        "answer": answer,
        "sure": sure,
        "hit": hit,
        "draft_sure": draft_sure,
    }


def follow(
    draft: LlamaEngine, prompt: list[int], answer: list[int], width: int, sampling: SamplingParams
) -> tuple[list[bool], list[float]]:
    """What the draft says along an answer, among `width` tokens: by place, whether it hits, and how sure it is."""
    draft.truncate(0, 0)
    read(draft, prompt[:-1])
    hit, sure = [], []
    text = [*prompt, *answer]
    for start in range(len(prompt) - 1, len(text) - 1, _CHUNK):
        places = range(start, min(start + _CHUNK, len(text) - 1))
        rows = [Row(text[place], 0, place, wants_logits=True) for place in places]
        for place, logits in zip(places, draft.forward(rows), strict=True):
            sure.append(round(confidence(logits), _DIGITS))
            hit.append(choose(logits[:width], place + 1 - len(prompt), sampling) == text[place + 1])
    return hit, sure


def main() -> None:
    """Append what is missing to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="one JSON object a line; what is there is not recorded again")
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="a model YAML")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    options = parser.parse_args()
    config = prepared_handler(options.config)
    if config.draft is None or config.draft.path is None or config.target.path is None:
        raise SystemExit("There is no draft in this configuration to record.")
    models = [LlamaModel(path) for path in (config.target.path, config.draft.path)]
    target, draft = (
        LlamaEngine(
            model,
            n_slots=1,
            context_length=config.context_length,
            threads=config.threads or usable_cores(),
            max_rows=_CHUNK,
            max_logits=_CHUNK,
        )
        for model in models
    )
    lines = options.file.read_text(encoding="utf-8").splitlines() if options.file.exists() else []
    known = {(line["name"], line["temperature"]) for line in map(json.loads, lines)}
    tasks = [(task, heat) for heat in options.temperatures for family in RECORDED for task in read_tasks(family)]
    for task, heat in track(tasks, "recording", console=Console(stderr=True)):
        if (task.name, heat) not in known:
            sampling = SamplingParams(temperature=heat)
            line = record((target, draft), config.speculation.window, models[0], task, sampling)
            with options.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
