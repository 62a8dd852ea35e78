"""`scripts/doctor`: is this machine, this build and this pair right for speculation, and what would be better?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass

from rich.console import Console

from specserve.config import HandlerConfig, load_yaml, usable_cores
from specserve.engine.invariance import probe
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel, check_same_vocabulary
from specserve.speculation.cost import Cost
from specserve.speculation.passes import measure
from specserve.tools import cli
from specserve.tools.archive import add_config
from specserve.tools.choose import CONTEXT, PROMPTS, Observed, fastest, loaded, read_along, write
from specserve.tools.findings import (
    CELLS,
    MOST_ROWS,
    Finding,
    computing,
    costs,
    forms,
    machine,
    model_files,
    thread_count,
)
from specserve.tools.prepare import Prepared, prepare
from specserve.tools.selftest import (
    first_difference,
    greedy_with_drafts,
    is_wrong,
    lumped,
    rows_along,
    worst_deviation,
)

_PLACES = 4
_TRIALS = 5000
# Logits so far apart are not turned by the order in which a kernel sums.
_NO_TIE = 1.0


@dataclass(frozen=True)
class Pair:
    """A target and its draft, each with a cache of one slot, and the costs of their passes."""

    vocabulary: LlamaModel
    target: LlamaEngine
    draft: LlamaEngine
    costs: tuple[Cost, Cost]


def examine(handler: HandlerConfig, prepared: Prepared) -> Iterator[Finding]:
    """All findings, the quick ones first.

    Raises:
        EnvironmentFailure: a model file cannot be read.
        ModelLoadError: a model cannot be loaded, or the pair does not fit.
    """
    threads = handler.threads or usable_cores()
    yield machine(threads, prepared)
    yield computing(handler.kernels, threads)
    yield model_files(prepared)
    with ExitStack() as stack:
        model, target = stack.enter_context(loaded(prepared.target, threads, MOST_ROWS))
        yield invariance(target)
        target_cost = Cost(measure(target), most=MOST_ROWS)
        if prepared.draft is None:
            yield costs(target_cost, None)
            yield thread_count(model, threads)
        else:
            draft_model, draft = stack.enter_context(loaded(prepared.draft, threads, MOST_ROWS))
            check_same_vocabulary(model, draft_model)
            yield Finding("pair", f"Target and draft have one vocabulary, of {model.size} tokens.")
            pair = Pair(model, target, draft, (target_cost, Cost(measure(draft), most=MOST_ROWS)))
            yield costs(*pair.costs)
            yield thread_count(model, threads)
            texts = answers(pair)
            yield greedy_texts(pair, texts)
            yield distributions(pair, texts)
            yield ceiling(pair, texts, handler)
    # Last, and when the pair is closed: with it there may be no memory for a third model.
    yield forms(prepared, threads)


def invariance(target: LlamaEngine) -> Finding:
    """Whether greedy and seeded texts repeat."""
    found = probe(target, CONTEXT)
    facts = found._asdict()
    if found.alone:
        said = "The target gives the same logits for any number of rows: greedy and seeded texts repeat exactly."
        return Finding("repeating", said, facts=facts)
    said = f"The target's logits move by up to {found.largest:.2g} with the number of rows, so near-ties may turn"
    return Finding("repeating", f"{said}.", facts=facts)


def answers(pair: Pair) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what the target writes behind them one token at a time."""
    prompts = [pair.vocabulary.encode(prompt) for prompt in PROMPTS]
    texts = [(prompt, write(pair.target, pair.vocabulary, prompt)) for prompt in prompts]
    pair.target.truncate(0, 0)
    return texts


def greedy_texts(pair: Pair, texts: list[tuple[list[int], list[int]]]) -> Finding:
    """Whether greedy texts are the same with drafts and without."""
    gaps = []
    for prompt, plain in texts:
        drafted = greedy_with_drafts(pair.target, pair.draft, pair.costs, prompt, len(plain))
        found = first_difference(pair.target, prompt, plain, drafted)
        gaps += [] if found is None else [found.gap]
    facts = {"texts": len(texts), "differing": len(gaps), "gaps": gaps}
    if not gaps:
        return Finding(
            "greedy", f"{len(texts)} of {len(texts)} greedy texts are the same with drafts and without.", facts=facts
        )
    said = f"{len(gaps)} of {len(texts)} greedy texts differ, where two logits are {max(gaps):.2g} apart at most"
    if max(gaps) >= _NO_TIE:
        return Finding("greedy", f"{said}, too far for rounding: please report this.", False, facts)
    return Finding("greedy", f"{said}: near-ties, which the number of rows decides (see repeating).", facts=facts)


