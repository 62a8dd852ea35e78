"""A GGUF that llama.cpp has loaded: its weights, its vocabulary, and the check that a draft fits a target."""

import ctypes
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import takewhile
from pathlib import Path

import llama_cpp

from specserve.config import LEAST_CONTEXT
from specserve.errors import EngineError, ModelLoadError

_GGUF_MAGIC = b"GGUF"
# Where a file says that it is no model of its own, in the first metadata: a key, the type of a string, its length.
_HEAD = 1 << 16  # bytes
_NO_MODEL = re.compile(rb"general\.(?:type|architecture)\x08\0{3}.\0{7}(adapter|clip|imatrix|mmproj)")
_PARTS = {
    b"adapter": "a LoRA adapter, not a model; point `path` at its model and `adapter` at this file",
    b"imatrix": "an importance matrix, not a model; point `path` at a model",
}
_PARTS |= dict.fromkeys((b"clip", b"mmproj"), "the part of a model that reads images; point `path` at the model's GGUF")
# Tokens that a draft model with a mask token drafts in one pass if its file does not say how many.
_BLOCK_LENGTH = 8
# Of encoders, embedding and diffusion models.
NO_GENERATOR = "this kind of model does not write text token by token; choose one that generates text."
_CONVERT_AGAIN = "convert the model again, or choose another one."
_LOG_LEVEL_ERROR = 4  # GGML_LOG_LEVEL_ERROR of ggml.h, which llama-cpp-python does not export


class _Said(threading.local):
    """llama.cpp's errors while this thread loads a model."""

    errors: tuple[str, ...] = ()


_said = _Said()
# The files that are being loaded, or computed for the first time; passes have threads of their own.
_tried: list[Path] = []


@contextmanager
def trying(path: Path) -> Iterator[None]:
    """While it tries a file, the process ends with a sentence where llama.cpp aborts, since nothing can catch that."""
    _tried.append(path)
    try:
        yield
    finally:
        _tried.remove(path)


def _log_errors(level: int, text: bytes, _user_data: object) -> None:
    """Print only llama.cpp's errors; the rest is kilobytes for each model."""
    if level == _LOG_LEVEL_ERROR:
        os.write(2, b"llama.cpp: " + text)
        _said.errors += (text.decode(errors="replace").strip().rpartition("error loading model: ")[2],)


def _log_abort(message: bytes) -> None:
    """Print why llama.cpp aborts, in place of its backtrace."""
    reason = message.decode(errors="replace").strip().rpartition("/")[2]
    if not _tried:
        os.write(2, f"llama.cpp: {reason}\n".encode())
        return
    files = " or ".join(map(str, _tried))
    os.write(2, f"specserve cannot load: {files}: {_refusal(reason)}\n".encode())
    os._exit(ModelLoadError.exit_code)


def _refusal(reason: str) -> str:
    return (
        f"llama.cpp cannot load this GGUF ({reason}); if it is incomplete, fetch it again, otherwise llama-cpp-python "
        f"{llama_cpp.__version__} cannot serve it."
    )


# llama.cpp keeps the pointers, so the callbacks must live as long as the process.
_LOG_CALLBACK = llama_cpp.llama_log_callback(_log_errors)
_ABORT_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_log_abort)


@lru_cache(maxsize=1)
def start_backend() -> None:
    """Initialise llama.cpp once, with its log reduced to errors."""
    llama_cpp.llama_log_set(_LOG_CALLBACK, ctypes.c_void_p(0))
    ctypes.CDLL("libggml-base.so.0", os.RTLD_NOLOAD | os.RTLD_NOW).ggml_set_abort_callback(_ABORT_CALLBACK)
    llama_cpp.llama_backend_init()


