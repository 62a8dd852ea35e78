"""One CPU engine as a process that runs single forward passes for cost_curve.py, and idles in between.

    python pass_worker.py ours|stock|ik|openvino [VARIANT of our kernels]

The first line of input is a `Setting`, every further line a `Pass`, as JSON. An answer is a line that begins with MARK;
other output of an engine is ignored. Each engine is imported where it is used, since each has its own environment.
"""
# ruff: noqa: PLC0415

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

MARK = "pass: "
# Maximum rows of a pass.
MOST_ROWS = 512
# Decode steps of OpenVINO in one request.
OPENVINO_STEPS = 4


class Setting(NamedTuple):
    """The GGUF file, the number of threads, and the tokens that passes run over."""

    file: str
    threads: int
    tokens: list[int]


class Pass(NamedTuple):
    """A pass over `rows` tokens after the first `context` ones, with logits of the last `logits` rows."""

    context: int
    rows: int
    logits: int


class Outcome(NamedTuple):
    """Seconds of one or more passes, and the argmax of the last row (None if the engine does not return it)."""

    seconds: list[float]
    token: int | None


Runner = Callable[[Pass], Outcome]


def load_llama(kernels_mode: str, setting: Setting) -> Runner:
    """llama.cpp through our engine, with our kernels ("auto") or its own ("off")."""
    from perplexity import use_all_formats
    from specserve.engine import kernels
    from specserve.engine.base import Row
    from specserve.engine.llama import LlamaEngine
    from specserve.engine.llama_model import LlamaModel

    if kernels_mode == "auto":
        use_all_formats(*sys.argv[2:])
    else:
        kernels.use("off")
    most = len(setting.tokens)
    engine = LlamaEngine(
        LlamaModel(Path(setting.file)),
        n_slots=1,
        context_length=2 * most,
        threads=setting.threads,
        max_rows=min(most, MOST_ROWS),
        max_logits=64,
    )

    def fill(context: int) -> None:
        """Cache so many tokens: where the engine can copy them, those of the first pass again and again."""
        engine.truncate(0, 0)
        for first in range(0, context, engine.max_rows):
            positions = range(first, min(context, first + engine.max_rows))
            if first and engine.token_bytes is not None:
                engine.load(0, engine.save(0, 0, len(positions)))
            else:
                engine.forward([Row(setting.tokens[position], 0, position, False) for position in positions])

    def run(asked: Pass) -> Outcome:
        end = asked.context + asked.rows
        rows = [
            Row(token, 0, position, wants_logits=position >= end - asked.logits)
            for position, token in enumerate(setting.tokens[:end])
        ]
        if engine.cached_len(0) < asked.context:
            fill(asked.context)
        engine.truncate(0, asked.context)
        started = perf_counter()
        logits = engine.forward(rows[asked.context :])
        return Outcome([perf_counter() - started], int(logits[-1].argmax()))

    return run


def load_ik(setting: Setting) -> Runner:
    """ik_llama.cpp through the ctypes structures of ik-llama-cpp-python.

    Weights are repacked at load, flash attention is on (the default), keys and values are F16.
    """
    import numpy as np
    from ik_llama_cpp import _ctypes_api as api

    api.llama_backend_init()
    model_params = api.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model_params.use_mmap = False
    model_params.repack_tensors = True
    model = api.llama_model_load_from_file(setting.file.encode(), model_params)
    if not model:
        raise RuntimeError(f"ik_llama.cpp cannot load {setting.file}")
    n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    most = len(setting.tokens)
    params = api.llama_context_default_params()
    params.n_ctx = 2 * most
    params.n_batch = params.n_ubatch = most
    params.n_threads = params.n_threads_batch = setting.threads
    context = api.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("ik_llama.cpp cannot allocate its context")
    batch = api.llama_batch_init(most, 0, 1)
    # The package does not declare this function.
    remove = api._lib.llama_kv_cache_seq_rm  # noqa: SLF001
    remove.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]
    remove.restype = ctypes.c_bool
    cached = 0

    def truncate(length: int) -> None:
        if not remove(context, 0, length, -1):
            raise RuntimeError("ik_llama.cpp cannot truncate its KV cache")

    def forward(first: int, end: int, logits: int) -> None:
        batch.n_tokens = end - first
        for row, position in enumerate(range(first, end)):
            batch.token[row], batch.pos[row] = setting.tokens[position], position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
            batch.logits[row] = position >= end - logits
        if code := api.llama_decode(context, batch):
            raise RuntimeError(f"ik_llama.cpp's llama_decode failed with code {code}")

    def run(asked: Pass) -> Outcome:
        nonlocal cached
        end = asked.context + asked.rows
        if cached < asked.context:
            truncate(0)
            forward(0, asked.context, 1)
        truncate(asked.context)
        cached = end
        started = perf_counter()
        forward(asked.context, end, asked.logits)
        seconds = perf_counter() - started
        logits = api.llama_get_logits_ith(context, asked.rows - 1)
        return Outcome([seconds], int(np.argmax(np.ctypeslib.as_array(logits, shape=(n_vocab,)))))

    return run


def load_openvino(setting: Setting) -> Runner:
    """OpenVINO GenAI, which reads the GGUF itself, with its defaults for a CPU.

    Its pipeline generates whole answers, so it can time prefill and steps of one row (by its own measurement of
    inference, without sampling), but no pass of several rows.
    """
    import numpy as np
    import openvino
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(setting.file, "CPU", INFERENCE_NUM_THREADS=setting.threads)

    def generate(length: int, new_tokens: int) -> tuple[list[float], list[int]]:
        prompt = openvino.Tensor(np.array([setting.tokens[:length]], np.int64))
        config = openvino_genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        answer = pipeline.generate(prompt, config)
        # In microseconds; the first is prefill.
        seconds = [float(each) / 1e6 for each in answer.perf_metrics.raw_metrics.token_infer_durations]
        return seconds, list(answer.tokens[0])

    def run(asked: Pass) -> Outcome:
        if asked.context == 0:
            seconds, tokens = generate(asked.rows, 1)
            return Outcome(seconds[:1], tokens[0])
        if asked.rows == 1:
            seconds, _ = generate(asked.context, OPENVINO_STEPS + 1)
            return Outcome(seconds[1:], None)
        raise NotImplementedError("its pipeline has no pass of several rows")

    return run


LOADERS: dict[str, Callable[[Setting], Runner]] = {
    "ours": partial(load_llama, "auto"),
    "stock": partial(load_llama, "off"),
    "ik": load_ik,
    "openvino": load_openvino,
}


def _answer(fields: dict[str, Any]) -> None:
    print(f"{MARK}{json.dumps(fields)}", flush=True)


def main() -> None:
    """Load the engine that the command line names, then answer every line of input."""
    run = LOADERS[sys.argv[1]](Setting(**json.loads(sys.stdin.readline())))
    _answer({"ready": True})
    for line in sys.stdin:
        try:
            _answer(run(Pass(*json.loads(line)))._asdict())
        except NotImplementedError as reason:
            _answer({"error": str(reason)})


if __name__ == "__main__":
    main()
