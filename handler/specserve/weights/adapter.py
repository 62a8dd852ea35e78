"""Adds a LoRA (arXiv 2106.09685) to the weights of a model."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFWriter, LlamaFileType
from gguf.quants import dequantize
from numpy.typing import NDArray

from specserve.errors import ModelLoadError

# What an adapter of scripts/train_draft says of the draft: its mask token, that token's embedding, and how many tokens
# it drafts in one pass.
MASK_TOKEN, MASK_EMBEDDING = "tokenizer.ggml.mask_token_id", "specserve.mask_embedding"
BLOCK_LENGTH = "specserve.block_length"
_EMBEDDING = "token_embd.weight"
# Keys that GGUFWriter writes itself, or that the adapter changes.
_WRITTEN = ("GGUF.", "general.architecture", "general.file_type")


def merge(source: Path, adapter: Path, target: Path) -> None:
    """Write a model with an adapter added; the tensors that it changes have 16 bits, others stay as they are.

    Raises:
        ModelLoadError: the adapter is no LoRA for this model in GGUF, as llama.cpp's convert_lora_to_gguf.py writes it.
    """
    try:
        base, lora = GGUFReader(source), GGUFReader(adapter)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{adapter}: cannot be added to {source.name}: {error}.") from error
    architecture = _value(base, "general.architecture")
    if _value(lora, "adapter.type") != "lora" or _value(lora, "general.architecture") != architecture:
        raise ModelLoadError(f"{adapter}: is no LoRA for a model of the architecture {architecture}.")
    changed = _changed(base, lora, f"{adapter}: does not fit {source.name}")
    writer = GGUFWriter(target, architecture)
    fields = {name: field for name, field in base.fields.items() if not name.startswith(_WRITTEN)}
    fields |= {key: lora.fields[key] for key in (MASK_TOKEN, BLOCK_LENGTH) if key in lora.fields}
    for field in fields.values():
        kind, *of = field.types
        writer.add_key_value(field.name, field.contents(), kind, of[-1] if of else None)
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    for tensor in base.tensors:
        if tensor.name in changed:
            writer.add_tensor(tensor.name, changed[tensor.name])
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _changed(base: GGUFReader, lora: GGUFReader, unfit: str) -> dict[str, NDArray[np.float16]]:
    """The tensors with the adapter, by name."""
    parts = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in lora.tensors}
    tensors = {tensor.name: tensor for tensor in base.tensors}
    changed = {}
    for name in (name.removesuffix(".lora_a") for name in parts if name.endswith(".lora_a")):
        a, b = parts[f"{name}.lora_a"], parts[f"{name}.lora_b"]
        values = dequantize(tensors[name].data, tensors[name].tensor_type) if name in tensors else np.empty(0)
        if (b.shape[0], a.shape[1]) != values.shape:
            raise ModelLoadError(f"{unfit}, which has no {name} of its shape.")
        changed[name] = (values + (_value(lora, "adapter.lora.alpha") / len(a)) * (b @ a)).astype(np.float16)
    if mask := _value(lora, MASK_EMBEDDING):
        embedding = tensors[_EMBEDDING]
        changed[_EMBEDDING] = dequantize(embedding.data, embedding.tensor_type).astype(np.float16)
        changed[_EMBEDDING][_value(lora, MASK_TOKEN)] = mask
    return changed


def _value(reader: GGUFReader, key: str) -> Any:
    return reader.fields[key].contents() if key in reader.fields else None
