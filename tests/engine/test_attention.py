"""specserve's attention: as exact as half precision, and a row's result depends on its own sequence only."""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attention_cases import AttentionCase, conversations
from kernel_products import needs_kernels
from pairs import open_engine
from planted import build_library
from specserve.config import CacheType
from specserve.engine import kernel_library, kernel_trial
from specserve.engine.base import FloatArray, Row
from specserve.engine.kernel_library import library
from specserve.errors import EngineError, Unusable
from tiny_formats import tiny_model

pytestmark = needs_kernels

__all__ = ["build_library"]

# Keys and values rounded to half precision cause 2e-4 to 7e-4 by the same measure.
MAX_ERROR = 5e-4


def last_rows(seed: int, rows: int, *lengths: int, **sizes: Any) -> AttentionCase:
    """The last rows of each of some sequences: a row does not see the tokens of those after it."""
    case = conversations(seed, lengths, **sizes)
    random = np.random.default_rng(seed + 1)
    queries = random.normal(size=(rows * len(lengths), *case.queries.shape[1:])).astype(np.float32)
    ends = np.concatenate([np.arange(length - rows + 1, length + 1) for length in lengths])
    visible = case.visible.repeat(rows, axis=0) & (case.positions < ends[:, None])
    return replace(case, queries=queries, visible=visible)


