"""The doctor's test of losslessness on an operator's own pair: greedy answers and the distribution of each rule."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specserve.engine.base import Engine, FloatArray, Row, Vocabulary
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from specserve.errors import EngineError, ModelLoadError
from specserve.kv_cache import KVCache
from specserve.sampling.distribution import to_distribution
from specserve.sampling.noise import Noise
from specserve.sequence import SamplingParams, SpeculationParams
from specserve.sequence import Sequence as Request
from specserve.speculation.cost import Cost
from specserve.speculation.draft_model import DraftModel
from specserve.speculation.drafters import Drafters
from specserve.speculation.measure import prefill
from specserve.speculation.policy import Controller
from specserve.speculation.rejection import RULES, Rule
from specserve.speculation.round import run_round
from specserve.speculation.step import Step

PROMPTS = (
    "def quicksort(items: list[int]) -> list[int]:\n",
    '[\n  {"name": "Ada Lovelace", "born": 1815, "country": "England"},\n  {"name": "Alan Turing", ',
    "The lighthouse keeper climbed the stairs once more, since",
)
CONTEXT = 512
# Longest answer to each prompt, in tokens, and rows of a pass.
_TOKENS, _MAX_ROWS = 40, 64
# Prompt and answer, as tokens.
Answer = tuple[list[int], list[int]]
GAMMA = 3
# The most probable tokens of either model keep their own bin; all others share one, which no rule can notice.
_TOP_TOKENS = 500
# Bins with fewer expected draws are merged, as usual for a chi-square test.
_MIN_EXPECTED = 10
# In standard deviations: a correct rule exceeds this once in three million trials.
_WRONG = 5.0


class Difference(NamedTuple):
    """First difference of two answers: its position, and the difference of the two tokens' logits."""

    position: int
    gap: float


def greedy_with_drafts(
    target: Engine, draft: Engine, costs: tuple[Cost, Cost], prompt: list[int], length: int
) -> list[int]:
    """Return a greedy answer of `length` tokens, decoded in rounds of three drafts.

    Args:
        target: its cache must be empty, and is emptied.
        draft: likewise.
        costs: of target and draft; updated by the passes.
        prompt: its tokens.
        length: of the answer, in tokens.
    """
    cache = KVCache(target)
    model = DraftModel(
        KVCache(draft), costs[1], window=256, max_rows=64, vocabulary=target.width, context_length=draft.slot_length
    )
    drafters = Drafters(Controller(*costs), model=model, vocabulary=target.width, end_tokens=())
    request = Request(prompt, SamplingParams(temperature=0), SpeculationParams(GAMMA, "token"), max_tokens=length)
    request.slot = 0
    while request.remaining > 0:
        rows = min(len(request.tokens) - cache.end(0), target.max_rows - GAMMA)
        gamma = min(GAMMA, request.remaining - 1) if request.generated else 0
        run_round(cache, drafters, [Step(request, cache.end(0), rows, gamma)])
    for used in (cache, model.cache):
        used.truncate(0, 0)
    return request.answer


def first_difference(engine: Engine, prompt: list[int], plain: list[int], drafted: list[int]) -> Difference | None:
    """Return where two answers differ; None if they do not, as far as both go."""
    position = next((i for i, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b), None)
    if position is None:
        return None
    *_, logits = answer_logits(engine, prompt, plain[: position + 1])
    gap = abs(float(logits[plain[position]]) - float(logits[drafted[position]]))
    engine.truncate(0, 0)
    return Difference(position, gap)


def answer_distributions(engine: Engine, prompt: list[int], answer: list[int], width: int) -> list[FloatArray]:
    """Return the distributions at temperature 1 for each token of an answer, each of shape (width,)."""
    rows = []
    for logits in answer_logits(engine, prompt, answer):
        row = to_distribution(logits[:width], SamplingParams(temperature=1))
        # Models of one family pad their vocabularies differently.
        rows.append(np.pad(row, (0, width - row.size)))
    engine.truncate(0, 0)
    return rows


