"""Greedy and seeded output is the same alone and among concurrent requests, whatever the KV caches hold."""

import random
from itertools import product
from typing import Any
from unittest import mock

import pytest

from pairs import KERNELS, PLAIN, Pair, TinyFiles, fixed_gamma
from specserve.core import admission
from specserve.core.prefix_store import BLOCK_TOKENS, PrefixStore
from specserve.core.scheduler import Scheduler
from specserve.core.text_sequence import TextSequence
from tiny_models import ARCHITECTURES, HYBRID

pytestmark = pytest.mark.skipif(
    KERNELS == "off", reason="with llama.cpp's attention logits depend on other sequences: unset SPECSERVE_TEST_KERNELS"
)

PREFIXES = ["The quick brown fox", "The quick brown dog jumps", "def accept(p, q):", "once upon a time " * 6]
MODES = [PLAIN, *map(fixed_gamma, (1, 3, 7)), {"mode": "auto"}, {"mode": "fixed", "drafter": "lookup"}]


def random_requests(rng: random.Random) -> list[dict[str, Any]]:
    """Twelve requests, some with common prefixes, each greedy or with a seed of its own."""
    return [
        {
            "prompt": rng.choice(PREFIXES) + rng.choice(["", " and", " and then"]),
            "max_tokens": rng.choice([5, 30, 60]),
            "speculation": rng.choice(MODES),
            **rng.choice([{"temperature": 0}, {"temperature": 0.9, "seed": number}]),
        }
        for number in range(12)
    ]


def run_concurrently(
    pair: Pair, requests: list[dict[str, Any]], rng: random.Random, scheduler: Scheduler | None = None
) -> list[TextSequence]:
    """Run the requests a random number of rounds apart, from empty KV caches by default, and store their prefixes."""
    scheduler = scheduler or pair.scheduler()
    sequences = [pair.sequence(**fields) for fields in requests]
    for sequence in sequences:
        scheduler.submit(sequence)
        for _ in range(rng.randrange(12)):
            scheduler.run_round()
    while scheduler.busy:
        scheduler.run_round()
    while scheduler.store_prefixes():
        pass
    return sequences


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, HYBRID])
def test_greedy_and_seeded_output_is_the_same_alone_concurrent_and_where_sequences_are_preempted(
    files: TinyFiles, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read again has the bits that it had; one of the longer sequences needs all cells of the small cache."""
    monkeypatch.setattr(admission, "_ANSWER", 8)
    config = files.config(architecture, "qwen2" if architecture == HYBRID else None, context_length=100)
    for cache_tokens, seed in product((300, 100), range(2)):
        pair = Pair(config.model_copy(update={"cache_tokens": cache_tokens}))
        rng = random.Random(seed)
        requests = [{**fields, "ignore_eos": cache_tokens == 100} for fields in random_requests(rng)]
        alone = [pair.complete(**fields).sequence.answer for fields in requests]
        concurrent = run_concurrently(pair, requests, rng)
        assert [sequence.answer for sequence in concurrent] == alone
        reused = sum(sequence.cached_tokens > 0 for sequence in concurrent)
        assert reused >= 3 or cache_tokens == 100 or architecture == HYBRID
        assert any(sequence.preemptions for sequence in concurrent) or cache_tokens == 300


def test_conversations_that_leave_the_cache_and_return_go_on_with_the_same_bits(
    files: TinyFiles, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six conversations take turns, grow and begin anew; the store has room for half of what they are."""
    # Too few for two of the longer ones.
    crowded = Pair(files.config(architecture).model_copy(update={"cache_tokens": 300}))
    loads = mock.Mock(wraps=crowded.models.target.load)
    monkeypatch.setattr(crowded.models.target, "load", loads)
    token_bytes = crowded.models.target.engine.token_bytes
    assert token_bytes is not None
    store = PrefixStore(token_bytes, 16 * BLOCK_TOKENS * (token_bytes + 4))
    scheduler = crowded.scheduler(store)
    rng = random.Random(0)
    conversations: list[list[int]] = [[] for _ in range(6)]
    answers: list[tuple[list[int], dict[str, Any], list[int]]] = []
    for _ in range(16):
        turns = []
        for number in rng.sample(range(6), 3):
            if len(conversations[number]) > 110:
                del conversations[number][rng.choice([0, 70]) :]
            prompt = conversations[number] + crowded.vocabulary.encode(rng.choice(PREFIXES) * rng.randrange(1, 3))
            fields = {"max_tokens": rng.choice([3, 20]), "temperature": 0.9, "seed": number, "ignore_eos": True}
            turns.append((number, prompt, fields, crowded.sequence(prompt, speculation=rng.choice(MODES), **fields)))
            scheduler.submit(turns[-1][-1])
        while scheduler.busy:
            scheduler.run_round()
        for number, prompt, fields, sequence in turns:
            conversations[number] = prompt + sequence.answer
            answers.append((prompt, fields, sequence.answer))
    for prompt, fields, answer in answers:
        assert crowded.complete(prompt, speculation=PLAIN, **fields).sequence.answer == answer
    assert loads.call_count > 5
