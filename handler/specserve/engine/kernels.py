"""The matrix products and the attention of our own (handler/kernels), put in place of llama.cpp's where they are right.

llama.cpp asks a list of buffer types, in order, which of them takes a weight, and the library puts its own first. So a
model loaded after `use("auto")` has its weights packed for our kernels, one loaded after `use("off")` for llama.cpp's.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from specserve.engine.llama_model import start_backend

# (llama_model loads llama_cpp, and with it the libraries that ours takes its symbols from)
FILE = "libspecserve_kernels.so"
Mode = Literal["auto", "off"]
# By number: `enum class Format` of kernels.h.
FORMATS = ("Q4_0", "Q8_0", "Q4_K", "Q6_K")
VARIANTS = ("avx512_vnni", "avx_vnni", "avx2")
# Largest error of a product, in units of its root mean square: activations of 8 bits leave 0.023 (768 terms, any
# variant: tests/engine/test_kernels.py), a bias or a scale that is wrong 0.2 and more.
_MAX_ERROR = 0.05
# The product that is timed against llama.cpp's: a megabyte or two of weights, milliseconds for all formats.
_TIMED_K, _TIMED_COLUMNS, _TIMED_ROWS, _TIMES = 2048, 1536, (1, 4, 8), 5
# Slower by less than this share is what a noisy machine may show of equals; a neighbour that takes a core for a moment
# shows more, so what looks slow is timed so many times.
_NOISE = 0.1
_TRIALS = 6


class Kernels(NamedTuple):
    """What computes for models that are loaded from now on.

    Args:
        variant: of the instructions our kernels use; None where llama.cpp's serve.
        formats: of the weights that are ours.
        sentence: the same, and why, for people.
    """

    variant: str | None
    formats: tuple[str, ...]
    sentence: str


class Unusable(Exception):
    """Our kernels cannot be used; the text says why."""


def library_path() -> Path:
    """Where the library is, if it was built: beside this module in an archive, else where it was installed."""
    beside = Path(__file__).with_name(FILE)
    if beside.exists():
        return beside
    try:
        return Path(str(importlib.metadata.distribution("specserve-kernels").locate_file(f"specserve_kernels/{FILE}")))
    except importlib.metadata.PackageNotFoundError:
        return beside


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The library, loaded.

    Raises:
        Unusable: there is none, or it does not fit the llama-cpp-python that is installed.
    """
    path = library_path()
    if not path.exists():
        raise Unusable(
            "they were not built (that takes a C++ compiler and an x86-64 Linux when specserve is installed)"
        )
    try:
        for name in ("libggml-base.so.0", "libggml.so.0", "libggml-cpu.so.0"):
            ctypes.CDLL(name, os.RTLD_GLOBAL | os.RTLD_NOLOAD | os.RTLD_NOW)
        loaded = ctypes.CDLL(str(path), os.RTLD_NOW)
        declare(loaded)
    except (OSError, AttributeError) as error:
        raise Unusable(f"{path.name} does not fit specserve or llama-cpp-python ({error})") from error
    built_for, installed = loaded.specserve_built_for().decode(), importlib.metadata.version("llama-cpp-python")
    if built_for != installed:
        raise Unusable(f"they were built for llama-cpp-python {built_for}, and {installed} is installed")
    return loaded


def declare(loaded: ctypes.CDLL) -> None:
    """Tell ctypes the types of library.cpp's functions, where they are not plain ints."""
    loaded.specserve_built_for.restype = ctypes.c_char_p
    loaded.specserve_use.restype = ctypes.c_char_p
    loaded.specserve_use.argtypes = [ctypes.c_char_p]
    loaded.specserve_take.argtypes = [ctypes.c_uint]
    loaded.specserve_products.restype = loaded.specserve_attentions.restype = ctypes.c_int64
    loaded.specserve_check_product.restype = loaded.specserve_time_product.restype = ctypes.c_double
    loaded.specserve_check_product.argtypes = [ctypes.c_int, ctypes.c_int]
    loaded.specserve_read_bandwidth.restype = loaded.specserve_dot_peak.restype = ctypes.c_double
    two, sizes = [ctypes.c_int, ctypes.c_int], [ctypes.c_int64, ctypes.c_int64]
    loaded.specserve_time_product.argtypes = [*two, *sizes, ctypes.c_int, *two]
    loaded.specserve_run_product.restype = ctypes.c_double
    pointer = ctypes.c_void_p
    loaded.specserve_run_product.argtypes = [*two, *sizes, pointer, ctypes.c_int, pointer, ctypes.c_int, pointer]
    loaded.specserve_attend.restype = None
    loaded.specserve_attend.argtypes = [*sizes, ctypes.c_int, ctypes.c_float, ctypes.c_int, *[pointer] * 5]


