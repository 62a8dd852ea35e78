"""The kernels' library for aarch64, cross-compiled with llama.cpp's and run by qemu."""

import ctypes
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf

import peer_engines
import roof
from planted import SOURCES

COMPILER, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
PACKAGES = {COMPILER: "g++-aarch64-linux-gnu", QEMU: "qemu-user-static"}
_SYSTEM = (
    "-GNinja",
    # CMake would keep the one of the environment that built ggml first.
    f"-DCMAKE_MAKE_PROGRAM={Path(sys.executable).with_name('ninja')}",
    "-DCMAKE_SYSTEM_NAME=Linux",
    "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
    f"-DCMAKE_CXX_COMPILER={COMPILER}",
    "-DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc",
)
# llama.cpp for the oldest processor, and of it only ggml.
_GGML = (
    *(f"-DGGML_{option}=OFF" for option in ("CCACHE", "LLAMAFILE", "NATIVE", "OPENMP")),
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("COMMON", "EXAMPLES", "SERVER", "TESTS", "TOOLS")),
    "-DCMAKE_BUILD_TYPE=Release",
)


def build(directory: Path) -> Path:
    """Build the library and a program that calls it; returns the program. ggml is built once, in two minutes."""
    log, kernels = directory / "log", directory / "kernels"
    home = peer_engines.unpack(peer_engines.locked(peer_engines.LLAMA))
    ggml = home / "aarch64"

    def run(*command: str | Path) -> None:
        peer_engines.run_logged([*command], log)

    run("cmake", "-S", home / "package" / "vendor" / "llama.cpp", "-B", ggml, *_SYSTEM, *_GGML)
    run("cmake", "--build", ggml, "--target", "ggml")
    run("cmake", "-S", SOURCES, "-B", kernels, *_SYSTEM, f"-DPython_EXECUTABLE={sys.executable}")
    run("cmake", "--build", kernels)
    libraries = [
        kernels / "libspecserve_kernels.so",
        *(ggml / "bin" / f"libggml{part}.so" for part in ("", "-cpu", "-base")),
    ]
    paths = [f"-Wl,-rpath,{library.parent}" for library in libraries]
    program = directory / "program"
    run(COMPILER, "-std=c++20", Path(__file__).with_suffix(".cpp"), roof.SOURCE, *libraries, *paths, "-o", program)
    return program


class EmulatedLibrary:
    """What kernel_trial calls of the library, by a program that qemu runs on one of its processors."""

    def __init__(self, program: Path, processor: str) -> None:
        command: list[str | Path] = [QEMU, "-L", "/usr/aarch64-linux-gnu", "-cpu", processor, program]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def specserve_use(self, name: bytes) -> bytes:
        return self._text(0, inputs=[name + b"\0"])

    def specserve_take(self, formats: int) -> None:
        """It loads no models."""

    def specserve_format(self, number: int) -> bytes:
        return self._text(1, number)

    def specserve_max_tile(self) -> int:
        return int(self._call(2)[0])

    def specserve_run_product(self, *arguments: Any) -> float:
        ours, number, k, columns, weights, pieces, rows, x, *of_experts, threads, repeats, out = arguments
        chosen, experts, used, inputs = of_experts
        length, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.specserve_format(number).decode().upper()]]
        sizes = experts * columns * k // length * size, 4 * rows * inputs * k, 4 * rows * used
        sent = list(map(ctypes.string_at, (weights, x, chosen), sizes[: 2 if chosen is None else 3]))
        numbers = ours, number, k, columns, pieces, rows, experts, used, inputs, threads, repeats
        seconds, result = self._call(3, *numbers, inputs=sent, output=4 * rows * used * columns)
        ctypes.memmove(out, result, len(result))
        return seconds

    def specserve_attend(self, *arguments: Any) -> float:
        size, value_size, cells, key_heads, heads, rows, scale, softcap, *addresses, is_8_bit, threads, out = arguments
        result_bytes, in_cache = 4 * rows * heads * value_size, 4 * cells * key_heads
        sizes = 4 * rows * heads * size, in_cache * size, in_cache * value_size, 4 * cells, 2 * rows * cells, 4 * heads
        inputs = [ctypes.string_at(*part) if part[0] else b"" for part in zip(addresses, sizes, strict=True)]
        numbers = size, value_size, cells, key_heads, heads, rows, is_8_bit, threads
        came, result = self._call(4, *numbers, floats=(scale, softcap), inputs=inputs, output=result_bytes)
        ctypes.memmove(out, result, len(result))
        return came

    def dot_peak(self, variant: str) -> float:
        return self._call(5, inputs=[variant.encode() + b"\0"])[0]

    def _text(self, what: int, *numbers: int, inputs: list[bytes] | None = None) -> bytes:
        return self._call(what, *numbers, inputs=inputs, output=16)[1].rstrip(b"\0")

    def _call(
        self,
        what: int,
        *numbers: int,
        floats: tuple[float, float] = (0, 0),
        inputs: list[bytes] | None = None,
        output: int = 0,
    ) -> tuple[float, bytes]:
        """As `Call` of emulated.cpp; returns the result, and the bytes of the output."""
        buffers = (inputs or []) + [b""] * (6 - len(inputs or [])) + [bytes(output)]
        padded = (*numbers, *[0] * (11 - len(numbers)))
        call = struct.pack("=iff4x11q7q", what, *floats, *padded, *map(len, buffers))
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(call + b"".join(buffers))
        self._process.stdin.flush()
        answer = self._process.stdout.read(8 + output)
        assert len(answer) == 8 + output, f"the program ended: {self._process.wait()}"
        return struct.unpack_from("d", answer)[0], answer[8:]
