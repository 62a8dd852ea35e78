"""A fake engine as a measurement of its passes needs it: what fills its cache may come from anywhere."""

import numpy as np
from numpy.typing import NDArray

from fake_engine import FakeEngine
from specserve.engine.base import FloatArray, Row
from specserve.errors import EngineError


class MeasuredEngine(FakeEngine):
    """A fake engine that counts its passes, and loads saved tokens at any position: their keys are not used."""

    def __init__(self, n_slots: int = 1) -> None:
        super().__init__(vocabulary=50, n_slots=n_slots)
        self.passes = 0

    def forward(self, rows: list[Row]) -> FloatArray:
        self.passes += 1
        return super().forward(rows)

    def logits(self, context: list[int]) -> FloatArray:
        return super().logits(context[:1])

    def load(self, slot: int, saved: NDArray[np.uint8]) -> None:
        if saved.shape[1:] != (self.token_bytes,):
            raise EngineError("These keys and values are not of this engine.")
        if len(self.cache[slot]) + len(saved) > self.slot_length:
            raise EngineError(f"Slot {slot} has no room for {len(saved)} more tokens.")
        self.cache[slot] += [0] * len(saved)
