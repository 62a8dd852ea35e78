"""How much faster is speculative decoding than plain decoding, by kind of text and mode of speculation?

All modes answer each prompt side by side in one process. Each has its own caches and controller, and the mode with the
fewest tokens always runs the next round, so that changes in the machine's speed affect all of them alike. A ratio
compares two answers to the same prompt. No server is involved; load.py measures servers.

    .venv/bin/python benchmarks/decode.py [--quick] [--config FILE] [--results FILE]
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median, quantiles

from common import (
    FAMILIES,
    MAX_INTERFERENCE,
    ResultsFile,
    Row,
    Task,
    argument_parser,
    loaded,
    print_result,
    print_table,
    read_tasks,
    with_interference,
    with_progress,
)
from specserve.cli.archive import prepared_handler
from specserve.config import HandlerConfig
from specserve.core.loading import PREFILL_ROWS, Models, load_models, open_engines
from specserve.core.scheduler import Scheduler
from specserve.core.text_sequence import TextSequence
from specserve.engine.kv_cache import KVCache
from specserve.sequence import SamplingParams, SequenceStats, SpeculationParams
from specserve.speculation.drafters import Drafters
from specserve.speculation.ngram import Pools

# Tokens of prompt and answer: none of ours are longer, and each mode has a cache of its own.
_CONTEXT_LENGTH = 4096
# Tokens of finished answers that a mode with a pool keeps.
_HISTORY = 100_000
QUICK_FAMILIES = ("code", "json", "schema", "prose", "edit", "edit, predicted")
TEMPERATURES = (0.0, 0.8)
PLAIN, ADAPTIVE = "plain", "adaptive"
FIXED = {f"fixed {gamma}": SpeculationParams(gamma, drafter="model") for gamma in (1, 2, 3, 4, 7, 15)}
# Ratios are to plain decoding.
MODES = {PLAIN: SpeculationParams(mode="off"), **FIXED, ADAPTIVE: SpeculationParams(15, mode="auto")}
QUICK_MODES = ("fixed 3", ADAPTIVE)


@dataclass(frozen=True)
class Run:
    """One answer: its tokens, and the statistics of its rounds."""

    tokens: list[int]
    stats: SequenceStats

    @property
    def speed(self) -> float:
        """Tokens per second after the first token; an answer of one token is followed by an end token."""
        return max(1, len(self.tokens) - 1) / self.stats.decode_seconds

    def seconds_for(self, tokens: int) -> float:
        """What an answer of so many tokens takes at this pace, prefill included."""
        return self.stats.prefill_seconds + (tokens - 1) / self.speed


@dataclass(frozen=True)
class Lane:
    """A mode with its own engines and a controller that only sees the rounds of this mode."""

    mode: SpeculationParams
    models: Models
    target: KVCache
    drafters: Drafters

    def start(self, task: Task, temperature: float, seed: int = 1) -> tuple[Scheduler, TextSequence]:
        """Submit a prompt to a new scheduler, of whose caches nothing is used."""
        vocabulary = self.models.vocabulary
        scheduler = Scheduler(self.target, self.drafters, prefill_rows=PREFILL_ROWS)
        sequence = TextSequence(
            vocabulary.encode(task.text, special=True),
            SamplingParams(temperature=temperature, seed=seed),
            replace(self.mode, verification="block" if temperature else "token"),
            vocabulary,
            max_tokens=task.max_tokens,
            reuses_prefix=False,
            constraint=self.models.grammars.json_schema(task.schema) if task.schema else None,
            prediction=vocabulary.encode(task.prediction) if task.prediction else (),
        )
        scheduler.submit(sequence)
        return scheduler, sequence


def load_for_one(config: HandlerConfig) -> Models:
    """Load models for one sequence, of as many tokens as any benchmark needs."""
    context_length = min(config.context_length, _CONTEXT_LENGTH)
    return load_models(config.model_copy(update={"sequences": 1, "context_length": context_length}))


def open_lanes(models: Models, modes: Iterable[SpeculationParams]) -> list[Lane]:
    """A lane for each mode, of one sequence each."""
    lanes = []
    for mode in modes:
        target, drafters = open_engines(
            models.vocabulary, models.draft, models.config, models.placement, Pools(_HISTORY)
        )
        lanes.append(Lane(mode, models, KVCache(target), drafters))
    return lanes


def run_side_by_side(lanes: list[Lane], task: Task, temperature: float, seed: int) -> list[Run]:
    """Answer a prompt in all lanes; the lane with the fewest tokens always runs the next round."""
    started = [(*lane.start(task, temperature, seed), lane.target) for lane in lanes]

    def progress(lane: tuple[Scheduler, TextSequence, KVCache]) -> tuple[int, int]:
        _, sequence, target = lane
        return sequence.generated, target.num_computed_tokens(sequence.slot) if sequence.slot >= 0 else 0

    while running := [lane for lane in started if lane[0].busy]:
        min(running, key=progress)[0].run_round()
    for _, sequence, _ in started:
        if sequence.error:
            raise SystemExit(f"{task.name}: {sequence.error}")
    return [Run(sequence.answer, sequence.stats) for _, sequence, _ in started]


def as_json(run: Run) -> Row:
    return {"tokens": run.tokens, "stats": vars(run.stats)}


def from_json(kept: Row) -> Run:
    values: Row = {name: Counter(value) if isinstance(value, dict) else value for name, value in kept["stats"].items()}
    return Run(kept["tokens"], SequenceStats(**values))


def summarise(family: str, temperature: float, mode: str, pairs: list[tuple[Run, Run]]) -> Row:
    """One row of the result, from pairs of a plain run and this mode's, one for each prompt and seed."""
    runs = [run for _, run in pairs]
    ratios = [run.speed / plain.speed for plain, run in pairs]
    # Above temperature 0 the two answers differ, also in length.
    with_prefill = [plain.seconds_for(len(run.tokens)) / run.seconds_for(len(run.tokens)) for plain, run in pairs]
    stats = SequenceStats.total(run.stats for run in runs)
    seconds = stats.decode_seconds
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "family": family,
        "temperature": temperature,
        "mode": mode,
        "tokens_per_second": round(median(run.speed for run in runs), 2),
        "ratio": round(median(ratios), 3),
        "mean": round(mean(ratios), 3),
        "ratio_with_prefill": round(median(with_prefill), 3),
        "least_with_prefill": round(min(with_prefill), 3),
        "spread": [round(low, 3), round(high, 3)],
        "acceptance_rate": round(stats.accepted / stats.drafted, 3) if stats.drafted else None,
        "mean_acceptance_length": round(stats.mean_acceptance_length, 3),
        "drafters": {name: [drafted, stats.accepted_by[name]] for name, drafted in sorted(stats.drafted_by.items())},
        "alternatives": [stats.alternatives, stats.adopted],
        "share_target": round(stats.target_seconds / seconds, 4),
        "share_draft": round(stats.draft_seconds / seconds, 4),
        "share_other": round(stats.other_seconds / seconds, 4),
        "same_text_as_plain": sum(run.tokens == plain.tokens for plain, run in pairs),
        "answers": len(pairs),
    }


