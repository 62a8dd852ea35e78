"""Records the target's answers and the draft's predictions along them, for simulate.py to replay.

The target answers the first prompts of each family alone. Then the draft is run over the answer (teacher forcing), and
at every position its choices are compared with the target's token. Above temperature 0 both choose with the noise of
coupled verification, so that the comparison is deterministic.

    .venv/bin/python benchmarks/record.py FILE [--config FILE] [--temperatures T ...] [--prompts N]
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common import FAMILIES, Task, argument_parser, read_tasks, with_progress
from specserve.cli.archive import prepared_handler
from specserve.engine.base import FloatArray, Row
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from specserve.machine import usable_cores
from specserve.sampling.distribution import confidence, race, to_distribution
from specserve.sampling.noise import Noise
from specserve.sequence import SamplingParams
from specserve.speculation.measure import prefill

# A family with a schema or a prediction has the prompts of another family.
RECORDED = [family for family, (file, extra) in FAMILIES.items() if extra is None and file != "long"]
# Tokens of the prompt that the draft model reads, as a server's does.
_DRAFT_WINDOW = 128
_CHUNK = 64
_DIGITS = 4
_SEED = 1
_MOST_TOKENS = 128
# The draft's choices at a position that are recorded.
_CHOICES = 3


def choose(logits: FloatArray, index: int, sampling: SamplingParams, choices: int = 1) -> list[int]:
    """The token chosen at an index of the answer, and the next choices, each as if those before it had no chance."""
    p = to_distribution(logits, sampling) if sampling.temperature else np.exp(logits - logits.max())
    noise = partial(Noise(secret=0, round_number=0, seed=_SEED, choice=0, position=0).exponentials, index)
    chosen: list[int] = []
    while len(chosen) < choices:
        chosen.append(race(p, noise) if sampling.temperature else int(np.argmax(p)))
        p[chosen[-1]] = 0
    return chosen


def record(
    engines: tuple[LlamaEngine, LlamaEngine], window: int, model: LlamaModel, task: Task, sampling: SamplingParams
) -> dict[str, Any]:
    """One line of the file, see `simulate.Recording`.

    The draft sees the last `window` tokens of the prompt; in a server it begins nearer to the end of long ones.
    """
    target, draft = engines
    prompt = model.encode(task.text, special=True)
    answer: list[int] = []
    sure = []
    target.truncate(0, 0)
    prefill(target, prompt[:-1])
    while len(answer) < min(task.max_tokens, _MOST_TOKENS) and not (answer and model.is_end_token(answer[-1])):
        tokens = [*prompt, *answer]
        [logits] = target.forward([Row(tokens[-1], 0, len(tokens) - 1, wants_logits=True)])
        sure.append(round(confidence(logits), _DIGITS))
        answer += choose(logits, len(answer), sampling)
    rank, draft_sure, others = teacher_force(draft, prompt[-window:], answer, target.width, sampling)
    return {
        "family": task.family,
        "name": task.name,
        "temperature": sampling.temperature,
        "prompt": prompt,
        "answer": answer,
        "sure": sure,
        "rank": rank,
        "draft_sure": draft_sure,
        "others": others,
    }


def teacher_force(
    draft: LlamaEngine, prompt: list[int], answer: list[int], width: int, sampling: SamplingParams
) -> tuple[list[int], list[float], list[list[float]]]:
    """By index of the answer: the token's place among the draft's choices (over `width` tokens), and what it thinks.

    That is its confidence, and the probabilities of its choices after the first one, at temperature 1.
    """
    draft.truncate(0, 0)
    prefill(draft, prompt[:-1])
    rank, sure, others = [], [], []
    tokens = [*prompt, *answer]
    for start in range(len(prompt) - 1, len(tokens) - 1, _CHUNK):
        positions = range(start, min(start + _CHUNK, len(tokens) - 1))
        rows = [Row(tokens[position], 0, position, wants_logits=True) for position in positions]
        for position, logits in zip(positions, draft.forward(rows), strict=True):
            stated = confidence(logits)
            sure.append(round(stated, _DIGITS))
            choices = choose(logits[:width], position + 1 - len(prompt), sampling, _CHOICES)
            right = tokens[position + 1]
            rank.append(choices.index(right) if right in choices else _CHOICES)
            probabilities = stated * np.exp(logits[choices[1:]] - logits.max())
            others.append([round(float(probability), _DIGITS) for probability in probabilities])
    return rank, sure, others


def main() -> None:
    parser = argument_parser(__doc__, quick="one prompt a family")
    parser.add_argument("file", type=Path, help="one JSON object a line; existing recordings are not repeated")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument("--prompts", type=int, default=4, help="prompts a family (%(default)s)")
    options = parser.parse_args()
    config = prepared_handler(options.config)
    if config.draft is None or config.draft.path is None or config.target.path is None:
        raise SystemExit(f"{options.config} has no draft model to record.")
    models = [LlamaModel(path) for path in (config.target.path, config.draft.path)]
    target, draft = (
        LlamaEngine(
            model,
            n_slots=1,
            context_length=config.context_length,
            threads=usable_cores(config.cores, config.threads).threads,
            max_rows=_CHUNK,
            max_logits=_CHUNK,
        )
        for model in models
    )
    lines = options.file.read_text(encoding="utf-8").splitlines() if options.file.exists() else []
    known = {(line["name"], line["temperature"]) for line in map(json.loads, lines)}
    limit = 1 if options.quick else options.prompts
    tasks = [
        (task, temperature)
        for temperature in options.temperatures
        for family in RECORDED
        for task in read_tasks(family, limit)
    ]
    for task, temperature in with_progress(tasks, "recording"):
        if (task.name, temperature) not in known:
            sampling = SamplingParams(temperature=temperature)
            line = record((target, draft), _DRAFT_WINDOW, models[0], task, sampling)
            with options.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
