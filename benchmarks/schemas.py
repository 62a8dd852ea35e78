"""How many real schemas are taken, why are the others refused, and is every answer valid by another implementation?

A directory of schemas is read, each of its subdirectories as a set of its own: JSON Schema Bench, for one
(github.com/guidance-ai/jsonschemabench, `data/`). Beside the share that is taken here stands llguidance's own, without
any limits and promises of ours. Answers are sampled with speculation and without, as many at a time as there are slots,
and judged by the `jsonschema` library; one that the length limit cuts is counted apart.

    .venv/bin/python benchmarks/schemas.py DIRECTORY [--sample N] [--answers N] [--skip N] [--tokens N] [--longest N]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
from jsonschema.validators import validator_for

from machine import describe_machine
from specserve.config import HandlerConfig
from specserve.engine.grammar import GrammarCompiler
from specserve.engine.schema import MAX_TEXT
from specserve.errors import RequestError
from specserve.operations.archive import prepared_handler
from specserve.operations.places import DEFAULT_CONFIG
from specserve.serving.generation import Generation
from specserve.serving.loading import Models, load_models
from specserve.serving.openai import Tokenizer, to_generations
from specserve.serving.requests import CompletionRequest
from specserve.serving.scheduler import Scheduler, longest_wait
from specserve.serving.validation import parse_body

PROMPT = "A short document in JSON:\n"


@dataclass
class Survey:
    """What became of the schemas of one set, and what compiling those that are taken took."""

    taken: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    count: int = 0
    theirs: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)


def read_sets(directory: Path, sample: int) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """By the name of each set at most `sample` of its schemas with their names, always the same."""
    folders = sorted(folder for folder in directory.iterdir() if folder.is_dir()) or [directory]
    sets = {}
    for folder in folders:
        files = sorted(folder.glob("*.json"))
        random.Random(0).shuffle(files)
        read = [(file.name, json.loads(file.read_text(encoding="utf-8"))) for file in files[:sample]]
        sets[folder.name] = [(name, schema) for name, schema in read if isinstance(schema, dict)]
    return sets


def survey(schemas: list[tuple[str, dict[str, Any]]], compiler: GrammarCompiler) -> Survey:
    """Compile every schema, here and by llguidance alone."""
    found = Survey(count=len(schemas))
    for name, schema in schemas:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
        found.theirs += not llguidance.LLMatcher(compiler.tokenizer, grammar, log_level=0).is_error()
        begun = time.perf_counter()
        try:
            compiler.json_schema(schema)
        except RequestError as error:
            # Names and numbers apart the reasons are few.
            found.reasons[re.sub(r"[\"/#].*", "...", error.message.partition(": ")[2])[:70]] += 1
        else:
            found.taken.append((name, schema))
        found.seconds.append(time.perf_counter() - begun)
    return found


class Asker:
    """Answers to schemas, as a worker would give them."""

    def __init__(self, models: Models, config: HandlerConfig, tokens: int) -> None:
        self._models = models
        self._config = config
        self._tokens = tokens
        self._wait = longest_wait(config.max_wait_ms, models.drafters.controller.target)

    def answers(self, schemas: list[dict[str, Any]], mode: dict[str, Any]) -> list[Generation]:
        """One sampled answer by each schema."""
        scheduler = Scheduler(
            self._models.target,
            self._models.drafters,
            prefill_rows=self._config.prefill_rows,
            idle_tokens=0,
            max_wait_seconds=self._wait,
            begin_masks=self._models.grammars.begin_round,
        )
        generations = [self._generation(schema, mode) for schema in schemas]
        for generation in generations:
            scheduler.submit(generation)
        while scheduler.busy:
            scheduler.step()
        return generations

    def _generation(self, schema: dict[str, Any], mode: dict[str, Any]) -> Generation:
        form = {"type": "json_schema", "json_schema": {"name": "any", "schema": schema}}
        body = {"prompt": PROMPT, "max_tokens": self._tokens, "response_format": form, "speculation": mode, "seed": 0}
        request = parse_body(body, CompletionRequest)
        prompts = Tokenizer(self._models.vocabulary, self._config).completion(request)
        [[generation]] = to_generations(request, prompts, self._models.vocabulary, self._models.grammars, self._config)
        return generation


def judge(generation: Generation, schema: dict[str, Any]) -> str:
    """What another implementation says of an answer."""
    if generation.error is not None:
        return f"ended: {generation.error.code}"
    if generation.finish_reason == "length":
        return "cut by the length limit"
    validator: Any = validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    try:
        return "valid" if validator.is_valid(json.loads(generation.take_text())) else "INVALID"
    except re.error:
        return "not judged: a pattern that Python cannot read"


def print_survey(found: dict[str, Survey]) -> None:
    """The shares by set, and why schemas are refused."""
    print(f"\n{'set':20} {'schemas':>8} {'taken':>7} {'llguidance':>11} {'slowest, s':>11}")
    for name, one in found.items():
        shares = f"{len(one.taken) / one.count:7.2f} {one.theirs / one.count:11.2f}"
        print(f"{name:20} {one.count:8} {shares} {max(one.seconds):11.3f}")
    reasons: Counter[str] = Counter()
    for one in found.values():
        reasons += one.reasons
    for reason, count in reasons.most_common(20):
        print(f"{count:6} {reason}")


def main() -> None:
    """Survey, sample answers if that is asked for, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="schemas as JSON files, or sets of them")
    parser.add_argument("--sample", type=int, default=120, help="schemas of each set (default: 120)")
    parser.add_argument("--answers", type=int, default=0, help="schemas to sample answers by (default: 0)")
    parser.add_argument("--skip", type=int, default=0, help="the first of those that are taken (default: 0)")
    parser.add_argument("--tokens", type=int, default=200, help="the longest answer (default: 200)")
    parser.add_argument("--longest", type=int, default=MAX_TEXT, help="characters of a schema that is answered")
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="a model YAML")
    options = parser.parse_args()
    config = prepared_handler(options.config)
    models = load_models(config)
    compiler = GrammarCompiler(models.vocabulary)
    found = {name: survey(read, compiler) for name, read in read_sets(options.directory, options.sample).items()}
    print_survey(found)
    taken = [schema for one in found.values() for schema in one.taken]
    random.Random(0).shuffle(taken)
    short = [one for one in taken if len(json.dumps(one[1])) <= options.longest]
    asked = short[options.skip : options.skip + options.answers]
    asker = Asker(models, config, options.tokens)
    verdicts: dict[str, Counter[str]] = {}
    for mode in ("off", "fixed") if asked else ():
        generations = asker.answers([schema for _, schema in asked], {"mode": mode})
        judged = [(name, judge(one, schema)) for one, (name, schema) in zip(generations, asked, strict=True)]
        verdicts[mode] = Counter(verdict for _, verdict in judged)
        print(f"\nspeculation {mode}: {dict(verdicts[mode])}")
        print("\n".join(f"INVALID: {name}" for name, verdict in judged if verdict == "INVALID"))
    count = sum(one.count for one in found.values())
    result = {
        "benchmark": "schemas",
        "machine": describe_machine(),
        "llguidance": llguidance.get_version(),
        "rows": [
            {"set": name, "schemas": one.count, "taken": len(one.taken), "llguidance": one.theirs}
            for name, one in found.items()
        ],
        "taken": round(len(taken) / count, 4),
        "llguidance_taken": round(sum(one.theirs for one in found.values()) / count, 4),
        "answers": {mode: dict(verdict) for mode, verdict in verdicts.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
