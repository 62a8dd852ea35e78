"""The tiny models resemble real ones in what speculation, streaming and stopping depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from specserve.engine.base import Row
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
from tiny_models import ARCHITECTURES, ROLES, write_tiny

TEXTS = [
    "héllo 世界 🙂",
    "The weather isn't what they've said; it's worse.",
    "def accept(self):\n\tfor x in range(10):\r\n\n        return {'a': [1, 22, 333]}  \n",
    " a leading space, two  inside, and a trailing one ",
    "Ελληνικά עברית العربية हिन्दी 한국어 👩‍👩‍👧 e\u0301 \x00\x7f",
    "<|im_end|> </s> <0x41> as plain text",
]
PROMPTS = ["The ", "def index(", "héllo 世界 🙂", "What is", "1 + 2 =", '{"name":', "Once upon a time", "Hello!"]

Probabilities = NDArray[np.float64]
Choose = Callable[[Probabilities], int]


class Runner:
    """A model, and an engine with one slot."""

    def __init__(self, path: Path) -> None:
        self.model = LlamaModel(path)
        self._engine = LlamaEngine(self.model, n_slots=1, context_length=512, threads=1, max_rows=512, max_logits=1)
        self.pieces = list(map(self.model.name, range(self.model.size)))

    def begin(self, text: str) -> Probabilities:
        """The distribution after this text."""
        self._engine.truncate(0, 0)
        return self.feed(self.model.encode(text))

    def feed(self, tokens: list[int]) -> Probabilities:
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


def greedy(p: Probabilities) -> int:
    return int(p.argmax())


def sampler(seed: int) -> Choose:
    generator = np.random.default_rng(seed)
    return lambda p: int(generator.choice(len(p), p=p))


def generate(
    target: Runner, prompt: str, choose: Choose, draft: Runner | None = None, limit: int = 200
) -> tuple[list[int], list[Probabilities], list[Probabilities]]:
    """The tokens up to an end token, and the distributions of target and draft at each."""
    tokens: list[int] = []
    p, q = target.begin(prompt), draft.begin(prompt) if draft else np.empty(0)
    expected, drafted = [p], [q]
    while len(tokens) < limit:
        tokens.append(choose(p))
        if target.model.is_end_token(tokens[-1]):
            break
        p, q = target.feed(tokens[-1:]), draft.feed(tokens[-1:]) if draft else q
        expected.append(p)
        drafted.append(q)
    return tokens, expected, drafted


def distributions(
    target: Runner, draft: Runner | None, choose: Choose
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The distributions of target and draft at each token that the target generates."""
    answers = [generate(target, prompt, choose, draft, limit=60) for prompt in PROMPTS]
    return np.concatenate([answer[1] for answer in answers]), np.concatenate([answer[2] for answer in answers])


def test_tokenisers_use_their_merges_and_lose_nothing(load: Load) -> None:
    for architecture, role in product(ARCHITECTURES, ("target", "other")):
        model = load(architecture, role).model
        for text in TEXTS:
            assert b"".join(map(model.piece, model.encode(text))).decode() == text
        assert len(model.encode("a")) - len(model.encode("a", begin=False)) == (architecture == "llama")
    text = "the large model checks the tokens"
    for architecture in ARCHITECTURES:
        assert len(load(architecture, "target").model.encode(text)) < len(text) / 2


def test_drafts_resemble_their_targets(load: Load) -> None:
    for architecture in ARCHITECTURES:
        target, draft = load(architecture, "target"), load(architecture, "draft")
        p, q = distributions(target, draft, greedy)
        assert 0.6 < np.mean(p.argmax(axis=1) == q.argmax(axis=1)) < 0.85
        p, q = distributions(target, draft, sampler(1))
        assert 0.6 < np.minimum(p, q).sum(axis=1).mean() < 0.9
        # Bits of entropy.
        assert 1 < -(p * np.log2(p + 1e-300)).sum(axis=1).mean() < 4


def test_greedy_answers_vary_and_rarely_end_early(load: Load) -> None:
    for architecture in ARCHITECTURES:
        answers = [generate(load(architecture, "target"), prompt, greedy, limit=64)[0] for prompt in PROMPTS]
        assert sum(len(tokens) == 64 for tokens in answers) >= 6
        assert all(len(set(tokens)) >= min(10, len(tokens) // 2) for tokens in answers)


def test_sampled_answers_sometimes_end_and_split_characters_between_tokens(load: Load) -> None:
    for architecture in ARCHITECTURES:
        target = load(architecture, "target")
        answers = [generate(target, PROMPTS[seed % 8], sampler(seed))[0] for seed in range(12)]
        assert 1 <= sum(target.model.is_end_token(tokens[-1]) for tokens in answers) <= 11
        pieces = [target.model.piece(token) for tokens in answers for token in tokens]
        text = b"".join(pieces).decode(errors="replace")
        assert sum("\ufffd" in piece.decode(errors="replace") for piece in pieces) >= 5
        assert text.count("\ufffd") < len(text) / 200


def test_a_file_is_the_same_whenever_it_is_written(tmp_path: Path) -> None:
    for architecture, role in product(ARCHITECTURES, ROLES):
        digests = set()
        for name in ("one.gguf", "two.gguf"):
            write_tiny(tmp_path / name, architecture, role)
            digests.add(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())
        assert len(digests) == 1
