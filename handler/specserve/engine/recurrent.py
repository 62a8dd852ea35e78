"""A llama.cpp context of a model with recurrent layers, alone (Mamba 2) or beside attention (Qwen3.5, LFM2)."""

from typing import Any

import numpy as np

from specserve.engine.base import FloatArray, Row
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel


class RecurrentEngine(LlamaEngine):
    """An `Engine` whose slots grow or are emptied: of a recurrent layer llama.cpp keeps the last state only.

    llama.cpp divides a batch of several sequences in its own way, which specserve's attention does not follow
    (handler/kernels/cache.h), so each slot of a pass is computed alone.
    """

    truncates = False

    def __init__(self, model: LlamaModel, **options: Any) -> None:
        super().__init__(model, **options)
        self.token_bytes = None

    def forward(self, rows: list[Row]) -> FloatArray:
        self._check(rows)
        logits = {}
        for slot in dict.fromkeys(row.slot for row in rows):
            logits[slot] = iter(super().forward([row for row in rows if row.slot == slot]).copy())
        wanted = [next(logits[row.slot]) for row in rows if row.wants_logits]
        return np.array(wanted, np.float32).reshape(-1, self.width)

    def truncate(self, slot: int, length: int) -> None:
        if length < self.cached_len(slot):
            self._remove_from(slot, 0)
