"""A llama.cpp context of a model with recurrent layers, alone (Mamba 2) or beside attention (Qwen3.5, LFM2)."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import llama_cpp
import numpy as np

from specserve.engine.base import FloatArray, Row
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel, trying
from specserve.errors import ModelLoadError

# The most tokens that a slot can go back, and the most memory in bytes that earlier states of all slots may take.
# Assumptions, which no command prints.
_ROLLBACK, _STATES = 7, 2**30
# What is saved of a sequence: its last state, without its keys and values.
_STATE = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


class RecurrentEngine(LlamaEngine):
    """An `Engine` whose slots grow, go back within their last pass, or are emptied.

    Of a recurrent layer llama.cpp keeps the states after the last tokens of a pass, for some architectures, or the very
    last one. It divides a batch into parts with the same number of rows of each sequence, which specserve's attention
    does not follow (handler/kernels/cache.h), so slots with one row are computed together, others one by one.
    """

    rollback = 0
    _shares_passes = False

    def __init__(self, model: LlamaModel, *, n_slots: int, **options: Any) -> None:
        # By slot, how many tokens it can go back; and whether it did, which llama.cpp notes for the next pass only.
        self._removable = [0] * n_slots
        self._went_back = [False] * n_slots
        super().__init__(model, n_slots=n_slots, **options)
        self.rollback = int(llama_cpp.llama_n_rs_seq(self._context))
        self.token_bytes = None
        self._shares_passes = n_slots > 1 and self._can_share()

    def forward(self, rows: list[Row]) -> FloatArray:
        self._check(rows)
        of_slot: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            of_slot.setdefault(row.slot, []).append(index)
        logits: dict[int, FloatArray] = {}
        for slots in self._passes({slot: len(own) for slot, own in sorted(of_slot.items())}):
            # llama.cpp orders them by sequence.
            ordered = [index for slot in slots for index in of_slot[slot]]
            found = super().forward([rows[index] for index in ordered]).copy()
            logits |= zip((index for index in ordered if rows[index].wants_logits), found, strict=True)
            if len(slots) > 1:
                self._removable = [0] * self.n_slots  # see `_passes`
            for slot in slots:
                # The state before a pass is not kept.
                self._removable[slot], self._went_back[slot] = min(self.rollback, len(of_slot[slot]) - 1), False
        return np.array([logits[index] for index in sorted(logits)], np.float32).reshape(-1, self.width)

    def _passes(self, counts: dict[int, int]) -> list[list[int]]:
        """The slots of each pass, in order; `counts` is their numbers of rows.

        llama.cpp puts the states of a pass's slots side by side. Of a slot that is in the way it moves the last state
        and loses the earlier ones. So the pass that slots share comes first.
        """
        shared = [slot for slot, count in counts.items() if count == 1 and self._shares_passes]
        return [*([shared] if shared else []), *([slot] for slot in counts if slot not in shared)]

    def _can_share(self) -> bool:
        """Whether slots that share passes have the bits of each alone; of several rows PLaMo 2 mixes up the slots."""

        def logits(forward: Callable[[list[Row]], FloatArray]) -> FloatArray:
            found = []
            for positions in (range(2), range(2, 3)):
                places = [(slot, position) for slot in range(2) for position in positions]
                rows = [Row(1 + slot + position, slot, position, wants_logits=True) for slot, position in places]
                found.append(forward(rows).copy())
            for slot in range(2):
                self.truncate(slot, 0)
            return np.concatenate(found)

        return np.array_equal(logits(super().forward), logits(self.forward))

    def truncate(self, slot: int, length: int) -> None:
        back = self.cached_len(slot) - length
        if back <= 0:
            return
        self._went_back[slot] = back <= self._removable[slot] and self._remove_from(slot, length)
        if not self._went_back[slot]:
            self._remove_from(slot, 0)

    def copy(self, source: int, destination: int, length: int) -> None:
        if self._went_back[source]:
            self.truncate(destination, 0)
            return
        super().copy(source, destination, length)
        # They share a state now.
        self._removable[source] = self._removable[destination] = 0


class _Sizes(NamedTuple):
    state: int  # in bytes
    cell: int  # numbers that a token takes in the KV cache
    goes_back: bool


def earlier_states(model: LlamaModel, n_slots: int) -> int:
    """How many states are kept of each slot beside the last one."""
    if not model.recurrent or not _sizes(model).goes_back:
        return 0
    return min(_ROLLBACK, _STATES // (n_slots * _sizes(model).state))


def all_states_bytes(model: LlamaModel, n_slots: int) -> int:
    """The size of all states that are kept."""
    return n_slots * (1 + earlier_states(model, n_slots)) * _sizes(model).state if model.recurrent else 0


def cell_values(model: LlamaModel) -> int:
    """How many numbers a token takes in the KV cache, in the layers that attend."""
    return _sizes(model).cell if model.recurrent else model.cell_values


@cache
def _sizes(model: LlamaModel) -> _Sizes:
    """What metadata do not tell of all architectures: which layers are recurrent, llama.cpp may know alone."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 64
    params.n_rs_seq = params.n_threads = params.n_threads_batch = 1
    token, sizes = (llama_cpp.llama_token * 1)(), []
    with trying(model.path):
        context = llama_cpp.llama_init_from_model(model.pointer, params)
        try:
            for _ in range(2):
                if context is None or llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(token, 1)) != 0:
                    raise ModelLoadError(f"{model.path}: its first forward pass failed.")
                sizes.append([int(llama_cpp.llama_state_seq_get_size_ext(context, 0, flags)) for flags in (_STATE, 0)])
            goes_back = llama_cpp.llama_n_rs_seq(context) > 0
        finally:
            llama_cpp.llama_free(context)
    (state, before), (_, after) = sizes
    # Of two bytes each; Mamba 2 has none.
    return _Sizes(state, max(1, (after - before) // 2), goes_back)