def binned(p: FloatArray, q: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return both distributions over the most probable tokens of either and one bin for all others."""
    top = np.union1d(np.argsort(p)[-_TOP_TOKENS:], np.argsort(q)[-_TOP_TOKENS:])
    rows = []
    for row in (p, q):
        own = row[top].astype(np.float64)
        all_bins = np.append(own, max(0.0, float(row.sum(dtype=np.float64)) - own.sum()))
        rows.append(all_bins / all_bins.sum())
    return rows[0], rows[1]


def deviation(name: str, p: Sequence[FloatArray], q: Sequence[FloatArray], trials: int, seed: int = 1) -> float:
    """Return how far the first token that a rule emits deviates from p[0], in standard deviations.

    Args:
        name: of the rule.
        p: the target's distributions of two consecutive tokens.
        q: the draft's distribution of the first.
        trials: rounds of one draft, each with its own noise.
        seed: of the noise.
    """
    counts = np.zeros(p[0].size)
    rule: Rule = RULES[name]
    for trial in range(trials):
        # The coupled rule's noise depends on the position, that of the other rules on the round.
        noise = Noise(secret=seed, round_number=trial, seed=seed, choice=0, position=trial)
        drafted = rule.sample(q[0], 0, noise)
        n_accepted, token = rule.verify(p, q, [drafted], noise)
        counts[drafted if n_accepted else token] += 1
    return chi_square_deviation(counts, trials * p[0])


def chi_square_deviation(counts: FloatArray, expected: FloatArray) -> float:
    """Return a chi-square statistic as standard deviations of a normal variable (Wilson and Hilferty 1931)."""
    frequent = expected >= _MIN_EXPECTED
    observed = np.append(counts[frequent], counts[~frequent].sum())
    expected = np.append(expected[frequent], expected[~frequent].sum())
    possible = expected > 0
    if (observed[~possible] > 0).any():
        return math.inf
    freedom = int(possible.sum()) - 1
    if freedom < 1:
        return 0.0
    statistic = float(((observed[possible] - expected[possible]) ** 2 / expected[possible]).sum())
    away = (statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))
    return float(away / math.sqrt(2 / (9 * freedom)))


def largest_deviations(pairs: Sequence[tuple[list[FloatArray], list[FloatArray]]], trials: int) -> dict[str, float]:
    """Return the largest deviation of each rule over all pairs of distributions (p, q)."""
    return {name: max((deviation(name, p, q, trials) for p, q in pairs), default=-math.inf) for name in RULES}


def is_wrong(standard_deviations: float) -> bool:
    """Whether a deviation is too large to be chance."""
    return standard_deviations > _WRONG


def one_slot_engine(model: LlamaModel, threads: int, max_logits: int) -> LlamaEngine:
    """Return a context for one short sequence."""
    return LlamaEngine(
        model, n_slots=1, context_length=CONTEXT, threads=threads, max_rows=_MAX_ROWS, max_logits=max_logits
    )


@contextlib.contextmanager
def loaded(path: Path, threads: int, max_logits: int) -> Iterator[tuple[LlamaModel, LlamaEngine]]:
    """Load a model and a context of it, and close both at the end.

    Raises:
        ModelLoadError: the model cannot be loaded, or a forward pass failed.
    """
    with contextlib.ExitStack() as stack:
        model = LlamaModel(path)
        stack.callback(model.close)
        engine = one_slot_engine(model, threads, max_logits)
        stack.callback(engine.close)
        try:
            yield model, engine
        except EngineError as error:
            raise ModelLoadError(f"{path}: cannot be measured: {error}") from error


def greedy_answer(engine: Engine, vocabulary: Vocabulary, prompt: list[int]) -> list[int]:
    """Return the model's greedy answer, at most a few dozen tokens."""
    tokens = list(prompt)
    engine.truncate(0, 0)
    prefill(engine, prompt[:-1])
    while len(tokens) < len(prompt) + _TOKENS:
        [logits] = engine.forward([Row(tokens[-1], 0, len(tokens) - 1, wants_logits=True)])
        tokens.append(int(np.argmax(logits)))
        if vocabulary.is_end_token(tokens[-1]):
            break
    return tokens[len(prompt) :]


def answer_logits(engine: Engine, prompt: list[int], answer: list[int]) -> Iterator[FloatArray]:
    """Yield the logits that precede each token of an answer; each row is overwritten by a later pass."""
    tokens = [*prompt, *answer]
    step = min(engine.max_rows, engine.max_logits)
    engine.truncate(0, 0)
    prefill(engine, prompt[:-1])
    for first in range(len(prompt) - 1, len(tokens) - 1, step):
        positions = range(first, min(first + step, len(tokens) - 1))
        yield from engine.forward([Row(tokens[position], 0, position, wants_logits=True) for position in positions])
