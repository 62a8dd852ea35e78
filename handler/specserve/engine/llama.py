"""The llama.cpp engine: the only module that imports llama_cpp, through its low-level API alone."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import llama_cpp
import numpy as np

from specserve.engine.base import FloatArray, Row
from specserve.errors import EngineError, ModelLoadError

_GGUF_MAGIC = b"GGUF"
_LOG_LEVEL_ERROR = 4  # ggml.h, enum ggml_log_level; the binding leaves it out
_TYPES = {"f16": 1, "bf16": 30}  # ggml.h, enum ggml_type; left out in parts


def _keep_quiet(level: int, text: bytes, _user_data: object) -> None:
    """Pass on only llama.cpp's errors; the rest is kilobytes a load."""
    if level == _LOG_LEVEL_ERROR:
        os.write(2, b"llama.cpp: " + text)


# llama.cpp keeps the pointer, so the object behind it must live as long as the process.
_LOG_CALLBACK = llama_cpp.llama_log_callback(_keep_quiet)


@lru_cache(maxsize=1)
def _start_backend() -> None:
    llama_cpp.llama_log_set(_LOG_CALLBACK, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()


class LlamaModel:
    """A loaded GGUF: its weights and its vocabulary.

    Raises:
        ModelLoadError: the file is missing, is not GGUF, or llama.cpp refuses it.
    """

    def __init__(self, path: Path) -> None:
        _check_file(path)
        _start_backend()
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


@dataclass(frozen=True)
class EngineSettings:
    """How keys and values are kept, and which kernels work on them; benchmarks/engine_settings.py compares them.

    Slots that share one cache may have any numbers of rows in a pass, but a row's sums depend on where its text's
    cells lie among the others', and without flash attention it walks over all of them; with separate caches it does
    neither.

    With flash attention, half precision for both takes other kernels for a lone row over more than 512 cells and for
    64 rows and more, with other sums; of two formats, all rows take the same one, and it sums in float32.
    """

    type_k: Literal["f16", "bf16"] = "f16"
    type_v: Literal["f16", "bf16"] = "bf16"
    flash_attention: bool = True
    separate: bool = False


def target_settings() -> EngineSettings:
    """The fastest attention for long texts whose sums for a row depend neither on other rows nor on other slots.

    Matrix products are faster than flash attention and keep to one order of summing, but for tinyBLAS (llamafile),
    which takes over from two rows on: then it has to be flash attention.
    """
    if has_tiny_blas():
        return EngineSettings(separate=True)
    return EngineSettings(type_v="f16", flash_attention=False, separate=True)


def has_tiny_blas() -> bool:
    """Whether llama.cpp was built with it; scripts/_environment.sh builds without."""
    return "LLAMAFILE" in build_description()


def build_description() -> str:
    """What llama.cpp says of its own build: the instructions and libraries that it uses."""
    return str(llama_cpp.llama_print_system_info().decode())


class LlamaEngine:
    """A context of one model: the caches of `n_slots` sequences and batched forward passes.

    Raises:
        ModelLoadError: there is no memory for the context, or the model's cache cannot be cut back.
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        n_slots: int,
        context_length: int,
        threads: int,
        max_rows: int,
        max_logits: int,
        settings: EngineSettings | None = None,
    ) -> None:
        settings = settings or target_settings()
        self.n_slots = n_slots
        self.max_rows = max_rows
        self.max_logits = max_logits
        self.slot_length = min(context_length, model.trained_context)
        self.width = model.size
        params = llama_cpp.llama_context_default_params()
        self.separate = settings.separate and n_slots > 1
        # Rows that are only there to make a pass cheaper stay within a slot's length, too.
        params.n_ctx = n_slots * context_length
        params.n_seq_max = n_slots
        params.n_batch = params.n_ubatch = max_rows
        params.n_outputs_max = max_logits
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = not self.separate
        params.type_k = _TYPES[settings.type_k]
        params.type_v = _TYPES[settings.type_v]
        params.flash_attn_type = int(settings.flash_attention)
        params.no_perf = True
        context = llama_cpp.llama_init_from_model(model.pointer, params)
        if context is None:
            raise ModelLoadError(
                f"{model.path}: no memory for {n_slots} sequences of {context_length} tokens; "
                "lower `sequences` or `context_length`."
            )
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self._lengths = [0] * n_slots
        self._make_batch(max_rows)
        self._check_cuts(model)

    def _make_batch(self, rows: int) -> None:
        """A batch over memory of our own, so that NumPy fills it and its capacity is one we can check."""
        self._tokens = np.zeros(rows, np.int32)
        self._positions = np.zeros(rows, np.int32)
        self._counts = np.ones(rows, np.int32)
        self._slots = np.zeros(rows, np.int32)
        self._wants = np.zeros(rows, np.int8)
        first = self._slots.ctypes.data
        self._slot_pointers = np.arange(rows, dtype=np.uintp) * self._slots.itemsize + first
        batch = llama_cpp.llama_batch()
        int32s = ctypes.POINTER(ctypes.c_int32)
        batch.token = self._tokens.ctypes.data_as(int32s)
        batch.pos = self._positions.ctypes.data_as(int32s)
        batch.n_seq_id = self._counts.ctypes.data_as(int32s)
        batch.seq_id = self._slot_pointers.ctypes.data_as(ctypes.POINTER(int32s))
        batch.logits = self._wants.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        self._batch = batch

    def _check_cuts(self, model: LlamaModel) -> None:
        """Some kinds of model cannot forget their last tokens; speculation needs exactly that."""
        self.forward([Row(0, 0, position, wants_logits=False) for position in range(2)])
        if not self._forget(0, 1):
            raise ModelLoadError(
                f"{model.path}: this kind of model cannot take tokens back, so drafts cannot be verified with it."
            )
        self.cut(0, 0)

    def held(self, slot: int) -> int:
        """How many tokens a slot holds."""
        return self._lengths[slot]

    def reach(self, slots: Iterable[int]) -> int:
        """How many tokens a row walks over; what slots share counts for each."""
        return max((self._lengths[slot] for slot in slots), default=0) if self.separate else sum(self._lengths)

    def forward(self, rows: list[Row]) -> FloatArray:
        """Run the model over `rows`; see `Engine.forward`."""
        count = len(rows)
        if not 0 < count <= self.max_rows:
            raise EngineError(f"A forward pass takes 1 to {self.max_rows} rows, not {count}.")
        tokens, slots, positions, wants = zip(*rows, strict=True)
        wanted = sum(wants)
        if wanted > self.max_logits:
            raise EngineError(f"A forward pass gives at most {self.max_logits} rows of logits, not {wanted}.")
        lengths = self._lengths.copy()
        for slot, position in zip(slots, positions, strict=True):
            if position != lengths[slot]:
                raise EngineError(f"Slot {slot} holds {lengths[slot]} tokens; position {position} does not follow.")
            lengths[slot] += 1
        self._tokens[:count] = tokens
        self._slots[:count] = slots
        self._positions[:count] = positions
        self._wants[:count] = wants
        self._batch.n_tokens = count
        code = llama_cpp.llama_decode(self._context, self._batch)
        if code != 0:
            for slot in set(slots):
                self._forget(slot, self._lengths[slot])
            raise EngineError(f"llama_decode failed with code {code} on {count} rows.")
        self._lengths = lengths
        if not wanted:
            return np.empty((0, self.width), np.float32)
        logits = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, shape=(wanted, self.width))

    def cut(self, slot: int, length: int) -> None:
        """Keep the first `length` tokens of a slot's cache."""
        if length < self._lengths[slot]:
            self._forget(slot, length)
            self._lengths[slot] = length

    def copy(self, source: int, destination: int, length: int) -> None:
        """Make a slot hold the first `length` tokens of another one's; in a common cache both share their place."""
        if length > self._lengths[source]:
            raise EngineError(f"Slot {source} holds {self._lengths[source]} tokens; {length} cannot be copied.")
        self.cut(destination, 0)
        # Separate caches are copied as a whole or not at all.
        end = -1 if self.separate else length
        llama_cpp.llama_memory_seq_cp(self._memory, source, destination, 0, end)
        self._lengths[destination] = self._lengths[source] if self.separate else length
        self.cut(destination, length)

    def _forget(self, slot: int, length: int) -> bool:
        """Take the tokens from `length` on out of the cache; False where this kind of cache cannot."""
        return bool(llama_cpp.llama_memory_seq_rm(self._memory, slot, length, -1))

    def close(self) -> None:
        """Give the cache back."""
        llama_cpp.llama_free(self._context)


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
