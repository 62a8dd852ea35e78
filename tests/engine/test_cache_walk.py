"""With specserve's kernels logits do not depend on what the KV cache went through, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from kernel_products import SUPPORTED_VARIANTS, needs_kernels
from specserve.engine import kernels
from specserve.engine.base import FloatArray, Row
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from tiny_formats import FORMATS, quantise_as
from tiny_models import ARCHITECTURES, write_tiny

SLOTS, LENGTH, ALTERNATIVES = 3, 96, 4
STEPS = 500
TOKENS = 200


class Walk:
    """A walk of an engine through random steps; another engine reads each prefix anew, in a single pass."""

    def __init__(self, model: LlamaModel, random: Random) -> None:
        self._random = random
        self._engine = self._make(model, SLOTS, ALTERNATIVES)
        self._plain = self._make(model, 1, 0)
        self._tokens: list[list[int]] = [[] for _ in range(SLOTS)]
        self.compared = 0

    @staticmethod
    def _make(model: LlamaModel, slots: int, alternatives: int) -> LlamaEngine:
        return LlamaEngine(
            model,
            n_slots=slots,
            context_length=LENGTH,
            threads=1,
            max_rows=LENGTH,
            max_logits=64,
            max_alternatives=alternatives,
        )

    def close(self) -> None:
        self._engine.close()
        self._plain.close()

    def step(self) -> None:
        """A pass, after which some slots adopt an alternative; or a truncation; or a copy."""
        random, slot = self._random, self._random.randrange(SLOTS)
        action = random.choice(["pass", "pass", "pass", "truncate", "copy"])
        if action == "pass":
            self._pass()
        elif action == "truncate":
            length = random.randint(0, len(self._tokens[slot]))
            self._engine.truncate(slot, length)
            del self._tokens[slot][length:]
        else:
            source = random.choice([other for other in range(SLOTS) if other != slot])
            length = random.randint(0, len(self._tokens[source]))
            self._engine.copy(source, slot, length)
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
            assert logits.tobytes() == self._anew(prefix).tobytes(), f"after {prefix}"
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


@pytest.fixture(scope="module", params=ARCHITECTURES)
def single(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated model in single precision."""
    file = tmp_path_factory.mktemp("tiny") / "single.gguf"
    write_tiny(file, request.param, "target")
    return file


@pytest.fixture(params=FORMATS)
def walk(request: pytest.FixtureRequest, single: Path, tmp_path: Path) -> Iterator[Walk]:
    kernels.use("auto", variant=next(iter(SUPPORTED_VARIANTS), None))
    model = LlamaModel(quantise_as(single, tmp_path / "quantised.gguf", request.param))
    walk = Walk(model, Random(5))
    yield walk
    walk.close()
    model.close()


@needs_kernels
def test_logits_are_those_of_a_fresh_pass_after_any_alternatives_copies_and_truncations(walk: Walk) -> None:
    for _ in range(STEPS):
        walk.step()
    assert walk.compared > 2 * STEPS
