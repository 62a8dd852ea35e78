"""Tries specserve's kernels out: whether they crash, and whether they are right; and measures how fast they are.

A new library, llama-cpp-python or processor is tried in a process of its own, so that a crash costs the kernels and not
the server. Both products and attention go by way of llama.cpp's graphs there, as in a forward pass.
"""

import ctypes
import hashlib
import importlib.metadata
import logging
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specserve.config import cache_directory
from specserve.engine import kernel_library
from specserve.engine.base import FloatArray
from specserve.engine.kernel_library import check_version, checksum, library
from specserve.errors import Unusable
from specserve.machine import processor
from specserve.private_file import open_private

logger = logging.getLogger(__name__)

# The trial takes a second, and some more beside busy neighbours; one that takes so long hangs.
_MAX_SECONDS = 60
# Errors relative to the root mean square. Activations that 8 bits hold without rounding leave 1e-6 to products, where a
# wrong bias or scale makes 0.1 and more.
# 16-bit keys and values cause 0.0009 in attention (half precision 0.0015).
_MAX_ERROR, _MAX_ATTENTION_ERROR = 5e-3, 2e-3
# Product for the comparison of speeds: 2 to 3 MB of weights, milliseconds for all formats.
_TIMED_K, _TIMED_COLUMNS, _TIMED_ROWS, _REPEATS = 2048, 1536, (1, 4, 8), 5


def run() -> None:
    """Try the kernels in another process, unless they have passed before; `Unusable` if they fail."""
    check_version()
    conditions = f"{checksum()} {importlib.metadata.version('llama-cpp-python')} {processor()}"
    note = cache_directory() / "kernels" / hashlib.sha256(conditions.encode()).hexdigest()[:32]
    # What others may have written counts for nothing.
    with suppress(OSError), open(note, opener=open_private):
        return
    _run_in_another_process()
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        # What stands there was not this user's alone.
        note.unlink(missing_ok=True)
        open(note, "w", opener=open_private).close()
    except OSError as error:
        logger.warning("specserve: %s cannot be written (%s); the next start tries again", note, error.strerror)


def _run_in_another_process() -> None:
    command = [sys.executable, "-m", __name__, str(kernel_library.library_path())]
    # An archive's worker has put its own directory on sys.path.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        trial = subprocess.run(  # noqa: S603 - this very module
            command, env=environment, capture_output=True, timeout=_MAX_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Unusable(f"a trial run of them did not end within {_MAX_SECONDS} s") from error
    if trial.returncode < 0:
        raise Unusable(f"they crashed in a trial run ({signal.strsignal(-trial.returncode)})")
    if trial.returncode:
        *_, reason = trial.stderr.decode(errors="replace").splitlines() or ["no reason given"]
        raise Unusable(f"a trial run of them failed ({reason})")


def wrong_results() -> dict[str, float]:
    """Return the too large errors of the variant in use, relative to the root mean square: by format, and of attention.

    Products are compared with llama.cpp's, for any number of rows of a tile and two tiles, and of a mixture of experts.
    """
    errors = {name: _product_error(name) for name in formats()}
    wrong = {name: error for name, error in errors.items() if error > _MAX_ERROR}
    return wrong | ({"attention": error} if (error := _attention_error()) > _MAX_ATTENTION_ERROR else {})


def _product_error(name: str) -> float:
    random, blocks, errors = np.random.default_rng(0), _weights(name, 768, 35), []
    experts = np.stack([blocks, blocks[::-1], np.roll(blocks, 1, axis=0)])
    for rows in range(1, library().specserve_max_tile() + 2):
        # 8 bits hold them without rounding, whether 32 or 256 share a scale.
        x = random.integers(-127, 128, (rows, 768)).astype(np.float32)
        x[:, ::32] = 127
        # In half precision llama.cpp sums up to 32 of a row.
        x *= 2.0 ** np.arange(rows)[:, None] / 2**12
        chosen = np.argsort(random.random((rows, 3)), axis=1)[:, :2].astype(np.int32)
        for arguments in ((blocks, x), (experts, x, chosen)):
            ours, theirs = (product(name, *arguments, threads=2, ours=ours)[0] for ours in (True, False))
            scale = np.sqrt(np.mean(theirs**2, axis=-1, keepdims=True))
            errors.append(float(np.nan_to_num(np.abs(ours - theirs) / scale, nan=np.inf).max()))
    return max(errors)


