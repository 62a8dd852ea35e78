"""Is greedy text the same, token for token, with speculation and without, on every prompt of prompts/?

Each prompt is answered twice in empty caches, plainly and with drafts. Where the texts part, the target reads the text
up to there row by row, and the gap between the logits of the two tokens says how near a tie it was.

    .venv/bin/python benchmarks/identity.py [--config FILE] [--tokens N]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from decode import ADAPTIVE, FAMILIES, PLAIN, open_lanes, race, read_tasks
from machine import describe_machine
from specserve.engine.base import Engine, Row
from specserve.serving.loading import load_models
from specserve.tools.archive import prepared_handler
from specserve.tools.paths import DEFAULT_CONFIG


def gap_where_they_part(target: Engine, prompt: list[int], plain: list[int], other: list[int]) -> float | None:
    """By how much the target prefers the plain token at the first place where two answers differ; None if nowhere."""
    place = next((i for i, pair in enumerate(zip(plain, other, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return None
    target.truncate(0, 0)
    for position, token in enumerate(prompt + plain[:place]):
        [logits] = target.forward([Row(token, 0, position, wants_logits=True)])
    return float(logits[plain[place]] - logits[other[place]])


def main() -> None:
    """Compare all prompts and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="a model YAML")
    parser.add_argument("--tokens", type=int, default=64, help="the longest answer compared (default: 64)")
    options = parser.parse_args()
    config = prepared_handler(options.config)
    models = load_models(config)
    lanes = open_lanes(models, config, [PLAIN, ADAPTIVE])
    tasks = [task for family in FAMILIES for task in read_tasks(family)]
    differences: list[dict[str, Any]] = []
    for task in track(tasks, "comparing", console=Console(stderr=True)):
        short = replace(task, max_tokens=min(task.max_tokens, options.tokens))
        answers = [run.tokens for run in race(lanes, short, 0.0)]
        if answers[0] != answers[1]:
            gap = gap_where_they_part(models.target, models.vocabulary.encode(task.text, special=True), *answers)
            differences.append({"family": task.family, "prompt": task.name, "gap": gap})
    print(
        json.dumps(
            {
                "benchmark": "identity",
                "machine": describe_machine(),
                "models": {"target": str(config.target.path), "draft": config.draft and str(config.draft.path)},
                "rows": [{"prompts": len(tasks), "same_text": len(tasks) - len(differences)}, *differences],
                "notes": [f"greedy, at most {options.tokens} tokens, every answer alone in empty caches"],
            }
        )
    )


if __name__ == "__main__":
    main()