_STOCK = Kernels(None, (), "llama.cpp's own kernels compute: ours were not asked for")
_state = {"in_use": _STOCK}


def in_use() -> Kernels:
    """What the last `use` in this process decided."""
    return _state["in_use"]


def use(mode: Mode, *, threads: int = 1, variant: str | None = None) -> Kernels:
    """Decide what computes for the models that are loaded from now on, and for all attention.

    What is used has proved itself here: every kernel against exact arithmetic, every format against llama.cpp's speed.

    Args:
        mode: `off` is llama.cpp's own kernels.
        threads: that passes will use, for the comparison of speeds.
        variant: one of VARIANTS, instead of the best that the processor has; every format of it is used, also where it
            is slower.
    """
    _state["in_use"] = chosen = _choose(mode, threads, variant)
    return chosen


def _choose(mode: Mode, threads: int, variant: str | None) -> Kernels:
    try:
        loaded = library()
    except Unusable as reason:
        return _stock(str(reason)) if mode == "auto" else _stock("`kernels: off`")
    start_backend()
    loaded.specserve_take(0)
    if mode == "off":
        return _stock("`kernels: off`")
    found = loaded.specserve_use((variant or "").encode())
    if found is None:
        return _stock(f"this processor has not {variant}" if variant else "this processor has not even AVX2")
    wrong = {name: error for name in FORMATS if (error := largest_error(name)) > _MAX_ERROR}
    slow = {} if variant else {name: ratio for name in FORMATS if (ratio := _best_speed(name, threads)) < 1 - _NOISE}
    taken = [name for name in FORMATS if name not in wrong and name not in slow]
    loaded.specserve_take(sum(1 << FORMATS.index(name) for name in taken))
    left = [f"{name} failed its check (an error of {error:.2g})" for name, error in wrong.items()]
    left += [f"{name} is slower than llama.cpp's ({ratio:.2f} times its speed)" for name, ratio in slow.items()]
    if not taken:
        return _stock("; ".join(left))
    sentence = f"specserve's own kernels compute ({found.decode()}: {', '.join(taken)}, attention)"
    if left:
        sentence += f", but not all: {'; '.join(left)}"
    return Kernels(found.decode(), tuple(taken), sentence)


def _stock(reason: str) -> Kernels:
    return Kernels(None, (), f"llama.cpp's own kernels compute: {reason}")


def largest_error(name: str) -> float:
    """The largest error of a format's products over all numbers of rows, in units of their root mean square."""
    tile = library().specserve_max_tile()
    number = FORMATS.index(name)
    return max(float(library().specserve_check_product(number, rows)) for rows in range(1, tile + 1))


def _best_speed(name: str, threads: int) -> float:
    ratios: list[float] = []
    while len(ratios) < _TRIALS and max(ratios, default=0.0) < 1 - _NOISE:
        ratios.append(speed(name, threads))
    return max(ratios)


def speed(name: str, threads: int) -> float:
    """How many times as fast as llama.cpp's a format's products are, over a few numbers of rows."""
    number = FORMATS.index(name)

    def seconds(*, ours: bool) -> float:
        time_product = library().specserve_time_product
        sizes = number, _TIMED_K, _TIMED_COLUMNS
        return sum(float(time_product(ours, *sizes, rows, threads, _TIMES)) for rows in _TIMED_ROWS)

    return seconds(ours=False) / seconds(ours=True)


class Roof(NamedTuple):
    """What the machine could do at most, for kernels of the variant in use.

    Args:
        bytes_per_second: read from memory.
        products_per_second: of a weight and an activation, both of 8 bits, by dot-product instructions alone.
    """

    bytes_per_second: float
    products_per_second: float


def roof(threads: int) -> Roof:
    """Measure both, each in a fraction of a second; after a `use` that put a variant of ours in use.

    Raises:
        Unusable: there is no library, or llama.cpp's own kernels are in use.
    """
    loaded = library()
    if in_use().variant is None:
        raise Unusable(in_use().sentence)
    return Roof(loaded.specserve_read_bandwidth(threads), loaded.specserve_dot_peak(threads))


def identity() -> str:
    """What the cost of a pass depends on: the library's own text and what of it is in use."""
    chosen = in_use()
    if chosen.variant is None:
        return "stock"
    text = hashlib.sha256(library_path().read_bytes()).hexdigest()
    return f"{text} {chosen.variant} {' '.join(chosen.formats)}"


class Calls(NamedTuple):
    """How often passes came to a product, and to attention, of our own."""

    products: int
    attentions: int


def calls() -> Calls:
    """Counts since the process began; zero where the library is not used."""
    try:
        return Calls(library().specserve_products(), library().specserve_attentions())
    except Unusable:
        return Calls(0, 0)
