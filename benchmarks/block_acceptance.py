"""How often a draft model's tokens are accepted, by their position in the draft, along recorded answers of the target.

Prints sum min(p, q) at temperature 0.8 and the share of equal tokens at 0, each if all before it are accepted: drafted
one by one, which the next pass reads, and in one pass behind masks. E is the tokens of a round, the target's own one
included. The recorded prompts take no part in training (train_draft.py).

    .venv/bin/python benchmarks/block_acceptance.py DRAFT.gguf [--recordings FILE] [--config FILE] [--every N]
"""

import json
from pathlib import Path

import numpy as np

from common import argument_parser, print_table, with_progress
from specserve.cli.archive import prepared_handler
from specserve.engine import kernels
from specserve.engine.base import FloatArray, Row
from specserve.engine.draft_head import DraftHead
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from specserve.machine import usable_cores
from specserve.sampling.distribution import one_hot, to_distribution
from specserve.sequence import SamplingParams
from specserve.speculation.measure import prefill

RECORDINGS = Path(__file__).parent / "recordings" / "coder-0.5b-1.5b.jsonl"
_ROWS = 64


def open_engine(path: Path, threads: int, *, is_draft: bool) -> tuple[LlamaModel, LlamaEngine]:
    model = LlamaModel(path)
    head = DraftHead(model.size, model.end_tokens()) if is_draft else None
    return model, LlamaEngine(
        model, n_slots=1, context_length=2048, threads=threads, max_rows=_ROWS, max_logits=_ROWS, head=head
    )


def distributions(engine: LlamaEngine, tokens: list[int], start: int, sampling: SamplingParams) -> list[FloatArray]:
    """What the model says follows each token from position `start` on."""
    engine.truncate(0, 0)
    prefill(engine, tokens[:start])
    found = []
    for first in range(start, len(tokens), _ROWS):
        rows = [Row(tokens[n], 0, n, wants_logits=True) for n in range(first, min(first + _ROWS, len(tokens)))]
        found += [to_distribution(logits, sampling) for logits in engine.forward(rows)]
    return found


def main() -> None:
    parser = argument_parser(__doc__, quick="every 24th position")
    parser.add_argument("draft", type=Path)
    parser.add_argument("--recordings", type=Path, default=RECORDINGS)
    parser.add_argument("--every", type=int, default=3, help="positions apart that drafts begin (%(default)s)")
    options = parser.parse_args()
    config = prepared_handler(options.config)
    if config.target.path is None:
        raise SystemExit(f"{options.config} names no file of a target.")
    kernels.use(config.kernels)
    threads = usable_cores(config.cores, config.threads).threads
    _, target = open_engine(config.target.path, threads, is_draft=False)
    model, draft = open_engine(options.draft, threads, is_draft=True)
    length = max(2, model.block_length)
    stride = options.every * (8 if options.quick else 1)
    # By temperature, way of drafting and family: a line of acceptance probabilities for each beginning.
    found: dict[tuple[float, str, str], list[list[float]]] = {}
    for line in with_progress(options.recordings.read_text(encoding="utf-8").splitlines(), "answers"):
        recording = json.loads(line)
        tokens, first = recording["prompt"] + recording["answer"], len(recording["prompt"])
        sampling = SamplingParams(temperature=recording["temperature"])
        # Greedy answers show what the target says.
        if sampling.is_greedy:
            p = [one_hot(token, target.width) for token in recording["answer"]]
        else:
            p = distributions(target, tokens, first - 1, sampling)
        singly = [
            float(np.minimum(each, q[: each.size]).sum())
            for each, q in zip(p, distributions(draft, tokens, first - 1, sampling), strict=False)
        ]
        draft.truncate(0, first - 1)
        for begin in range(first - 1, len(tokens) - length, stride):
            after = begin - first + 1
            ways = {"one by one": singly[after : after + length]}
            if model.mask_token is not None:
                rows = [Row(tokens[begin], 0, begin, wants_logits=True)]
                rows += [Row(model.mask_token, 0, begin + n, wants_logits=True) for n in range(1, length)]
                q = [to_distribution(logits, sampling) for logits in draft.forward(rows)]
                ways["in one pass"] = [
                    float(np.minimum(each, other[: each.size]).sum()) for each, other in zip(p[after:], q, strict=False)
                ]
            for way, each in ways.items():
                for family in (recording["family"], "all"):
                    found.setdefault((sampling.temperature, way, family), []).append(each)
            draft.truncate(0, begin)
            prefill(draft, tokens[: begin + stride], begin)
    table = []
    for (temperature, way, family), values in sorted(found.items()):
        accepted = np.array(values)
        reached = np.cumprod(accepted, axis=1)
        before = np.hstack([np.ones((len(values), 1)), reached[:, :-1]]).sum(axis=0)
        shares = " ".join(f"{value:.2f}" for value in reached.sum(axis=0) / np.maximum(before, 1e-9))
        lengths = [k for k in (2, 4, 8) if k <= length]
        expected = {f"E{k}": f"{1 + reached[:, :k].sum(axis=1).mean():.2f}" for k in lengths}
        table.append({"temperature": temperature, "drafted": way, "family": family, "acceptance": shares} | expected)
    print_table(f"Acceptance by position of {options.draft.name}", table)


if __name__ == "__main__":
    main()
