"""Loads the library of specserve's kernels (handler/kernels), if it can be trusted with the installed llama-cpp-python.

The library calls internals of llama.cpp by their place in memory, so with a version that it was not built for it would
call wrong functions. Its file says for which version it was built, and that is read before it is loaded. A new pair of
library and llama-cpp-python first computes in a process of its own, so that a crash costs the kernels and not the
server.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import logging
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from specserve.config import cache_directory, processor

logger = logging.getLogger(__name__)

FILE = "libspecserve_kernels.so"
# In the order of `enum class Format` in kernels.h.
FORMATS = ("Q4_0", "Q8_0", "Q4_K", "Q6_K")
# specserve_built_for of library.cpp.
_BUILT_FOR = re.compile(rb"specserve kernels for llama-cpp-python ([^\0]+)\0")
# The trial takes half a second, and a few beside busy neighbours; one that takes so long hangs.
_MAX_TRIAL_SECONDS = 60
# Two threads meet at ggml's barrier.
_TRIAL_THREADS = 2


class Unusable(Exception):
    """The kernels cannot be used, for the reason that the message gives."""


def library_path() -> Path:
    """Return where the library should be: beside this module in an archive, else where pip installed it."""
    beside = Path(__file__).with_name(FILE)
    return beside if beside.exists() else _installed(FILE) or beside


def _installed(file: str) -> Path | None:
    """Return where a file of the distribution is that handler/kernels builds; None if that is not installed."""
    try:
        return Path(str(importlib.metadata.distribution("specserve-kernels").locate_file(f"specserve_kernels/{file}")))
    except importlib.metadata.PackageNotFoundError:
        return None


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Load the library, once.

    Raises:
        Unusable: it was not built, or not for the installed llama-cpp-python, or it failed its trial run.
    """
    path = library_path()
    if not path.exists():
        raise Unusable(f"they were not built ({_why_not_built()})")
    content = path.read_bytes()
    built_for, installed = _BUILT_FOR.search(content), importlib.metadata.version("llama-cpp-python")
    if built_for is None:
        raise Unusable(f"{path} is not a library of this specserve's kernels")
    if built_for[1].decode() != installed:
        raise Unusable(f"they were built for llama-cpp-python {built_for[1].decode()}, and {installed} is installed")
    _try_out(path, f"{checksum()} {installed} {processor()}")
    return load(path)


def loaded() -> ctypes.CDLL | None:
    """Return the library if this process has loaded it."""
    return library() if library.cache_info().currsize else None


def checksum() -> str:
    """Return the SHA-256 of the library's file."""
    return _checksum(library_path().read_bytes())


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _why_not_built() -> str:
    """Return the reason that CMakeLists.txt has noted."""
    note = _installed("not_built.txt")
    if note is None or not note.exists():
        return "pip install handler/kernels builds them"
    return note.read_text(encoding="utf-8")


def load(path: Path) -> ctypes.CDLL:
    """Load a library for the installed llama-cpp-python.

    Raises:
        Unusable: the linker refuses it, or it lacks a function.
    """
    # Only now: scripts/serve asks for the path alone, without half a second for llama_cpp and NumPy.
    from specserve.engine.llama_model import start_backend  # noqa: PLC0415

    start_backend()
    try:
        # Makes the symbols of the ggml that llama_cpp has loaded visible to the library.
        for name in ("libggml-base.so.0", "libggml.so.0", "libggml-cpu.so.0"):
            ctypes.CDLL(name, os.RTLD_GLOBAL | os.RTLD_NOLOAD | os.RTLD_NOW)
        return declare(ctypes.CDLL(str(path), os.RTLD_NOW))
    except (OSError, AttributeError) as error:
        raise Unusable(f"{path.name} does not fit specserve or llama-cpp-python ({error})") from error


