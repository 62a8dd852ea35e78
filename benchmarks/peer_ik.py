"""ik_llama.cpp as a worker of peers.py, by the structures of its own Python package (ik-llama-cpp-python).

Weights are repacked at load, flash attention is on (its default), keys and values are F16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from time import perf_counter

import numpy as np
from ik_llama_cpp import _ctypes_api as api

from pass_worker import Outcome, Pass, Setting, serve


def _let_go(context: int, length: int) -> None:
    # The package leaves this function out.
    library = api._lib  # noqa: SLF001
    library.llama_kv_cache_seq_rm.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]
    library.llama_kv_cache_seq_rm.restype = ctypes.c_bool
    if not library.llama_kv_cache_seq_rm(context, 0, length, -1):
        raise RuntimeError("ik_llama.cpp did not take tokens back")


def load(setting: Setting) -> Callable[[Pass], Outcome]:
    """Load the file with repacked weights."""
    api.llama_backend_init()
    params = api.llama_model_default_params()
    params.n_gpu_layers = 0
    params.use_mmap = False
    params.repack_tensors = True
    model = api.llama_model_load_from_file(setting.file.encode(), params)
    if not model:
        raise RuntimeError(f"ik_llama.cpp cannot load {setting.file}")
    width = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    most = len(setting.tokens)
    context_params = api.llama_context_default_params()
    context_params.n_ctx = 2 * most
    context_params.n_batch = context_params.n_ubatch = most
    context_params.n_threads = context_params.n_threads_batch = setting.threads
    context = api.llama_init_from_model(model, context_params)
    if not context:
        raise RuntimeError("ik_llama.cpp has no memory for its context")
    batch = api.llama_batch_init(most, 0, 1)
    held: list[int] = []

    def forward(first: int, end: int, logits: int) -> None:
        batch.n_tokens = end - first
        for row, at in enumerate(range(first, end)):
            batch.token[row], batch.pos[row] = setting.tokens[at], at
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
            batch.logits[row] = at >= end - logits
        if code := api.llama_decode(context, batch):
            raise RuntimeError(f"ik_llama.cpp's llama_decode failed with code {code}")

    def run(wanted: Pass) -> Outcome:
        end = wanted.context + wanted.rows
        if len(held) < wanted.context:
            _let_go(context, 0)
            forward(0, wanted.context, 1)
        _let_go(context, wanted.context)
        held[:] = setting.tokens[:end]
        started = perf_counter()
        forward(wanted.context, end, wanted.logits)
        seconds = perf_counter() - started
        logits = api.llama_get_logits_ith(context, wanted.rows - 1)
        return Outcome([seconds], int(np.argmax(np.ctypeslib.as_array(logits, shape=(width,)))))

    return run


if __name__ == "__main__":
    serve(load)
