"""Builds the kernels with planted faults."""

import ctypes
import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from specserve.engine import kernel_library, kernels

SOURCES = Path(__file__).parents[2] / "handler" / "kernels"
# Of llama.cpp, as llama-cpp-python installs it.
INCLUDE = Path(str(importlib.metadata.distribution("llama-cpp-python").locate_file("include")))


@cache
def _common(directory: Path) -> tuple[list[str], list[str]]:
    """The command of the compiler, and what it makes of all sources but those of the variants."""
    version = f'-DSPECSERVE_BUILT_FOR="{importlib.metadata.version("llama-cpp-python")}"'
    common = ["g++", "-std=c++20", "-O1", "-fPIC", f"-I{INCLUDE}", version]
    directory.mkdir()
    (directory / "others.cpp").write_text(
        '#include "kernels.h"\n'
        "const specserve::Kernels * specserve::avx512_vnni() { return nullptr; }\n"
        "const specserve::Kernels * specserve::avx_vnni() { return nullptr; }\n"
    )
    sources = [source for source in SOURCES.glob("*.cpp") if source.stem not in kernels.VARIANTS]
    objects = []
    for source in [directory / "others.cpp", *sources]:
        objects.append(str(directory / f"{source.stem}.o"))
        subprocess.run([*common, f"-I{SOURCES}", "-c", str(source), "-o", objects[-1]], check=True)
    return common, objects


@pytest.fixture(scope="module")
def build_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ctypes.CDLL]:
    """A function that builds a library in whose avx2 variant some pieces of headers are replaced."""
    if platform.machine() != "x86_64":
        pytest.skip("faults are planted into the avx2 variant: run these tests on x86-64")
    common, objects = _common(tmp_path_factory.getbasetemp() / "objects")
    directory = tmp_path_factory.mktemp("planted")

    def build(name: str, *changes: tuple[str, str, str], options: tuple[str, ...] = ()) -> ctypes.CDLL:
        copy = directory / name
        copy.mkdir()
        for source in (*SOURCES.glob("*.h"), SOURCES / "avx2.cpp"):
            shutil.copy(source, copy)
        for header, right, wrong in changes:
            text = (copy / header).read_text()
            assert text.count(right) == 1, right
            (copy / header).write_text(text.replace(right, wrong))
        vector = ["-mavx2", "-mfma", "-mf16c", "-shared", str(copy / "avx2.cpp"), *objects]
        subprocess.run([*common, *options, f"-I{copy}", *vector, "-o", str(copy / "wrong.so")], check=True)
        found = kernel_library.declare(ctypes.CDLL(str(copy / "wrong.so")))
        # It stays in llama.cpp's list of buffer types, and accepts no tensor of a model.
        assert found.specserve_use(b"avx2")
        return found

    return build