def declare(found: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the types of library.cpp's functions that are not plain ints; returns the library."""
    found.specserve_use.restype = ctypes.c_char_p
    found.specserve_use.argtypes = [ctypes.c_char_p]
    found.specserve_take.argtypes = [ctypes.c_uint]
    found.specserve_products.restype = found.specserve_attentions.restype = ctypes.c_int64
    found.specserve_check_product.restype = found.specserve_check_attention.restype = ctypes.c_double
    found.specserve_check_product.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int]
    found.specserve_check_attention.argtypes = [ctypes.c_int, ctypes.c_int]
    found.specserve_prefetch.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    two, sizes = [ctypes.c_int, ctypes.c_int], [ctypes.c_int64, ctypes.c_int64]
    found.specserve_time_product.restype = found.specserve_run_product.restype = ctypes.c_double
    found.specserve_time_product.argtypes = [*two, *sizes, ctypes.c_int, *two]
    pointer = ctypes.c_void_p
    found.specserve_run_product.argtypes = [*two, *sizes, pointer, *two, pointer, ctypes.c_int, pointer]
    found.specserve_time_prefetch.restype = None
    found.specserve_time_prefetch.argtypes = [ctypes.c_int, *sizes, *two, ctypes.c_int, pointer, ctypes.c_int, pointer]
    found.specserve_assist.restype = None
    found.specserve_assist.argtypes = [pointer, ctypes.c_int64]
    found.specserve_compute_head.restype = found.specserve_begin_pass.restype = None
    found.specserve_compute_head.argtypes = [pointer, ctypes.c_int64]
    found.specserve_attend.argtypes = [*[ctypes.c_int64] * 5, ctypes.c_float, *[pointer] * 5, *two, pointer]
    found.specserve_new_cache.restype = pointer
    found.specserve_free_cache.argtypes = [pointer]
    found.specserve_free_cache.restype = found.specserve_save.restype = None
    found.specserve_begin_pass.argtypes = [pointer, pointer, ctypes.c_int64, pointer]
    found.specserve_cells.restype = ctypes.POINTER(ctypes.c_int32)
    found.specserve_cell_count.restype = found.specserve_cell_bytes.restype = ctypes.c_int64
    found.specserve_cells.argtypes = found.specserve_cell_count.argtypes = [pointer]
    found.specserve_cell_bytes.argtypes = [pointer]
    found.specserve_save.argtypes = [pointer, pointer, ctypes.c_int64, pointer]
    return found


def _try_out(path: Path, conditions: str) -> None:
    """Let the library compute in another process, unless that has ended well before under these conditions.

    Raises:
        Unusable: that process crashed, failed or did not end.
    """
    note = cache_directory() / "kernels" / _checksum(conditions.encode())[:32]
    with suppress(OSError):
        if note.exists():
            return
    command = [sys.executable, "-m", __name__, str(path)]
    # An archive's worker has put its own directory on sys.path.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        trial = subprocess.run(  # noqa: S603 - this very module
            command, env=environment, capture_output=True, timeout=_MAX_TRIAL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Unusable(f"a trial run of them did not end within {_MAX_TRIAL_SECONDS} s") from error
    except OSError as error:
        raise Unusable(f"a trial run of them cannot be started ({error.strerror})") from error
    if trial.returncode < 0:
        name = next((known.name for known in signal.Signals if known == -trial.returncode), str(-trial.returncode))
        raise Unusable(f"they crashed in a trial run ({name})")
    if trial.returncode:
        *_, reason = trial.stderr.decode(errors="replace").splitlines() or ["no reason given"]
        raise Unusable(f"a trial run of them failed ({reason})")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()
    except OSError as error:
        logger.warning("specserve: %s cannot be written (%s); the next start tries again", note, error.strerror)


def _compute(path: Path) -> None:
    """Compute by way of llama.cpp what a forward pass does, all formats and attention; what counts is that it ends."""
    found = load(path)
    # The best variant; none if this processor has none.
    if found.specserve_use(b"") is not None:
        for rows in (1, found.specserve_max_tile() + 1):
            for number in range(len(FORMATS)):
                found.specserve_check_product(number, rows, _TRIAL_THREADS)
            found.specserve_check_attention(rows, _TRIAL_THREADS)


if __name__ == "__main__":
    _compute(Path(sys.argv[1]))
