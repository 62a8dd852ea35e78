"""What a machine could do at most: bytes read from memory, and products of bytes, a second (roof.cpp)."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from specserve.errors import EnvironmentFailure

SOURCE = Path(__file__).with_name("roof.cpp")


class Roof(NamedTuple):
    """The roofline of a machine for one variant of our kernels.

    Args:
        bytes_per_second: memory read bandwidth.
        products_per_second: peak of 8-bit multiply-adds by the variant's dot-product instructions.
    """

    bytes_per_second: float
    products_per_second: float


def measure_roof(threads: int, variant: str, source: Path = SOURCE) -> Roof:
    """Measure the roofline in a fraction of a second; the source is built before, once in a process.

    Raises:
        EnvironmentFailure: there is no C++ compiler, or it refuses the source.
    """
    library = _library(source)
    return Roof(library.read_bandwidth(threads), library.dot_peak(threads, variant.encode()))


@lru_cache
def _library(source: Path) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as directory:
        built = Path(directory) / "roof.so"
        command = ["c++", "-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"]
        try:
            outcome = subprocess.run(
                [*command, str(source), "-o", str(built)], capture_output=True, text=True, check=False
            )
        except FileNotFoundError as error:
            raise EnvironmentFailure("c++ is not on PATH, and roof.cpp is built here; install a compiler.") from error
        if outcome.returncode:
            raise EnvironmentFailure(f"c++ refuses {source}: {(outcome.stderr.splitlines() or ['no reason given'])[0]}")
        library = ctypes.CDLL(str(built))
    library.read_bandwidth.restype = library.dot_peak.restype = ctypes.c_double
    library.read_bandwidth.argtypes = [ctypes.c_int]
    library.dot_peak.argtypes = [ctypes.c_int, ctypes.c_char_p]
    return library
