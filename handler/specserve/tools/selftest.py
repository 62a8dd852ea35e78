"""Whether an operator's own pair keeps the target's text and distribution, tried on that pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specserve.engine.base import Engine
from specserve.sampling.distribution import FloatArray, to_distribution
from specserve.sampling.noise import Noise
from specserve.sequence import SamplingParams, SpeculationParams
from specserve.sequence import Sequence as Text
from specserve.speculation.controller import Controller
from specserve.speculation.cost import Cost
from specserve.speculation.draft_model import DraftModel
from specserve.speculation.drafters import Drafters
from specserve.speculation.rejection import RULES, Rule
from specserve.speculation.round import Plan, run_round
from specserve.tools.choose import logits_along

GAMMA = 3
# The most probable tokens of either model; all others are one together, which changes nothing about a rule.
_NAMED = 500
# Fewer draws than this are expected of a token: it is counted with its like.
_LEAST_EXPECTED = 10
# In standard deviations: a right rule is called wrong once in three million trials.
_WRONG = 5.0


class Difference(NamedTuple):
    """Where a text with drafts left the one without, and by how much the two tokens' logits differ there."""

    place: int
    gap: float


def greedy_with_drafts(
    target: Engine, draft: Engine, costs: tuple[Cost, Cost], prompt: list[int], length: int
) -> list[int]:
    """So many greedy tokens behind a prompt, in rounds of three drafts; both caches must be empty, and are again.

    Args:
        target: verifies.
        draft: drafts.
        costs: of their passes; they follow what these take.
        prompt: its tokens.
        length: of the answer.
    """
    model = DraftModel(
        draft, costs[1], window=256, max_rows=64, vocabulary=target.width, context_length=draft.slot_length
    )
    drafters = Drafters(Controller(*costs), model=model, vocabulary=target.width)
    text = Text(prompt, SamplingParams(temperature=0), SpeculationParams(GAMMA, "token"), max_tokens=length)
    text.slot = 0
    while text.remaining > 0:
        rows = min(text.target_pending, target.max_rows - GAMMA)
        gamma = min(GAMMA, text.remaining - 1) if text.generated else 0
        run_round(target, drafters, [Plan(text, rows, gamma)])
    for engine in (target, draft):
        engine.truncate(0, 0)
    return text.answer


def first_difference(engine: Engine, prompt: list[int], plain: list[int], drafted: list[int]) -> Difference | None:
    """Where two answers part; None where they are the same as far as both go."""
    place = next((i for i, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b), None)
    if place is None:
        return None
    *_, logits = logits_along(engine, prompt, plain[: place + 1])
    gap = abs(float(logits[plain[place]]) - float(logits[drafted[place]]))
    engine.truncate(0, 0)
    return Difference(place, gap)


def rows_along(engine: Engine, prompt: list[int], answer: list[int], width: int) -> list[FloatArray]:
    """The distributions at temperature 1 of every place of an answer, each of shape (width,)."""
    rows = []
    for logits in logits_along(engine, prompt, answer):
        row = to_distribution(logits[:width], SamplingParams(temperature=1))
        # Models of one family pad differently.
        rows.append(np.pad(row, (0, width - row.size)))
    engine.truncate(0, 0)
    return rows


def lumped(p: FloatArray, q: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Both rows over the tokens that either holds for probable, and one token that stands for all others."""
    named = np.union1d(np.argsort(p)[-_NAMED:], np.argsort(q)[-_NAMED:])
    rows = []
    for row in (p, q):
        kept = row[named].astype(np.float64)
        whole = np.append(kept, max(0.0, float(row.sum(dtype=np.float64)) - kept.sum()))
        rows.append(whole / whole.sum())
    return rows[0], rows[1]


def deviation(name: str, p: Sequence[FloatArray], q: Sequence[FloatArray], trials: int, seed: int = 1) -> float:
    """How far the first token that a rule leaves is from p[0], in standard deviations of chance.

    Args:
        name: of the rule.
        p: two rows, of the place and of the one behind it.
        q: one row.
        trials: rounds of one draft, each with noise of its own.
        seed: of the noise.
    """
    counts = np.zeros(p[0].size)
    rule: Rule = RULES[name]
    for trial in range(trials):
        # The coupled rule's noise belongs to a place of a text, the others' to a round of it.
        noise = Noise(seed, trial, trial, 0)
        drafted = rule.sample(q[0], 0, noise)
        n_accepted, token = rule.verify(p, q, [drafted], noise)
        counts[drafted if n_accepted else token] += 1
    return chance(counts, trials * p[0])


def chance(counts: FloatArray, expected: FloatArray) -> float:
    """A chi-square statistic as standard deviations of a normal one (Wilson and Hilferty 1931)."""
    often = expected >= _LEAST_EXPECTED
    seen, due = np.append(counts[often], counts[~often].sum()), np.append(expected[often], expected[~often].sum())
    filled = due > 0
    if (seen[~filled] > 0).any():
        return math.inf
    freedom = int(filled.sum()) - 1
    if freedom < 1:
        return 0.0
    statistic = float(((seen[filled] - due[filled]) ** 2 / due[filled]).sum())
    away = (statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))
    return float(away / math.sqrt(2 / (9 * freedom)))


def worst_deviation(pairs: Sequence[tuple[list[FloatArray], list[FloatArray]]], trials: int) -> dict[str, float]:
    """By rule, the largest deviation over all places."""
    worst = dict.fromkeys(RULES, -math.inf)
    for p, q in pairs:
        for name in RULES:
            worst[name] = max(worst[name], deviation(name, p, q, trials))
    return worst


def is_wrong(standard_deviations: float) -> bool:
    """Whether chance is no explanation."""
    return standard_deviations > _WRONG
