"""How much faster is speculative decoding than plain decoding, on this machine, for this kind of text?

Every prompt is answered by the same engine once a mode, one mode after the other (so that a drift of the machine
meets all of them alike), and a ratio compares two answers to one prompt. No server runs; see overhead.py for that.

    .venv/bin/python benchmarks/decode.py [--config FILE] [--quick]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

from machine import describe_machine
from specserve.config import HandlerConfig, load_yaml
from specserve.operations.archive import resolve
from specserve.operations.places import DEFAULT_CONFIG
from specserve.operations.prepare import prepare
from specserve.sequence import Account, SamplingParams, Sequence, SpeculationParams
from specserve.serving.generation import Generation
from specserve.serving.loading import Models, load_models
from specserve.serving.scheduler import Scheduler

PROMPTS = Path(__file__).parent / "prompts"
FAMILIES = ("code", "json", "prose")
TEMPERATURES = (0.0, 0.8)
CHAT = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Mode:
    """A way to decode; plain is the one that all others are compared with."""

    name: str
    gamma: int


@dataclass(frozen=True)
class Run:
    """One answer: its tokens and what they took."""

    tokens: list[int]
    account: Account

    @property
    def speed(self) -> float:
        """Tokens per second behind the first token."""
        return (len(self.tokens) - 1) / self.account.decode_seconds

    @property
    def whole_speed(self) -> float:
        """Tokens per second, the prompt's prefill included."""
        return len(self.tokens) / (self.account.decode_seconds + self.account.prefill_seconds)


def read_prompts(family: str, quick: bool) -> Iterator[tuple[str, str, int]]:
    """Name, text as the model reads it, and length of the answer, of every prompt of a family."""
    entries = yaml.safe_load((PROMPTS / f"{family}.yaml").read_text(encoding="utf-8"))
    for entry in entries[:3] if quick else entries:
        text = CHAT.format(prompt=entry["prompt"]) if entry["chat"] else entry["prompt"]
        yield entry["name"], text, entry["max_tokens"]


def decode(scheduler: Scheduler, models: Models, text: str, max_tokens: int, *, mode: Mode, temperature: float) -> Run:
    """Answer one prompt alone; a new scheduler begins with empty caches."""
    sampling = SamplingParams(temperature=temperature, seed=1)
    prompt = models.vocabulary.encode(text, special=True)
    sequence = Sequence(prompt, sampling, SpeculationParams(mode.gamma), max_tokens=max_tokens)
    scheduler.submit(Generation(sequence, models.vocabulary, []))
    while scheduler.busy:
        scheduler.step()
    return Run(sequence.answer, sequence.account)


def summarise(family: str, temperature: float, mode: Mode, pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    """One row of the result from (plain, this mode) pairs, one a prompt."""
    runs = [run for _, run in pairs]
    ratios = [run.speed / plain.speed for plain, run in pairs]
    account = Account.total(run.account for run in runs)
    seconds = account.decode_seconds
    low, _, high = quantiles(ratios, n=4)
    return {
        "family": family,
        "temperature": temperature,
        "mode": mode.name,
        "tokens_per_second": round(median(run.speed for run in runs), 2),
        "ratio": round(median(ratios), 3),
        "ratio_with_prefill": round(median(run.whole_speed / plain.whole_speed for plain, run in pairs), 3),
        "spread": [round(low, 3), round(high, 3)],
        "acceptance_rate": round(account.accepted / account.drafted, 3) if account.drafted else None,
        "mean_acceptance_length": round(account.mean_acceptance_length, 3),
        "share_target": round(account.target_seconds / seconds, 4),
        "share_draft": round(account.draft_seconds / seconds, 4),
        "share_other": round(account.other_seconds / seconds, 4),
        "same_text_as_plain": sum(run.tokens == plain.tokens for plain, run in pairs),
        "prompts": len(pairs),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """The rows as a table for people."""
    table = Table(title="decoding, ratios to plain decoding of the same run")
    columns = list(rows[0])
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*("-" if row[column] is None else str(row[column]) for column in columns))
    Console(width=180).print(table)


def main() -> None:
    """Run the benchmark and print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="a model YAML")
    parser.add_argument("--quick", action="store_true", help="three prompts a family, greedy only")
    options = parser.parse_args()
    document, _ = load_yaml(options.config)
    config = HandlerConfig.model_validate(resolve(document, prepare(options.config))["handler"])
    models = load_models(config)
    plain = Mode("plain", 0)
    modes = [plain, Mode(f"fixed {config.speculation.gamma}", config.speculation.gamma)]
    rows = []
    for family in FAMILIES:
        prompts = list(read_prompts(family, options.quick))
        for temperature in TEMPERATURES[:1] if options.quick else TEMPERATURES:
            results = [
                {
                    mode: decode(
                        Scheduler(models.target, models.drafters, prefill_rows=config.prefill_rows, idle_tokens=4096),
                        models,
                        text,
                        length,
                        mode=mode,
                        temperature=temperature,
                    )
                    for mode in modes
                }
                for _, text, length in track(
                    prompts, f"{family}, temperature {temperature}", console=Console(stderr=True)
                )
            ]
            rows += [summarise(family, temperature, mode, [(r[plain], r[mode]) for r in results]) for mode in modes]
    show(rows)
    files = {"target": str(config.target.path), "draft": str(config.draft.path) if config.draft else None}
    names = {role: Path(path).name if path else None for role, path in files.items()}
    print(
        json.dumps(
            {
                "benchmark": "decode",
                "machine": describe_machine(),
                "models": names,
                "rows": rows,
                "notes": ["one sequence, no server; seconds of the first token are in ratio_with_prefill only"],
            }
        )
    )


if __name__ == "__main__":
    main()
