"""A text is the same, bit for bit, whoever else is served meanwhile, and whatever the caches held before."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pairs import KERNELS, PLAIN, Pair, TinyFiles, drafting
from specserve.serving.generation import Generation
from tiny_models import ARCHITECTURES

pytestmark = pytest.mark.skipif(KERNELS == "off", reason="in a crowd only our attention gives the same texts")

BEGINNINGS = ["The quick brown fox", "The quick brown dog jumps", "def accept(p, q):", "once upon a time " * 6]
MODES = [PLAIN, drafting(1), drafting(3), drafting(7), {"mode": "auto"}, {"mode": "fixed", "drafter": "lookup"}]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(TinyFiles(tmp_path_factory.mktemp("tiny")).config(request.param))


def requests(chance: random.Random) -> list[dict[str, Any]]:
    """A dozen requests that begin alike now and then, greedy or with a seed of their own."""
    return [
        {
            "prompt": chance.choice(BEGINNINGS) + chance.choice(["", " and", " and then"]),
            "max_tokens": chance.choice([5, 30, 60]),
            "speculation": chance.choice(MODES),
            **chance.choice([{"temperature": 0}, {"temperature": 0.9, "seed": number}]),
        }
        for number in range(12)
    ]


def in_a_crowd(pair: Pair, asked: list[dict[str, Any]], chance: random.Random) -> list[Generation]:
    """All of them on three slots, coming when chance has it."""
    scheduler = pair.scheduler(idle_tokens=10_000)
    generations = [pair.generation(**fields) for fields in asked]
    for generation in generations:
        scheduler.submit(generation)
        for _ in range(chance.randrange(12)):
            scheduler.step()
    while scheduler.busy:
        scheduler.step()
    return generations


@pytest.mark.parametrize("seed", range(5))
def test_greedy_and_seeded_texts_are_the_same_alone_and_in_a_crowd(pair: Pair, seed: int) -> None:
    chance = random.Random(seed)
    asked = requests(chance)
    alone = [pair.answer(**fields).sequence.answer for fields in asked]
    crowd = in_a_crowd(pair, asked, chance)
    assert [generation.answer for generation in crowd] == alone
    assert sum(generation.cached_tokens > 0 for generation in crowd) >= 3
