"""SmolLM2-135M drafts for itself at another quantisation: a real model of another family than the default's."""

from typing import Any

import numpy as np
import pytest

from pairs import PLAIN, Pair, fixed_gamma
from specserve.cli.archive import prepared_handler
from specserve.cli.paths import CONFIG
from specserve.engine.base import Engine, FloatArray, Row

pytestmark = pytest.mark.real

SMOLLM2 = CONFIG / "smollm2-135m.yaml"
QUESTION = "What is the capital of France? Answer in one sentence."
PROMPTS = {
    "code": "def fibonacci(n):\n",
    "json": '{"name": "Alice", "age": 30}\n{"name": "Bob", "age": 25}\n{"name": "',
    "prose": "The lighthouse keeper had not spoken to anyone for",
}


@pytest.fixture(scope="module")
def smollm2() -> Pair:
    config = prepared_handler(SMOLLM2)
    # One thread varies less than one a core if the machine does other things as well.
    return Pair(config.model_copy(update={"threads": 1, "sequences": 1, "context_length": 512}))


def logits_of(engine: Engine, tokens: list[int], *, rows: int) -> FloatArray:
    """The logits after every token, fed with `rows` rows a pass."""
    engine.truncate(0, 0)
    passes = []
    for start in range(0, len(tokens), rows):
        fed = enumerate(tokens[start : start + rows], start)
        passes.append(engine.forward([Row(token, 0, position, wants_logits=True) for position, token in fed]).copy())
    return np.concatenate(passes)


def differs_first_at_a_near_tie(engine: Engine, plain: list[int], speculative: list[int]) -> bool:
    """Whether the logits of the first two tokens that differ are nearly the same.

    Allowed is twice what the number of rows in a pass changes logits by, which is nothing for many files.
    """
    common = next(position for position, pair in enumerate(zip(plain, speculative, strict=False)) if pair[0] != pair[1])
    alone, together = (logits_of(engine, plain[:common], rows=rows) for rows in (1, 4))
    gap = abs(alone[-1, plain[common]] - alone[-1, speculative[common]])
    return bool(gap <= 2 * np.abs(together - alone).max())


def test_the_chat_template_adds_its_system_prompt_and_a_question_is_answered(smollm2: Pair) -> None:
    prompt = smollm2.chat_prompt({"role": "user", "content": QUESTION})
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    )
    completion = smollm2.complete(prompt, max_tokens=32, temperature=0)
    assert sum(map(smollm2.vocabulary.is_end_token, completion.sequence.prompt)) == 2
    assert "Paris" in completion.text
    assert completion.finish_reason == "stop"


def test_greedy_output_is_the_same_with_speculation_or_differs_at_a_near_tie(smollm2: Pair) -> None:
    """It was the same on the x86 this was written on; another CPU may round passes of more rows differently.

    In prose fewer than half of the drafts are accepted: so small a model is uncertain.
    """
    engine, drafted, accepted = smollm2.models.target.engine, 0, 0
    for family, prompt in PROMPTS.items():
        fields: dict[str, Any] = {"max_tokens": 32, "temperature": 0}
        plain = smollm2.complete(prompt, **fields, speculation=PLAIN).sequence
        speculative = smollm2.complete(prompt, **fields, speculation=fixed_gamma(3)).sequence
        assert plain.stats.drafted == 0, family
        assert 0 < speculative.stats.accepted < speculative.stats.drafted, family
        is_same = plain.tokens == speculative.tokens
        assert is_same or differs_first_at_a_near_tie(engine, plain.tokens, speculative.tokens), family
        if family != "prose":
            drafted += speculative.stats.drafted
            accepted += speculative.stats.accepted
    assert accepted > 0.6 * drafted
