"""What a request asks for, it gets from a Qwen2 (BPE), a Llama (SentencePiece) and a GPT-2 pair alike."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

import tiny_models as tiny
from pairs import KERNELS, PLAIN, Pair, TinyFiles, drafting
from specserve.config import ModelConfig
from specserve.engine.base import Row
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from specserve.errors import ModelLoadError, RequestError
from specserve.serving import loading
from tiny_models import ARCHITECTURES, END_OF_TEXT

PROMPTS = ["The quick brown fox", "def accept(p, q):", "héllo 世界 🙂, once upon a time there was a"]
GAMMAS = [1, 3, 7]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TinyFiles:
    return TinyFiles(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(architecture: str, files: TinyFiles) -> Pair:
    return Pair(files.config(architecture))


def never_ending(pair: Pair) -> dict[str, Any]:
    """Fields that forbid every token that ends a text."""
    ends = [token for token in range(pair.vocabulary.size) if pair.vocabulary.is_end_token(token)]
    return {"logit_bias": {str(token): -100 for token in ends}}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_the_same_token_for_token_with_and_without_speculation(pair: Pair, prompt: str) -> None:
    """Each token has the largest logit, or with llama.cpp's kernels nearly, if the text is fed token by token."""
    plain = pair.answer(prompt, max_tokens=60, temperature=0, speculation=PLAIN).sequence
    assert plain.stats.drafted == 0
    target = pair.models.target
    target.truncate(0, 0)
    for position, (token, following) in enumerate(pairwise(plain.tokens)):
        [logits] = target.forward([Row(token, 0, position, wants_logits=True)])
        assert position + 1 < plain.prompt_length or logits[following] >= logits.max() - 0.05 * (KERNELS == "off")
    for gamma in GAMMAS:
        speculative = pair.answer(prompt, max_tokens=60, temperature=0, speculation=drafting(gamma)).sequence
        assert speculative.answer == plain.answer
        assert 0 < speculative.stats.accepted < speculative.stats.drafted


@pytest.mark.parametrize("seed", range(4))
def test_a_seed_gives_one_text_token_for_token_with_and_without_speculation(pair: Pair, seed: int) -> None:
    fields: dict[str, Any] = {"seed": seed, "temperature": 0.9, "max_tokens": 60, **never_ending(pair)}
    plain = pair.answer(PROMPTS[0], **fields, speculation=PLAIN).sequence
    assert len(plain.answer) == 60
    for gamma in GAMMAS:
        speculative = pair.answer(PROMPTS[0], **fields, speculation=drafting(gamma)).sequence
        assert speculative.speculation.verification == "coupled"
        assert speculative.answer == plain.answer
        assert 0 < speculative.stats.accepted < speculative.stats.drafted


def test_another_seed_gives_another_text(pair: Pair) -> None:
    texts = {pair.answer(PROMPTS[0], seed=seed, max_tokens=30, **never_ending(pair)).text for seed in range(4)}
    assert len(texts) == 4


def test_a_stream_joins_to_the_decoded_whole_though_its_tokens_split_characters(pair: Pair) -> None:
    split = 0
    for seed, speculation in product(range(3), [PLAIN, drafting(3)]):
        answered = pair.answer(PROMPTS[2], seed=seed, temperature=1.2, max_tokens=80, speculation=speculation)
        pieces = [pair.vocabulary.piece(token) for token in answered.sequence.answer]
        assert answered.text == b"".join(pieces).decode(errors="replace")
        split += sum("\ufffd" in piece.decode(errors="replace") for piece in pieces)
    assert split > 0


def test_a_stop_string_ends_the_text_before_it_with_and_without_speculation(pair: Pair) -> None:
    fields: dict[str, Any] = {"max_tokens": 60, "temperature": 0, **never_ending(pair)}
    text = pair.answer(PROMPTS[1], **fields).text
    for start, length in ((5, 1), (20, 3), (30, 9)):
        stop = text[start : start + length]
        for speculation in (PLAIN, *map(drafting, GAMMAS)):
            answered = pair.answer(PROMPTS[1], **fields, stop=["never said", stop], speculation=speculation)
            assert answered.text == text[: text.index(stop)]
            assert answered.finish_reason == "stop"
            assert not any(stop in chunk for chunk in answered.chunks)


