"""Selects specserve's kernels (handler/kernels) or llama.cpp's for matrix products and attention.

llama.cpp offers each weight to a list of buffer types, in order, and the library puts its own first. So a model loaded
after `use("auto")` has its weights packed for specserve's kernels, one loaded after `use("off")` for llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specserve.engine.kernel_library import FORMATS, Unusable, checksum, library, loaded

__all__ = [
    "FORMATS",
    "VARIANTS",
    "Calls",
    "Hint",
    "Kernels",
    "Mode",
    "Share",
    "Unusable",
    "assist",
    "attention_error",
    "calls",
    "chosen_prefetch",
    "head_limited_to",
    "identity",
    "in_use",
    "largest_error",
    "library",
    "share_of",
    "speed",
    "use",
]

Mode = Literal["auto", "off"]
VARIANTS = ("avx512_vnni", "avx_vnni", "avx2")


class Hint(IntEnum):
    """Who prefetches weights: the processor by itself, or an instruction."""

    NONE = 0
    T1 = 1
    NTA = 2


# Error of a product relative to its root mean square. Activations of 8 bits cause 0.023 (768 terms, any variant), a
# wrong bias or scale 0.2 and more; 16-bit keys and values cause 0.0009 in attention (half precision 0.0015).
_MAX_ERROR, _MAX_ATTENTION_ERROR = 0.05, 2e-3
# Product for the comparison of speeds: 2 to 3 MB of weights, milliseconds for all formats.
_TIMED_K, _TIMED_COLUMNS, _TIMED_ROWS, _TIMES = 2048, 1536, (1, 4, 8), 5
# Kernels of the same speed differ by up to this share when measured on a noisy machine. A process that takes a core for
# a moment causes more, so a kernel that seems slower is measured up to `_MAX_TRIALS` times.
_NOISE = 0.1
_MAX_TRIALS = 6
# Ways to prefetch weights that are timed, the usual distance first (benchmarks/decisions/tried.md).
_KIB = {Hint.NONE: (0,), Hint.T1: (24, 12, 48, 96), Hint.NTA: (24, 12, 48)}
# `prefetcht1` has to be so many times as fast to be used: it loses for some numbers of rows only, by where the code
# lies in memory, and those that are timed may be lucky. Another distance has to be so many times as fast as the usual.
_MARGINS, _DISTANCE_MARGIN = {Hint.NONE: 1.0, Hint.T1: 1.1, Hint.NTA: 1.0}, 1.03
# Products for that comparison, in the most frequent format, of few rows and of more: 188 MB of weights, since of half
# as many two third-level caches of 32 MB kept so much that what takes a pass 1.2 times as long seemed faster. Each way
# is timed in every turn. It takes 1.4 s, once a process.
_STREAMED_FORMAT, _STREAMED_K, _STREAMED_COLUMNS, _STREAMED_ROWS, _STREAMED_TURNS = "Q4_K", 2048, 163_840, (1, 6), 9


class Prefetch(NamedTuple):
    """A way to prefetch weights; results are the same.

    Args:
        hint: the instruction.
        kib: how far before they are needed, in KiB.
    """

    hint: Hint
    kib: int

    def __str__(self) -> str:
        """The instruction and the distance."""
        return f"prefetch{self.hint.name.lower()} {self.kib} KiB ahead" if self.hint else "no prefetch"


class Kernels(NamedTuple):
    """The kernels that compute for models loaded from now on.

    Args:
        variant: instruction set of specserve's kernels; None if llama.cpp's are used.
        formats: weight formats that specserve's kernels compute.
        prefetch: how they prefetch weights in products of few rows, and of more; none without kernels.
        sentence: the same for people, with the reason.
    """

    variant: str | None
    formats: tuple[str, ...]
    prefetch: tuple[Prefetch, ...]
    sentence: str


_STOCK = Kernels(None, (), (), "llama.cpp's own kernels compute: specserve's were not selected")
_state = {"in_use": _STOCK}


def in_use() -> Kernels:
    """Return the result of the last `use` in this process."""
    return _state["in_use"]


def use(mode: Mode, *, threads: int = 1, variant: str | None = None) -> Kernels:
    """Select the kernels for models loaded from now on, and for all attention.

    Kernels are selected only if their results are correct and their speed is at least llama.cpp's on this machine.
    The first call in a process must precede the first load of a model, when llama.cpp reads its list of buffer types.

    Args:
        mode: `off` selects llama.cpp's kernels.
        threads: compute threads, for the comparison of ways to prefetch.
        variant: one of VARIANTS, instead of the best that the processor supports; its speed is then not compared.
    """
    _state["in_use"] = chosen = _choose(mode, threads, variant)
    return chosen


def _choose(mode: Mode, threads: int, variant: str | None) -> Kernels:
    if mode == "off":
        if found := loaded():
            found.specserve_take(0)
        return _stock("`kernels: off`")
    try:
        found = library()
    except Unusable as reason:
        return _stock(str(reason))
    found.specserve_take(0)
    named = found.specserve_use((variant or "").encode())
    if named is None:
        return _stock(f"this processor has not {variant}" if variant else "this processor has not even AVX2")
    used = named.decode()
    # First, since each way to prefetch has code of its own: what is checked and timed below is what will compute.
    prefetch = chosen_prefetch(used, threads)
    for are_many, way in enumerate(prefetch):
        found.specserve_prefetch(are_many, way.hint, way.kib << 10)
    if (error := attention_error()) > _MAX_ATTENTION_ERROR:
        return _stock(f"attention failed its check (an error of {error:.2g})")
    wrong = {name: error for name in FORMATS if (error := largest_error(name)) > _MAX_ERROR}
    slow = {} if variant else {name: ratio for name in FORMATS if (ratio := _best_speed(name)) < 1 - _NOISE}
    selected = [name for name in FORMATS if name not in wrong and name not in slow]
    found.specserve_take(sum(1 << FORMATS.index(name) for name in selected))
    rejected = [f"{name} failed its check (an error of {error:.2g})" for name, error in wrong.items()]
    rejected += [f"{name} is slower than llama.cpp's ({ratio:.2f} times its speed)" for name, ratio in slow.items()]
    if not selected:
        return _stock("; ".join(rejected))
    ways = ", for more than 2 rows ".join(dict.fromkeys(map(str, prefetch)))
    sentence = f"specserve's own kernels compute ({used}, {ways}: {', '.join(selected)}, attention)"
    if rejected:
        sentence += f", but not all: {'; '.join(rejected)}"
    return Kernels(used, tuple(selected), prefetch, sentence)


def _stock(reason: str) -> Kernels:
    return Kernels(None, (), (), f"llama.cpp's own kernels compute: {reason}")


def largest_error(name: str) -> float:
    """Return the largest error of a format's products over all numbers of rows, relative to their root mean square."""
    max_rows = library().specserve_max_tile()
    number = FORMATS.index(name)
    return max(float(library().specserve_check_product(number, rows, 1)) for rows in range(1, max_rows + 1))