def main() -> None:
    parser = argument_parser(__doc__, quick="three prompts a family, three modes, greedy only", resumable=True)
    parser.add_argument("--prompts", type=int, help="number of prompts of each family")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, help="only these families")
    parser.add_argument("--max-tokens", type=int, help="the most tokens of an answer, in place of each prompt's own")
    names = [name for name in MODES if name != PLAIN]
    parser.add_argument("--modes", nargs="+", choices=names, metavar="MODE", help=f"only these of {', '.join(names)}")
    parser.add_argument("--temperatures", nargs="+", type=float, help="default: 0 and 0.8, with --quick 0")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], help="above temperature 0 an answer for each")
    options = parser.parse_args()
    config = prepared_handler(options.config)
    results = ResultsFile(options.results)
    chosen = options.modes or (QUICK_MODES if options.quick else names)
    families = options.families or (QUICK_FAMILIES if options.quick else FAMILIES)
    temperatures = options.temperatures or TEMPERATURES[: 1 if options.quick else None]
    modes = [name for name in MODES if name == PLAIN or name in chosen]
    lanes = open_lanes(load_for_one(config), [MODES[name] for name in modes])

    def answered(task: Task, temperature: float, seed: int) -> list[Row]:
        return [as_json(run) for run in run_side_by_side(lanes, task, temperature, seed)]

    rows = []
    disturbed = 0
    for family in families:
        tasks = list(read_tasks(family, options.prompts or (3 if options.quick else None)))
        if options.max_tokens:
            tasks = [replace(task, max_tokens=options.max_tokens) for task in tasks]
        for temperature in temperatures:
            asked = [(task, seed) for seed in options.seeds[: None if temperature else 1] for task in tasks]
            answers: list[list[Run]] = []
            for task, seed in with_progress(asked, f"{family}, temperature {temperature}"):
                key = [family, task.name, task.max_tokens, temperature, seed, modes]
                measure = partial(with_interference, partial(answered, task, temperature, seed))
                runs, others = results.measured(key, measure)
                disturbed += others > MAX_INTERFERENCE
                answers.append([from_json(run) for run in runs])
            for index, mode in enumerate(modes):
                pairs = [(runs[0], runs[index]) for runs in answers]
                rows.append(summarise(family, temperature, mode, pairs))
    print_table("decoding, ratios to plain decoding of the same run", rows, omit=["drafters", "alternatives"])
    notes = [
        "one sequence, no server; the draft's prefill happens after the first token, so it is in `ratio` too",
        f"{disturbed} answers were given while other processes used more than {MAX_INTERFERENCE:.0%} of a core",
    ]
    print_result("decode", loaded(config), rows, notes)


if __name__ == "__main__":
    main()
