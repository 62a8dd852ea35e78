"""Where logits are batch-invariant (test_formats.py), outputs repeat; the measurement finds planted faults."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batch_invariance import largest_difference
from fake_engine import FakeEngine
from kernel_products import needs_kernels
from specserve.config import HandlerConfig, ModelConfig
from specserve.core.loading import load_models
from specserve.engine import kernel_trial, kernels
from specserve.engine.base import FloatArray, Row
from tiny_formats import tiny_model

NOISE = 0.25

Fault = Callable[[list[Row], Row], bool]


class FaultyEngine(FakeEngine):
    """An engine that adds `NOISE` to the logits of each row for which `fault` is true."""

    def __init__(self, fault: Fault, *, n_slots: int = 2) -> None:
        super().__init__(vocabulary=24, n_slots=n_slots)
        self._fault = fault

    def forward(self, rows: list[Row]) -> FloatArray:
        wrong = [self._fault(rows, row) for row in rows if row.wants_logits]
        return super().forward(rows) + NOISE * np.array(wrong, np.float32)[:, None]


ALONE: dict[str, Fault] = {
    "a kernel for four rows": lambda rows, _row: len(rows) == 4,
    "llama.cpp's products with weights that it has not repacked": lambda rows, _row: len(rows) == 8,
    "llama.cpp's attention": lambda rows, row: len(rows) == 1 and row.position > 264,
}
BESIDE_OTHERS: dict[str, Fault] = {
    "neighbours before": lambda rows, row: rows[0].slot != row.slot,
    "neighbours after": lambda rows, row: rows[-1].slot != row.slot,
}


def test_a_planted_fault_is_found() -> None:
    for n_slots in (1, 2):
        engine = FaultyEngine(lambda *_: False, n_slots=n_slots)
        assert largest_difference(engine) == 0
        assert not any(engine.cache)
    for name, fault in ALONE.items():
        assert largest_difference(FaultyEngine(fault, n_slots=1)) == pytest.approx(NOISE), name
    for name, fault in BESIDE_OTHERS.items():
        assert largest_difference(FaultyEngine(fault, n_slots=1)) == 0
        assert largest_difference(FaultyEngine(fault)) == pytest.approx(NOISE), name
    engine.poison_after = 20
    assert np.isnan(largest_difference(engine))


@needs_kernels
def test_a_server_promises_that_outputs_repeat_where_specserves_kernels_compute_the_whole_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """IQ3_S, in rows of 256 weights, has no kernel of specserve's, and is exact all the same; so are experts."""
    # Whether the kernels are faster than llama.cpp's depends on what else the machine does.
    monkeypatch.setattr(kernel_trial, "run", dict)
    exact = "exact: true: a row has the same bits in any pass: {} repeat exactly"
    modes: list[tuple[str, kernels.Mode, int, str]] = [
        ("q4_0", "auto", 0, exact),
        ("q4_k", "auto", 4, exact),
        ("iq3_s", "auto", 0, exact),
        ("iq3_s", "auto", 4, exact),
        ("q4_0", "off", 0, "exact: false: llama.cpp's kernels compute matrix products and attention: {} may differ"),
    ]
    for form, mode, experts, sentence in modes:
        caplog.clear()
        architecture = "llama" if experts else "qwen2"
        path = tiny_model(tmp_path, form, architecture, WIDTH=256, FEED_FORWARD=512, EXPERTS=experts)
        target = ModelConfig(path=path)
        sizes: dict[str, Any] = {"sequences": 3, "context_length": 512, "threads": 1}
        with caplog.at_level("INFO"):
            models = load_models(HandlerConfig(model_id="tiny", kernels=mode, target=target, **sizes))
        assert models.left.sentence.startswith(sentence.format("greedy and seeded outputs"))
        [record] = [record for record in caplog.records if models.left.sentence in record.getMessage()]
        assert (record.levelname == "WARNING") == (mode == "off")
        left = f"{form}.gguf: llama.cpp's own kernels compute products of IQ3_S weights of this model"
        assert (left in caplog.text) == (form == "iq3_s")
        assert caplog.text.count("llama.cpp's own kernels compute") == (form == "iq3_s" or mode == "off")
