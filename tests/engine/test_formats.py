"""Models in every weight format, and mixtures of experts: exact, and near llama.cpp's own kernels."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batch_invariance import largest_difference
from kernel_products import FORMATS, SUPPORTED_VARIANTS, needs_kernels
from pairs import open_engine
from specserve.engine import kernels
from specserve.engine.base import FloatArray
from specserve.engine.llama_model import LlamaModel
from test_kernels import logits
from tiny_formats import tiny_model
from tiny_models import ARCHITECTURES

pytestmark = needs_kernels

SIZES = {"WIDTH": 256, "FEED_FORWARD": 256}
EXPERTS = {"EXPERTS": 4, **SIZES}
# Formats of whole files; those that have no kernel are computed by llama.cpp's dot products.
WITHOUT_KERNEL = ("IQ3_S",)
CASES: list[tuple[str, str, dict[str, Any]]] = [("qwen2", form, SIZES) for form in (*FORMATS, *WITHOUT_KERNEL)]
CASES += [("llama", form, EXPERTS) for form in (*FORMATS, *WITHOUT_KERNEL)]
CASES += product(ARCHITECTURES, ("Q4_0", "Q8_0"), [{}])


@pytest.mark.parametrize(("architecture", "form", "sizes"), CASES)
def test_logits_have_the_same_bits_in_any_pass_and_are_near_llama_cpps_whose_have_not(
    architecture: str, form: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """With llama.cpp's attention a single row differs above 256 tokens in the cache, for several threads."""
    path = tiny_model(tmp_path, form.lower(), architecture, **sizes)

    def logits_of(mode: kernels.Mode) -> FloatArray:
        kernels.use(mode, variant=SUPPORTED_VARIANTS[0])
        before, model = kernels.growth(), LlamaModel(path)
        engine = open_engine(model, n_slots=2, context_length=512, threads=2, max_rows=128, max_logits=64)
        found = logits(engine)
        assert (largest_difference(engine) == 0) == (mode == "auto")
        if mode == "auto":
            grows = form in ("Q5_0", "Q3_K", "Q4_1", "Q5_1")
            assert (kernels.growth() - before > 0.3 * path.stat().st_size) == grows
            assert engine.left_to_llama_cpp == ((), (form,) if form in WITHOUT_KERNEL else ())
        engine.close()
        model.close()
        assert kernels.growth() == before
        return found

    ours, theirs = logits_of("auto"), logits_of("off")
    assert 0 < np.abs(ours - theirs).max() < 0.05 * np.abs(theirs).max()
