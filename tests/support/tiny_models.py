"""Writes the models of the tests: GGUF files that load in milliseconds.

Tokenisers, entropy and acceptance rates resemble those of real models; the output is meaningless.
"""

import math
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGUFWriter, LlamaFileType, TokenType
from numpy.typing import NDArray

ARCHITECTURES = ("qwen2", "llama", "gpt2", "gemma3")
# Its first layer is recurrent.
HYBRID = "lfm2"
# Some have Qwen2's tokeniser here; in Gemma 3 every other layer sees the last `WINDOW` tokens only.
TOKENISERS = {name: name for name in ARCHITECTURES} | {"gemma3": "qwen2", HYBRID: "qwen2"}
WINDOW = 16
# The network's sizes: layers, features, heads, features of a feed-forward layer, tokens; and merges of the tokeniser.
LAYERS, WIDTH, HEADS, FEED_FORWARD, CONTEXT, MERGES = 2, 64, 4, 128, 2048, 160
# Of a Llama; two of them compute a token.
EXPERTS = 0
# The scale of the logits, and the share of noise in a draft's weights: the target has 2 to 3 bits of entropy per token,
# and the draft's argmax is the target's for 3 of 4 tokens.
SHARPNESS, DRIFT = 4.0, 0.075
# Logit biases: of tokens that are hardly ever generated, of first bytes of a character, and of the end token.
RARE_BIAS, FIRST_BYTE_BIAS, END_BIAS = -6.0, -1.0, 2.8
END_OF_TEXT = {"qwen2": "<|im_end|>", "llama": "</s>", "gpt2": "<|endoftext|>", "gemma3": "<|im_end|>"}
END_OF_TEXT[HYBRID] = END_OF_TEXT["qwen2"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CORPUS = """\
A small model proposes the next few tokens and a large model checks all of them in one pass. Where the two
agree the text moves on by several tokens at the price of one; where they differ the large model's own choice
is taken, so the text is the one that the large model would have written alone. "What's the weather?" he said;
I don't know, they've gone, we'll see. Café, naïve, déjà vu, 世界, 世间, 🙂🙃🙂🙁🙂.

def accept(self, target: list[float], draft: list[int], count: int = 2048) -> list[int]:
    for index, token in enumerate(draft):
        if target[index].argmax() != token:
            return self.tokens[:index]

{"name": "get_weather", "arguments": {"city": "Paris", "days": 3, "units": ["metric", null, true, false]}}
"""
# GPT-2 names printable bytes by themselves, and the others by the characters from 256 on.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
UNPRINTABLE = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_NAMES = {byte: chr(byte) for byte in PRINTABLE} | {byte: chr(256 + n) for n, byte in enumerate(UNPRINTABLE)}
SPECIALS = ["endoftext", "im_start", "im_end", "fim_prefix", "fim_middle", "fim_suffix"]
# llama.cpp's pre-tokenisers, with Python's nearest classes for \p{L} and \p{N}.
PRE_TOKENISERS = {
    "qwen2": r"'(?:[sdmt]|ll|ve|re)|[^\r\n\w]?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama": r" *[^ \n]+",
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+",
}
Array = NDArray[np.float32]
Merges = list[tuple[str, str]]


class _Token(NamedTuple):
    """The name, type and bytes that a token has; a token without bytes is hardly ever generated."""

    name: str
    kind: TokenType = TokenType.CONTROL
    text: bytes = b""


def write_tiny(path: Path, architecture: str, role: str) -> None:
    """Write a model: a `target`, its `draft`, one that drafts a `block`, or an `other` with a different vocabulary."""
    tokeniser = TOKENISERS[architecture]
    tokens, merges = vocabulary(tokeniser, CORPUS.swapcase() if role == "other" else CORPUS)
    weights = _weights(architecture, tokens, DRIFT if role in {"draft", "block"} else 0.0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".tiny-") as directory:
        partial = Path(directory) / path.name
        writer = GGUFWriter(partial, architecture)
        _write_hyperparameters(writer, architecture)
        write_tokeniser(writer, tokeniser, tokens, merges)
        if role == "block":
            writer.add_mask_token_id(len(tokens) - 1)
            writer.add_uint32("specserve.block_length", 3)
        write_tensors(writer, weights)
        partial.replace(path)


def write_tensors(writer: GGUFWriter, tensors: Mapping[str, NDArray[np.float32]]) -> None:
    """Write what the writer was given, and these tensors, and close it."""
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def vocabulary(tokeniser: str, corpus: str = CORPUS) -> tuple[list[_Token], Merges]:
    """The tokens of one of `TOKENISERS`, and the merges that lead to them."""
    merges = _learn_merges(corpus, tokeniser)
    return (_sentence_pieces(corpus, merges) if tokeniser == "llama" else _byte_pairs(merges, tokeniser)), merges


def _learn_merges(corpus: str, architecture: str) -> Merges:
    """Return the pairs of symbols that byte-pair encoding merges, most frequent first."""
    words: list[str] = re.findall(PRE_TOKENISERS[architecture], corpus)
    if architecture == "llama":
        words = [word.replace(" ", "▁") for word in words]
    else:
        words = ["".join(BYTE_NAMES[byte] for byte in word.encode()) for word in words]
    counts = Counter(tuple(word) for word in words)
    merges: Merges = []
    while len(merges) < MERGES:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in counts.items():
            for pair in pairwise(word):
                pairs[pair] += count
        merges.append(max(pairs, key=lambda pair: (pairs[pair], pair)))
        counts = Counter({_merge(word, merges[-1]): count for word, count in counts.items()})
    return merges


def _merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    """Join every occurrence of the pair, from the left."""
    joined: list[str] = []
    index = 0
    while index < len(word):
        width = 2 if word[index : index + 2] == pair else 1
        joined.append("".join(word[index : index + width]))
        index += width
    return tuple(joined)


def _byte_pairs(merges: Merges, architecture: str) -> list[_Token]:
    """Return GPT-2's vocabulary: all bytes under printable names, the merges, the special tokens."""
    byte_of = {name: byte for byte, name in BYTE_NAMES.items()}
    names = [*byte_of, *map("".join, merges)]
    tokens = [_Token(name, TokenType.NORMAL, bytes(byte_of[letter] for letter in name)) for name in names]
    specials = SPECIALS if architecture == "qwen2" else SPECIALS[:1]
    return tokens + [_Token(f"<|{name}|>") for name in specials]


def _sentence_pieces(corpus: str, merges: Merges) -> list[_Token]:
    """Return Llama's vocabulary: special tokens, a fallback for every byte, the merges, the characters."""
    tokens = [_Token("<unk>", TokenType.UNKNOWN), _Token("<s>"), _Token("</s>")]
    for byte in range(256):
        # Printable ASCII has its own pieces; only line feeds and parts of characters use byte tokens.
        text = bytes([byte]) if byte == ord("\n") or byte >= 0x80 else b""
        tokens.append(_Token(f"<0x{byte:02X}>", TokenType.BYTE, text))
    characters = sorted({"▁", *map(chr, range(0x21, 0x7F)), *"".join(corpus.split())})
    pieces = [*map("".join, merges), *characters]
    return tokens + [_Token(piece, TokenType.NORMAL, piece.replace("▁", " ").encode()) for piece in pieces]


def _write_hyperparameters(writer: GGUFWriter, architecture: str) -> None:
    writer.add_name(f"specserve tiny {architecture}")
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    if architecture == "gpt2":
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_head_count_kv([0, HEADS // 2] if architecture == HYBRID else HEADS // 2)
        writer.add_layer_norm_rms_eps(1e-5)
    if architecture == "gemma3":
        writer.add_key_length(WIDTH // HEADS)
        writer.add_value_length(WIDTH // HEADS)
        writer.add_sliding_window(WINDOW)
        writer.add_sliding_window_pattern(2)
    if architecture == HYBRID:
        writer.add_shortconv_l_cache(3)
    if EXPERTS:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)


def write_tokeniser(writer: GGUFWriter, architecture: str, tokens: list[_Token], merges: Merges) -> None:
    """Write the vocabulary, the special tokens and, except for gpt2, the chat template."""
    id_of = {token.name: index for index, token in enumerate(tokens)}
    writer.add_token_list([token.name for token in tokens])
    writer.add_token_types([token.kind for token in tokens])
    writer.add_eos_token_id(id_of[END_OF_TEXT[architecture]])
    writer.add_add_bos_token(architecture == "llama")
    if architecture == "llama":
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(index) for index in id_of.values()])
        # Llama's files prepend a space, so that decoding would not give the encoded text back.
        writer.add_add_space_prefix(False)
        writer.add_unk_token_id(id_of["<unk>"])
        writer.add_bos_token_id(id_of["<s>"])
        writer.add_chat_template(ZEPHYR)
        return
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if architecture == "qwen2" else "gpt-2")
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(id_of["<|endoftext|>"])
    if architecture == "qwen2":
        writer.add_pad_token_id(id_of["<|endoftext|>"])
        writer.add_eot_token_id(id_of["<|im_end|>"])
        for key, name in {"pre": "prefix", "suf": "suffix", "mid": "middle"}.items():
            writer.add_uint32(f"tokenizer.ggml.fim_{key}_token_id", id_of[f"<|fim_{name}|>"])
        writer.add_chat_template(CHATML)


def _printable(text: bytes) -> bool:
    try:
        return text.decode().replace("\n", " ").isprintable()
    except UnicodeDecodeError:
        return False


def _preference(token: _Token) -> tuple[float, bool, bool]:
    """Return a token's logit bias, and whether it begins and whether it can complete a multi-byte character."""
    if token.text and _printable(token.text):
        return 0.0, False, False
    if token.text and _printable(token.text + b"\x80"):
        return FIRST_BYTE_BIAS, True, False
    return RARE_BIAS, False, len(token.text) == 1 and 0x80 <= token.text[0] < 0xC0


def _norms(architecture: str) -> dict[str, Array]:
    sizes = {"attn": (WIDTH, 1.0), "ffn": (WIDTH, 1.0)}
    if architecture == "gemma3":
        sizes |= {"post_attention": (WIDTH, 1.2), "post_ffw": (WIDTH, 1.2)}
        sizes |= {"attn_q": (WIDTH // HEADS, 1.2), "attn_k": (WIDTH // HEADS, 1.2)}
    tensors = {"output_norm.weight": np.ones(WIDTH, np.float32)}
    for block, (name, (size, weight)) in product(range(LAYERS), sizes.items()):
        tensors[f"blk.{block}.{name}_norm.weight"] = np.full(size, weight, np.float32)
    if architecture == HYBRID:
        tensors["token_embd_norm.weight"] = tensors.pop("output_norm.weight")
        tensors |= {f"blk.1.attn_{name}_norm.weight": np.ones(WIDTH // HEADS, np.float32) for name in "qk"}
    if architecture == "gpt2":
        tensors |= {name.replace("weight", "bias"): np.zeros(WIDTH, np.float32) for name in tensors}
    return tensors


def _weights(architecture: str, tokens: list[_Token], drift: float) -> dict[str, Array]:
    """Return the tensors of a random network; those of a draft are the target's with `drift` of noise."""
    seed = (*ARCHITECTURES, HYBRID).index(architecture)
    shared, noise = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])

    def normal(*shape: int, scale: float) -> Array:
        common, own = shared.standard_normal(shape), noise.standard_normal(shape)
        return (scale * (math.sqrt(1 - drift**2) * common + drift * own)).astype(np.float32)

    # llama.cpp multiplies Gemma's by the root of the width.
    unit = 1 / math.sqrt(WIDTH) if architecture == "gemma3" else 1.0
    embedding = normal(len(tokens), WIDTH, scale=unit)
    output = normal(len(tokens), WIDTH, scale=SHARPNESS / math.sqrt(WIDTH))
    # Two features bypass the layers: a constant, which carries the logit bias, and "a character is incomplete".
    for index, token in enumerate(tokens):
        logit_bias, opens, closes = _preference(token)
        embedding[index, :2] = 3.0 * unit, 5.0 * opens * unit
        output[index, :2] = logit_bias, 8.0 * closes
    # The end token is always possible and rarely likely: its logit varies less than those of other tokens.
    end = next(index for index, token in enumerate(tokens) if token.name == END_OF_TEXT[architecture])
    output[end] *= 0.3
    output[end, 0] = END_BIAS
    tensors = {"token_embd.weight": embedding, "output.weight": output, **_norms(architecture)}
    shapes = {"attn_output": (WIDTH, WIDTH, 0.7), "ffn_up": (FEED_FORWARD, WIDTH, 1.0)}
    shapes["ffn_down"] = (WIDTH, FEED_FORWARD, 1.0)
    if architecture == "gpt2":
        positions = normal(CONTEXT, WIDTH, scale=0.3)
        positions[:, :2] = 0.0
        tensors["position_embd.weight"] = positions
        shapes["attn_qkv"] = (3 * WIDTH, WIDTH, 1.5)
    else:
        shapes |= {"attn_q": (WIDTH, WIDTH, 1.5), "ffn_gate": (FEED_FORWARD, WIDTH, 1.0)}
        shapes |= {"attn_k": (WIDTH // 2, WIDTH, 1.5), "attn_v": (WIDTH // 2, WIDTH, 1.5)}
        shapes |= {"ffn_gate_inp": (EXPERTS, WIDTH, 3.0)} if EXPERTS else {}
    recurrent = {name: shape for name, shape in shapes.items() if name.startswith("ffn")}
    recurrent |= {"shortconv.in_proj": (3 * WIDTH, WIDTH, 1.5), "shortconv.conv": (WIDTH, 3, 1.0)}
    recurrent["shortconv.out_proj"] = WIDTH, WIDTH, 0.7
    for block in (f"blk.{layer}" for layer in range(LAYERS)):
        for name, (rows, columns, gain) in (
            recurrent if (architecture, block) == (HYBRID, "blk.0") else shapes
        ).items():
            experts = (EXPERTS,) if EXPERTS and name in ("ffn_up", "ffn_down", "ffn_gate") else ()
            weight = normal(*experts, rows, columns, scale=gain / math.sqrt(columns))
            bias = normal(rows, scale=0.1)
            if name in ("attn_output", "ffn_down", "shortconv.out_proj"):
                weight[..., :2, :], bias[:2] = 0.0, 0.0
            tensors[f"{block}.{name}{'_exps' if experts else ''}.weight"] = weight
            if architecture == "gpt2" or (architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v")):
                tensors[f"{block}.{name}.bias"] = bias
    return tensors


if __name__ == "__main__":
    write_tiny(Path(sys.argv[1]), *sys.argv[2:])
