"""A GGUF file as llama.cpp loads it: its weights, its vocabulary, and whether two of them fit each other."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path

import llama_cpp

from specserve.errors import EngineError, ModelLoadError

_GGUF_MAGIC = b"GGUF"
_LOG_LEVEL_ERROR = 4  # ggml.h, enum ggml_log_level; the binding leaves it out


def _keep_quiet(level: int, text: bytes, _user_data: object) -> None:
    """Pass on only llama.cpp's errors; the rest is kilobytes a load."""
    if level == _LOG_LEVEL_ERROR:
        os.write(2, b"llama.cpp: " + text)


# llama.cpp keeps the pointer, so the object behind it must live as long as the process.
_LOG_CALLBACK = llama_cpp.llama_log_callback(_keep_quiet)


@lru_cache(maxsize=1)
def start_backend() -> None:
    """Let llama.cpp begin, once, with its log reduced to errors."""
    llama_cpp.llama_log_set(_LOG_CALLBACK, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()


class LlamaModel:
    """A loaded GGUF: its weights and its vocabulary.

    Raises:
        ModelLoadError: the file is missing, is not GGUF, or llama.cpp refuses it.
    """

    def __init__(self, path: Path) -> None:
        _check_file(path)
        start_backend()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        # Repacked weights are private copies: a mapping would keep every page a second time.
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
        model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if model is None:
            raise ModelLoadError(
                f"{path}: llama.cpp cannot load this GGUF; is it complete, and of an architecture it knows?"
            )
        self.path = path
        self.pointer = model
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self.size = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self.trained_context = llama_cpp.llama_model_n_ctx_train(model)
        self._pieces: dict[int, bytes] = {}
        self._end_tokens: list[int] | None = None

    def encode(self, text: str, *, special: bool = False, begin: bool = True) -> list[int]:
        """Tokenise `text`; see `Vocabulary.encode`."""
        data = text.encode("utf-8")
        room = len(data) + 8
        tokens = (llama_cpp.llama_token * room)()
        count = llama_cpp.llama_tokenize(self._vocab, data, len(data), tokens, room, begin, special)
        if count < 0:
            raise EngineError(f"The tokenizer needs {-count} tokens for {len(data)} bytes of text.")
        return list(tokens[:count])

    def piece(self, token: int) -> bytes:
        """The bytes a token adds to the text; empty for control tokens."""
        known = self._pieces.get(token)
        if known is None:
            known = self._pieces[token] = self._read_piece(token, special=False)
        return known

    def name(self, token: int) -> bytes:
        """The bytes of a token; for a control token, its name."""
        return self.piece(token) or self._read_piece(token, special=True)

    def _read_piece(self, token: int, *, special: bool) -> bytes:
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, room, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    def ends_text(self, token: int) -> bool:
        """Whether the model ends its answer with this token."""
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))

    def end_tokens(self) -> list[int]:
        """All tokens that end a text."""
        if self._end_tokens is None:
            self._end_tokens = [token for token in range(self.size) if self.ends_text(token)]
        return self._end_tokens

    def infill(self, prefix: list[int], suffix: list[int]) -> list[int] | None:
        """The prompt for what stands between two texts; None where the model has no tokens for that."""
        marks = (llama_cpp.llama_vocab_fim_pre, llama_cpp.llama_vocab_fim_suf, llama_cpp.llama_vocab_fim_mid)
        before, behind, middle = (mark(self._vocab) for mark in marks)
        if min(before, behind, middle) < 0:
            return None
        start = self.start_token() if llama_cpp.llama_vocab_get_add_bos(self._vocab) else None
        return [*([] if start is None else [start]), before, *prefix, behind, *suffix, middle]

    def start_token(self) -> int | None:
        """The token that stands for an empty prompt, None where the vocabulary has no such token."""
        token = llama_cpp.llama_vocab_bos(self._vocab)
        # Where a file names none, llama.cpp assumes token 11, whatever piece of text that is.
        return token if token >= 0 and llama_cpp.llama_vocab_is_control(self._vocab, token) else None

    @property
    def weights(self) -> tuple[int, int]:
        """How many there are, and how many bytes they take."""
        return int(llama_cpp.llama_model_n_params(self.pointer)), int(llama_cpp.llama_model_size(self.pointer))

    def description(self) -> str:
        """Architecture, size and quantisation, as llama.cpp calls them."""
        buffer = ctypes.create_string_buffer(128)
        llama_cpp.llama_model_desc(self.pointer, buffer, len(buffer))
        return buffer.value.decode("utf-8", errors="replace")

    def chat_template(self) -> str | None:
        """The Jinja template that the file carries for chats."""
        template = llama_cpp.llama_model_chat_template(self.pointer, None)
        return template.decode("utf-8", errors="replace") if template else None

    def start_text(self) -> str:
        """What a chat template writes for the token that begins a text; nothing where `encode` adds that token."""
        token = self.start_token()
        adds = llama_cpp.llama_vocab_get_add_bos(self._vocab)
        return "" if token is None or adds else self.token_text(token).decode("utf-8", errors="replace")

    def end_text(self) -> str:
        """What a chat template writes for the token that ends a text."""
        token = llama_cpp.llama_vocab_eos(self._vocab)
        return self.token_text(token).decode("utf-8", errors="replace") if token >= 0 else ""

    def token_text(self, token: int) -> bytes:
        """A token as the vocabulary spells it."""
        return llama_cpp.llama_vocab_get_text(self._vocab, token) or b""

    def vocabulary_kind(self) -> int:
        """Which algorithm tokenises: SentencePiece's, byte-level BPE or another of llama.cpp's."""
        return int(llama_cpp.llama_vocab_type(self._vocab))

    def outer_tokens(self) -> tuple[int, int, bool, bool]:
        """The tokens that begin and end a text, and whether a prompt is given them."""
        vocab = self._vocab
        return (
            llama_cpp.llama_vocab_bos(vocab),
            llama_cpp.llama_vocab_eos(vocab),
            bool(llama_cpp.llama_vocab_get_add_bos(vocab)),
            bool(llama_cpp.llama_vocab_get_add_eos(vocab)),
        )

    def close(self) -> None:
        """Give the weights back."""
        llama_cpp.llama_model_free(self.pointer)


