"""Records the target's answers and the draft's predictions along them, for simulate.py to replay.

The target answers the first prompts of each family alone. Then the draft is run over the answer (teacher forcing), and
at every position its choices are compared with the target's token. Above temperature 0 both choose with the noise of
coupled verification, so that the comparison is deterministic. A draft that drafts in one pass is also run with mask
tokens behind every token. The table has the share of right tokens by their place in a draft, if all before are right,
drafted one by one and in one pass; and the tokens that a round of four and of eight drafts gives.

    .venv/bin/python benchmarks/record.py FILE [--config FILE] [--temperatures T ...] [--prompts N] [--answers FILE]
"""

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from common import FAMILIES, Task, argument_parser, print_table, read_tasks, with_progress
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
# Places in a draft that the table has.
_SHOWN = 8


def choose(logits: FloatArray, index: int, sampling: SamplingParams, choices: int = 1) -> list[int]:
    """The token chosen at an index of the answer, and the next choices, each as if those before it had no chance."""
    p = to_distribution(logits, sampling) if sampling.temperature else np.exp(logits - logits.max())
    noise = partial(Noise(secret=0, round_number=0, seed=_SEED, choice=0, position=0).exponentials, index)
    chosen: list[int] = []
    while len(chosen) < choices:
        chosen.append(race(p, noise) if sampling.temperature else int(np.argmax(p)))
        p[chosen[-1]] = 0
    return chosen


def answer_of(target: LlamaEngine, model: LlamaModel, task: Task, sampling: SamplingParams) -> dict[str, Any]:
    """The target's part of a line of the file, see `simulate.Recording`."""
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
    return {
        "family": task.family,
        "name": task.name,
        "temperature": sampling.temperature,
        "prompt": prompt,
        "answer": answer,
        "sure": sure,
    }


def teacher_force(draft: LlamaEngine, line: dict[str, Any], width: int, sampling: SamplingParams) -> dict[str, Any]:
    """By index of the answer: the token's place among the draft's choices (over `width` tokens), and what it thinks.

    That is its confidence, and the probabilities of its choices after the first one, at temperature 1. Of a prompt it
    sees the last tokens; in a server it begins nearer to the end of long ones.
    """
    prompt, answer = line["prompt"][-_DRAFT_WINDOW:], line["answer"]
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
    return {"rank": rank, "draft_sure": sure, "others": others}


def force_behind_masks(
    draft: LlamaEngine, model: LlamaModel, line: dict[str, Any], width: int, sampling: SamplingParams
) -> list[list[tuple[int, float]]]:
    """By index of the answer, for the tokens that follow it behind 1, 2, ... masks: rank and confidence as above."""
    prompt, answer = line["prompt"][-_DRAFT_WINDOW:], line["answer"]
    found, tokens = [], [*prompt, *answer]
    for index in range(len(answer)):
        position = len(prompt) - 1 + index
        draft.truncate(0, position)
        behind = range(min(model.block_length - 1, len(answer) - 1 - index))
        masks = [Row(model.mask_token, 0, position + 1 + n, wants_logits=True) for n in behind]
        rows = draft.forward([Row(tokens[position], 0, position, wants_logits=False), *masks])
        each = []
        for depth, logits in zip(behind, rows, strict=True):
            logits[model.mask_token] = -np.inf
            choices = choose(logits[:width], index + 1 + depth, sampling, _CHOICES)
            right = answer[index + 1 + depth]
            rank = choices.index(right) if right in choices else _CHOICES
            each.append((rank, round(confidence(logits), _DIGITS)))
        found.append(each)
    return found


def show(lines: list[dict[str, Any]]) -> None:
    """Print the share of right tokens by their place in a draft."""
    hits: dict[tuple[float, str, str], list[list[bool]]] = {}
    for line in lines:
        right = [rank == 0 for rank in line["rank"]]
        masked = [[rank == 0 for rank, _ in each] for each in line.get("masked", [])]
        for index in range(len(right) - _SHOWN):
            ways = {"one by one": right[index : index + _SHOWN]}
            if masked:
                ways["in one pass"] = [right[index], *masked[index][: _SHOWN - 1]]
            for (way, each), family in product(ways.items(), (line["family"], "all")):
                hits.setdefault((line["temperature"], way, family), []).append(each)
    rows = []
    for (temperature, way, family), each in sorted(hits.items()):
        reached = np.cumprod(np.array(each), axis=1).mean(axis=0)
        shares = " ".join(f"{share:.2f}" for share in reached / np.maximum([1, *reached[:-1]], 1e-9))
        tokens = {f"E{drafts}": f"{1 + reached[:drafts].sum():.2f}" for drafts in (4, _SHOWN)}
        rows.append({"temperature": temperature, "drafted": way, "family": family, "right": shares} | tokens)
    print_table("Right tokens by place in a draft", rows)


def main() -> None:
    parser = argument_parser(__doc__, quick="one prompt a family")
    parser.add_argument("file", type=Path, help="one JSON object a line; existing recordings are not repeated")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument("--prompts", type=int, default=4, help="prompts a family (%(default)s)")
    parser.add_argument("--answers", type=Path, help="a file whose answers another draft is recorded along")
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
    known, answered = (
        {(line["name"], line["temperature"]): line for line in map(json.loads, file.read_text("utf-8").splitlines())}
        if file and file.exists()
        else {}
        for file in (options.file, options.answers)
    )
    limit = 1 if options.quick else options.prompts
    tasks = [
        (task, temperature)
        for temperature in options.temperatures
        for family in RECORDED
        for task in read_tasks(family, limit)
    ]
    for task, temperature in with_progress(tasks, "recording"):
        key, sampling = (task.name, temperature), SamplingParams(temperature=temperature)
        if key in known:
            continue
        line = answered.get(key) or answer_of(target, models[0], task, sampling)
        line |= teacher_force(draft, line, target.width, sampling)
        if models[1].block_length > 1:
            line["masked"] = force_behind_masks(draft, models[1], line, target.width, sampling)
        known[key] = line
        with options.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    show([*known.values()])


if __name__ == "__main__":
    main()
