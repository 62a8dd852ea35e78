"""A llama.cpp context of a model with recurrent layers, alone (Mamba 2) or beside attention (Qwen3.5, LFM2)."""

from functools import cache
from typing import Any

import llama_cpp
import numpy as np

from specserve.engine.base import FloatArray, Row
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel

# The most tokens that a slot can go back, and the most memory in bytes that earlier states of all slots may take.
# Assumptions, which no command prints.
_ROLLBACK, _STATES = 7, 2**30


class RecurrentEngine(LlamaEngine):
    """An `Engine` whose slots grow, go back within their last pass, or are emptied.

    Of a recurrent layer llama.cpp keeps the states after the last tokens of a pass, for some architectures, or the very
    last one. It divides a batch of several sequences in its own way, which specserve's attention does not follow
    (handler/kernels/cache.h), so each slot of a pass is computed alone.
    """

    rollback = 0

    def __init__(self, model: LlamaModel, *, n_slots: int, **options: Any) -> None:
        # By slot, how many tokens it can go back; and whether it did, which llama.cpp notes for the next pass only.
        self._removable = [0] * n_slots
        self._went_back = [False] * n_slots
        super().__init__(model, n_slots=n_slots, **options)
        self.rollback = int(llama_cpp.llama_n_rs_seq(self._context))
        self.token_bytes = None

    def forward(self, rows: list[Row]) -> FloatArray:
        self._check(rows)
        logits = {}
        for slot in dict.fromkeys(row.slot for row in rows):
            own = [row for row in rows if row.slot == slot]
            logits[slot] = iter(super().forward(own).copy())
            # The state before a pass is not kept.
            self._removable[slot], self._went_back[slot] = min(self.rollback, len(own) - 1), False
        wanted = [next(logits[row.slot]) for row in rows if row.wants_logits]
        return np.array(wanted, np.float32).reshape(-1, self.width)

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

    def state_bytes(self, slot: int) -> int:
        """The size of the last state of a slot that is not empty."""
        only_states = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        return int(llama_cpp.llama_state_seq_get_size_ext(self._context, slot, only_states))


def earlier_states(model: LlamaModel, n_slots: int) -> int:
    """How many states are kept of each slot beside the last one."""
    size, goes_back = _state(model) if model.recurrent else (0, False)
    return min(_ROLLBACK, _STATES // (n_slots * size)) if goes_back else 0


def all_states_bytes(model: LlamaModel, n_slots: int) -> int:
    """The size of all states that are kept."""
    return n_slots * (1 + earlier_states(model, n_slots)) * _state(model)[0] if model.recurrent else 0


@cache
def _state(model: LlamaModel) -> tuple[int, bool]:
    """The size of a state, in bytes, and whether its architecture can go back: what no metadata tells."""
    engine = RecurrentEngine(model, n_slots=1, context_length=64, threads=1, max_rows=64, max_logits=1, states=1)
    engine.forward([Row(0, 0, 0, wants_logits=False)])
    size = engine.state_bytes(0)
    engine.close()
    return size, engine.rollback > 0