def test_the_models_own_end_ends_the_text_and_is_no_part_of_it(pair: Pair, architecture: str) -> None:
    [*_, end] = pair.vocabulary.encode(END_OF_TEXT[architecture], special=True)
    forced = {"logit_bias": {str(end): 100}}
    for speculation in (PLAIN, drafting(3)):
        answered = pair.answer(PROMPTS[0], temperature=0, **forced, speculation=speculation)
        assert (answered.text, answered.finish_reason) == ("", "stop")


def test_control_tokens_are_read_from_a_prompt_and_add_no_text(pair: Pair, architecture: str) -> None:
    name = END_OF_TEXT[architecture]
    before, after = pair.vocabulary.encode("", special=True), pair.vocabulary.encode(name, special=True)
    [token] = after[len(before) :]
    assert pair.vocabulary.is_end_token(token)
    assert pair.vocabulary.piece(token) == b""
    assert len(pair.vocabulary.encode(name)) > len(after)


def test_a_prompt_with_control_tokens_inside_is_continued_alike(pair: Pair, architecture: str) -> None:
    prompt = f"The quick{END_OF_TEXT[architecture]}brown fox"
    plain = pair.answer(prompt, max_tokens=40, temperature=0, speculation=PLAIN)
    assert any(map(pair.vocabulary.is_end_token, plain.sequence.prompt))
    for gamma in GAMMAS:
        speculative = pair.answer(prompt, max_tokens=40, temperature=0, speculation=drafting(gamma))
        assert speculative.sequence.tokens == plain.sequence.tokens


