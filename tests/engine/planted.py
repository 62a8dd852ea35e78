"""Builds the kernels with planted faults."""

from __future__ import annotations

import ctypes
import importlib.metadata
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from specserve.engine import kernel_library

SOURCES = Path(__file__).parents[2] / "handler" / "kernels"


@pytest.fixture(scope="module")
def build_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ctypes.CDLL]:
    """A function that builds a library in whose avx2 variant one piece of source is replaced."""
    directory = tmp_path_factory.mktemp("planted")
    include = importlib.metadata.distribution("llama-cpp-python").locate_file("include")
    version = f'-DSPECSERVE_BUILT_FOR="{importlib.metadata.version("llama-cpp-python")}"'
    common = ["g++", "-std=c++17", "-O1", "-fPIC", f"-I{include}", f"-I{SOURCES}", version]
    (directory / "others.cpp").write_text(
        '#include "kernels.h"\n'
        "const specserve::Kernels * specserve::avx512_vnni() { return nullptr; }\n"
        "const specserve::Kernels * specserve::avx_vnni() { return nullptr; }\n"
    )
    unchanged = [
        directory / "others.cpp",
        *(source for source in SOURCES.glob("*.cpp") if not source.name.startswith("avx")),
    ]
    objects = []
    for source in unchanged:
        objects.append(str(directory / f"{source.stem}.o"))
        subprocess.run([*common, "-c", str(source), "-o", objects[-1]], check=True)

    def build(right: str, wrong: str, *options: str, header: str = "product.h") -> ctypes.CDLL:
        text = (SOURCES / header).read_text()
        assert text.count(right) == 1
        build_directory = directory / f"{abs(hash(right))}"
        build_directory.mkdir()
        for source in (*SOURCES.glob("*.h"), SOURCES / "avx2.cpp"):
            shutil.copy(source, build_directory)
        (build_directory / header).write_text(text.replace(right, wrong))
        vector = ["-mavx2", "-mfma", "-mf16c", "-shared", str(build_directory / "avx2.cpp"), *objects]
        subprocess.run(
            [*common, *options, f"-I{build_directory}", *vector, "-o", str(build_directory / "wrong.so")], check=True
        )
        found = kernel_library.declare(ctypes.CDLL(str(build_directory / "wrong.so")))
        assert found.specserve_use(b"avx2")
        return found

    return build