class LlamaModel:
    """The weights and the `Vocabulary` that a GGUF holds.

    Raises:
        ModelLoadError: the file is missing, is not GGUF, or llama.cpp refuses it.
    """

    def __init__(self, path: Path) -> None:
        _check_file(path)
        start_backend()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        # No mmap: weights are repacked into private copies, and mapped pages would stay in memory beside them.
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
        _said.errors = ()
        with trying(path):
            model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if model is None:
            raise ModelLoadError(f"{path}: {_refusal((_said.errors or ('it does not say why',))[0])}")
        self.path = path
        self.pointer = model
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self.size = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self.trained_context = llama_cpp.llama_model_n_ctx_train(model)
        # The last tokens that some layers see; 0 where all see all.
        self.window = llama_cpp.llama_model_n_swa(model)
        # Whether some layers keep the state after the last token only.
        self.recurrent = llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model)
        self.tokenizer = llama_cpp.llama_vocab_type(self._vocab)
        # The BOS and the EOS token that a prompt gets; None for one that is not added.
        self.added_tokens = (
            llama_cpp.llama_vocab_bos(self._vocab) if llama_cpp.llama_vocab_get_add_bos(self._vocab) else None,
            llama_cpp.llama_vocab_eos(self._vocab) if llama_cpp.llama_vocab_get_add_eos(self._vocab) else None,
        )
        self._pieces: dict[int, bytes] = {}
        if reason := self._unfit():
            self.close()
            raise ModelLoadError(f"{path}: {reason}")

    def _unfit(self) -> str | None:
        """Say why the model cannot serve although llama.cpp, which asks for some things late, has loaded it."""
        if llama_cpp.llama_model_has_encoder(self.pointer):
            return NO_GENERATOR
        if self.trained_context < LEAST_CONTEXT:
            return f"was trained for {self.trained_context % 2**32} tokens, by its metadata; {_CONVERT_AGAIN}"
        if self.tokenizer == llama_cpp.LLAMA_VOCAB_TYPE_SPM:
            # At a character that neither a token nor these spell, llama.cpp ends the process.
            missing = {b"<0x%02X>" % byte for byte in range(0x80, 0x100)}
            for token in range(self.size):
                missing.discard(self.token_text(token))
                if not missing:
                    return None
            return f"its vocabulary has no {min(missing).decode()}, so it cannot read all texts; {_CONVERT_AGAIN}"
        return None

    def encode(self, text: str, *, special: bool = False, begin: bool = True) -> list[int]:
        data = text.encode("utf-8")
        size = len(data) + 8
        tokens = (llama_cpp.llama_token * size)()
        count = llama_cpp.llama_tokenize(self._vocab, data, len(data), tokens, size, begin, special)
        if count < 0:
            raise EngineError(f"The tokenizer needs {-count} tokens for {len(data)} bytes of text.")
        encoded = list(tokens[:count])
        bos = self._added_bos()
        if begin and bos is not None:
            # One that the text spells at its beginning is not added again.
            del encoded[: max(0, _leading(bos, encoded) - 1)]
        return encoded

    def piece(self, token: int) -> bytes:
        if token not in self._pieces:
            self._pieces[token] = self._read_piece(token, special=False)
        return self._pieces[token]

    def name(self, token: int) -> bytes:
        return self.piece(token) or self._read_piece(token, special=True)

    def _read_piece(self, token: int, *, special: bool) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            size = -count

    def is_end_token(self, token: int) -> bool:
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))

    def end_tokens(self) -> list[int]:
        return self._end_tokens

    @cached_property
    def _end_tokens(self) -> list[int]:
        return [token for token in range(self.size) if self.is_end_token(token)]

    def infill(self, prefix: list[int], suffix: list[int]) -> list[int] | None:
        fim_tokens = (llama_cpp.llama_vocab_fim_pre, llama_cpp.llama_vocab_fim_suf, llama_cpp.llama_vocab_fim_mid)
        prefix_token, suffix_token, middle_token = (token(self._vocab) for token in fim_tokens)
        if min(prefix_token, suffix_token, middle_token) < 0:
            return None
        bos = self._added_bos()
        begin = [] if bos is None else [bos]
        text = prefix if bos is None else prefix[_leading(bos, prefix) :]
        return [*begin, prefix_token, *text, suffix_token, *suffix, middle_token]

    def file_separators(self) -> tuple[int | None, int | None]:
        repository, separator = llama_cpp.llama_vocab_fim_rep(self._vocab), llama_cpp.llama_vocab_fim_sep(self._vocab)
        return None if repository < 0 else repository, None if separator < 0 else separator

    def _added_bos(self) -> int | None:
        return self.bos_token() if llama_cpp.llama_vocab_get_add_bos(self._vocab) else None

    def bos_token(self) -> int | None:
        token = llama_cpp.llama_vocab_bos(self._vocab)
        # If the file names none, llama.cpp returns token 11, which may be any text.
        return token if token >= 0 and llama_cpp.llama_vocab_is_control(self._vocab, token) else None

    @property
    def mask_token(self) -> int:
        """The token that a draft model reads in place of a draft; -1 if its file names none of its vocabulary."""
        token = self._number("tokenizer.ggml.mask_token_id", -1)
        return token if token < self.size else -1

    @property
    def block_length(self) -> int:
        """How many tokens a draft model drafts at most in one pass."""
        return 1 if self.mask_token < 0 else max(1, self._number("specserve.block_length", _BLOCK_LENGTH))

    @property
    def has_splitter(self) -> bool:
        """False where llama.cpp splits texts in its default way before it merges bytes: the file does not say how."""
        return self.tokenizer != llama_cpp.LLAMA_VOCAB_TYPE_BPE or bool(self._metadata("tokenizer.ggml.pre"))

    @property
    def has_end(self) -> bool:
        """False where the file names no token that ends answers: llama.cpp takes token 11, which may be any text."""
        named = (self._metadata(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
        return self.tokenizer != llama_cpp.LLAMA_VOCAB_TYPE_BPE or any(named)

    @property
    def cell_values(self) -> int:
        """How many numbers a token takes in a KV cache, by the file's metadata: its keys and values in all layers.

        Of a model without recurrent layers (recurrent.py).
        """
        width = llama_cpp.llama_model_n_embd(self.pointer) // max(1, llama_cpp.llama_model_n_head(self.pointer))
        attention = f"{self._metadata('general.architecture')}.attention"
        widths = sum(int(self._metadata(f"{attention}.{part}_length") or width) for part in ("key", "value"))
        heads = llama_cpp.llama_model_n_head_kv(self.pointer) * llama_cpp.llama_model_n_layer(self.pointer)
        return max(1, int(heads * widths))

    def _number(self, key: str, default: int) -> int:
        """Return a metadatum that is a natural number; a file may hold anything."""
        text = self._metadata(key)
        return int(text) if text.isdecimal() else default

    def _metadata(self, key: str) -> str:
        buffer = ctypes.create_string_buffer(4096)
        length = llama_cpp.llama_model_meta_val_str(self.pointer, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", errors="replace") if length > 0 else ""

    @property
    def weights(self) -> tuple[int, int]:
        """The number of parameters that the model has, and their size in bytes."""
        return int(llama_cpp.llama_model_n_params(self.pointer)), int(llama_cpp.llama_model_size(self.pointer))

    def description(self) -> str:
        """Return architecture, size and quantisation as llama.cpp writes them."""
        buffer = ctypes.create_string_buffer(128)
        llama_cpp.llama_model_desc(self.pointer, buffer, len(buffer))
        return buffer.value.decode("utf-8", errors="replace")

    def chat_template(self) -> str | None:
        template = llama_cpp.llama_model_chat_template(self.pointer, None)
        return template.decode("utf-8", errors="replace") if template else None

    def bos_text(self) -> str:
        token = self.bos_token()
        return "" if token is None else self.token_text(token).decode("utf-8", errors="replace")

    def eos_text(self) -> str:
        token = llama_cpp.llama_vocab_eos(self._vocab)
        return self.token_text(token).decode("utf-8", errors="replace") if token >= 0 else ""

    def token_text(self, token: int) -> bytes:
        """Return a token as the vocabulary spells it."""
        return llama_cpp.llama_vocab_get_text(self._vocab, token) or b""

    def close(self) -> None:
        llama_cpp.llama_model_free(self.pointer)


def _leading(token: int, tokens: list[int]) -> int:
    return sum(1 for _ in takewhile(token.__eq__, tokens))


def build_description() -> str:
    """Return which instructions and libraries llama.cpp's build uses."""
    return str(llama_cpp.llama_print_system_info().decode())


def able_to_draft(draft: LlamaModel) -> LlamaModel:
    """Return the draft model; ModelLoadError, and it is closed, if it cannot go back after rejected drafts."""
    if draft.recurrent:
        draft.close()
        raise ModelLoadError(f"{draft.path}: has recurrent layers, which cannot go back over the passes of its drafts.")
    return draft


def check_same_vocabulary(target: LlamaModel, draft: LlamaModel) -> None:
    """Refuse a draft whose tokens differ from the target's, by the rule of llama.cpp's speculative decoding.

    Which tokens end an answer may differ, as in a base model's file for an instruct target: the target decides that.
    Source: common_speculative_are_compatible of llama.cpp's common/speculative.cpp.

    Raises:
        ModelLoadError: names the first difference.
    """
    tokens = range(5, min(target.size, draft.size))
    other = next((token for token in tokens if target.token_text(token) != draft.token_text(token)), None)
    differences = {
        "their tokenizers are of different kinds": target.tokenizer != draft.tokenizer,
        "their prompts begin or end with different tokens": target.added_tokens != draft.added_tokens,
        f"their vocabularies hold {draft.size} and {target.size} tokens": abs(target.size - draft.size) > 128,
        f"token {other} is a different text in each": other is not None,
    }
    if difference := next(filter(differences.get, differences), None):
        raise ModelLoadError(
            f"The draft {draft.path.name} does not fit the target {target.path.name}: {difference}; "
            "choose a draft of the target's own family."
        )


def quantise(source: Path, target: Path, file_type: str = "Q4_0", *, pure: bool = True) -> bool:
    """Requantise the matrices of a GGUF, all to one format if `pure`.

    Returns False, with a reason on stderr, if llama.cpp refuses.
    """
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{file_type}")
    params.pure = pure
    params.allow_requantize = True
    return bool(llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), params) == 0)


def _check_file(path: Path) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError as error:
        raise ModelLoadError(
            f"{path}: the model file cannot be read ({error.strerror}); run scripts/prepare and scripts/archive again."
        ) from error
    if not head.startswith(_GGUF_MAGIC):
        raise ModelLoadError(f"{path}: this is not a GGUF file; point `path` at a model in GGUF format.")
    if part := _NO_MODEL.search(head):
        raise ModelLoadError(f"{path}: this is {_PARTS[part[1]]}.")
