"""The tokenizer built from a GGUF gives the same ids as llama.cpp, on which lm-evaluation-harness depends."""

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import ours
from gguf_tokenizer import save_tokenizer
from ours import PROJECT
from server import Server
from store import CONFIG
from tiny_config import tiny_config

ALPHABET = "aAbeE zZ 09 \t\n\r'\"()[]{}<>|/\\_-+=.,:;!?#@ é ß ﬁ Å 世界 🙂👩‍👩‍👧 ¼ ٣ \u00a0\u3000\u200b e\u0301 İ \u017f"
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "  two  spaces,\ttabs\t\tand\n\n\nlines \r\n\r\n  \n end  ",
    "I'M, we'LL, they've, don't: 12345 3.14159 0x1F 1,000,000",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<|endoftext|><|im_sta",
    "Café naïve déjà vu, e\u0301 is é, ﬁ ligature, 世界 🙂🙃 👩‍👩‍👧, नमस्ते, مرحبا",
    # llama.cpp takes every token whose text is </s> for an end token, and parses it as a control token even in a
    # vocabulary where it is an ordinary one, as in Qwen's.
    *(path.read_text().replace("</s>", "<s>") for path in sorted((PROJECT / "handler").rglob("*.py"))),
]


def sample(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(ALPHABET, k=rng.randint(1, 60))) for _ in range(count)]


def assert_same_tokens(model: Path, directory: Path) -> None:
    texts = TEXTS + sample(1, 2000)
    save_tokenizer(model, directory)
    theirs = AutoTokenizer.from_pretrained(directory)(texts).input_ids
    for text, ids, expected in zip(texts, theirs, ours.encode(model, texts), strict=True):
        assert ids == expected, text


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])
def test_the_tokenizer_of_a_tiny_vocabulary_gives_llama_cpps_ids(tmp_path: Path, architecture: str) -> None:
    assert_same_tokens(ours.target(tiny_config(tmp_path, architecture)), tmp_path)


@pytest.mark.real
def test_the_tokenizer_of_qwens_vocabulary_gives_llama_cpps_ids(tmp_path: Path) -> None:
    assert_same_tokens(ours.target(CONFIG), tmp_path)


def test_the_server_counts_the_same_number_of_tokens(server: Server, tokenizer: Path) -> None:
    prompt = "def accept(p, q):  # 世界 🙂"
    answer = server.client().completions.create(model="tiny", prompt=prompt, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(AutoTokenizer.from_pretrained(tokenizer)(prompt).input_ids)
