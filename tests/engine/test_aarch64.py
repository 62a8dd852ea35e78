"""specserve's kernels for aarch64, on processors that qemu emulates: all that is promised of those for x86-64."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kernel_products
import test_attention
import test_kernels
from emulated import PACKAGES, EmulatedLibrary, build
from kernel_products import FORMATS, exact, needs_kernels, product, quantised, variants
from specserve.engine import kernel_trial, kernels
from specserve.engine.base import FloatArray
from test_kernels import ROWS, numbers, with_halves_of

pytestmark = [needs_kernels, pytest.mark.long]

VARIANTS = ("i8mm", "asimddp", "asimd")
# Of processors, their variants.
PROCESSORS = {"max": VARIANTS, "neoverse-n1": VARIANTS[1:], "cortex-a72": VARIANTS[2:]}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [package for name, package in PACKAGES.items() if shutil.which(name) is None]
    assert not missing, f"apt install {' '.join(missing)}"
    return build(tmp_path_factory.mktemp("aarch64"))


@pytest.fixture(params=PROCESSORS)
def emulated(
    program: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EmulatedLibrary]:
    """The library on an emulated processor, in place of this machine's."""
    library = EmulatedLibrary(program, request.param)
    library.specserve_use(b"")
    for module in (kernel_trial, kernels):
        monkeypatch.setattr(module, "library", lambda: library)
    monkeypatch.setattr(kernel_products, "SUPPORTED_VARIANTS", PROCESSORS[request.param])
    yield library
    library.close()


def test_a_processor_gets_the_best_variant_that_it_has(
    emulated: EmulatedLibrary, request: pytest.FixtureRequest
) -> None:
    supported = PROCESSORS[request.node.callspec.params["emulated"]]
    assert emulated.specserve_use(b"").decode() == supported[0]
    assert tuple(name for name in VARIANTS if emulated.specserve_use(name.encode())) == supported


@pytest.mark.usefixtures("emulated")
def test_integer_products_are_exact() -> None:
    """Activations and scales are such that no float is rounded; any bytes of weights, and the largest sums."""
    random, largest = np.random.default_rng(1), np.full((33, 512), 127, np.float32)
    largest[1::4] = largest[2::4, ::2] = largest[3::4, ::4] = -127
    any_x = random.integers(-127, 128, (33, 512)).astype(np.float32)
    any_x[:, ::32] = 127
    any_x *= 2.0 ** (np.arange(33) % 5)[:, None]
    for name in FORMATS[:-3]:  # single precision rounds products of floats
        noise = random.integers(256, size=quantised(name, np.zeros((35, 512), np.float32)).shape, dtype=np.uint8)
        one = np.array([128, 128] if name == "MXFP4" else [0x00, 0x3C], np.uint8)
        ones = np.broadcast_to(np.tile(one, noise.shape[1] // 2), noise.shape)
        extreme = [(np.full_like(noise, byte), largest) for byte in (0x00, 0x0F, 0x7F, 0x80, 0xF0, 0xFF)]
        for weights, x in [(noise, any_x), *extreme]:
            with_halves_of(ones, weights, name)
            expected = exact(name, weights, x)
            for _ in variants():
                for rows in ROWS:
                    assert np.array_equal(product(name, weights, x[:rows])[0], expected[:rows]), (name, rows)


def products() -> dict[str, list[FloatArray]]:
    """Of every variant of the processor, in every format."""
    x = numbers(22, 9, 768)
    return {
        variant: [product(name, quantised(name, numbers(21, 35, 768)), x)[0] for name in FORMATS]
        for variant in variants()
    }


@pytest.fixture
def of_this_machine() -> dict[str, list[FloatArray]]:
    return products()


def test_all_variants_with_dot_products_give_the_same_bits(
    of_this_machine: dict[str, list[FloatArray]], emulated: EmulatedLibrary
) -> None:
    """Those of x86-64, too, if this machine has VNNI; with AVX2 alone scales are multiplied as integers."""
    assert emulated
    first, *others = (bits for name, bits in {**of_this_machine, **products()}.items() if name != "avx2")
    assert all(np.array_equal(first, other) for other in others)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_as_on_x86(name: str) -> None:
    test_kernels.test_products_are_as_accurate_as_llama_cpps(name)
    test_kernels.test_products_of_any_shape_are_correct(name)
    test_kernels.test_product_rows_have_the_same_bits_for_any_rows_tiles_threads_and_pieces(name)
    test_kernels.test_rows_of_other_magnitudes_infinities_and_nan_affect_no_other_row(name)
    test_kernels.test_sums_of_the_largest_weights_and_activations_do_not_overflow(name)
    test_kernels.test_blocks_of_random_bytes_are_dequantised_as_gguf_defines(name)


@pytest.mark.usefixtures("emulated")
def test_attention_is_as_on_x86() -> None:
    test_attention.test_the_8_bit_cache_is_as_exact_as_q8_0()
    test_attention.test_any_rows_scores_and_values_are_exact()
    test_attention.test_soft_caps_and_sinks_are_exact()
    test_attention.test_a_row_has_the_same_bits_alone_and_in_any_company()
    test_attention.test_sequences_may_share_the_cells_of_a_prefix_and_alternatives_a_position()
    test_attention.test_a_sliding_window_hides_the_positions_before_it_and_a_row_that_sees_nothing_gets_zeros()


@pytest.mark.usefixtures("emulated")
def test_the_trial_finds_nothing_wrong() -> None:
    for _ in variants():
        assert kernel_trial.wrong_results() == {}


def test_every_variant_has_a_product_rate(emulated: EmulatedLibrary) -> None:
    assert all(emulated.dot_peak(variant) > 0 for variant in kernel_products.SUPPORTED_VARIANTS)
