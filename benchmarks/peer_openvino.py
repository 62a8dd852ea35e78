"""OpenVINO GenAI as a worker of peers.py: it reads the GGUF itself, and computes with its defaults for a CPU.

Its pipeline writes texts, so it can be asked for prefill and for steps of one row, by its own account of inference
(without sampling), and not for a pass of a few rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import openvino
import openvino_genai

from pass_worker import Outcome, Pass, Setting, serve

# Steps that one turn brings.
STEPS = 4


def load(setting: Setting) -> Callable[[Pass], Outcome]:
    """Convert and compile the file."""
    pipeline = openvino_genai.LLMPipeline(setting.file, "CPU", INFERENCE_NUM_THREADS=setting.threads)

    def generate(length: int, new: int) -> tuple[list[float], list[int]]:
        prompt = openvino.Tensor(np.array([setting.tokens[:length]], np.int64))
        config = openvino_genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        answer = pipeline.generate(prompt, config)
        # The first one is the prompt's; in microseconds.
        times = [float(each) / 1e6 for each in answer.perf_metrics.raw_metrics.token_infer_durations]
        return times, list(answer.tokens[0])

    def run(wanted: Pass) -> Outcome:
        if wanted.context == 0:
            times, tokens = generate(wanted.rows, 1)
            return Outcome(times[:1], tokens[0])
        if wanted.rows == 1:
            times, _ = generate(wanted.context, STEPS + 1)
            return Outcome(times[1:], None)
        raise NotImplementedError("its pipeline has no pass of a few rows")

    return run


if __name__ == "__main__":
    serve(load)
