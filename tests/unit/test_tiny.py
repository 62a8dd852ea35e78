"""The tiny models resemble real ones in what speculation, streaming and stopping depend on."""

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specserve.engine.base import Row
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from tiny_models import ARCHITECTURES, write_tiny

TEXTS = [
    "héllo 世界 🙂",
    "The weather isn't what they've said; it's worse.",
    "def accept(self):\n\tfor x in range(10):\r\n\n        return {'a': [1, 22, 333]}  \n",
    " a leading space, two  inside, and a trailing one ",
    "Ελληνικά עברית العربية हिन्दी 한국어 👩‍👩‍👧 e\u0301 \x00\x7f",
    "<|im_end|> </s> <0x41> as plain text",
]
PROMPTS = ["The ", "def index(", "héllo 世界 🙂", "What is", "1 + 2 =", '{"name":', "Once upon a time", "Hello!"]

Rows = NDArray[np.float64]
Choose = Callable[[Rows], Any]


class Runner:
    """A model, and an engine with one slot."""

    def __init__(self, path: Path) -> None:
        self.model = LlamaModel(path)
        self._engine = LlamaEngine(self.model, n_slots=1, context_length=512, threads=1, max_rows=512, max_logits=1)

    def begin(self, text: str) -> Rows:
        """The distribution after this text."""
        self._engine.truncate(0, 0)
        return self.feed(self.model.encode(text))

    def feed(self, tokens: list[int]) -> Rows:
        """The distribution after these further tokens."""
        start, last = self._engine.cached_len(0), len(tokens) - 1
        [logits] = self._engine.forward([Row(token, 0, start + i, i == last) for i, token in enumerate(tokens)])
        weights = np.exp(logits.astype(np.float64) - logits.max())
        return np.asarray(weights / weights.sum())

    def close(self) -> None:
        self._engine.close()
        self.model.close()


Load = Callable[[str, str], Runner]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    directory = tmp_path_factory.mktemp("tiny")
    runners: dict[tuple[str, str], Runner] = {}

    def loaded(architecture: str, role: str) -> Runner:
        if (architecture, role) not in runners:
            path = directory / f"{architecture}-{role}.gguf"
            write_tiny(path, architecture, role)
            runners[architecture, role] = Runner(path)
        return runners[architecture, role]

    yield loaded
    for runner in runners.values():
        runner.close()


def test_tokenisers_use_their_merges_and_lose_nothing(load: Load) -> None:
    for architecture, role in product(ARCHITECTURES, ("target", "other")):
        model = load(architecture, role).model
        for text in TEXTS:
            assert b"".join(map(model.piece, model.encode(text))).decode() == text
        assert len(model.encode("a")) - len(model.encode("a", begin=False)) == (architecture == "llama")
    text = "the large model checks the tokens"
    for architecture in ARCHITECTURES:
        assert len(load(architecture, "target").model.encode(text)) < len(text) / 2


def answers(target: Runner, draft: Runner, choose: Choose, limit: int) -> tuple[list[list[int]], Rows, Rows]:
    """Texts that a target generates up to an end token, and what target and draft say at each token."""
    texts: list[list[int]] = []
    distributions: list[tuple[Rows, Rows]] = []
    for prompt in PROMPTS:
        tokens: list[int] = []
        distributions.append((target.begin(prompt), draft.begin(prompt)))
        while len(tokens) < limit:
            tokens.append(int(choose(distributions[-1][0])))
            if target.model.is_end_token(tokens[-1]):
                break
            distributions.append((target.feed(tokens[-1:]), draft.feed(tokens[-1:])))
        texts.append(tokens)
    p, q = map(np.array, zip(*distributions, strict=True))
    return texts, p, q


def test_answers_vary_are_drafted_well_sometimes_end_and_split_characters_between_tokens(load: Load) -> None:
    for architecture in ARCHITECTURES:
        target, draft = (load(architecture, role) for role in ("target", "draft"))
        texts, p, q = answers(target, draft, np.argmax, 50)
        assert 0.6 < np.mean(p.argmax(axis=1) == q.argmax(axis=1)) < 0.85
        assert sum(len(tokens) == 50 for tokens in texts) >= 6
        assert all(len(set(tokens)) >= min(10, len(tokens) // 2) for tokens in texts)
        generator = np.random.default_rng(1)
        texts, p, q = answers(target, draft, lambda row, own=generator: own.choice(len(row), p=row), 200)  # type: ignore[misc]
        assert 0.6 < np.minimum(p, q).sum(axis=1).mean() < 0.9
        # Bits of entropy.
        assert 1 < -(p * np.log2(p + 1e-300)).sum(axis=1).mean() < 4
        assert 1 <= sum(target.model.is_end_token(tokens[-1]) for tokens in texts) < len(PROMPTS)
        pieces = [target.model.piece(token) for tokens in texts for token in tokens]
        assert sum("\ufffd" in piece.decode(errors="replace") for piece in pieces) >= 5
        text = b"".join(pieces).decode(errors="replace")
        assert text.count("\ufffd") < len(text) / 200


def test_a_file_is_the_same_whenever_it_is_written(tmp_path: Path) -> None:
    for architecture in ARCHITECTURES:
        for name in ("one.gguf", "two.gguf"):
            write_tiny(tmp_path / name, architecture, "draft")
        assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()
