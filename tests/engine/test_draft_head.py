"""The draft model's output head computes frequent and recently read tokens; the logits of the others are -inf."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tiny_models
from kernel_products import needs_kernels
from pairs import open_engine
from specserve.engine import draft_head, kernels
from specserve.engine.base import FloatArray, Row
from specserve.engine.draft_head import GROUP, DraftHead
from specserve.engine.llama_model import LlamaModel
from tiny_formats import tiny_model
from tiny_models import write_tiny

SIZE = 100 * GROUP
FREQUENT = 3 * GROUP


@pytest.fixture(autouse=True)
def small_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_head, "_FREQUENT", FREQUENT)
    monkeypatch.setattr(draft_head, "_RECENT", 8)


def test_frequent_end_and_recently_read_tokens_are_computed_in_groups() -> None:
    head = DraftHead(SIZE + 1, always=[50 * GROUP + 1])
    reads = [([0], []), ([70 * GROUP, 3], [70]), ([90 * GROUP + 5], [70, 90]), ([1] * 6, [70, 90]), ([1], [90])]
    for read, recent in reads:
        assert list(head.groups(read)) == [0, 1, 2, 50, *recent]
    # The last group is partial.
    assert list(head.groups([SIZE])) == [0, 1, 2, 50, 100]


def logits(path: Path, head: DraftHead | None) -> FloatArray:
    """The logits after each of three tokens, shape (3, vocabulary)."""
    engine = open_engine(path, n_slots=1, threads=2, head=head)
    return engine.forward([Row(token, 0, position, True) for position, token in enumerate((40, 41, 42))]).copy()


@needs_kernels
@pytest.mark.usefixtures("variant")
def test_computed_logits_have_the_same_bits_and_the_others_are_minus_infinity(tiny: Path) -> None:
    full = logits(tiny, None)
    size = full.shape[1]
    assert size % GROUP, "the vocabulary has to end within a group"
    reduced = logits(tiny, DraftHead(size, always=[size - 1]))
    computed = np.zeros(size, bool)
    computed[:FREQUENT] = computed[size - size % GROUP :] = True
    assert np.array_equal(reduced[:, computed], full[:, computed])
    assert np.isneginf(reduced[:, ~computed]).all()
    assert np.array_equal(logits(tiny, None), full), "other engines compute the full head"


@needs_kernels
@pytest.mark.usefixtures("variant")
def test_a_head_that_cannot_be_reduced_is_computed_in_full(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By llama.cpp's kernels, unquantised, or with a bias, so that the sum and not the product is `result_output`."""
    weights = tiny_models._weights

    def with_bias(*arguments: Any) -> dict[str, NDArray[np.float32]]:
        tensors = weights(*arguments)
        return {**tensors, "output.bias": np.zeros(len(tensors["output.weight"]), np.float32)}

    monkeypatch.setattr(tiny_models, "_weights", with_bias)
    biased, single = tiny_model(tmp_path, "q4_0"), tmp_path / "single.gguf"
    monkeypatch.undo()
    write_tiny(single, "qwen2", "target")
    head = DraftHead(LlamaModel(tiny).size, always=[])
    for path in (biased, single):
        assert np.isfinite(logits(path, head)).all()
    kernels.use("off")
    assert np.isfinite(logits(tiny, head)).all()