def build_description() -> str:
    """What llama.cpp says of its own build: the instructions and libraries that it uses."""
    return str(llama_cpp.llama_print_system_info().decode())


def check_same_vocabulary(target: LlamaModel, draft: LlamaModel) -> None:
    """Refuse a pair whose token ids mean different texts, by llama.cpp's own rule for drafts.

    Raises:
        ModelLoadError: names the first difference.
    """
    pair = f"The draft {draft.path.name} does not fit the target {target.path.name}"
    advice = "choose a draft of the target's own family"
    if target.vocabulary_kind() != draft.vocabulary_kind():
        raise ModelLoadError(f"{pair}: their tokenizers are of different kinds; {advice}.")
    if target.outer_tokens() != draft.outer_tokens():
        raise ModelLoadError(f"{pair}: their texts begin or end with different tokens; {advice}.")
    if abs(target.size - draft.size) > 128:
        raise ModelLoadError(f"{pair}: their vocabularies hold {draft.size} and {target.size} tokens; {advice}.")
    for token in range(5, min(target.size, draft.size)):
        if target.token_text(token) != draft.token_text(token):
            raise ModelLoadError(f"{pair}: token {token} is a different text in each; {advice}.")


def write_pure_q4_0(source: Path, target: Path) -> bool:
    """Write every tensor of a GGUF as Q4_0; False, and a reason on stderr, if llama.cpp refuses."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    params.pure = True
    params.allow_requantize = True
    return bool(llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), params) == 0)


def _check_file(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise ModelLoadError(
            f"{path}: the model file cannot be read ({error.strerror}); run scripts/prepare and scripts/archive again."
        ) from error
    if magic != _GGUF_MAGIC:
        raise ModelLoadError(f"{path}: this is not a GGUF file; point `path` at a model in GGUF format.")
