"""Logits do not depend on what the KV cache went through: with specserve's kernels bit for bit."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from kernel_products import SUPPORTED_VARIANTS, needs_kernels
from pairs import open_engine
from specserve.config import CacheType
from specserve.engine import kernels
from specserve.engine.base import FloatArray, Row
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from tiny_formats import tiny_model

SLOTS, LENGTH, ALTERNATIVES = 3, 96, 4
STEPS = 500
TOKENS = 200


class EngineWalk:
    """A walk of an engine through random steps; another engine reads each prefix anew, in a single pass."""

    def __init__(self, engine: LlamaEngine, plain: LlamaEngine, random: Random) -> None:
        self._engine, self._plain, self._random = engine, plain, random
        self._tokens: list[list[int]] = [[] for _ in range(engine.n_slots)]
        self.compared = 0

    def close(self) -> None:
        self._engine.close()
        self._plain.close()


class Walk(EngineWalk):
    def __init__(self, model: LlamaModel, random: Random, tolerance: float, *, cache_type: CacheType = "f16") -> None:
        sizes = {"context_length": LENGTH, "max_rows": LENGTH, "max_logits": 64}
        options: dict[str, Any] = {**sizes, "cache_type": cache_type}
        engine = open_engine(model, n_slots=SLOTS, max_alternatives=ALTERNATIVES, **options)
        super().__init__(engine, open_engine(model, n_slots=1, **options), random)
        self._tolerance = tolerance

    def step(self) -> None:
        """A pass, after which some slots adopt an alternative; or a truncation; or a copy, whose end is loaded."""
        random, slot = self._random, self._random.randrange(SLOTS)
        action = random.choice(["pass", "pass", "pass", "truncate", "copy", "copy"])
        if action == "pass":
            self._pass()
        elif action == "truncate":
            length = random.randint(0, len(self._tokens[slot]))
            self._engine.truncate(slot, length)
            del self._tokens[slot][length:]
        else:
            source = random.choice([other for other in range(SLOTS) if other != slot])
            length = random.randint(0, len(self._tokens[source]))
            # What is not shared comes back from host memory.
            shared = random.randint(0, length) if self._engine.token_bytes else length
            saved = [self._engine.save(source, shared, length)] if shared < length else []
            self._engine.copy(source, slot, shared)
            for part in saved:
                self._engine.load(slot, part)
            self._tokens[slot] = self._tokens[source][:length]

    def _pass(self) -> None:
        random = self._random
        rows: list[Row] = []
        prefixes: list[list[int]] = []
        alternatives: dict[int, list[list[int]]] = {}
        for slot in random.sample(range(SLOTS), random.randint(1, SLOTS)):
            tokens = self._tokens[slot]
            positions = range(len(tokens), min(len(tokens) + random.randint(1, 6), LENGTH))
            for position in positions:
                tokens.append(random.randrange(TOKENS))
                rows.append(Row(tokens[-1], slot, position, wants_logits=True))
                prefixes.append(list(tokens))
            left = ALTERNATIVES - sum(map(len, alternatives.values()))
            for _ in range(random.randint(0, left) if positions else 0):
                position, token = random.choice(positions), random.randrange(TOKENS)
                rows.append(Row(token, slot, position, wants_logits=True, alternative=True))
                prefixes.append([*tokens[:position], token])
                alternatives.setdefault(slot, []).append(prefixes[-1])
        if not rows:
            return
        for prefix, logits in zip(prefixes, self._engine.forward(rows).copy(), strict=True):
            assert np.abs(logits - self._anew(prefix)).max() <= self._tolerance, f"after {prefix}"
            self.compared += 1
        for slot, read in alternatives.items():
            if random.random() < 0.7:
                number = random.randrange(len(read))
                self._engine.adopt(slot, number)
                self._tokens[slot] = list(read[number])

    def _anew(self, prefix: list[int]) -> FloatArray:
        self._plain.truncate(0, 0)
        last = len(prefix) - 1
        logits: FloatArray = self._plain.forward([Row(token, 0, n, n == last) for n, token in enumerate(prefix)])[0]
        return logits


# Formats of weights and types of the cache; F32 by llama.cpp's kernels.
CASES: list[tuple[str, CacheType]] = [("q4_0", "f16"), ("q8_0", "f16"), ("q4_0", "q8_0")]


@pytest.fixture(params=[*(pytest.param(case, marks=needs_kernels) for case in CASES), ("f32", "f16")])
def walk(request: pytest.FixtureRequest, architecture: str, tmp_path: Path) -> Iterator[Walk]:
    """By llama.cpp's kernels attention adds in the order of cells. Faults cost 5 and more."""
    form, cache_type = request.param
    is_exact = form != "f32"
    kernels.use("auto" if is_exact else "off", variant=SUPPORTED_VARIANTS[0] if is_exact else None)
    # In 8 bits 32 numbers of a head have a scale.
    model = LlamaModel(tiny_model(tmp_path, form, architecture, WIDTH=64 if cache_type == "f16" else 128))
    walk = Walk(model, Random(5), 0.0 if is_exact else 0.1, cache_type=cache_type)
    yield walk
    walk.close()
    model.close()


def test_logits_are_those_of_a_fresh_pass_after_any_alternatives_copies_and_truncations(walk: Walk) -> None:
    for _ in range(STEPS):
        walk.step()
    assert walk.compared > 2 * STEPS
