"""SmolLM2-135M drafts for itself at another quantisation: a real model of another family than the default's."""

from typing import Any

import pytest

from pairs import PLAIN, Pair, fixed_gamma
from specserve.cli.archive import prepared_handler
from specserve.cli.paths import CONFIG

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


def test_the_chat_template_adds_its_system_prompt_and_a_question_is_answered(smollm2: Pair) -> None:
    assert smollm2.chat_template is not None
    prompt = smollm2.chat_template.render([{"role": "user", "content": QUESTION}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    )
    completion = smollm2.complete(prompt, max_tokens=32, temperature=0)
    assert sum(map(smollm2.vocabulary.is_end_token, completion.sequence.prompt)) == 2
    assert "Paris" in completion.text
    assert completion.finish_reason == "stop"


def test_greedy_output_is_the_same_with_and_without_speculation(smollm2: Pair) -> None:
    """In prose fewer than half of the drafts are accepted: so small a model is uncertain."""
    drafted, accepted = 0, 0
    for family, prompt in PROMPTS.items():
        fields: dict[str, Any] = {"max_tokens": 32, "temperature": 0}
        plain = smollm2.complete(prompt, **fields, speculation=PLAIN).sequence
        speculative = smollm2.complete(prompt, **fields, speculation=fixed_gamma(3)).sequence
        assert plain.stats.drafted == 0, family
        assert 0 < speculative.stats.accepted < speculative.stats.drafted, family
        assert speculative.tokens == plain.tokens, family
        if family != "prose":
            drafted += speculative.stats.drafted
            accepted += speculative.stats.accepted
    assert accepted > 0.6 * drafted