def attention_error() -> float:
    """Return the largest error of attention for one row and for several, relative to its root mean square."""
    return max(float(library().specserve_check_attention(rows, 1)) for rows in range(1, 6))


def _best_speed(name: str) -> float:
    ratios: list[float] = []
    while len(ratios) < _MAX_TRIALS and max(ratios, default=0.0) < 1 - _NOISE:
        # In one thread: others would wait at barriers for one that a neighbour holds up.
        ratios.append(speed(name, 1))
    return max(ratios)


def speed(name: str, threads: int) -> float:
    """Return the speed of a format's products relative to llama.cpp's, over a few numbers of rows."""
    number = FORMATS.index(name)

    def seconds(*, ours: bool) -> float:
        time_product = library().specserve_time_product
        sizes = number, _TIMED_K, _TIMED_COLUMNS
        return sum(float(time_product(ours, *sizes, rows, threads, _TIMES)) for rows in _TIMED_ROWS)

    return seconds(ours=False) / seconds(ours=True)


@lru_cache
def chosen_prefetch(variant: str, threads: int) -> tuple[Prefetch, ...]:
    """Return how to prefetch weights that come from memory, for few rows and for more; `variant` is in use."""
    del variant
    ways = [Prefetch(hint, kib) for hint, kibs in _KIB.items() for kib in kibs]
    given = np.array([(way.hint, way.kib << 10) for way in ways], np.int64)

    def margin(way: Prefetch) -> float:
        return _MARGINS[way.hint] * (1 if way.kib == _KIB[way.hint][0] else _DISTANCE_MARGIN)

    seconds = np.empty((_STREAMED_TURNS, len(ways)))
    chosen = []
    for rows in _STREAMED_ROWS:
        library().specserve_time_prefetch(
            FORMATS.index(_STREAMED_FORMAT),
            _STREAMED_K,
            _STREAMED_COLUMNS,
            rows,
            threads,
            _STREAMED_TURNS,
            given.ctypes.data,
            len(ways),
            seconds.ctypes.data,
        )
        # Beside two busy processes the least chose as on a quiet machine 13 of 14 times, the lower quartile 6 times.
        least = dict(zip(ways, seconds.min(axis=0).tolist(), strict=True))
        chosen.append(min(ways, key=lambda way: least[way] * margin(way)))
    return tuple(chosen)