def test_an_empty_prompt_is_the_token_that_begins_a_text(pair: Pair, architecture: str) -> None:
    name = {"qwen2": b"<|endoftext|>", "llama": b"<s>", "gpt2": b"<|endoftext|>"}[architecture]
    plain = pair.answer("", max_tokens=30, temperature=0, speculation=PLAIN, **never_ending(pair))
    [start] = plain.sequence.prompt
    assert pair.vocabulary.token_text(start) == name
    speculative = pair.answer("", max_tokens=30, temperature=0, **never_ending(pair))
    assert speculative.sequence.tokens == plain.sequence.tokens
    assert speculative.sequence.stats.accepted > 0


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])
def test_an_empty_prompt_is_refused_where_no_token_begins_a_text(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp then answers with token 11, an ordinary piece of text."""
    monkeypatch.setattr(GGUFWriter, "add_bos_token_id", lambda *_: None)
    pair = Pair(TinyFiles(tmp_path).config(architecture))
    assert pair.vocabulary.bos_token() is None
    assert pair.vocabulary.bos_text() == ""
    with pytest.raises(RequestError, match="The prompt is empty; this model needs at least one token"):
        pair.answer("")


def test_a_chat_is_rendered_by_the_models_own_template_and_tokenised_with_one_beginning(files: TinyFiles) -> None:
    expected = {
        "qwen2": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "llama": "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\n",
    }
    for architecture, text in expected.items():
        pair = Pair(files.config(architecture))
        prompt = pair.chat_prompt({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})
        assert prompt == text
        plain = pair.answer(prompt, max_tokens=40, temperature=0, speculation=PLAIN).sequence
        assert sum(map(pair.vocabulary.is_end_token, plain.prompt)) == 2
        assert plain.prompt.count(pair.vocabulary.bos_token() or 0) == (architecture == "llama")
        assert pair.answer(prompt, max_tokens=40, temperature=0).sequence.tokens == plain.tokens


def test_a_model_without_a_chat_template_has_none(files: TinyFiles) -> None:
    assert Pair(files.config("gpt2")).models.chat_template is None


def test_an_answer_fills_the_context_to_its_last_token(pair: Pair) -> None:
    fields: dict[str, Any] = {"max_tokens": 10_000, "temperature": 0, **never_ending(pair)}
    plain = pair.answer(PROMPTS[0], **fields, speculation=PLAIN)
    assert len(plain.sequence.tokens) == pair.config.context_length
    assert plain.finish_reason == "length"
    assert pair.answer(PROMPTS[0], **fields, speculation=drafting(7)).sequence.tokens == plain.sequence.tokens


def test_a_draft_that_was_trained_for_shorter_texts_reads_only_the_end_of_longer_ones(
    architecture: str, files: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2 has a learned vector for every position and none behind the last."""
    config = files.config(architecture)
    monkeypatch.setattr(tiny, "CONTEXT", 128)
    short = TinyFiles(tmp_path).config(architecture, context_length=128)
    pair = Pair(config.model_copy(update={"draft": short.draft}))
    fields: dict[str, Any] = {"max_tokens": 10_000, "temperature": 0, **never_ending(pair)}
    plain = pair.answer(PROMPTS[0], **fields, speculation=PLAIN).sequence
    speculative = pair.answer(PROMPTS[0], **fields).sequence
    assert speculative.tokens == plain.tokens
    assert speculative.draft_cached_len <= 128
    assert speculative.stats.drafted > 128 * 2, "it begins again near the end of the text"


def test_a_context_beyond_what_the_target_was_trained_for_is_refused(architecture: str, files: TinyFiles) -> None:
    with pytest.raises(ModelLoadError, match="was trained for 2048 tokens; lower `context_length` from 2049"):
        Pair(files.config(architecture, context_length=2049))


@pytest.mark.parametrize(
    ("target", "draft", "reason"),
    [
        ("qwen2", "llama", "their tokenizers are of different kinds"),
        ("llama", "qwen2", "their tokenizers are of different kinds"),
        ("llama", "gpt2", "their tokenizers are of different kinds"),
        ("gpt2", "llama", "their tokenizers are of different kinds"),
        ("qwen2", "gpt2", "their texts begin or end with different tokens"),
        ("gpt2", "qwen2", "their texts begin or end with different tokens"),
    ],
)
def test_a_draft_of_another_family_is_refused_at_load_with_the_reason(
    target: str, draft: str, reason: str, files: TinyFiles
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        Pair(files.config(target, draft))
    assert str(caught.value) == (
        f"The draft {draft}-draft.gguf does not fit the target {target}-target.gguf: {reason}; "
        "choose a draft of the target's own family."
    )


def test_a_draft_with_other_words_is_refused_at_load_with_the_first_of_them(
    architecture: str, files: TinyFiles
) -> None:
    config = files.config(architecture)
    other = ModelConfig(path=files.path(architecture, "other"))
    with pytest.raises(
        ModelLoadError,
        match=rf"The draft {architecture}-other.gguf does not fit the target {architecture}-target.gguf: "
        r"token \d+ is a different text in each; choose a draft of the target's own family\.",
    ):
        Pair(config.model_copy(update={"draft": other}))


def test_a_draft_that_cannot_be_read_is_left_out_and_said_so(
    files: TinyFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = files.config("qwen2")
    assert whole.draft
    assert whole.draft.path
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.draft.path.read_bytes()[:5000])
    broken = Pair(whole.model_copy(update={"draft": ModelConfig(path=cut)}))
    assert not broken.models.drafters.has_model
    plain, speculative = (one.answer(PROMPTS[0], max_tokens=40, temperature=0) for one in (broken, Pair(whole)))
    assert plain.text == speculative.text
    assert "Serving goes on without the draft model" in caplog.text


def test_a_draft_for_which_there_is_no_room_is_left_out_and_said_so(
    files: TinyFiles, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = files.config("qwen2")

    def without_room(model: LlamaModel, **options: Any) -> LlamaEngine:
        if whole.draft and model.path == whole.draft.path:
            raise ModelLoadError(f"{model.path}: there is no memory for it.")
        return LlamaEngine(model, **options)

    with monkeypatch.context() as patch:
        patch.setattr(loading, "LlamaEngine", without_room)
        alone = Pair(whole)
    assert not alone.models.drafters.has_model
    plain, speculative = (one.answer(PROMPTS[0], max_tokens=40, temperature=0) for one in (alone, Pair(whole)))
    assert plain.text == speculative.text
    assert "there is no memory for it. Serving goes on without the draft model" in caplog.text
