"""Tiny models of any architecture: a table of hyperparameters, random weights for the tensors that llama.cpp reads."""

import ctypes
import math
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from gguf import GGUFWriter, LlamaFileType
from numpy.typing import NDArray

from tiny_formats import quantise_as
from tiny_models import DRIFT, SHARPNESS, vocabulary, write_tensors, write_tokeniser

Keys = dict[str, Any]
Array = NDArray[np.float32]
# Every architecture gets these, and the other tables by its kind; what it has no use for, llama.cpp does not read.
COMMON: Keys = {
    "context_length": 512,
    "embedding_length": 256,
    "block_count": 4,
    "feed_forward_length": 256,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": 64,
    "rope.scaling.original_context_length": 512,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "attention.scale": 0.125,
    "logit_scale": 1.0,
}
WINDOW: Keys = {
    "attention.sliding_window": 32,
    "attention.sliding_window_pattern": [True, False, True, False],
    "attention.key_length_swa": 64,
    "attention.value_length_swa": 64,
    "rope.dimension_count_swa": 64,
    "embedding_length_per_layer_input": 32,
}
EXPERTS: Keys = {
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 256,
    "expert_shared_feed_forward_length": 256,
    "expert_shared_count": 1,
    "leading_dense_block_count": 1,
    "expert_gating_func": 2,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": True,
    "interleave_moe_layer_step": 1,
    "nextn_predict_layers": 0,
}
RECURRENT: Keys = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 512,
    "ssm.state_size": 64,
    "ssm.time_step_rank": 8,
    "ssm.group_count": 1,
    "full_attention_interval": 4,
    "rope.dimension_sections": [11, 11, 10, 0],
}
# Most hybrids attend in one layer of four.
HYBRID: Keys = RECURRENT | {"attention.head_count_kv": [0, 0, 2, 0]}
NEMOTRON: Keys = HYBRID | {"feed_forward_length": [0, 0, 0, 256], "attention.head_count_kv": [0, 2, 0, 0]}
MAMBA: Keys = {"ssm.state_size": 16, "ssm.time_step_rank": 16}
CONVOLUTION: Keys = {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 0, 2, 0]}
DELTA: Keys = RECURRENT | {"ssm.inner_size": 256, "ssm.time_step_rank": 4, "ssm.group_count": 2}
LATENT: Keys = {
    "attention.head_count_kv": 1,
    "attention.key_length": 128,
    "attention.key_length_mla": 128,
    "attention.value_length_mla": 64,
    "attention.kv_lora_rank": 64,
    "attention.q_lora_rank": 64,
}
WIDE_KEYS: Keys = {"attention.key_length": 96, "rope.dimension_count": 32, "attention.head_count_kv": 4}

DENSE = ["qwen2", "qwen3", "llama", "phi3", "mistral3", "smollm3", "olmo2", "minicpm", "granite", "glm4", "command-r"]
DENSE += ["ernie4_5", "hunyuan-dense", "seed_oss", "gemma", "phi2", "falcon", "stablelm", "internlm2"]
DENSE += ["olmo", "nemotron", "exaone", "arcee", "chatglm"]
MIXTURES = ["qwen2moe", "qwen3moe", "glm4moe", "granitemoe", "ernie4_5-moe", "bailingmoe2", "minimax-m2", "phimoe"]
MIXTURES += ["hunyuan-moe", "deepseek", "bailingmoe"]
FAMILIES: dict[str, Keys] = {
    **{name: {} for name in DENSE},
    **dict.fromkeys(("gemma3", "cohere2", "exaone4"), WINDOW),
    "gemma4": WINDOW | {"attention.shared_kv_layers": 2},
    "llama4": WINDOW | EXPERTS | {"attention.chunk_size": 32},
    **dict.fromkeys(MIXTURES, EXPERTS),
    **dict.fromkeys(("olmoe", "dots1"), EXPERTS | {"attention.head_count_kv": 4}),
    **dict.fromkeys(("smallthinker", "afmoe", "exaone-moe"), WINDOW | EXPERTS),
    "lfm2": CONVOLUTION,
    "lfm2moe": CONVOLUTION | EXPERTS,
    "granitehybrid": HYBRID,
    "nemotron_h": NEMOTRON,
    "nemotron_h_moe": NEMOTRON | EXPERTS,
    "plamo2": HYBRID | {"ssm.group_count": 0},
    "jamba": HYBRID | EXPERTS | MAMBA,
    "falcon-h1": RECURRENT,
    "mamba": RECURRENT | MAMBA | {"attention.head_count": 0},
    "mamba2": RECURRENT | {"attention.head_count": 0},
    "qwen35": DELTA,
    "qwen35moe": DELTA | EXPERTS,
    "qwen3next": DELTA | EXPERTS,
    "gemma2": WINDOW | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0},
    "gpt-oss": WINDOW | EXPERTS,
    "gemma3n": WINDOW | {"altup.num_inputs": 4, "altup.active_idx": 0},
    **dict.fromkeys(("deepseek2", "mistral4"), EXPERTS | LATENT),
    "minicpm3": LATENT | WIDE_KEYS,
    "bitnet": {},
    "refact": {},
}
# What is no model that writes text, or one that llama.cpp computes wrong.
UNFIT: dict[str, Keys] = {
    "t5": {"attention.relative_buckets_count": 32},
    "gemma-embedding": WINDOW,
    **{name: {} for name in ("dream", "llama-embed", "cogvlm")},
}

