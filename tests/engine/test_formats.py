"""Models in every weight format, and mixtures of experts: exact, and near llama.cpp's own kernels."""

from pathlib import Path

import numpy as np
import pytest

from batch_invariance import largest_difference
from kernel_products import FORMATS, SUPPORTED_VARIANTS, needs_kernels
from pairs import PLAIN, Pair, TinyFiles, fixed_gamma, open_engine
from specserve.config import ModelConfig
from specserve.engine import kernels
from specserve.engine.base import FloatArray
from specserve.engine.llama_model import LlamaModel
from test_kernels import logits
from tiny_formats import tiny_model

pytestmark = needs_kernels

SIZES = {"WIDTH": 256, "FEED_FORWARD": 256}
EXPERTS = {"EXPERTS": 4, **SIZES}
# Formats of whole files; those that have no kernel are computed by llama.cpp's dot products.
WITHOUT_KERNEL = ("IQ3_S",)
CASES = [("qwen2", form, SIZES) for form in (*FORMATS, *WITHOUT_KERNEL)]
CASES += [("llama", form, EXPERTS) for form in (*FORMATS, *WITHOUT_KERNEL)]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str, bool]:
    """A target, its format, and whether it is a mixture of experts."""
    architecture, form, sizes = request.param
    return tiny_model(tmp_path, form.lower(), architecture, **sizes), form, sizes is EXPERTS


def test_logits_have_the_same_bits_in_any_pass_and_are_near_llama_cpps(case: tuple[Path, str, bool]) -> None:
    path, form, _ = case

    def logits_of(mode: kernels.Mode) -> FloatArray:
        kernels.use(mode, variant=SUPPORTED_VARIANTS[0])
        before, model = kernels.growth(), LlamaModel(path)
        engine = open_engine(model, n_slots=2, context_length=512, threads=2, max_rows=128, max_logits=64)
        found = logits(engine)
        if mode == "auto":
            grows = form in ("Q5_0", "Q3_K", "Q4_1", "Q5_1")
            assert (kernels.growth() - before > 0.3 * path.stat().st_size) == grows
            assert engine.left_to_llama_cpp == ((), (form,) if form in WITHOUT_KERNEL else ())
            assert largest_difference(engine) == 0
        engine.close()
        model.close()
        assert kernels.growth() == before
        return found

    ours, theirs = logits_of("auto"), logits_of("off")
    assert 0 < np.abs(ours - theirs).max() < 0.05 * np.abs(theirs).max()


def test_greedy_output_is_the_same_with_and_without_drafts(case: tuple[Path, str, bool], tmp_path: Path) -> None:
    path, _, of_experts = case
    architecture = "llama" if of_experts else "qwen2"
    draft = tiny_model(tmp_path, "q4_0", architecture, role="draft", **(EXPERTS if of_experts else SIZES))
    files = {"target": ModelConfig(path=path), "draft": ModelConfig(path=draft), "kernels": "auto"}
    pair = Pair(TinyFiles(tmp_path).config(architecture).model_copy(update=files))
    assert pair.models.left.exact
    for prompt in ("The quick brown fox", "def accept(p, q):"):
        greedy = {"max_tokens": 80, "temperature": 0}
        plain = pair.complete(prompt, **greedy, speculation=PLAIN).sequence
        for gamma in (3, 7, 15):
            found = pair.complete(prompt, **greedy, speculation=fixed_gamma(gamma)).sequence
            assert found.answer == plain.answer
            assert 0 < found.stats.accepted < found.stats.drafted