@contextmanager
def head_limited_to(groups: NDArray[np.int32] | None) -> Iterator[None]:
    """Let forward passes compute these columns of a model's head only; the other logits are -inf.

    Args:
        groups: numbers of groups of 16 columns, ascending; None for the whole head. A head in a format without a kernel
            here is always computed as a whole.
    """
    if groups is None:
        yield
        return
    compute_head = library().specserve_compute_head
    compute_head(groups.ctypes.data, groups.size)
    try:
        yield
    finally:
        compute_head(None, 0)


def assist(cores: tuple[int, ...]) -> None:
    """Let a thread on each of these cores help with the products of passes that run in one thread.

    Nobody waits for them (assistants.h). Without specserve's kernels there are none.
    """
    if in_use().variant is not None:
        numbers = np.array(cores, np.int32)
        library().specserve_assist(numbers.ctypes.data, numbers.size)


def identity() -> str:
    """Return a key for cached pass costs: the library's checksum, the variant and the formats in use."""
    chosen = in_use()
    if chosen.variant is None:
        return "stock"
    # Distances differ by some per cent, and from start to start.
    hints = " ".join(way.hint.name.lower() for way in chosen.prefetch)
    return f"{checksum()} {chosen.variant} {hints} {' '.join(chosen.formats)}"


class Calls(NamedTuple):
    """How many matrix products and attentions specserve's kernels have computed."""

    products: int
    attentions: int


def calls() -> Calls:
    """Return the counts since the process began; zero if the library is not loaded."""
    found = loaded()
    return Calls(found.specserve_products(), found.specserve_attentions()) if found else Calls(0, 0)


class Share(NamedTuple):
    """What specserve's kernels computed of a forward pass: all matrix products, all attention."""

    products: bool
    attention: bool


def share_of(run: Callable[[], object]) -> Share:
    """Return what specserve's kernels compute of the forward passes in `run`; no others may run meanwhile."""
    found = loaded()
    if found is None:
        run()
        return Share(products=False, attention=False)
    # The notes of earlier passes.
    found.specserve_left()
    before = calls()
    run()
    after, left = calls(), found.specserve_left()
    # Bits 0 and 1, see library.cpp. llama.cpp notes nothing while the library is not in its list of buffer types.
    return Share(
        products=after.products > before.products and not left & 1,
        attention=after.attentions > before.attentions and not left & 2,
    )