VOCABULARY = vocabulary("qwen2")


class _Tensor(ctypes.Structure):
    """The first fields of ggml's tensor."""

    _fields_ = [("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4)]


class _Parameters(ctypes.Structure):
    """gguf_init_params."""

    _fields_ = [("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p)]


def tiny_family(directory: Path, architecture: str, role: str = "target") -> Path:
    """Write a `target` or its `draft`, in the mixture of formats that llama.cpp names Q4_K_M; beside it one in F32."""
    single = directory / f"{architecture}.gguf"
    _write(single, architecture, {})
    _write(single, architecture, _weights(_shapes(single), DRIFT if role == "draft" else 0.0))
    return quantise_as(single, directory / f"{architecture}-{role}.gguf", "q4_k_m", pure=False)


def _write(path: Path, architecture: str, tensors: dict[str, Array]) -> None:
    writer = GGUFWriter(path, architecture)
    writer.add_file_type(LlamaFileType.ALL_F32)
    add: dict[type, Any] = {bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
    add[float] = writer.add_float32
    for name, value in (COMMON | (FAMILIES | UNFIT)[architecture]).items():
        add[type(value)](f"{architecture}.{name}", value)
    write_tokeniser(writer, "qwen2", *VOCABULARY)
    write_tensors(writer, tensors)


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """By name, the tensors that llama.cpp reads of a model with these hyperparameters, the optional ones, too."""
    base = ctypes.CDLL("libggml-base.so.0")
    base.gguf_init_from_file.restype, base.gguf_free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    base.ggml_get_name.restype, base.ggml_get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    shapes: dict[str, tuple[int, ...]] = {}

    @llama_cpp.llama_model_set_tensor_data_t  # type: ignore[untyped-decorator]
    def note(tensor: int, _: object) -> None:
        sizes, name = list(_Tensor.from_address(tensor).ne), base.ggml_get_name(tensor).decode()
        while len(sizes) > 1 and sizes[-1] == 1:
            sizes.pop()
        # Of weights in NVFP4, and in BitNet's files.
        if not name.endswith("scale") or "bitnet" in path.name:
            shapes[name] = tuple(reversed(sizes))

    keys = base.gguf_init_from_file(str(path).encode(), _Parameters(no_alloc=True))
    model = llama_cpp.llama_model_init_from_user(keys, note, None, llama_cpp.llama_model_default_params())
    assert model, f"{path}: llama.cpp lacks a hyperparameter; it says which"
    llama_cpp.llama_model_free(model)
    base.gguf_free(keys)
    return shapes


def _weights(shapes: dict[str, tuple[int, ...]], drift: float) -> dict[str, Array]:
    """Random weights; a draft's are the target's with `drift` of noise."""
    shared, noise = np.random.default_rng(0), np.random.default_rng(1)
    tensors = {}
    for name, shape in shapes.items():
        common, own = shared.standard_normal(shape), noise.standard_normal(shape)
        normal = math.sqrt(1 - drift**2) * common + drift * own
        if any(part in name for part in ("norm", "rope", "scale")) and len(shape) == 1:
            tensors[name] = np.ones(shape)
        elif name.endswith("ssm_a"):
            tensors[name] = -0.5 * np.abs(normal) - 0.1  # states fade
        elif len(shape) == 1:
            tensors[name] = normal * (0.05 if name.endswith("bias") else 1.0)
        else:
            # A large embedding that is also the output layer would make every token follow itself.
            gains = {"token_embd.weight": SHARPNESS if "output.weight" in shapes else 0.1, "output.weight": SHARPNESS}
            tensors[name] = normal * (gains.get(name, 1.0) / math.sqrt(shape[-1]))
    # Answers are as long as they may be: the control tokens are the last ones.
    tensors["output.weight" if "output.weight" in tensors else "token_embd.weight"][-6:] *= 0.1
    return {name: values.astype(np.float32) for name, values in tensors.items()}
