"""specserve's kernels: correct in every format, variant and shape, and independent of other rows."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernel_products import BLOCK, FORMATS, SUPPORTED_VARIANTS, exact, needs_kernels, product, quantised, variants
from pairs import open_engine
from planted import SOURCES, build_library
from specserve.engine import kernel_trial, kernels
from specserve.engine.base import FloatArray, Row
from specserve.engine.kernel_library import library
from specserve.engine.llama import LlamaEngine
from specserve.errors import ModelLoadError
from tiny_formats import tiny_model

pytestmark = needs_kernels

__all__ = ["build_library"]

ROWS = (*range(1, 18), 32, 33)


def numbers(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def errors(got: FloatArray, expected: NDArray[np.float64]) -> tuple[float, float]:
    """Return the root mean square and the largest error, relative to the products' root mean square."""
    scale = np.sqrt(np.mean(expected**2))
    # NaN, for example from results that were not written, would compare as no error.
    deviations = (np.nan_to_num(got, nan=1e9, posinf=1e9, neginf=-1e9) - expected) / scale
    return float(np.sqrt(np.mean(deviations**2))), float(np.abs(deviations).max())


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_as_accurate_as_llama_cpps(name: str) -> None:
    """Both round activations to 8 bits, so their errors have the same size: within 5 % over 23,000 products.

    Or ours do not round them, and only sums in single precision.
    """
    blocks, x = quantised(name, numbers(1, 71, 1024)), numbers(2, 330, 1024)
    expected = exact(name, blocks, x)
    stock = errors(product(name, blocks, x, ours=False)[0], expected)
    for _ in variants():
        for threads in (1, 2):
            ours = errors(product(name, blocks, x, threads=threads)[0], expected)
            assert ours[0] <= max(1.05 * stock[0], 2e-7)
            assert ours[1] <= max(1.3 * stock[1], 2e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_products_of_any_shape_are_correct(name: str) -> None:
    """The scales of the first 8 of 11 blocks lie together in some formats, then those of the last 3."""
    shapes = [(rows, 40, 2) for rows in ROWS]
    shapes += [(5, columns, blocks) for columns in (1, 2, 7, 8, 9, 15, 16, 17, 33) for blocks in (1, 3, 11)]
    for _ in variants():
        for rows, columns, n_blocks in shapes:
            k = n_blocks * BLOCK[name]
            blocks, x = quantised(name, numbers(3, columns, k)), numbers(4, rows, k)
            deviations = np.abs(product(name, blocks, x)[0] - exact(name, blocks, x)) / np.sqrt(k)
            assert deviations.max() < 0.05, (rows, columns, k)


@pytest.mark.parametrize("name", FORMATS)
def test_product_rows_have_the_same_bits_for_any_rows_tiles_threads_and_pieces(name: str) -> None:
    """llama.cpp writes weights in pieces that it reads by way of pinned memory; they need not end where columns do."""
    blocks, x = quantised(name, numbers(7, 300, 768)), numbers(8, 80, 768)
    for _ in variants():
        alone = np.concatenate([product(name, blocks, x[row : row + 1])[0] for row in range(80)])
        for rows in (*ROWS, 80):
            found, _ = product(name, blocks, x[:rows], threads=1 + rows % 3, pieces=(1, 2, 7)[rows % 3])
            assert np.array_equal(found, alone[:rows])
        assert np.array_equal(product(name, blocks[17:], x[:5])[0], alone[:5, 17:])


@pytest.mark.parametrize("name", FORMATS)
def test_products_of_a_mixture_have_the_bits_of_each_experts_own(name: str) -> None:
    """Expert 0 computes no row, expert 5 all, also where all experts of a row share its activations."""
    blocks, random = quantised(name, numbers(16, 6 * 41, 512)).reshape(6, 41, -1), np.random.default_rng(17)
    chosen = np.argsort(random.random((40, 4)), axis=1)[:, :3].astype(np.int32) + 1
    chosen[np.arange(40), random.integers(3, size=40)] = 5
    for _ in variants():
        for inputs in (1, 3):
            x = numbers(18, 40, inputs, 512)
            taken = chosen, np.arange(40)[:, None], np.arange(3) % inputs

            def of_chosen(products: list[NDArray[Any]], taken: Any = taken, inputs: int = inputs) -> NDArray[Any]:
                found: NDArray[Any] = np.reshape(products, (6, 40, inputs, 41))[taken]
                return found

            flat = x.reshape(-1, 512)
            expected = of_chosen([product(name, expert, flat)[0] for expert in blocks])
            assert max(errors(expected, of_chosen([exact(name, expert, flat) for expert in blocks]))) < 0.06
            for rows in range(1, 41):
                for threads in (1, 2, 5):
                    found, _ = product(name, blocks, x[:rows], chosen[:rows], threads=threads, pieces=1 + rows % 3)
                    assert np.array_equal(found, expected[:rows]), (rows, threads)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_other_magnitudes_infinities_and_nan_affect_no_other_row(name: str) -> None:
    blocks, x = quantised(name, numbers(11, 24, 512)), numbers(12, 6, 512)
    for _ in variants():
        expected, _ = product(name, blocks, x)
        for scale in (1e-30, 1e-6, 1e6, 1e30):
            scaled = x * np.where(np.arange(6) % 2, 1, np.float32(scale))[:, None].astype(np.float32)
            for got, row in zip(product(name, blocks, scaled)[0], exact(name, blocks, scaled), strict=True):
                assert max(errors(got, row)) < 0.06
        for value in (np.inf, -np.inf, np.nan, 3e38):
            poisoned = x.copy()
            poisoned[2, 100] = value
            others = [0, 1, 3, 4, 5]
            assert np.array_equal(product(name, blocks, poisoned)[0][others], expected[others])


# Where a block has numbers of half precision, or a power of two.
HALVES: dict[str, tuple[int, ...]] = {"Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82)}
HALVES |= dict.fromkeys(("Q4_0", "Q8_0", "Q5_0", "IQ4_NL", "IQ4_XS", "MXFP4"), (0,))
HALVES |= dict.fromkeys(("Q4_K", "Q5_K", "Q4_1", "Q5_1"), (0, 2))


def with_halves_of(blocks: NDArray[np.uint8], noise: NDArray[np.uint8], name: str) -> None:
    """Give noise the numbers of half precision that blocks have, since random ones may be infinite."""
    size = blocks.shape[1] * BLOCK[name] // 512
    for start in range(0, blocks.shape[1], size):
        for half in HALVES.get(name, range(0, size, 2)):
            noise[:, start + half : start + half + 2] = blocks[:, start + half : start + half + 2]


@pytest.mark.parametrize("name", FORMATS)
def test_sums_of_the_largest_weights_and_activations_do_not_overflow(name: str) -> None:
    blocks = quantised(name, numbers(13, 32, 512))
    size = blocks.shape[1] * BLOCK[name] // 512
    scales = {"Q4_K": slice(4, 16), "Q5_K": slice(4, 16), "Q6_K": slice(192, 208), "Q2_K": slice(16)}
    x = np.ones((8, 512), np.float32)
    x[1::4] = -1
    x[2::4, ::2] = -1
    x[3::4, ::4] = x[3::4, 1::4] = -1
    for byte in (0x00, 0x0F, 0x30, 0x7F, 0x80, 0xF0, 0xFF):
        largest = np.full_like(blocks, byte)
        with_halves_of(blocks, largest, name)
        for start in range(0, blocks.shape[1], size):
            largest[:, start : start + size][:, scales.get(name, slice(0))] = byte or 0x7F
        expected = exact(name, largest, x)
        assert np.abs(expected).max() > 0 or (name, byte) in {("Q8_0", 0), ("MXFP4", 0), ("MXFP4", 0x80)}
        for _ in variants():
            assert np.abs(product(name, largest, x)[0] - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_of_random_bytes_are_dequantised_as_gguf_defines(name: str) -> None:
    """Uses every bit of a block, also those that quantised normal numbers seldom set."""
    blocks = quantised(name, numbers(13, 32, 512))
    noise = np.random.default_rng(14).integers(256, size=blocks.shape, dtype=np.uint8)
    with_halves_of(blocks, noise, name)
    x = numbers(15, 7, 512)
    for _ in variants():
        assert max(errors(product(name, noise, x)[0], exact(name, noise, x))) < 0.05


@pytest.mark.skipif(
    "avx512_vnni" not in SUPPORTED_VARIANTS, reason="AVX-VNNI is tested by AVX-512 VNNI: run it on a CPU with that"
)
def test_avx_vnni_kernels_are_correct_when_run_by_avx512_instructions(
    build_library: Callable[..., ctypes.CDLL], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few machines have AVX-VNNI; its two instructions are AVX-512's with another encoding."""
    renamed = [f"-D_mm256_{name}_avx_epi32=_mm256_{name}_epi32" for name in ("dpbusd", "dpwssd")]
    library()
    built = build_library("vnni", options=("-D__AVXVNNI__", "-mavx512vl", "-mavx512vnni", *renamed))
    monkeypatch.setattr(kernel_trial, "library", lambda: built)
    assert kernel_trial.wrong_results() == {}


def test_mxfp4_has_all_powers_of_two() -> None:
    """Also those that half precision lacks: a block of each, with activations that 8 bits hold without rounding.

    With the last ones 12 is infinite in single precision.
    """
    blocks = np.random.default_rng(16).integers(256, size=(253, 17), dtype=np.uint8)
    blocks[:, 0] = np.arange(253)
    x = np.random.default_rng(17).integers(-127, 128, (3, 32)).astype(np.float32)
    x[:, 0] = 127
    x /= 2**12  # sums of the largest weights fit
    for _ in variants():
        assert np.array_equal(product("MXFP4", blocks, x)[0], exact("MXFP4", blocks, x).astype(np.float32))


# By planted fault, a header and what is written in it instead. Several at once are of different formats.
PLANTED = {
    "biases, signs and minima": [
        ("q4_0.h", "start_of_32(bytes, bias)", "start_of_32(bytes, 0)"),
        ("format.h", "_mm256_sign_epi8(four_for_all(activations + 32 * r), weights)",
         "four_for_all(activations + 32 * r)"),
        ("q2_k.h", "fnma(dmin, to_float(sum), mul(d, to_float(total[r])))", "mul(d, to_float(total[r]))"),
        ("q4_k.h", "fnma(dmin, to_float(sum), sub[r])", "sub[r]"),
        ("q6_k.h", "= start_of_16(bytes, 32)", "= start_of_16(bytes + 2, 32)"),
        ("q5_1.h", "fma(to_float(sum), d, mul(m, all(static_cast<float>(x.sums[r]))))", "mul(to_float(sum), d)"),
        ("floats.h", "add(out[r], sub[r])", "sub[r]"),
    ],
    "places of weights": [
        ("q4_0.h", "v < 4 ? low", "v >= 4 ? low"),
        ("q2_k.h", "2 * (pair % 4)", "2 * (pair % 4 ^ 1)"),
        ("q8_0.h", "spread(block + 2, 8,", "spread(block + 3, 8,"),
        ("q4_k.h", "x.values + j * 32 * rows + 4 * v);", "x.values + j * 32 * rows + 4 * (v ^ 1));"),
        ("q6_k.h", "shift_left<2>(bits) :", "shift_left<4>(bits) :"),
        ("q5_1.h", "spread(values, 8, weights", "spread(values, 7, weights"),
        ("floats.h", "i * kLanes + lane", "i * kLanes + (lane ^ 1)"),
    ],
    "scales": [
        ("format.h", "mul(d, all(scales[r]))", "mul(d, all(scales[(r + 1) % rows]))"),
        ("iq4_xs.h", "widen_signed(side + j * kLanes)", "widen_signed(side + (j ^ 1) * kLanes)"),
        ("q2_k.h", "2 * which + i % 2", "2 * (1 - which) + i % 2"),
        ("q5_1.h", "all(x.scales[r])", "all(x.scales[(r + 1) % rows])"),
        ("floats.h", "x.sums[i * rows + r]", "x.sums[i * rows + (r + 1) % rows]"),
        ("format.h", "_mm256_slli_epi32(scales, 16), 0xaa", "_mm256_slli_epi32(scales, 16), 0x00"),
    ],
    "a tile's edge": [("product.h", "r < rows; r++) {\n        store(", "r < rows - 1; r++) {\n        store(")],
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_fail_the_trial_and_these_tests(
    fault: str, build_library: Callable[..., ctypes.CDLL], monkeypatch: pytest.MonkeyPatch
) -> None:
    library()
    wrong = build_library(fault.replace(" ", "_"), *PLANTED[fault])
    monkeypatch.setattr(kernel_trial, "library", lambda: wrong)
    assert kernel_trial.wrong_results().keys() == set(FORMATS)
    for name in FORMATS:
        blocks, x = quantised(name, numbers(3, 40, 512)), numbers(4, 3, 512)
        assert max(errors(product(name, blocks, x)[0], exact(name, blocks, x))) > 0.05


def logits(engine: LlamaEngine, slot: int = 0) -> FloatArray:
    rows = [Row(token, slot, position, wants_logits=position == 19) for position, token in enumerate(range(40, 60))]
    found = engine.forward(rows).copy()
    engine.truncate(slot, 0)
    return found


def test_a_forward_pass_calls_the_kernels_unless_they_are_off(tiny: Path) -> None:
    kernels.use("auto", variant=SUPPORTED_VARIANTS[0])
    # Two layers of seven products, and the head.
    for expected in ([15, 2], [0, 0]):
        engine = open_engine(tiny)
        before = kernels.calls()
        logits(engine)
        assert np.subtract(kernels.calls(), before).tolist() == expected
        kernels.use("off")


def test_an_engine_tells_what_llama_cpp_computes_of_its_model(tiny: Path, tmp_path: Path) -> None:
    """Also after another engine, for whose model it computed something else.

    Heads of eight numbers are fewer than a register holds. For rows of less than 256 weights llama.cpp takes Q4_0 or
    IQ4_NL in place of Q2_K and IQ3_S: so some products have a kernel and others have none.
    """
    kernels.use("auto", variant=SUPPORTED_VARIANTS[0])
    small_heads = tiny_model(tmp_path, "q4_0", HEADS=8)
    half_without = tiny_model(tmp_path, "iq3_s", FEED_FORWARD=256)
    for path, left in ((small_heads, (("attention",), ())), (half_without, ((), ("IQ3_S",)))):
        assert open_engine(path).left_to_llama_cpp == left
        assert open_engine(tiny).left_to_llama_cpp == ((), ())
    # A row's attention reads its own sequence, or with llama.cpp's kernel all of them.
    for path, expected in ((tiny, 20), (small_heads, 32)):
        engine = open_engine(path)
        for slot, length in ((0, 20), (1, 12)):
            engine.forward([Row(40, slot, position, wants_logits=False) for position in range(length)])
        assert engine.kv_len([0]) == expected
    kernels.use("off")
    assert open_engine(tiny).left_to_llama_cpp == (("matrix products", "attention"), ())


def test_results_that_depend_on_other_rows_are_not_exact_and_those_of_another_row_are_refused(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever operation of llama.cpp's is to blame."""
    kernels.use("auto", variant=SUPPORTED_VARIANTS[0])
    first = open_engine(tiny).forward([Row(84, 0, 0, wants_logits=True)]).copy()
    changes: list[tuple[Callable[[FloatArray], FloatArray], tuple[str, ...]]] = [
        (lambda logits: logits, ()),
        (lambda logits: np.nextafter(logits, np.float32(np.inf)), ("other operations",)),
    ]
    forward = LlamaEngine.forward
    for change, parts in (*changes, (lambda _: first, None)):

        def changed(engine: LlamaEngine, rows: list[Row], change: Any = change) -> FloatArray:
            logits = forward(engine, rows)
            return change(logits) if len(rows) > 1 else logits

        monkeypatch.setattr(LlamaEngine, "forward", changed)
        if parts is None:
            with pytest.raises(ModelLoadError, match="mixes up the tokens of a pass"):
                open_engine(tiny)
        else:
            assert open_engine(tiny).left_to_llama_cpp == (parts, ())


def test_logits_equal_llama_cpps_up_to_rounding_and_variants_can_be_loaded_together(tiny: Path) -> None:
    kernels.use("off")
    stock = open_engine(tiny, threads=2)
    expected = logits(stock)
    engines = [open_engine(tiny, threads=2) for _ in variants()]
    for _ in variants():
        for engine in engines:
            assert 0 < np.abs(logits(engine) - expected).max() < 0.05 * np.abs(expected).max()


_REPEATED_LOADS = """
import ctypes, gc, pathlib, sys
sys.path[:0] = sys.argv[2:]
from specserve.engine.llama_model import LlamaModel
from test_kernels import SUPPORTED_VARIANTS, kernels, logits, open_engine
kernels.use('auto', variant=SUPPORTED_VARIANTS[0])
class Statistics(ctypes.Structure):  # struct mallinfo2 of malloc.h
    _fields_ = [(name, ctypes.c_size_t) for name in 'arena a b c mapped d e used f g'.split()]
mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Statistics
def allocated_after_load():
    model = LlamaModel(pathlib.Path(sys.argv[1]))
    engine = open_engine(model)
    logits(engine)
    engine.close()
    model.close()
    gc.collect()
    assert sys.argv[1] not in pathlib.Path('/proc/self/maps').read_text(), 'the file is still mapped'
    return mallinfo2().used + mallinfo2().mapped
warm = [allocated_after_load() for _ in range(20)][-1]
print([allocated_after_load() for _ in range(40)][-1] - warm)
"""


def test_repeated_loading_leaks_no_memory(tiny: Path) -> None:
    """Less than 256 bytes a load by malloc's own count: resident memory grows in steps that hide such leaks."""
    command = [sys.executable, "-c", _REPEATED_LOADS, str(tiny), *sys.path]
    assert int(subprocess.check_output(command)) < 40 * 256


_ALL_KERNELS = """
import ctypes, os, pathlib, sys
import numpy as np
sys.path[:0] = sys.argv[2:]
from specserve.engine import kernel_library
kernel_library.library_path = lambda: pathlib.Path(sys.argv[1])
from attention_cases import conversations
from kernel_products import BLOCK, FORMATS, product, quantised, variants
for variant in variants():
    kernel_library.library().specserve_assist(ctypes.byref(ctypes.c_int32(max(os.sched_getaffinity(0)))), 1)
    random = np.random.default_rng(0)
    for name in FORMATS:
        for columns, k in ((1, BLOCK[name]), (35, 512)):
            blocks = quantised(name, random.normal(size=(columns, k)).astype(np.float32))
            for rows in (1, 2, 15, 16, 17, 33):
                x = random.normal(size=(rows, k)).astype(np.float32)
                x[0, :3] = np.inf, -np.inf, np.nan
                for threads in (1, 2):
                    product(name, blocks, x, threads=threads, pieces=1 + rows % 3)
                    product(name, np.stack([blocks] * 3), x, np.tile(np.int32([2, 0]), (rows, 1)), threads=threads)
    for size in (16, 48, 128, 256):
        for lengths in ((1,), (64, 1), (300, 33), (257,) * 33):
            case = conversations(0, lengths, size=size, key_heads=2, shared=3)
            case.keys[0, 0, :3] = np.inf, -np.inf, np.nan
            case.attend(threads=2)
print("clean")
"""


def test_address_and_undefined_behaviour_sanitizers_find_no_error(tmp_path: Path) -> None:
    build = tmp_path / "build"
    options = ["-DSPECSERVE_SANITIZE=ON", f"-DPython_EXECUTABLE={sys.executable}", "-G", "Ninja"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for step in (["cmake", "-S", str(SOURCES), "-B", str(build), *options], ["cmake", "--build", str(build)]):
        subprocess.run(step, check=True, env=environment, capture_output=True)
    [library] = build.glob("*.so")
    preload = subprocess.check_output(["g++", "-print-file-name=libasan.so"], text=True).strip()
    environment |= {"LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, "-c", _ALL_KERNELS, str(library), *sys.path]
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert outcome.stdout.strip().endswith("clean"), outcome.stderr[-2000:]
