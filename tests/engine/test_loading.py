"""What is loaded beside what, and what a load that fails says."""

from itertools import chain, repeat
from pathlib import Path
from threading import Event, get_ident
from typing import Any

import pytest
from gguf import GGUFWriter

import tiny_models
from pairs import PLAIN, Pair, TinyFiles, fixed_gamma
from specserve.config import ModelConfig
from specserve.core import loading
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from specserve.errors import ModelLoadError
from specserve.grammar.compiler import GrammarCompiler
from specserve.speculation import measure


def test_the_vocabulary_is_read_in_a_thread_beside_the_first_passes_and_before_any_is_timed(
    files: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    opened = Event()

    def open_engine(*arguments: Any, **options: Any) -> LlamaEngine:
        engine = LlamaEngine(*arguments, **options)
        opened.set()
        return engine

    def prepare(_compiler: GrammarCompiler) -> None:
        assert opened.wait(60)
        assert get_ident() != this_thread
        order.append("vocabulary")

    def measured_costs(*arguments: Any, **options: Any) -> Any:
        assert get_ident() == this_thread
        order.append("costs")
        return measure.measured_costs(*arguments, **options)

    this_thread = get_ident()
    monkeypatch.setattr(loading, "LlamaEngine", open_engine)
    monkeypatch.setattr(GrammarCompiler, "prepare", prepare)
    monkeypatch.setattr(loading, "measured_costs", measured_costs)
    pair = Pair(files.config("llama"))
    assert order == ["vocabulary", "costs", "costs"]
    assert pair.models.drafters.model is not None


def test_a_draft_model_whose_file_names_a_mask_token_drafts_blocks(
    files: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file says that it drafts three tokens in a pass."""
    config, masks = files.config("qwen2"), []
    pair = Pair(config.model_copy(update={"draft": ModelConfig(path=files.path("qwen2", "block"))}))
    model = pair.models.drafters.model
    assert model is not None
    read = model.read

    def reading(steps: Any, mask_tokens: Any, **options: Any) -> Any:
        masks.extend(mask_tokens)
        return read(steps, mask_tokens, **options)

    monkeypatch.setattr(model, "read", reading)
    plain, drafted = (
        pair.complete("Where the two", speculation=speculation, max_tokens=40, temperature=0)
        for speculation in (PLAIN, fixed_gamma(4))
    )
    assert drafted.text == plain.text
    assert drafted.sequence.stats.accepted > 0
    assert max(masks) == 2


def test_a_mask_token_or_block_length_that_is_none_leaves_the_draft_as_it_is(
    files: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token beyond the vocabulary, texts, and a block of no tokens."""
    model = LlamaModel(files.path("qwen2", "block"))
    for found, mask, length in (
        (("1000000", "3"), -1, 1),
        (("none", "3"), -1, 1),
        (("-1", ""), -1, 1),
        (("5", "x"), 5, 8),
        (("5", "0"), 5, 1),
        (("5", "3"), 5, 3),
    ):
        values = dict(zip(("tokenizer.ggml.mask_token_id", "specserve.block_length"), found, strict=True))
        monkeypatch.setattr(model, "_metadata", values.__getitem__)
        assert (model.mask_token, model.block_length) == (mask, length)
    model.close()


def test_a_draft_model_whose_cache_does_not_fit_beside_the_targets_is_left_out(
    files: TinyFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the room of its weights and of its cache the target's fits; else nothing is served."""
    config = files.config("llama")
    for freed in (2**20, 0):
        free = chain([2**40, 2**40, 400 * 2**20], repeat(400 * 2**20 + freed))
        monkeypatch.setattr(loading, "free_memory", lambda free=free: next(free))
        caplog.clear()
        if freed:
            assert Pair(config).models.draft is None
            assert "no memory for a KV cache of 256 tokens" in caplog.text
        else:
            with pytest.raises(ModelLoadError, match="no memory for a KV cache of 256 tokens"):
                Pair(config)
        assert ("Serving goes on without the draft model" in caplog.text) == (freed > 0)


def test_a_target_without_a_pre_tokenizer_is_served_with_a_warning(
    files: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """llama.cpp then splits texts as GPT-2 does. Llama's tokenizer has none."""
    for architecture in ("qwen2", "llama"):
        Pair(files.config(architecture))
    assert "pre-tokenizer" not in caplog.text
    monkeypatch.setattr(GGUFWriter, "add_tokenizer_pre", lambda *_: None)
    Pair(TinyFiles(tmp_path).config("qwen2"))
    assert "qwen2-target.gguf: names no pre-tokenizer, so answers may be worse: convert the model again" in caplog.text


def test_a_target_without_an_end_token_is_served_with_a_warning(
    files: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """llama.cpp then ends answers at token 11, which is a comma."""
    Pair(files.config("qwen2"))
    assert "end token" not in caplog.text
    for name in ("eos", "eot"):
        monkeypatch.setattr(GGUFWriter, f"add_{name}_token_id", lambda *_: None)
    assert Pair(TinyFiles(tmp_path).config("qwen2")).vocabulary.is_end_token(11)
    assert "qwen2-target.gguf: names no end token, so answers may end too early: convert the model again" in caplog.text


def test_a_draft_model_whose_context_holds_no_draft_is_left_out(
    files: TinyFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "CONTEXT", 1)
        draft = TinyFiles(tmp_path).config("qwen2").draft
    assert Pair(files.config("qwen2").model_copy(update={"draft": draft})).models.draft is None
    assert "another one. Serving goes on without the draft model." in caplog.text


def test_a_target_that_cannot_be_read_is_a_sentence_whatever_the_draft_is(files: TinyFiles, tmp_path: Path) -> None:
    config = files.config("llama")
    missing = ModelConfig(path=tmp_path / "missing.gguf")
    for draft in (config.draft, missing, None):
        with pytest.raises(ModelLoadError, match=r"missing\.gguf: there is no such model file in"):
            Pair(config.model_copy(update={"target": missing, "draft": draft}))
