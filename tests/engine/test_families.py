"""Requests have the same effects with a Qwen2 (BPE), a Llama (SentencePiece), a GPT-2 and a Gemma 3 (window) pair."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType, GGUFWriter

import tiny_models as tiny
from pairs import KERNELS, PLAIN, Pair, TinyFiles, fixed_gamma
from specserve.config import HandlerConfig, ModelConfig
from specserve.core import loading
from specserve.engine.base import Row
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from specserve.errors import ModelLoadError, RequestError
from tiny_models import ARCHITECTURES, END_OF_TEXT

PROMPTS = ["The quick brown fox", "def accept(p, q):", "héllo 世界 🙂, once upon a time there was a"]
GAMMAS = [1, 3, 7]
GREEDY = {"max_tokens": 60, "temperature": 0}


@pytest.fixture(scope="module")
def pair(architecture: str, files: TinyFiles) -> Pair:
    return Pair(files.config(architecture))


def without_end_tokens(pair: Pair) -> dict[str, Any]:
    """A `logit_bias` that forbids every end token."""
    return {"logit_bias": {str(token): -100 for token in pair.vocabulary.end_tokens()}}


def test_greedy_output_is_the_same_with_and_without_speculation(pair: Pair, architecture: str) -> None:
    """Fed token by token, each output token has the largest logit; with llama.cpp's kernels within 0.05 of it.

    Also after control tokens in a prompt, and from drafts of a pool of finished answers.
    """
    for prompt in (*PROMPTS, f"The quick{END_OF_TEXT[architecture]}brown fox"):
        plain = pair.complete(prompt, **GREEDY, speculation=PLAIN).sequence
        assert plain.stats.drafted == 0
        assert any(map(pair.vocabulary.is_end_token, plain.prompt)) == (prompt not in PROMPTS)
        target = pair.models.target.engine
        target.truncate(0, 0)
        for position, (token, following) in enumerate(pairwise(plain.tokens)):
            [logits] = target.forward([Row(token, 0, position, wants_logits=True)])
            assert position + 1 < plain.prompt_length or logits[following] >= logits.max() - 0.05 * (KERNELS == "off")
        for gamma in GAMMAS:
            speculative = pair.complete(prompt, **GREEDY, speculation=fixed_gamma(gamma)).sequence
            assert speculative.answer == plain.answer
            assert 0 < speculative.stats.accepted < speculative.stats.drafted or prompt not in PROMPTS
        pooled = {"mode": "fixed", "pool": prompt}
        first, second = (pair.complete(prompt, **GREEDY, speculation=pooled).sequence for _ in range(2))
        assert first.answer == second.answer == plain.answer
        assert second.stats.accepted > max(0.6 * len(plain.answer), first.stats.accepted - 1)


def test_an_end_token_is_parsed_in_a_prompt_ends_the_output_and_has_no_text(pair: Pair, architecture: str) -> None:
    name = END_OF_TEXT[architecture]
    before, after = pair.vocabulary.encode("", special=True), pair.vocabulary.encode(name, special=True)
    [token] = after[len(before) :]
    assert pair.vocabulary.is_end_token(token)
    assert pair.vocabulary.piece(token) == b""
    assert len(pair.vocabulary.encode(name)) > len(after)
    for speculation in (PLAIN, fixed_gamma(3)):
        forced = {"logit_bias": {str(token): 100}, "temperature": 0}
        completion = pair.complete(PROMPTS[0], **forced, speculation=speculation)
        assert (completion.text, completion.finish_reason) == ("", "stop")


def test_an_empty_prompt_becomes_the_bos_token(pair: Pair, architecture: str) -> None:
    name = b"<s>" if architecture == "llama" else b"<|endoftext|>"
    plain = pair.complete("", max_tokens=30, temperature=0, speculation=PLAIN, **without_end_tokens(pair))
    [bos] = plain.sequence.prompt
    assert pair.vocabulary.token_text(bos) == name
    speculative = pair.complete("", max_tokens=30, temperature=0, **without_end_tokens(pair))
    assert speculative.sequence.tokens == plain.sequence.tokens
    assert speculative.sequence.stats.accepted > 0


def test_an_empty_prompt_is_refused_without_a_bos_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp then gives token 11 as the BOS token, which is an ordinary one."""
    monkeypatch.setattr(GGUFWriter, "add_bos_token_id", lambda *_: None)
    pair = Pair(TinyFiles(tmp_path).config("qwen2"))
    assert pair.vocabulary.bos_token() is None
    assert pair.vocabulary.bos_text() == ""
    with pytest.raises(RequestError, match="The prompt is empty; this model needs at least one token"):
        pair.complete("")


def test_output_can_fill_the_context_to_its_last_token(pair: Pair) -> None:
    fields: dict[str, Any] = {"max_tokens": 10_000, "temperature": 0, **without_end_tokens(pair)}
    plain = pair.complete(PROMPTS[0], **fields, speculation=PLAIN)
    assert len(plain.sequence.tokens) == pair.config.context_length
    assert plain.finish_reason == "length"
    assert pair.complete(PROMPTS[0], **fields, speculation=fixed_gamma(7)).sequence.tokens == plain.sequence.tokens


