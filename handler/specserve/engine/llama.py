"""A llama.cpp context: forward passes, and the KV cache that all sequences of a model share."""

import ctypes
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import llama_cpp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from specserve.config import CacheType
from specserve.engine import kernels
from specserve.engine.attention_cache import AttentionCache
from specserve.engine.base import FloatArray, Row
from specserve.engine.draft_head import DraftHead
from specserve.engine.llama_model import NO_GENERATOR, LlamaModel, trying
from specserve.engine.thread_pool import ThreadPool
from specserve.errors import EngineError, ModelLoadError

_TYPES: dict[CacheType, int] = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}
# Tokens of the passes that try a model.
_TRIED = 4


class LlamaEngine:
    """An `Engine`: a llama.cpp context whose `n_slots` sequences share one unified KV cache.

    With specserve's attention kernel (engine/kernels.py) a row reads the cells of its own sequence only, and its result
    depends neither on where in the cache they are nor on other rows. llama.cpp's kernel, which also computes what ours
    cannot, reads the cells of all sequences, and sums in their order. `left_to_llama_cpp` tells which one computes.

    Raises:
        ModelLoadError: there is no memory for the context, or its passes are of no use.
    """

    rollback: int | None = None

    def __init__(
        self,
        model: LlamaModel,
        *,
        n_slots: int,
        context_length: int,
        threads: int,  # anywhere; a pool binds them to cores, and says how many they are
        max_rows: int,
        max_logits: int,
        n_cells: int | None = None,  # None for all that the slots can hold
        head: DraftHead | None = None,  # the logits that specserve's kernels compute; others are -inf
        max_alternatives: int = 0,
        pool: ThreadPool | None = None,
        states: int = 0,  # of recurrent layers, that are kept beside the last one of each slot
        cache_type: CacheType = "f16",  # of keys and values; specserve's attention keeps 16-bit integers for `f16`
    ) -> None:
        self.n_slots = n_slots
        self.n_cells = n_slots * context_length if n_cells is None else n_cells
        self.max_alternatives = max_alternatives
        self.max_rows = max_rows
        self.max_logits = max_logits
        self.slot_length = min(context_length, model.trained_context)
        self.width = model.size
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = self.n_cells + max_alternatives
        # An alternative is the end of a sequence of llama.cpp's own, which shares the cells of what precedes it. And
        # llama.cpp reuses a cell that has left the sliding window of its only sequence, although a truncated or copied
        # slot needs it again. So with a window each slot has a second sequence, which holds the same cells.
        self._slots = n_slots + max_alternatives
        params.n_seq_max = self._n_sequences = self._slots + (n_slots if model.window else 0)
        params.swa_full = True  # a cell for each token also in layers with a window
        params.n_batch = params.n_ubatch = max_rows
        params.n_outputs_max = max(max_logits, self._n_sequences)  # llama.cpp aborts with fewer
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        params.n_rs_seq = states
        params.type_k = params.type_v = _TYPES[cache_type]
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.no_perf = True
        with trying(model.path):
            context = llama_cpp.llama_init_from_model(model.pointer, params)
        if context is None:
            or_type = "" if cache_type == "f16" else f", or it cannot be in {cache_type}: use `cache_type: f16`"
            raise ModelLoadError(
                f"{model.path}: no memory for a KV cache of {self.n_cells} tokens: lower `cache_tokens` or `sequences`"
                f"{or_type}."
            )
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        # By slot, its alternatives of the last pass: llama.cpp's sequence, the position, and the row.
        self._alternatives: dict[int, list[tuple[int, int, int]]] = {}
        self._make_batch(max_rows)
        self._attention = AttentionCache() if kernels.in_use().variant else None
        self._head = head if self._attention else None
        # By slot and position, where in llama.cpp's cache a token lies, if our attention knows.
        self._cells = np.zeros((n_slots, self.slot_length), np.int32)
        self._pool = pool
        if pool:
            pool.add(context)
        try:
            with trying(model.path):
                # What specserve's kernels do not compute of a pass.
                self.left_to_llama_cpp = kernels.left_to_llama_cpp(lambda: self._check_first_passes(model))
        except EngineError as error:
            self.close()
            raise ModelLoadError(f"{model.path}: its first forward pass failed: {error}") from error
        except ModelLoadError:
            self.close()
            raise
        self.token_bytes: int | None = None
        # Where llama.cpp attends in some layers, it keeps keys and values of its own.
        if self._attention and "attention" not in self.left_to_llama_cpp.parts:
            self.token_bytes = self._attention.cell_bytes or None

    def _make_batch(self, rows: int) -> None:
        """Build a llama_batch over NumPy arrays, which are faster to fill than ctypes arrays."""
        self._tokens = np.zeros(rows, np.int32)
        self._positions = np.zeros(rows, np.int32)
        self._counts = np.ones(rows, np.int32)
        # A line for each row: its slot's sequences, and those of the alternatives that attend to it.
        self._sequences = np.zeros((rows, len(self._of(0)) + self.max_alternatives), np.int32)
        self._wants = np.zeros(rows, np.int8)
        first, line = self._sequences.ctypes.data, self._sequences.strides[0]
        self._sequence_pointers = np.arange(rows, dtype=np.uintp) * np.uintp(line) + np.uintp(first)
        batch = llama_cpp.llama_batch()
        int32s = ctypes.POINTER(ctypes.c_int32)
        batch.token = self._tokens.ctypes.data_as(int32s)
        batch.pos = self._positions.ctypes.data_as(int32s)
        batch.n_seq_id = self._counts.ctypes.data_as(int32s)
        batch.seq_id = self._sequence_pointers.ctypes.data_as(ctypes.POINTER(int32s))
        batch.logits = self._wants.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        self._batch = batch

    def _check_first_passes(self, model: LlamaModel) -> bool:
        """Return whether a token's logits have the same bits beside others as alone.

        Raises:
            ModelLoadError: they are none, or another token's, or the cache cannot be truncated although it should be.
        """
        if not self._memory:
            raise ModelLoadError(f"{model.path}: {NO_GENERATOR}")
        # A reduced head keeps the columns of what it has read: of a frequent token it has them anyway.
        step = 0 if self._head else model.size // (_TRIED + 1)
        tokens = [step * number for number in range(1, _TRIED + 1)]
        rows = [Row(token, 0, position, position == _TRIED - 1) for position, token in enumerate(tokens)]
        together = self.forward(rows).copy()
        if self.rollback is None and not self._remove_from(0, 1):
            raise ModelLoadError(
                f"{model.path}: the KV cache of this kind of model cannot be truncated, which speculation needs."
            )
        self.truncate(0, 0)
        if self._head:
            return True
        alone = np.concatenate([self.forward([row._replace(wants_logits=True)]).copy() for row in rows])
        self.truncate(0, 0)
        if not np.isfinite(alone).all() or (np.ptp(alone, axis=1) == 0).any():
            raise ModelLoadError(
                f"{model.path}: its logits are all equal, or no numbers: its weights are damaged, or it does not write "
                "text; fetch it again, or choose another one."
            )
        if np.argmin(np.abs(alone - together).sum(axis=1)) != _TRIED - 1:
            raise ModelLoadError(
                f"{model.path}: llama.cpp mixes up the tokens of a pass of this kind of model; choose another one."
            )
        return np.array_equal(alone[-1:], together)

    def cached_len(self, slot: int) -> int:
        return int(llama_cpp.llama_memory_seq_pos_max(self._memory, slot)) + 1

    def kv_len(self, slots: Iterable[int]) -> int:
        if "attention" not in self.left_to_llama_cpp.parts:
            return max(map(self.cached_len, slots), default=0)
        # Tokens that slots share count for each.
        return sum(map(self.cached_len, range(self.n_slots)))

    def forward(self, rows: list[Row]) -> FloatArray:
        lengths = self._check(rows)
        tokens, slots, positions, wants, alternative = zip(*rows, strict=True)
        for slot in list(self._alternatives):
            self._drop_alternatives(slot)
        self._fill(len(rows), tokens, slots, positions, wants)
        if any(alternative):
            self._add_alternatives(rows, lengths)
        self._decode(lengths, head=self._head.groups(tokens) if self._head else None)
        if self._attention and (cells := self._attention.cells()).size:
            own = ~np.array(alternative)
            self._cells[np.array(slots)[own], np.array(positions)[own]] = cells[own]
        if not any(wants):
            return np.empty((0, self.width), np.float32)
        logits = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, shape=(sum(wants), self.width))

    def _of(self, sequence: int) -> range:
        """llama.cpp's sequences that hold what a slot holds; an alternative's is only itself."""
        return range(sequence, self._n_sequences, self._slots)

    def _fill(self, count: int, tokens: ArrayLike, slots: ArrayLike, positions: ArrayLike, wants: ArrayLike) -> None:
        self._tokens[:count] = tokens
        own = len(self._of(0))
        self._sequences[:count, :own] = np.add.outer(slots, self._of(0))
        self._counts[:count] = own
        self._positions[:count] = positions
        self._wants[:count] = wants
        self._batch.n_tokens = count

    def _decode(
        self,
        lengths: dict[int, int],
        *,
        saved: NDArray[np.uint8] | None = None,
        head: NDArray[np.int32] | None = None,
    ) -> None:
        """Compute the batch, or load it if it was saved; slots keep these lengths if that fails."""
        count = self._batch.n_tokens
        computing: AbstractContextManager[None] = nullcontext()
        if self._attention:
            computing = self._attention.computing(self._positions[:count], saved=saved, head=head)
        with computing, self._pool.computing() if self._pool else nullcontext():
            code = llama_cpp.llama_decode(self._context, self._batch)
        if code != 0:
            for slot, length in lengths.items():
                self._drop_alternatives(slot)
                self._remove_from(slot, length)
            raise EngineError(f"llama_decode failed with code {code} on {count} rows.")

    def save(self, slot: int, start: int, end: int) -> NDArray[np.uint8]:
        if self._attention is None or not self.token_bytes or end > self.cached_len(slot):
            raise EngineError(f"Slot {slot} has no keys and values of tokens {start} to {end} that could be saved.")
        return self._attention.save(self._cells[slot, start:end])

    def load(self, slot: int, saved: NDArray[np.uint8]) -> None:
        length = end = self.cached_len(slot)
        if not self._attention or saved.shape[1:] != (self.token_bytes,):
            raise EngineError("These keys and values are not of this model's cache.")
        self._drop_alternatives(slot)
        for first in range(0, len(saved), self.max_rows):
            part = np.ascontiguousarray(saved[first : first + self.max_rows])
            start, end = end, end + len(part)
            self._fill(len(part), tokens=0, slots=slot, positions=np.arange(start, end), wants=0)
            self._decode({slot: length}, saved=part)
            self._cells[slot, start:end] = self._attention.cells()

    def _check(self, rows: list[Row]) -> dict[int, int]:
        """The cached length of every slot of these rows; an EngineError where such a pass is not possible."""
        wanted, alternatives = sum(row.wants_logits for row in rows), sum(row.alternative for row in rows)
        if not 0 < len(rows) <= self.max_rows:
            raise EngineError(f"A forward pass takes 1 to {self.max_rows} rows, not {len(rows)}.")
        if wanted > self.max_logits:
            raise EngineError(f"A forward pass gives at most {self.max_logits} rows of logits, not {wanted}.")
        if alternatives > self.max_alternatives:
            raise EngineError(f"A forward pass takes at most {self.max_alternatives} alternatives, not {alternatives}.")
        before = {slot: self.cached_len(slot) for slot in {row.slot for row in rows}}
        lengths = before.copy()
        for _, slot, position, _, alternative in rows:
            if alternative and before[slot] <= position < lengths[slot]:
                continue
            if alternative or position != lengths[slot]:
                raise EngineError(f"Slot {slot} holds {lengths[slot]} tokens; position {position} does not follow.")
            lengths[slot] += 1
        return before

    def truncate(self, slot: int, length: int) -> None:
        self._drop_alternatives(slot)
        if length < self.cached_len(slot):
            self._remove_from(slot, length)

    def adopt(self, slot: int, number: int) -> None:
        sequence, position, row = self._alternatives[slot][number]
        self._remove_from(slot, position)
        if self._attention and self.token_bytes:
            self._cells[slot, position] = self._attention.cells()[row]
        self._share(sequence, slot, position, position + 1)
        self._drop_alternatives(slot)

    def _add_alternatives(self, rows: list[Row], lengths: dict[int, int]) -> None:
        """Give each alternative a sequence of llama.cpp's, which what precedes it in its slot belongs to as well."""
        alternatives = [(index, row) for index, row in enumerate(rows) if row.alternative]
        for sequence, (index, row) in enumerate(alternatives, self.n_slots):
            self._share(row.slot, sequence, 0, lengths[row.slot])
            for before, other in enumerate(rows):
                if other.slot == row.slot and other.position < row.position and not other.alternative:
                    self._sequences[before, self._counts[before]] = sequence
                    self._counts[before] += 1
            self._sequences[index, 0], self._counts[index] = sequence, 1
            self._alternatives.setdefault(row.slot, []).append((sequence, row.position, index))

    def _drop_alternatives(self, slot: int) -> None:
        for sequence, *_ in self._alternatives.pop(slot, ()):
            self._remove_from(sequence, 0)

    def copy(self, source: int, destination: int, length: int) -> None:
        if length > self.cached_len(source):
            raise EngineError(f"Slot {source} holds {self.cached_len(source)} tokens; {length} cannot be copied.")
        self.truncate(destination, 0)
        self._share(source, destination, 0, length)
        self._cells[destination, :length] = self._cells[source, :length]

    def _share(self, source: int, destination: int, start: int, end: int) -> None:
        """Let a slot or an alternative hold the cells of another one's tokens as well."""
        for sequence in self._of(destination):
            llama_cpp.llama_memory_seq_cp(self._memory, source, sequence, start, end)

    def _remove_from(self, slot: int, length: int) -> bool:
        """Remove a slot's tokens from `length` on; False if this kind of cache does not support it."""
        return all(llama_cpp.llama_memory_seq_rm(self._memory, own, length, -1) for own in self._of(slot))

    def close(self) -> None:
        if self._pool:
            self._pool.remove(self._context)
        llama_cpp.llama_free(self._context)
        if self._attention:
            self._attention.close()
