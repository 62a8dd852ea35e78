"""What handler/kernels/ggml_internals.h declares of ggml's internals is what each verified llama-cpp-python declares.

`scripts/try_upgrade VERSION` runs this for another version; the message shows the declarations that have changed.
"""

import importlib.metadata
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

import peer_engines
from kernel_products import needs_kernels
from planted import INCLUDE, SOURCES

pytestmark = needs_kernels

HEADER = SOURCES / "ggml_internals.h"
VERIFIED = peer_engines.LOCK.with_name("verified.txt")
FIELDS = {
    "ggml_backend_buffer_type_i": "get_name alloc_buffer get_alignment get_max_size get_alloc_size is_host",
    "ggml_backend_buffer_type": "iface device context",
    "ggml_backend_buffer_i": "free_buffer get_base init_tensor memset_tensor set_tensor get_tensor set_tensor_2d "
    "get_tensor_2d cpy_tensor clear reset",
    "ggml_backend_buffer": "iface buft context size usage",
    "ggml_compute_params": "ith nth wsize wdata threadpool use_ref",
}
VIRTUAL = {
    "ggml::cpu::tensor_traits": "work_size compute_forward",
    "ggml::cpu::extra_buffer_type": "supports_op get_tensor_traits",
}
FUNCTIONS = ("ggml_backend_buffer_init", "ggml_barrier", "ggml_backend_cpu_get_extra_buffer_types")
# Prints offset, size and type of every field, and place in the table and type of every virtual function.
DESCRIBE = """
#include <cstddef>
#include <cstdio>
#include <cstring>
#define SIZE(type) std::printf(#type " has %zu bytes\\n", sizeof(type))
#define FIELD(type, field) print<decltype(type::field)>(#type "::" #field, offsetof(type, field), sizeof(type::field))
#define VIRTUAL(type, function) print_virtual(#type "::" #function, &type::function)
#define FUNCTION(function) print<decltype(&function)>(#function, 0, 0)
template <class Type> void print(const char * name, std::size_t first, std::size_t second) {
    std::printf("%s %zu %zu %s\\n", name, first, second, __PRETTY_FUNCTION__);
}
template <class Member> void print_virtual(const char * name, Member member) {
    std::size_t words[2];
    static_assert(sizeof member == sizeof words);
    std::memcpy(words, &member, sizeof words);
    print<Member>(name, words[0], words[1]);
}
int main() {
"""


def description(headers: Iterable[str], include: Iterable[Path], directory: Path) -> list[str]:
    """What these headers declare, a line for each field and function."""
    program = [f'#include "{header}"' for header in headers] + [DESCRIBE]
    for structure, fields in FIELDS.items():
        program += [f"SIZE({structure});", *(f"FIELD({structure}, {field});" for field in fields.split())]
    for structure, names in VIRTUAL.items():
        program += [f"SIZE({structure});", *(f"VIRTUAL({structure}, {name});" for name in names.split())]
    program += [*(f"FUNCTION({name});" for name in FUNCTIONS), "}"]
    source, binary = directory / "describe.cpp", directory / "describe"
    source.write_text("\n".join(program))
    options = ["-std=c++17", "-O1", "-w", *(f"-I{path}" for path in include)]
    subprocess.run(["g++", *options, str(source), "-o", str(binary)], check=True)
    return subprocess.run([str(binary)], check=True, capture_output=True, text=True).stdout.splitlines()


def ours(directory: Path, text: str) -> list[str]:
    """What ggml_internals.h declares if it has this text."""
    (directory / HEADER.name).write_text(text)
    return description([HEADER.name], [directory, INCLUDE], directory)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What ggml's own headers declare, by version, of the sources that are locked; they are downloaded once."""
    found = {}
    for entry in (peer_engines.locked(peer_engines.LLAMA), *peer_engines.entries(VERIFIED)):
        ggml = peer_engines.unpack(entry) / "package" / "vendor" / "llama.cpp" / "ggml"
        include = [ggml / "include", ggml / "src", ggml / "src" / "ggml-cpu"]
        headers = ["ggml-backend-impl.h", "ggml-cpu-impl.h", "traits.h"]
        version = entry.split(maxsplit=1)[0].partition("==")[2]
        found[version] = description(headers, include, tmp_path_factory.mktemp("theirs"))
    return found


def test_every_declaration_is_that_of_each_verified_version(theirs: dict[str, list[str]], tmp_path: Path) -> None:
    declared = ours(tmp_path, HEADER.read_text())
    assert theirs == dict.fromkeys(theirs, declared)
    [line] = re.findall(r"kVerified\[\] = \{(.*)\};", HEADER.read_text())
    assert set(re.findall(r'"(.*?)"', line)) == set(theirs)
    assert importlib.metadata.version("llama-cpp-python") in theirs


CLEAR, RESET = "    void (*clear)(ggml_backend_buffer_t, uint8_t);\n", "    void (*reset)(ggml_backend_buffer_t);\n"
PLANTED = {
    "functions that have changed places": (CLEAR + RESET, RESET + CLEAR),
    "a field that was added": ("    void * context;\n};", "    void * context;\n    void * added;\n};"),
    "a virtual function that was added": ("bool supports_op(", "bool added();\n virtual bool supports_op("),
    "another argument of a virtual function": ("ggml_tensor * op, size_t & size", "ggml_tensor * op, size_t * size"),
    "fields that have changed places": ("int ith, nth;", "int nth, ith;"),
    "another argument of a function": ("ggml_backend_buffer_i, void *", "const ggml_backend_buffer_i &, void *"),
}


@pytest.mark.parametrize("difference", PLANTED)
def test_a_planted_difference_is_found(difference: str, theirs: dict[str, list[str]], tmp_path: Path) -> None:
    text = HEADER.read_text()
    right, wrong = PLANTED[difference]
    assert text.count(right) == 1
    assert ours(tmp_path, text.replace(right, wrong)) not in theirs.values()


def test_nothing_is_declared_that_is_not_compared() -> None:
    text = HEADER.read_text()
    assert set(re.findall(r"^struct (\w+) \{", text, re.MULTILINE)) == set(FIELDS)
    assert set(re.findall(r"^class (\w+) \{", text, re.MULTILINE)) == {name.rpartition(":")[2] for name in VIRTUAL}
    assert set(re.findall(r"\b(ggml_\w+)\((?!\*)", text)) == set(FUNCTIONS)
