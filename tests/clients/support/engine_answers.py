"""Runs one function for `ours.py` in the project's own environment: arguments and result are JSON."""

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from specserve.engine import kernels
from specserve.engine.base import Row
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from specserve.weights.models import prepare


def target(config: str) -> str:
    return str(prepare(Path(config).absolute())["target"])


def encode(model: str, texts: list[str]) -> list[list[int]]:
    loaded = LlamaModel(Path(model))
    return [loaded.encode(text, special=True) for text in texts]


def score(model: str, texts: list[list[int]]) -> list[list[tuple[float, bool]]]:
    longest = max(len(tokens) for tokens in texts)
    # Of a model that is loaded after this, our kernels compute, as in the server.
    kernels.use("auto")
    loaded = LlamaModel(Path(model))
    engine = LlamaEngine(loaded, n_slots=1, context_length=longest, threads=1, max_rows=longest, max_logits=longest)
    scores = []
    for tokens in texts:
        engine.truncate(0, 0)
        rows = [Row(token, 0, position, wants_logits=True) for position, token in enumerate(tokens)]
        logits = engine.forward(rows)[:-1].astype(np.float64)
        top = logits.max(axis=1)
        chosen = logits[np.arange(len(tokens) - 1), tokens[1:]]
        logprobs = chosen - top - np.log(np.exp(logits - top[:, None]).sum(axis=1))
        scores.append(list(zip(logprobs.tolist(), (chosen == top).tolist(), strict=True)))
    return scores


FUNCTIONS: dict[str, Callable[..., Any]] = {"target": target, "encode": encode, "score": score}

if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # the functions may print messages
        result = FUNCTIONS[sys.argv[1]](*json.load(sys.stdin))
    json.dump(result, sys.stdout)