def _attention_error() -> float:
    """Return the largest error for one row and for several."""
    random, cells = np.random.default_rng(2), np.arange(300)
    keys, values = random.normal(size=(2, 300, 2, 64)).astype(np.float32)
    errors = []
    for rows in range(1, 6):
        queries = random.normal(size=(rows, 6, 64)).astype(np.float32)
        # Every third cell belongs to another sequence, and the last ones are later than the first rows.
        visible = (cells % 3 != 2) & (cells < 300 - rows + np.arange(rows)[:, None] + 1)
        positions = (cells // 3 * 2 + cells % 3).astype(np.int32)
        softcap, sinks = (2.0, random.normal(size=6).astype(np.float32)) if rows == 5 else (0, None)
        of_cells = (keys[:, :1], keys[:, :1, :32]) if rows == 4 else (keys, values)
        found = attend(queries, *of_cells, positions, visible, softcap=softcap, sinks=sinks, threads=2)
        exact = exact_attention(queries, *of_cells, visible, softcap=softcap, sinks=sinks)
        differences = np.inf if found is None else np.nan_to_num(np.abs(found - exact), nan=np.inf)
        errors.append(float(np.max(differences) / np.sqrt(np.mean(exact**2))))
    return max(errors)


def speed(name: str, threads: int) -> float:
    """Return the speed of a format's products relative to llama.cpp's, over a few numbers of rows."""
    blocks = np.tile(_weights(name, _TIMED_K, 16), (_TIMED_COLUMNS // 16, 1))

    def seconds(*, ours: bool) -> float:
        rows = (np.ones((rows, _TIMED_K), np.float32) for rows in _TIMED_ROWS)
        return sum(product(name, blocks, x, threads=threads, ours=ours, repeats=_REPEATS)[1] for x in rows)

    return seconds(ours=False) / seconds(ours=True)


@cache
def _weights(name: str, k: int, columns: int) -> NDArray[np.uint8]:
    return quantised(name, np.random.default_rng(1).normal(size=(columns, k)).astype(np.float32))


def quantised(name: str, weights: FloatArray) -> NDArray[np.uint8]:
    """Quantise weights, shape (columns, k), by llama.cpp as in a GGUF file; returns the bytes of each column."""
    base = ctypes.CDLL("libggml-base.so.0")
    base.ggml_type_name.restype = ctypes.c_char_p
    base.ggml_row_size.restype = ctypes.c_size_t
    base.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
    number = next(n for n in range(64) if (base.ggml_type_name(n) or b"").decode().upper() == name)
    columns, k = weights.shape
    blocks = np.zeros((columns, base.ggml_row_size(number, k)), np.uint8)
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    base.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
    base.ggml_quantize_chunk(number, weights.ctypes.data, blocks.ctypes.data, 0, columns, k, None)
    return blocks


def formats() -> tuple[str, ...]:
    """Return the weight formats of the variant in use, by their numbers, as GGUF files name them."""
    names: list[str] = []
    while name := library().specserve_format(len(names)):
        names.append(name.decode().upper())
    return tuple(names)


def product(
    name: str,
    blocks: NDArray[np.uint8],  # [columns, bytes], or of experts [experts, columns, bytes]
    x: FloatArray,  # [rows, k], or [rows, experts of a row, k]
    chosen: NDArray[np.int32] | None = None,  # [rows, experts of a row]
    *,
    threads: int = 1,
    ours: bool = True,
    repeats: int = 0,  # after the first run
    pieces: int = 1,  # in which the weights are written to their buffer
) -> tuple[FloatArray, float]:
    """Multiply by the variant in use, or by llama.cpp's kernels, in a graph.

    Returns the product, shape (rows, columns) or (rows, experts of a row, columns), and the seconds of the fastest run;
    infinite ones if it failed.
    """
    x, weights = np.ascontiguousarray(x, np.float32), np.ascontiguousarray(blocks)
    rows, columns = len(x), blocks.shape[-2]
    ids = None if chosen is None else np.ascontiguousarray(chosen, np.int32)
    experts = (None, 1, 1, 1) if ids is None else (ids.ctypes.data, len(blocks), ids.shape[1], x[0].size // x.shape[-1])
    out = np.full((*(x.shape[:1] if ids is None else ids.shape), columns), np.nan, np.float32)
    arguments = weights.ctypes.data, pieces, rows, x.ctypes.data, *experts, threads, repeats, out.ctypes.data
    return out, library().specserve_run_product(ours, formats().index(name), x.shape[-1], columns, *arguments)


def attend(
    queries: FloatArray,  # [rows, heads, size]
    keys: FloatArray,  # [cells, key heads, size]
    values: FloatArray,  # [cells, key heads, size of a value]; or of a single head a view of the keys, as in DeepSeek
    positions: NDArray[np.int32],  # [cells]
    visible: NDArray[np.bool_],  # [rows, cells]
    *,
    softcap: float = 0,  # scores are softcap * tanh(score / softcap), as in Gemma 2
    sinks: FloatArray | None = None,  # [heads]: scores of a position more, which has no value, as in gpt-oss
    is_8_bit: bool = False,
    threads: int = 1,
) -> FloatArray | None:
    """Attend by the variant in use, in a graph; shape (rows, heads, size of a value), None if llama.cpp attended."""
    (rows, heads, size), (cells, key_heads, _) = queries.shape, keys.shape
    mask = np.where(visible, np.float16(0), np.float16(-np.inf))
    arrays: list[NDArray[Any]] = [queries.transpose(1, 0, 2), keys, values, positions, mask]
    inputs = [np.ascontiguousarray(array) for array in arrays]
    out = np.full((rows, heads, values.shape[2]), np.nan, np.float32)
    addresses: list[int | None] = [array.ctypes.data for array in inputs]
    addresses.append(None if sinks is None else sinks.ctypes.data)
    if np.may_share_memory(keys, values):
        addresses[2] = None
    numbers = size, values.shape[2], cells, key_heads, heads, rows, size**-0.5, softcap
    return out if library().specserve_attend(*numbers, *addresses, is_8_bit, threads, out.ctypes.data) else None


def exact_attention(
    queries: FloatArray,
    keys: FloatArray,
    values: FloatArray,
    visible: NDArray[np.bool_],
    *,
    softcap: float = 0,
    sinks: FloatArray | None = None,
) -> NDArray[np.float64]:
    """Return in double precision what `attend` approximates."""
    shared = queries.shape[1] // keys.shape[1]
    k, v = (np.repeat(array.astype(np.float64), shared, axis=1) for array in (keys, values))
    scores = np.einsum("rhd,chd->rhc", queries, k) * queries.shape[2] ** -0.5
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(visible[:, None, :], scores, -np.inf)
    sink = np.full(queries.shape[1], -np.inf) if sinks is None else sinks
    most = np.maximum(scores.max(axis=-1), sink)[..., None]
    weights, of_sinks = np.exp(scores - most), np.exp(sink[:, None] - most)
    result: NDArray[np.float64] = np.einsum("rhc,chd->rhd", weights / (weights.sum(-1, keepdims=True) + of_sinks), v)
    return result


def _main(path: Path) -> None:
    """Try the best variant, if the processor has any; what counts first is that this ends."""
    kernel_library.library_path = lambda: path
    if library().specserve_use(b"") and (wrong := wrong_results()):
        sys.exit("wrong results: " + ", ".join(f"{name} (an error of {error:.2g})" for name, error in wrong.items()))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
