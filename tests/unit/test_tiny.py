"""Tiny models behave like real ones in what matters to speculation, streaming and stopping."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import llama_cpp
import numpy as np
import pytest
from numpy.typing import NDArray

from specserve.errors import ConfigError
from tiny_models import ARCHITECTURES, ROLES, write_tiny

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = [
    "héllo 世界 🙂",
    "The weather isn't what they've said; it's worse.",
    "def accept(self):\n\tfor x in range(10):\r\n\n        return {'a': [1, 22, 333]}  \n",
    " a leading space, two  inside, and a trailing one ",
    "Ελληνικά עברית العربية हिन्दी 한국어 👩‍👩‍👧 e\u0301 \x00\x7f",
    "<|im_end|> </s> <0x41> as plain text",
]
PROMPTS = [
    "The ",
    "def index(",
    "héllo 世界 🙂",
    "What is",
    "1 + 2 =",
    '{"name":',
    "Once upon a time",
    "Hello!",
]

Probabilities = NDArray[np.float64]


class Model:
    """The part of llama.cpp that these tests need, over one sequence."""

    def __init__(self, path: Path) -> None:
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        assert self._model
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = 512
        params.n_threads = params.n_threads_batch = 1
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        assert self._context
        self.vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.size: int = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.pieces = [self._piece(token) for token in range(self.size)]
        self.ends = [token for token in range(self.size) if llama_cpp.llama_vocab_is_eog(self.vocab, token)]

    def close(self) -> None:
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def _piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(128)
        length = llama_cpp.llama_token_to_piece(self.vocab, token, buffer, 128, 0, True)
        return buffer.raw[:length]

    def tokenise(self, text: str, *, start: bool = False, special: bool = False) -> list[int]:
        data, tokens = text.encode(), (llama_cpp.llama_token * 512)()
        count = llama_cpp.llama_tokenize(self.vocab, data, len(data), tokens, 512, start, special)
        assert count >= 0
        return list(tokens[:count])

    def detokenise(self, tokens: list[int]) -> str:
        buffer = ctypes.create_string_buffer(4096)
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        length = llama_cpp.llama_detokenize(self.vocab, array, len(tokens), buffer, 4096, False, False)
        assert length >= 0
        return buffer.raw[:length].decode()

    def begin(self, text: str) -> Probabilities:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        return self.feed(self.tokenise(text, start=True))

    def feed(self, tokens: list[int]) -> Probabilities:
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        assert llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(array, len(tokens))) == 0
        row = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, -1), shape=(self.size,))
        weights = np.exp(row.astype(np.float64) - row.max())
        return np.asarray(weights / weights.sum())

    def template(self) -> bytes | None:
        template: bytes | None = llama_cpp.llama_model_chat_template(self._model, None)
        return template


Load = Callable[[str, str], Model]
Choose = Callable[[Probabilities], int]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    directory = tmp_path_factory.mktemp("tiny")
    models: dict[tuple[str, str], Model] = {}

    def loaded(architecture: str, role: str) -> Model:
        if (architecture, role) not in models:
            path = directory / f"{architecture}-{role}.gguf"
            write_tiny(path, architecture, role)
            models[architecture, role] = Model(path)
        return models[architecture, role]

    yield loaded
    for model in models.values():
        model.close()


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def greedy(p: Probabilities) -> int:
    return int(p.argmax())


def sampler(seed: int) -> Choose:
    generator = np.random.default_rng(seed)
    return lambda p: int(generator.choice(len(p), p=p))


def generate(
    model: Model, prompt: str, choose: Choose, draft: Model | None = None, limit: int = 200
) -> tuple[list[int], list[Probabilities], list[Probabilities]]:
    """Return the tokens up to an end token, and the distributions of model and draft for each."""
    tokens: list[int] = []
    p, q = model.begin(prompt), draft.begin(prompt) if draft else np.empty(0)
    expected, drafted = [p], [q]
    while len(tokens) < limit:
        token = choose(p)
        tokens.append(token)
        if token in model.ends:
            break
        p, q = model.feed([token]), draft.feed([token]) if draft else q
        expected.append(p)
        drafted.append(q)
    return tokens, expected, drafted


def follow(load: Load, architecture: str, choose: Choose) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the distributions of target and draft for each token that the target generates."""
    target, draft = load(architecture, "target"), load(architecture, "draft")
    answers = [generate(target, prompt, choose, draft, limit=100) for prompt in PROMPTS]
    return np.concatenate([answer[1] for answer in answers]), np.concatenate([answer[2] for answer in answers])


class TestTokenisers:
    @pytest.mark.parametrize("text", TEXTS)
    @pytest.mark.parametrize("role", ["target", "other"])
    def test_the_pieces_of_an_encoded_text_join_to_the_text(
        self, load: Load, architecture: str, role: str, text: str
    ) -> None:
        model = load(architecture, role)
        assert b"".join(model.pieces[token] for token in model.tokenise(text)).decode() == text

    def test_llama_cpp_detokenises_exactly(self, load: Load, architecture: str) -> None:
        model = load(architecture, "target")
        assert model.detokenise(model.tokenise(TEXTS[0])) == TEXTS[0]

    def test_merges_are_used(self, load: Load, architecture: str) -> None:
        text = "the large model checks the tokens"
        assert len(load(architecture, "target").tokenise(text)) < len(text) / 2

    def test_special_tokens_are_parsed_only_on_request(self, load: Load) -> None:
        model = load("qwen2", "target")
        assert len(model.tokenise("<|im_end|>", special=True)) == 1
        assert len(model.tokenise("<|im_end|>")) > 1

    def test_qwen2_has_its_markers(self, load: Load) -> None:
        model = load("qwen2", "target")
        assert {model.pieces[token] for token in model.ends} == {b"<|im_end|>", b"<|endoftext|>"}
        for name, part in {"pre": "prefix", "suf": "suffix", "mid": "middle"}.items():
            token = getattr(llama_cpp, f"llama_vocab_fim_{name}")(model.vocab)
            assert model.pieces[token] == f"<|fim_{part}|>".encode()

    def test_only_llama_prepends_a_bos_token(self, load: Load, architecture: str) -> None:
        model = load(architecture, "target")
        added = len(model.tokenise("a", start=True)) - len(model.tokenise("a"))
        assert added == (architecture == "llama")

    def test_qwen2_and_llama_have_a_chat_template_and_gpt2_has_none(self, load: Load, architecture: str) -> None:
        template = load(architecture, "target").template()
        marker = {"qwen2": b"<|im_start|>", "llama": b"<|assistant|>", "gpt2": None}[architecture]
        assert template is None if marker is None else template is not None and marker in template