def distributions(pair: Pair, texts: list[tuple[list[int], list[int]]]) -> Finding:
    """Whether the rules keep the target's distribution, on rows of this pair."""
    pairs = []
    for prompt, answer in texts:
        p_rows = rows_along(pair.target, prompt, answer[: _PLACES + 1], pair.vocabulary.size)
        q_rows = rows_along(pair.draft, prompt, answer[: _PLACES + 1], pair.vocabulary.size)
        for place in range(min(_PLACES, len(p_rows) - 1)):
            p, q = lumped(p_rows[place], q_rows[place])
            behind, _ = lumped(p_rows[place + 1], q_rows[place + 1])
            pairs.append(([p, behind], [q]))
    worst = worst_deviation(pairs, _TRIALS)
    wrong = [name for name, away in worst.items() if is_wrong(away)]
    facts = {"places": len(pairs), "trials": _TRIALS, "standard_deviations": worst}
    if wrong:
        return Finding(
            "sampling",
            f"The rules {', '.join(wrong)} do not keep the target's distribution: please report this.",
            False,
            facts,
        )
    said = f"{_TRIALS} rounds of every rule at each of {len(pairs)} places of real texts left the target's distribution"
    return Finding(
        "sampling", f"{said} (largest deviation {max(worst.values()):.1f} standard deviations).", facts=facts
    )


def ceiling(pair: Pair, texts: list[tuple[list[int], list[int]]], handler: HandlerConfig) -> Finding:
    """The number of drafts that pays best on a few texts, and whether the configuration allows it."""
    hits = [read_along(pair.draft, prompt, answer, pair.vocabulary.size) for prompt, answer in texts]
    pair.draft.truncate(0, 0)
    target, draft = pair.costs
    best = fastest(Observed(hits, draft), target, 15)
    plain = 1 / target.seconds(1, CELLS)
    gain = best.tokens_per_second / plain
    facts = {"gamma": best.gamma, "tokens_per_second": best.tokens_per_second, "plain": plain}
    speeds = f"{best.tokens_per_second:.1f} tokens/s, plain {plain:.1f}"
    said = f"On {len(texts)} short texts {best.gamma} drafts a round are best: {speeds}"
    if gain < 1:
        return Finding("gain", f"{said}; this draft does not pay here, and `mode: auto` leaves it alone.", facts=facts)
    if best.gamma > handler.speculation.max_gamma:
        return Finding("gain", f"{said}; raise `speculation.max_gamma` to {best.gamma}.", False, facts)
    return Finding("gain", f"{said}; `mode: auto` finds that by itself.", facts=facts)


def main(arguments: Sequence[str]) -> int:
    """Say what was found; 1 if anything should be done."""
    parser = cli.Parser(prog="doctor", description=__doc__)
    add_config(parser)
    parser.add_argument("--json", action="store_true", help="all findings with their numbers, as one JSON object")
    options = parser.parse_args(arguments)
    _, handler = load_yaml(options.config)
    found = []
    console = Console(stderr=True)
    # What preparing says is for people.
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        prepared = prepare(options.config)
    with console.status("looking; this takes a minute or two") as status:
        for finding in examine(handler, prepared):
            found.append(finding)
            status.update(f"{finding.topic} is done")
            if not options.json:
                cli.say(f"{'ok  ' if finding.well else 'TODO'}  {finding.topic}: {finding.sentence}")
    if options.json:
        cli.say(
            json.dumps({"config": str(options.config), "findings": [asdict(finding) for finding in found]}, indent=1)
        )
    return 0 if all(finding.well for finding in found) else 1


if __name__ == "__main__":
    cli.run(main)
