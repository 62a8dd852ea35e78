"""What a machine could do at most: bytes read from memory, and products of bytes, a second (roof.cpp)."""

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("roof.cpp")


class Roof(NamedTuple):
    """The roofline of a machine for one variant of our kernels."""

    bytes_per_second: float  # memory read bandwidth
    products_per_second: float  # peak of 8-bit multiply-adds by the variant's dot-product instructions


def measure_roof(threads: int, variant: str) -> Roof:
    """Measure the roofline in a fraction of a second; the first call in a process compiles roof.cpp."""
    library = _library()
    return Roof(library.read_bandwidth(threads), library.dot_peak(threads, variant.encode()))


@cache
def _library() -> ctypes.CDLL:
    command = ["c++", "-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"]
    with tempfile.TemporaryDirectory() as directory:
        built = f"{directory}/roof.so"
        subprocess.run([*command, SOURCE, "-o", built], check=True)
        library = ctypes.CDLL(built)
    library.read_bandwidth.restype = library.dot_peak.restype = ctypes.c_double
    library.read_bandwidth.argtypes = [ctypes.c_int]
    library.dot_peak.argtypes = [ctypes.c_int, ctypes.c_char_p]
    return library