class TestPairs:
    def test_a_draft_has_its_targets_vocabulary(self, load: Load, architecture: str) -> None:
        assert load(architecture, "draft").pieces == load(architecture, "target").pieces

    def test_another_vocabulary_differs_in_texts_alone(self, load: Load, architecture: str) -> None:
        target, other = load(architecture, "target"), load(architecture, "other")
        assert other.size == target.size
        assert other.pieces[:250] == target.pieces[:250]
        assert sum(a != b for a, b in zip(target.pieces, other.pieces, strict=True)) > 100

    def test_the_draft_mostly_agrees_with_greedy_tokens(self, load: Load, architecture: str) -> None:
        p, q = follow(load, architecture, greedy)
        assert 0.6 < np.mean(p.argmax(axis=1) == q.argmax(axis=1)) < 0.85

    def test_the_drafts_distribution_overlaps_with_the_targets(self, load: Load, architecture: str) -> None:
        p, q = follow(load, architecture, sampler(1))
        assert 0.6 < np.minimum(p, q).sum(axis=1).mean() < 0.9


class TestGeneration:
    def test_the_next_token_is_neither_certain_nor_arbitrary(self, load: Load, architecture: str) -> None:
        p, _ = follow(load, architecture, sampler(2))
        assert 1 < -(p * np.log2(p + 1e-300)).sum(axis=1).mean() < 4

    def test_greedy_answers_vary_and_seldom_end_early(self, load: Load, architecture: str) -> None:
        model = load(architecture, "target")
        answers = [generate(model, prompt, greedy, limit=64)[0] for prompt in PROMPTS]
        assert sum(len(tokens) == 64 for tokens in answers) >= 6
        for tokens in answers:
            assert len(set(tokens)) >= min(10, len(tokens) // 2)

    def test_the_next_token_depends_on_more_than_the_last(self, load: Load, architecture: str) -> None:
        model = load(architecture, "target")
        # Three texts that end in the same token.
        choices = [model.begin(prompt + " =") for prompt in ("a", "Where", "1 + 2")]
        assert max(np.abs(choices[0] - other).sum() for other in choices[1:]) > 0.2

    def test_sampled_answers_sometimes_end(self, load: Load, architecture: str) -> None:
        model = load(architecture, "target")
        answers = [generate(model, PROMPTS[seed % 8], sampler(seed))[0] for seed in range(24)]
        ended = sum(tokens[-1] in model.ends for tokens in answers)
        assert 2 <= ended <= 22

    def test_text_is_printable_and_splits_characters_between_tokens(self, load: Load, architecture: str) -> None:
        model = load(architecture, "target")
        answers = [generate(model, prompt, sampler(seed))[0] for seed, prompt in enumerate(PROMPTS)]
        pieces = [model.pieces[token] for tokens in answers for token in tokens if token not in model.ends]
        text = b"".join(pieces).decode(errors="replace")
        assert sum("\ufffd" in piece.decode(errors="replace") for piece in pieces) >= 10
        assert text.count("\ufffd") < len(text) / 200
        # Joined bytes may form unassigned characters.
        assert sum(not character.isprintable() for character in text.replace("\n", "")) < len(text) / 200


class TestFiles:
    def test_a_file_is_written_byte_for_byte_again(self, tmp_path: Path, architecture: str) -> None:
        for role in ROLES:
            digests = set()
            for name in ("one.gguf", "two.gguf"):
                write_tiny(tmp_path / name, architecture, role)
                digests.add(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())
            assert len(digests) == 1

    def test_writing_replaces_the_file_and_leaves_no_other(self, tmp_path: Path) -> None:
        path = tmp_path / "models" / "tiny.gguf"
        path.parent.mkdir()
        path.write_bytes(b"half a file")
        write_tiny(path, "qwen2", "draft")
        assert path.read_bytes().startswith(b"GGUF")
        assert list(path.parent.iterdir()) == [path]

    @pytest.mark.parametrize(("architecture", "role"), [("mamba", "target"), ("qwen2", "judge")])
    def test_an_unknown_model_is_refused(self, tmp_path: Path, architecture: str, role: str) -> None:
        with pytest.raises(ConfigError, match=f"{architecture} {role}.*qwen2.*target"):
            write_tiny(tmp_path / "tiny.gguf", architecture, role)
        assert not list(tmp_path.iterdir())

    def test_a_model_can_be_quantised(self, tmp_path: Path, architecture: str) -> None:
        whole, small = tmp_path / "f32.gguf", tmp_path / "q4_0.gguf"
        write_tiny(whole, architecture, "target")
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.pure = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True
        source, destination = str(whole).encode(), str(small).encode()
        assert llama_cpp.llama_model_quantize(source, destination, ctypes.byref(params)) == 0
        model = Model(small)
        assert np.isfinite(model.begin(TEXTS[0])).all()
        model.close()
