"""The library of the kernels is loaded only if it is for the installed llama-cpp-python, and has run elsewhere."""

import ctypes
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernel_products import FORMATS, needs_kernels
from planted import INCLUDE, SOURCES
from specserve.engine import kernel_library, kernel_trial, kernels
from specserve.errors import Unusable

pytestmark = needs_kernels

INSTALLED = importlib.metadata.version("llama-cpp-python")
MARKER = f"specserve kernels for llama-cpp-python {INSTALLED}"


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is loaded, and no trial run has been noted; afterwards the real library is loaded."""
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "cache"))
    kernel_library.library.cache_clear()
    yield
    monkeypatch.undo()
    kernel_library.library.cache_clear()
    kernel_library.library()


@pytest.fixture
def be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """A function that writes the file that is taken for the library."""
    path = tmp_path / kernel_library.FILE

    def write(content: bytes) -> None:
        # A file of its own: the one before may be mapped.
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        monkeypatch.setattr(kernel_library, "library_path", lambda: path)

    return write


def compiled(directory: Path, fault: str) -> bytes:
    """A library for the installed llama-cpp-python that does this when it is first used."""
    names = [name for name in kernel_library._FUNCTIONS if name not in {"use", "format"}]
    functions = "".join(f"double specserve_{name}() {{ return 0; }}\n" for name in names)
    (directory / "library.cpp").write_text(
        "#include <csignal>\n#include <cstdlib>\n#include <unistd.h>\n"
        f'extern "C" {{\nextern const char built_for[];\nconst char built_for[] = "{MARKER}";\n{functions}'
        "const char * specserve_format(int) { return nullptr; }\n"
        f"const char * specserve_use(const char *) {{ {fault}; return nullptr; }}\n}}\n"
    )
    command = ["g++", "-shared", "-fPIC", str(directory / "library.cpp"), "-o", str(directory / "library.so")]
    subprocess.run(command, check=True)
    return (directory / "library.so").read_bytes()


def test_a_library_for_another_version_is_refused_before_it_is_loaded(be: Callable[[bytes], None]) -> None:
    """This one cannot even be loaded."""
    be(b"...specserve kernels for llama-cpp-python 9.9\0...")
    chosen = kernels.use("auto")
    assert chosen.variant is None
    assert f"built for llama-cpp-python 9.9, and {INSTALLED} is installed" in chosen.sentence


def test_the_library_is_refused_after_llama_cpp_python_was_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == "llama-cpp-python" else real(name))
    assert f"built for llama-cpp-python {INSTALLED}, and 9.9 is installed" in kernels.use("auto").sentence


@pytest.fixture
def unverified(tmp_path: Path) -> Path:
    """The kernels' sources as they are when llama-cpp-python has been changed and nobody has looked at its sources."""
    sources = tmp_path / "kernels"
    shutil.copytree(SOURCES, sources)
    header = sources / "ggml_internals.h"
    changed, number = re.subn(r"(kVerified\[\] =) \{.*\}", r'\1 {"0.3.1", "0.3.2"}', header.read_text())
    assert number == 1
    header.write_text(changed)
    return sources


def test_nothing_is_built_for_a_version_that_is_not_verified_and_the_server_says_so(
    unverified: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, installed = tmp_path / "build", tmp_path / "installed"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    configure = ["-S", str(unverified), "-B", str(build), f"-DPython_EXECUTABLE={sys.executable}", "-G", "Ninja"]
    for step in (configure, ["--build", str(build)], ["--install", str(build), "--prefix", str(installed)]):
        subprocess.run(["cmake", *step], check=True, env=environment, capture_output=True)
    distribution = SimpleNamespace(locate_file=installed.joinpath)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _name: distribution)
    assert not kernel_library.library_path().exists()
    reason = f"they are verified for llama-cpp-python 0.3.1, 0.3.2, and {INSTALLED} was installed"
    assert kernels.use("auto").sentence == f"llama.cpp's own kernels compute: they were not built ({reason})"


def test_a_compiler_refuses_a_version_that_is_not_verified(unverified: Path) -> None:
    """As of a build without CMakeLists.txt."""
    options = ["-std=c++17", "-fsyntax-only", f"-I{INCLUDE}", f'-DSPECSERVE_BUILT_FOR="{INSTALLED}"']
    for sources, accepted in ((SOURCES, True), (unverified, False)):
        command = ["g++", *options, str(sources / "library.cpp")]
        outcome = subprocess.run(command, check=False, capture_output=True, text=True)
        assert (outcome.returncode == 0) == accepted
        assert ("is not verified for this llama-cpp-python" in outcome.stderr) != accepted


FAULTS = {
    "std::raise(SIGSEGV)": "they crashed in a trial run (Segmentation fault)",
    "std::abort()": "they crashed in a trial run (Aborted)",
    "sleep(600)": "a trial run of them did not end within 2 s",
    'write(2, "wrong slot", 10); _exit(3)': "a trial run of them failed (wrong slot)",
}


def test_a_library_that_fails_in_another_process_is_not_loaded(
    be: Callable[[bytes], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every start, for what killed the trial may have been something else."""
    for fault, reason in [*FAULTS.items(), *list(FAULTS.items())[:1]]:
        be(compiled(tmp_path, fault))
        monkeypatch.setattr(kernel_trial, "_MAX_SECONDS", 2 if "sleep" in fault else 60)
        assert kernels.use("auto").sentence == f"llama.cpp's own kernels compute: {reason}"
        assert kernel_library.loaded() is None


def test_a_library_is_tried_until_it_has_passed(
    be: Callable[[bytes], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials: list[list[str]] = [["attention is wrong"], []]

    def run() -> None:
        for reason in trials.pop(0):
            raise Unusable(reason)

    monkeypatch.setattr(kernel_trial, "_run_in_another_process", run)
    assert kernels.use("auto").sentence == "llama.cpp's own kernels compute: attention is wrong"
    for _ in range(2):
        assert kernels.use("auto").formats == FORMATS
    be(compiled(tmp_path, ""))
    with pytest.raises(IndexError):
        kernels.use("auto")
    kernels.use("off")


def test_the_trial_finds_nothing_wrong_with_the_kernels() -> None:
    kernel_trial.run()


def test_a_cache_that_cannot_be_written_costs_a_trial_at_every_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(kernel_trial, "_run_in_another_process", dict)
    kernel_trial.run()
    assert "the next start tries again" in caplog.text


def test_without_a_usable_library_llama_cpps_kernels_are_used_with_a_reason(
    be: Callable[[bytes], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_trial, "_run_in_another_process", dict)

    def reason() -> str:
        chosen = kernels.use("auto")
        assert chosen.variant is None
        assert kernels.in_use() == chosen
        return chosen.sentence

    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda *_arguments: object())
        assert "does not fit" in reason()
    be(b"no library")
    assert "is not a library of this specserve's kernels" in reason()
    (tmp_path / kernel_library.FILE).unlink()
    assert "they were not built" in reason()


def test_kernels_off_loads_no_library(be: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch) -> None:
    be(b"no library")
    monkeypatch.delattr(subprocess, "run")
    assert kernels.use("off").sentence == "llama.cpp's own kernels compute: `kernels: off`"
    assert kernels.calls() == (0, 0)
