"""A LoRA that `prepare` adds to the weights, and the mask token that one of scripts/train_draft brings."""

import ctypes
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

from pairs import TinyFiles, open_engine
from specserve.engine.base import Row
from specserve.engine.llama_model import LlamaModel
from specserve.errors import ModelLoadError
from specserve.weights.adapter import MASK_EMBEDDING, merge
from specserve.weights.models import prepare
from tiny_models import write_tiny

RANK, ALPHA, BLOCK_LENGTH = 4, 12.0, 5
CHANGED = ("blk.0.attn_q.weight", "blk.1.attn_v.weight", "blk.1.ffn_down.weight")
TOKENS = [5, 30, 7, 90, 41, 12]


def write_adapter(
    path: Path, source: Path, *, architecture: str = "qwen2", mask_token: int | None = None, columns: int = 0
) -> None:
    """A LoRA for a few weights of a model, as llama.cpp's convert_lora_to_gguf.py writes it."""
    generator, shapes = np.random.default_rng(1), {t.name: t.shape[::-1] for t in gguf.GGUFReader(source).tensors}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, ALPHA)
    if mask_token is not None:
        writer.add_mask_token_id(mask_token)
        writer.add_uint32("specserve.block_length", BLOCK_LENGTH)
        writer.add_array(MASK_EMBEDDING, [0.5] * int(shapes["token_embd.weight"][1]))
    for name in CHANGED:
        n_rows, n_columns = map(int, shapes[name])
        for suffix, shape in (("lora_a", (RANK, columns or n_columns)), ("lora_b", (n_rows, RANK))):
            writer.add_tensor(f"{name}.{suffix}", generator.normal(0, 0.1, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(model: LlamaModel, adapter: Path | None = None) -> NDArray[np.float32]:
    """Those of some tokens, with an adapter that llama.cpp computes beside the weights."""
    engine = open_engine(model)
    if adapter:
        loaded = llama_cpp.llama_adapter_lora_init(model.pointer, str(adapter).encode())
        scale = ctypes.c_float(1.0)
        pointers = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(loaded)
        assert llama_cpp.llama_set_adapters_lora(engine._context, pointers, 1, ctypes.byref(scale)) == 0
    found = engine.forward([Row(token, 0, n, wants_logits=True) for n, token in enumerate(TOKENS)]).copy()
    engine.close()
    return found


def test_an_adapter_in_the_weights_gives_the_logits_of_one_beside_them(tmp_path: Path) -> None:
    source, adapter, merged = tmp_path / "draft.gguf", tmp_path / "adapter.gguf", tmp_path / "merged.gguf"
    # In single precision: with 4 bits llama.cpp would quantise what it multiplies the weights by.
    write_tiny(source, "qwen2", "draft")
    write_adapter(adapter, source)
    merge(source, adapter, merged)
    model = LlamaModel(source)
    beside, inside = logits(model, adapter), logits(LlamaModel(merged))
    assert np.abs(beside - logits(model)).max() > 1, "the adapter matters"
    np.testing.assert_allclose(inside, beside, atol=0.02)


def test_a_trained_drafts_mask_and_block_length_come_with_its_adapter(files: TinyFiles, tmp_path: Path) -> None:
    source, adapter, merged = files.path("qwen2", "draft"), tmp_path / "adapter.gguf", tmp_path / "merged.gguf"
    mask = LlamaModel(source).size - 1
    write_adapter(adapter, source, mask_token=mask)
    merge(source, adapter, merged)
    model = LlamaModel(merged)
    assert (model.mask_token, model.block_length) == (mask, BLOCK_LENGTH)
    [embedding] = [tensor.data for tensor in gguf.GGUFReader(merged).tensors if tensor.name == "token_embd.weight"]
    assert set(embedding[mask].tolist()) == {0.5}
    assert logits(model).shape == logits(LlamaModel(source)).shape


def test_prepare_adds_the_adapter_that_the_configuration_names_once(
    files: TinyFiles, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "cache"))
    adapter, config = tmp_path / "mine.gguf", tmp_path / "model.yaml"
    source = files.path("qwen2", "draft")
    write_adapter(adapter, source, mask_token=3)
    draft = {"path": str(source), "adapter": "mine.gguf", "requantise": "q4_0"}
    handler = {"model_id": "m", "target": {"path": str(files.path("qwen2", "target"))}, "draft": draft}
    config.write_text(yaml.safe_dump({"continuousBatching": True, "handler": handler}))
    prepared = prepare(config)["draft"]
    assert LlamaModel(prepared).mask_token == 3
    assert {tensor.tensor_type.name for tensor in gguf.GGUFReader(prepared).tensors} == {"F32", "Q4_0"}
    written = prepared.stat().st_mtime_ns
    assert prepare(config)["draft"].stat().st_mtime_ns == written
    write_adapter(adapter, source, mask_token=4)
    assert LlamaModel(prepare(config)["draft"]).mask_token == 4


def test_an_adapter_that_does_not_fit_is_refused_by_a_sentence(files: TinyFiles, tmp_path: Path) -> None:
    source, adapter, merged = files.path("qwen2", "draft"), tmp_path / "adapter.gguf", tmp_path / "merged.gguf"
    write_adapter(adapter, source, architecture="llama")
    with pytest.raises(ModelLoadError, match=r"adapter\.gguf: is no LoRA for a model of the architecture qwen2\."):
        merge(source, adapter, merged)
    with pytest.raises(ModelLoadError, match=r"is no LoRA for a model of the architecture qwen2\."):
        merge(source, source, merged)
    adapter.write_bytes(b"<html>")
    with pytest.raises(ModelLoadError, match=r"adapter\.gguf: cannot be added to .*draft.*\.gguf: "):
        merge(source, adapter, merged)
    write_adapter(adapter, source, columns=1)
    with pytest.raises(
        ModelLoadError, match=r"does not fit .*\.gguf, which has no blk\.0\.attn_q\.weight of its shape\."
    ):
        merge(source, adapter, merged)