def test_a_draft_with_a_shorter_context_reads_only_the_end_of_long_sequences(
    architecture: str, files: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2 has a learned embedding for every position of its context and none after it."""
    config = files.config(architecture)
    monkeypatch.setattr(tiny, "CONTEXT", 128)
    short = TinyFiles(tmp_path).config(architecture, context_length=128)
    pair = Pair(config.model_copy(update={"draft": short.draft}))
    fields: dict[str, Any] = {"max_tokens": 10_000, "temperature": 0, **without_end_tokens(pair)}
    plain = pair.complete(PROMPTS[0], **fields, speculation=PLAIN).sequence
    speculative = pair.complete(PROMPTS[0], **fields).sequence
    assert speculative.tokens == plain.tokens
    assert pair.models.drafters.model
    assert pair.models.drafters.model.cache.length(speculative.slot) <= 128
    assert speculative.stats.drafted > 128 * 2, "it restarts near the end of the sequence"


def left_out(config: HandlerConfig, log: pytest.LogCaptureFixture) -> str:
    """Why a pair is served without its draft model; lookup then drafts alone."""
    log.clear()
    pair = Pair(config)
    assert pair.models.draft is None
    assert pair.models.drafters.model is None
    assert "Serving goes on without the draft model" in log.text
    plain, found = (pair.complete(PROMPTS[2] * 3, **GREEDY, speculation=how) for how in (PLAIN, fixed_gamma(3)))
    assert found.text == plain.text
    assert found.sequence.stats.drafted > 0
    return log.text


def test_a_draft_of_another_family_or_with_other_tokens_is_left_out_with_the_reason(
    files: TinyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    """The pre-tokenisers of Qwen2 and GPT-2 differ, and so do the tokens of `other` files."""
    kinds, texts = "their tokenizers are of different kinds", "is a different text in each"
    pairs = {("qwen2", "llama"): kinds, ("llama", "gpt2"): kinds, ("qwen2", "gpt2"): texts, ("gpt2", "qwen2"): texts}
    pairs |= {(architecture, architecture): texts for architecture in ARCHITECTURES}
    for (target, draft), reason in pairs.items():
        path = files.path(draft, "other" if draft == target else "draft")
        said = left_out(files.config(target).model_copy(update={"draft": ModelConfig(path=path)}), caplog)
        assert f"The draft {path.name} does not fit the target {target}-target.gguf: " in said
        assert f"{reason}; choose a draft of the " in said


def draft_with(architecture: str, directory: Path, without: str, key: str, value: int) -> ModelConfig:
    """A draft whose file has this key of the tokenizer, and without what a method of GGUFWriter adds."""

    def write(writer: GGUFWriter, _value: object) -> None:
        kind = GGUFValueType.BOOL if isinstance(value, bool) else GGUFValueType.UINT32
        writer.add_key_value(f"tokenizer.ggml.{key}", value, kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUFWriter, without, write)
        return ModelConfig(path=TinyFiles(directory).path(architecture, "draft"))


def test_a_draft_whose_answers_end_otherwise_serves_its_target(
    architecture: str, pair: Pair, files: TinyFiles, tmp_path: Path
) -> None:
    """As a base model's file does for an instruct target; no prompt gets an end token from either."""
    draft = draft_with(architecture, tmp_path, "add_eos_token_id", "eos_token_id", 0)
    mixed = Pair(files.config(architecture).model_copy(update={"draft": draft}))
    assert mixed.models.draft is not None
    assert mixed.models.draft.is_end_token(0)
    assert not mixed.vocabulary.is_end_token(0)
    for prompt in PROMPTS:
        expected, found = pair.complete(prompt, **GREEDY, speculation=PLAIN), mixed.complete(prompt, **GREEDY)
        assert (found.text, found.finish_reason) == (expected.text, expected.finish_reason)
        assert found.sequence.stats.accepted > 0


def test_a_draft_whose_prompts_begin_or_end_otherwise_is_left_out(
    files: TinyFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A begin token that no prompt gets may differ."""
    cases = [
        ("qwen2", "add_add_bos_token", "add_bos_token", True, False),
        ("llama", "add_unk_token_id", "add_eos_token", True, False),
        ("llama", "add_bos_token_id", "bos_token_id", 0, False),
        ("qwen2", "add_bos_token_id", "bos_token_id", 0, True),
    ]
    for number, (architecture, without, key, value, fits) in enumerate(cases):
        draft = draft_with(architecture, tmp_path / str(number), without, key, value)
        config = files.config(architecture).model_copy(update={"draft": draft})
        if fits:
            assert Pair(config).models.draft is not None
            continue
        assert "their prompts begin or end with different tokens; choose a draft of" in left_out(config, caplog)


def test_a_draft_whose_engine_cannot_be_opened_is_left_out(
    files: TinyFiles, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else keeps a pair from its draft: test_doctor.py."""

    def without_memory(model: LlamaModel, **options: Any) -> LlamaEngine:
        if model.path.name == "qwen2-draft.gguf":
            raise ModelLoadError("There is no memory for it.")
        return LlamaEngine(model, **options)

    monkeypatch.setattr(loading, "LlamaEngine", without_memory)
    assert "There is no memory for it." in left_out(files.config("qwen2"), caplog)