def as_q8_0(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rounded as llama.cpp's Q8_0 does."""
    blocks = numbers.reshape(*numbers.shape[:-1], -1, 32)
    units = (np.abs(blocks).max(axis=-1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    return np.asarray(np.round(blocks / units) * units, np.float32).reshape(numbers.shape)


LENGTHS = [(1,), (63, 64, 65), (255, 256), (257, 300, 30, 31, 32)]


@pytest.mark.usefixtures("variant")
def test_attention_is_as_exact_as_half_precision() -> None:
    for size in (16, 48, 64, 80, 96, 128, 256):
        for shared in (1, 2, 3, 6, 7, 8):
            for seed, lengths in enumerate(LENGTHS):
                case = conversations(seed, lengths, size=size, shared=shared, key_heads=1 + seed % 2)
                assert case.error(threads=1 + seed % 3) < MAX_ERROR


@pytest.mark.usefixtures("variant")
def test_the_8_bit_cache_is_as_exact_as_q8_0() -> None:
    for size in (32, 64, 96, 128, 256):
        for seed, lengths in enumerate(LENGTHS):
            case = replace(conversations(seed, lengths, size=size, shared=3), is_8_bit=True)
            exact = case.exact()
            rounded = replace(case, keys=as_q8_0(case.keys), values=as_q8_0(case.values)).exact()
            largest = 1.5 * np.sqrt(np.mean((rounded - exact) ** 2) / np.mean(exact**2))
            assert case.error(threads=1 + seed % 3) < largest


@pytest.mark.usefixtures("variant")
def test_values_may_be_narrower_than_keys_or_a_part_of_them() -> None:
    """As in DeepSeek, with its latent attention or without; up to 128 query heads share a key head."""
    for size, value_size in ((48, 32), (96, 64), (192, 128), (576, 512)):
        for seed, lengths in enumerate(LENGTHS):
            sizes: dict[str, Any] = {"size": size, "value_size": value_size}
            case = conversations(seed, lengths, **sizes, key_heads=1 + seed % 2)
            assert case.error(threads=1 + seed % 3) < MAX_ERROR
            shared = (1, 4, 20, 128)[seed]
            latent = conversations(seed, lengths, **sizes, key_heads=1, shared=shared, latent=True)
            assert latent.error(threads=1 + seed % 3) < MAX_ERROR
            if size % 32 == 0:
                assert replace(latent, is_8_bit=True).error() < 20 * MAX_ERROR
            several = last_rows(seed, 8, 300, **sizes, key_heads=1, shared=shared, latent=True)
            several.queries[..., value_size:] /= 50
            assert several.error(threads=1 + seed % 3) < MAX_ERROR
            latent.keys[..., 0] = 100  # nearly the whole norm: sums are as large as they may be
            assert replace(latent, queries=0 * latent.queries).error() < MAX_ERROR


@pytest.mark.usefixtures("variant")
def test_any_rows_scores_and_values_are_exact() -> None:
    """With queries 100 times as large one key takes all the weight; values may be large, too, or all zero."""
    for rows in (*range(1, 10), 16, 17, 33):
        assert last_rows(rows, rows, 300 + rows).error(threads=2) < MAX_ERROR
    case = last_rows(1, 4, 700)
    for factor in (0.01, 1, 8, 100):
        assert replace(case, queries=factor * case.queries, values=case.values / factor).error() < 4 * MAX_ERROR
    assert not replace(case, values=0 * case.values).attend().any()
    uniform = replace(case, keys=0 * case.keys)
    assert np.allclose(uniform.attend(), uniform.exact(), atol=0.01)
    # As in Qwen2.5 all keys share large components, and the others decide.
    case.keys[..., :4] += (60, -40, 30, 100)
    case.queries[..., :4] *= 0.05
    assert case.error() < 2e-3


@pytest.mark.usefixtures("variant")
def test_soft_caps_and_sinks_are_exact() -> None:
    """A sink below and far above all scores; caps that change nothing, a little, and that level all scores."""
    for seed, lengths in enumerate(LENGTHS):
        case = conversations(seed, lengths, key_heads=2, shared=2)
        for softcap in (0, 0.5, 3, 50):
            for sink in (None, -9, 0, 3, 200):
                sinks = None if sink is None else np.array([sink, sink - 1, sink / 2, sink + 1], np.float32)
                found = replace(case, softcap=softcap, sinks=sinks)
                if sink == 200:
                    assert np.abs(found.attend(threads=2)).max() < 1e-30
                else:
                    assert found.error(threads=1 + seed % 3) < MAX_ERROR
    case.visible[1] = False
    assert not replace(case, sinks=sinks).attend()[1].any()


@pytest.mark.usefixtures("variant")
def test_a_row_has_the_same_bits_alone_and_in_any_company() -> None:
    """With other rows, sequences and threads, cells in another order; many rows are divided in another way than few."""
    for seed, lengths in enumerate([(40, 200, 300), (1, 64, 65, 256, 257, 700), range(500, 533)] * 2):
        latent: dict[str, Any] = {"value_size": 32, "key_heads": 1, "shared": 40, "latent": True}
        case = conversations(seed, lengths, size=64, **latent if seed in {0, 4} else {})
        case = replace(case, is_8_bit=seed > 2)
        if seed % 2:
            case = replace(case, softcap=2, sinks=np.linspace(-1, 2, case.queries.shape[1], dtype=np.float32))
        together = case.attend(threads=2)
        for threads in (1, 3):
            assert np.array_equal(together, case.attend(threads=threads))
        order = np.random.default_rng(seed).permutation(len(case.positions))
        assert np.array_equal(together, case.with_cells(order).attend())
        for row in range(0, len(together), 3):
            own = np.flatnonzero(case.visible[row])
            assert np.array_equal(together[[row]], case.rows([row]).with_cells(own).attend())


@pytest.mark.usefixtures("variant")
def test_sequences_may_share_the_cells_of_a_prefix_and_alternatives_a_position() -> None:
    """A draft and its alternative are two rows that see different cells at the same position."""
    sharing = conversations(3, (400, 500, 420, 401, 410), prefix=390)
    case = last_rows(4, 2, 300)
    last = int(np.flatnonzero(case.positions == 298)[0])
    stray = int(np.flatnonzero(~case.visible.any(axis=0))[0])
    positions, visible = case.positions.copy(), case.visible.copy()
    positions[stray] = 298
    visible[1] = visible[0]
    visible[1, last], visible[1, stray] = False, True
    for found in (sharing, replace(case, positions=positions, visible=visible)):
        assert found.error(threads=2) < MAX_ERROR
        for row in range(len(found.queries)):
            assert np.array_equal(found.attend()[[row]], found.rows([row]).attend())


@pytest.mark.usefixtures("variant")
def test_a_sliding_window_hides_the_positions_before_it_and_a_row_that_sees_nothing_gets_zeros() -> None:
    """A long and a short sequence leave positions between them that no row sees, few rows or many."""
    for rows, lengths in ((5, [600]), (2, [900, 90]), (32, [900, 90])):
        case = last_rows(5, rows, *lengths)
        last = np.where(case.visible, case.positions, -1).max(axis=1)
        for window in (1, 63, 64, 200, 256):
            hidden = case.positions <= last[:, None] - window
            assert replace(case, visible=case.visible & ~hidden).error() < MAX_ERROR
        case.visible[1] = False
        replace(case, values=np.nan * case.values).attend()  # what it leaves in memory must not matter
        assert not case.attend()[1].any()


PLANTED = {
    "a forgotten scale": ("* a.scale * kLog2E", "* kLog2E"),
    "a block counted twice": ("is_first ? mul(product, factor)", "is_first ? mul(add(product, product), factor)"),
    "a neighbour's cell read": ("stored.at(key_head, cells[i])) : zeros", "stored.at(key_head, cells[i] ^ 1)) : zeros"),
    "what is hidden": ("rows[q / heads].visible[block]", "rows[0].visible[block]"),
    "an uncapped score": ("is_capped ? capped(x, softcap) : x", "x"),
    "the scale of another head": ("stored.scale(key_head, cells[i]) : 0", "stored.scale(0, cells[i]) : 0"),
    "the scale of another part": ("std::copy(rest.scales, rest", "std::copy(keys.scales, keys"),
}  # fmt: skip


def test_planted_faults_fail_the_trial_and_these_tests(
    build_library: Callable[..., ctypes.CDLL], monkeypatch: pytest.MonkeyPatch
) -> None:
    library()
    monkeypatch.setattr(kernel_trial, "formats", tuple)
    for fault, change in PLANTED.items():
        faulty = build_library(fault.replace(" ", "_"), ("attention.h", *change))
        monkeypatch.setattr(kernel_trial, "library", lambda faulty=faulty: faulty)
        ordinary, latent = last_rows(7, 4, 300), last_rows(7, 4, 300, value_size=32, key_heads=1, latent=True)
        assert max(replace(ordinary, softcap=2).error(), latent.error()) > 10 * MAX_ERROR
        assert kernel_trial.wrong_results().keys() == {"attention"}
    monkeypatch.setattr(kernel_library, "library_path", lambda: Path(faulty._name))
    with pytest.raises(Unusable, match=r"wrong results: attention \(an error of"):
        kernel_trial._run_in_another_process()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads of 64 numbers, which llama.cpp turns before it rounds them to Q8_0."""
    return tiny_model(tmp_path_factory.mktemp("tiny"), "q4_0", WIDTH=256)


TOKENS = [(17 * position) % 200 + 20 for position in range(600)]


class Slots:
    """An engine of three slots, and what its passes return; what is saved and loaded: test_cache_walk.py."""

    def __init__(self, path: Path, cache_type: CacheType, *, threads: int = 1) -> None:
        self.engine = open_engine(path, context_length=700, threads=threads, max_alternatives=2, cache_type=cache_type)

    def feed(self, slot: int, end: int, chunk: int = 64) -> None:
        """Prefill a slot with TOKENS up to a position."""
        while (start := self.engine.cached_len(slot)) < end:
            stop = min(end, start + chunk)
            self.engine.forward([Row(TOKENS[at], slot, at, wants_logits=False) for at in range(start, stop)])

    def logits(self, slot: int) -> FloatArray:
        """Of the token after what a slot holds."""
        at = self.engine.cached_len(slot)
        [found] = self.engine.forward([Row(TOKENS[at], slot, at, wants_logits=True)]).copy()
        self.engine.truncate(slot, at)
        return np.asarray(found)


@pytest.fixture(params=["f16", "q8_0"])
def cache_type(request: pytest.FixtureRequest) -> CacheType:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def slots(variant: str, wide: Path, cache_type: CacheType) -> Iterator[Slots]:
    assert variant
    found = Slots(wide, cache_type)
    assert not any(found.engine.left_to_llama_cpp)
    yield found
    found.engine.close()


def test_what_does_not_fit_is_refused_and_changes_nothing(slots: Slots) -> None:
    engine = slots.engine
    slots.feed(0, 100)
    expected, saved = slots.logits(0), engine.save(0, 0, 100)
    with pytest.raises(EngineError, match="not of this model's cache"):
        engine.load(1, saved[:, :-4])
    with pytest.raises(EngineError, match="could be saved"):
        engine.save(0, 50, 101)
    # A stale copy would be noticed.
    saved[50] = saved[49]
    engine.load(1, saved)
    assert np.array_equal(slots.logits(0), expected)
    assert not np.array_equal(slots.logits(1), expected)


def test_the_cache_holds_what_other_chunks_and_threads_have_prefilled(
    slots: Slots, wide: Path, cache_type: CacheType
) -> None:
    slots.feed(0, 400, chunk=64)
    for chunk, threads in ((1, 1), (33, 2), (64, 3)):
        other = Slots(wide, cache_type, threads=threads)
        other.feed(2, 120)
        other.feed(0, 400, chunk)
        assert np.array_equal(other.engine.save(0, 0, 400), slots.engine.save(0, 0, 400))
        assert np.array_equal(other.logits(0), slots.logits(0))
        other.engine.close()
