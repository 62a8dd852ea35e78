"""How many real JSON schemas are accepted, why are the others refused, and are all answers valid?

Reads a directory of schemas, each subdirectory as a set, for example JSON Schema Bench
(github.com/guidance-ai/jsonschemabench, `data/`), and compares with llguidance alone, without our limits. Answers are
sampled with speculation and without and validated by the `jsonschema` library; truncated ones are counted separately.

    .venv/bin/python benchmarks/schemas.py DIRECTORY [--quick] [--sample N] [--answers N]
"""

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

from common import argument_parser, print_result, print_table
from specserve.api.parse import parse_body
from specserve.api.prompt import Tokenizer
from specserve.api.request_schema import CompletionRequest
from specserve.api.resolve import resolve
from specserve.cli.archive import prepared_handler
from specserve.config import HandlerConfig
from specserve.core.loading import PREFILL_ROWS, Models, load_models
from specserve.core.scheduler import Scheduler, max_wait
from specserve.core.text_sequence import TextSequence
from specserve.errors import RequestError
from specserve.grammar.compiler import GrammarCompiler

MAX_TOKENS = 200
PROMPT = "A short document in JSON:\n"


@dataclass
class Survey:
    count: int
    accepted: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # here
    llguidance: int = 0  # accepted by llguidance alone
    reasons: Counter[str] = field(default_factory=Counter)  # of refusals
    seconds: list[float] = field(default_factory=list)  # of compiling


def read_sets(directory: Path, sample: int) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """At most `sample` schemas of every set, by their names; always the same ones."""
    folders = sorted(folder for folder in directory.iterdir() if folder.is_dir()) or [directory]
    sets = {}
    for folder in folders:
        files = sorted(folder.glob("*.json"))
        random.Random(0).shuffle(files)
        read = [(file.name, json.loads(file.read_text(encoding="utf-8"))) for file in files[:sample]]
        sets[folder.name] = [(name, schema) for name, schema in read if isinstance(schema, dict)]
    return sets


def survey(schemas: list[tuple[str, dict[str, Any]]], compiler: GrammarCompiler) -> Survey:
    """Compile every schema, here and with llguidance alone."""
    found = Survey(len(schemas))
    for name, schema in schemas:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
        found.llguidance += not llguidance.LLMatcher(compiler.tokenizer, grammar, log_level=0).is_error()
        begun = time.perf_counter()
        try:
            compiler.json_schema(schema)
        except RequestError as error:
            # Without names and numbers there are few reasons.
            found.reasons[re.sub(r"[\"/#].*", "...", error.message.partition(": ")[2])[:70]] += 1
        else:
            found.accepted.append((name, schema))
        found.seconds.append(time.perf_counter() - begun)
    return found


def sample_answers(
    models: Models, config: HandlerConfig, schemas: list[dict[str, Any]], mode: str
) -> list[TextSequence]:
    """One sampled answer for each schema, as a worker gives them."""
    scheduler = Scheduler(
        models.target,
        models.drafters,
        prefill_rows=PREFILL_ROWS,
        max_wait_seconds=max_wait(config.max_wait_ms, models.drafters.controller.target_cost),
        limit_masks=models.grammars.limit_masks,
    )
    sequences = []
    for schema in schemas:
        body = {
            "prompt": PROMPT,
            "max_tokens": MAX_TOKENS,
            "response_format": {"type": "json_schema", "json_schema": {"name": "any", "schema": schema}},
            "speculation": {"mode": mode},
            "seed": 0,
            "cache_prompt": False,
        }
        request = parse_body(body, CompletionRequest)
        prompts = Tokenizer(models.vocabulary, config).completion(request)
        _, [sequence] = resolve(request, prompts, models.vocabulary, models.grammars, config)
        scheduler.submit(sequence)
        sequences.append(sequence)
    while scheduler.busy:
        scheduler.run_round()
    return sequences


def judge(sequence: TextSequence, schema: dict[str, Any]) -> str:
    if sequence.error is not None:
        return f"failed: {sequence.error.code}"
    if sequence.finish_reason == "length":
        return "truncated by max_tokens"
    validator: Any = validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    try:
        return "valid" if validator.is_valid(json.loads(sequence.take_text())) else "INVALID"
    except re.error:
        return "not checked: Python cannot compile a pattern"


def main() -> None:
    parser = argument_parser(__doc__, quick="20 schemas of each set")
    parser.add_argument("directory", type=Path, help="schemas as JSON files, or one directory a set")
    parser.add_argument("--sample", type=int, help="schemas of each set (default: 120)")
    parser.add_argument("--answers", type=int, default=0, help="number of schemas to sample answers for (default: 0)")
    options = parser.parse_args()
    sample = options.sample or (20 if options.quick else 120)
    config = prepared_handler(options.config)
    models = load_models(config)
    compiler = GrammarCompiler(models.vocabulary)
    found = {name: survey(read, compiler) for name, read in read_sets(options.directory, sample).items()}
    rows = [
        {"set": name, "schemas": group.count, "accepted": len(group.accepted), "llguidance": group.llguidance}
        | {"slowest_s": round(max(group.seconds), 3)}
        for name, group in found.items()
    ]
    print_table("accepted schemas", rows)
    for reason, number in sum((group.reasons for group in found.values()), Counter[str]()).most_common(20):
        print(f"{number:6} {reason}")
    accepted = [schema for group in found.values() for schema in group.accepted]
    random.Random(0).shuffle(accepted)
    asked = accepted[: options.answers]
    verdicts: dict[str, Counter[str]] = {}
    for mode in ("off", "fixed") if asked else ():
        sequences = sample_answers(models, config, [schema for _, schema in asked], mode)
        judged = [(name, judge(sequence, schema)) for sequence, (name, schema) in zip(sequences, asked, strict=True)]
        verdicts[mode] = Counter(verdict for _, verdict in judged)
        print(f"\nspeculation {mode}: {dict(verdicts[mode])}")
        print("\n".join(f"INVALID: {name}" for name, verdict in judged if verdict == "INVALID"))
    print_result(
        "schemas",
        {"target": config.model_id},
        rows,
        [f"llguidance {llguidance.get_version()}"],
        answers={mode: dict(verdict) for mode, verdict in verdicts.items()},
    )


if __name__ == "__main__":
    main()
