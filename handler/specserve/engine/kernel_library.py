"""Loads the library of specserve's kernels (handler/kernels), if it can be trusted with the installed llama-cpp-python.

The library calls internals of llama.cpp by their place in memory, so with a version that it was not built for it would
call wrong functions. Its file says for which version it was built, and that is read before it is loaded.
"""

import ctypes
import hashlib
import importlib.metadata
import os
import re
from functools import lru_cache
from pathlib import Path

from specserve.errors import Unusable

FILE = "libspecserve_kernels.so"
# specserve_built_for of library.cpp.
_BUILT_FOR = re.compile(rb"specserve kernels for llama-cpp-python ([^\0]+)\0")

_INT, _LONG, _POINTER, _TEXT = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p
# The functions of library.cpp: what they return, and their arguments.
_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "use": (_TEXT, [_TEXT]),
    "format": (_TEXT, [_INT]),
    "take": (None, [ctypes.c_uint]),
    "compute_head": (None, [_POINTER, _LONG]),
    "assist": (None, [_POINTER, _LONG]),
    "products": (_LONG, []),
    "attentions": (_LONG, []),
    "growth": (_LONG, []),
    "left": (_LONG, []),
    "type": (_TEXT, [_INT]),
    "max_tile": (_INT, []),
    "run_product": (
        ctypes.c_double,
        [_INT, _INT, _LONG, _LONG, _POINTER, _INT, _LONG, _POINTER, _POINTER, *[_LONG] * 3, _INT, _INT, _POINTER],
    ),
    "attend": (_INT, [*[_LONG] * 6, *[ctypes.c_float] * 2, *[_POINTER] * 6, _INT, _INT, _POINTER]),
    "new_cache": (_POINTER, []),
    "free_cache": (None, [_POINTER]),
    "begin_pass": (None, [_POINTER, _POINTER, _LONG, _POINTER]),
    "cells": (ctypes.POINTER(ctypes.c_int32), [_POINTER]),
    "cell_count": (_LONG, [_POINTER]),
    "cell_bytes": (_LONG, [_POINTER]),
    "save": (None, [_POINTER, _POINTER, _LONG, _POINTER]),
}


def library_path() -> Path:
    """Return where the library should be: beside this module in an archive, else where pip installed it."""
    beside = Path(__file__).with_name(FILE)
    return beside if beside.exists() else _installed(FILE) or beside


def _installed(file: str) -> Path | None:
    """Return where a file of the distribution is that handler/kernels builds."""
    try:
        return Path(str(importlib.metadata.distribution("specserve-kernels").locate_file(f"specserve_kernels/{file}")))
    except importlib.metadata.PackageNotFoundError:
        return None


def check_version() -> None:
    """Raise `Unusable` where no library is built, or one that is not for the installed llama-cpp-python."""
    path = library_path()
    if not path.exists():
        # CMakeLists.txt has noted the reason.
        note = _installed("not_built.txt")
        why = note.read_text(encoding="utf-8") if note and note.exists() else "pip install handler/kernels builds them"
        raise Unusable(f"they were not built ({why})")
    built_for, installed = _BUILT_FOR.search(path.read_bytes()), importlib.metadata.version("llama-cpp-python")
    if built_for is None:
        raise Unusable(f"{path} is not a library of this specserve's kernels")
    if built_for[1].decode() != installed:
        raise Unusable(f"they were built for llama-cpp-python {built_for[1].decode()}, and {installed} is installed")


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Load the library, once.

    Raises:
        Unusable: it is not for the installed llama-cpp-python, the linker refuses it, or it lacks a function.
    """
    # Only now: scripts/serve asks for the path alone, without half a second for llama_cpp and NumPy.
    from specserve.engine.llama_model import start_backend  # noqa: PLC0415

    check_version()
    start_backend()
    try:
        # Makes the symbols of the ggml that llama_cpp has loaded visible to the library.
        for name in ("libggml-base.so.0", "libggml.so.0", "libggml-cpu.so.0"):
            ctypes.CDLL(name, os.RTLD_GLOBAL | os.RTLD_NOLOAD | os.RTLD_NOW)
        return declare(ctypes.CDLL(str(library_path()), os.RTLD_NOW))
    except (OSError, AttributeError) as error:
        raise Unusable(f"{FILE} does not fit specserve or llama-cpp-python ({error})") from error


def declare(found: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the types of the library's functions; returns the library."""
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(found, f"specserve_{name}")
        function.restype, function.argtypes = result, arguments
    return found


def loaded() -> ctypes.CDLL | None:
    return library() if library.cache_info().currsize else None


def checksum() -> str:
    return hashlib.sha256(library_path().read_bytes()).hexdigest()
