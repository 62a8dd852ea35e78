"""Imports point one way: from the server to the algorithms, without cycles."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "handler" / "specserve"

# What each package may import of specserve, besides its own modules.
ALLOWED = {
    "errors": set(),
    "config": {"errors", "cores"},
    "cgroups": set(),
    "cores": {"errors", "cgroups"},
    "memory": {"cgroups"},
    "shares": set(),
    "private_file": set(),
    "sequence": {"errors"},
    "kv_cache": {"errors", "sequence", "engine.base"},
    "engine": {"errors", "sequence", "config", "cores", "private_file", "sampling.distribution"},
    "sampling": {"errors", "sequence"},
    "grammar": {"errors", "sequence", "engine.base"},
    "speculation": {"errors", "sequence", "shares", "kv_cache", "config", "private_file", "engine.base", "sampling"},
    "observability": {"errors", "config", "private_file", "sequence", "speculation.step"},
    "serving": {
        "errors",
        "sequence",
        "shares",
        "kv_cache",
        "config",
        "cores",
        "memory",
        "observability",
        "engine",
        "grammar",
        "sampling",
        "speculation",
    },
    "tools": {"errors", "sequence", "kv_cache", "config", "cores", "engine", "speculation"},
}
# Algorithms that import NumPy and the standard library only.
PURE = tuple(
    f"{name}.py"
    for name in (
        *("errors", "sequence", "sampling/distribution", "sampling/noise", "sampling/logits", "speculation/rejection"),
        *("speculation/cost", "speculation/charges", "speculation/acceptance", "speculation/gain"),
        *("speculation/alternatives", "speculation/answer_length", "speculation/policy", "speculation/step"),
        "engine/base",
    )
)
# The modules that may import a library.
OWNERS = {
    "llama_cpp": {"engine/llama.py", "engine/llama_model.py", "engine/thread_pool.py"},
    "llguidance": {"grammar/compiler.py", "grammar/constraint.py"},
    "ts": {"serving/torchserve_types.py"},
}


def modules() -> list[Path]:
    """Every module of the package."""
    return sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def imports(path: Path) -> Iterator[str]:
    """The absolute names a module imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def name_of(path: Path) -> str:
    """A module's path below the package."""
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_module_imports_only_allowed_packages(path: Path) -> None:
    package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name in imports(path):
        if not name.startswith("specserve."):
            continue
        target = name.removeprefix("specserve.")
        inside = target == package or target.startswith(f"{package}.")
        allowed = any(target == entry or target.startswith(f"{entry}.") for entry in ALLOWED[package])
        assert inside or allowed, f"{name_of(path)} imports {name}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_module_uses_nothing_from_tests(path: Path) -> None:
    of_tests = {module.stem for module in (PACKAGE.parents[1] / "tests").rglob("*.py")}
    assert not {name.split(".")[0] for name in imports(path)} & of_tests
    constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    assert not [text for text in constants if isinstance(text, str) and re.match(r"tests(/\S*)?$", text)]


def test_imports_have_no_cycles() -> None:
    """Between modules; serving/openai counts as one."""
    units = {path: name_of(path).removesuffix(".py").replace("/", ".") for path in modules()}
    units = {path: "serving.openai" if name.startswith("serving.openai.") else name for path, name in units.items()}
    graph: dict[str, set[str]] = {}
    for path, unit in units.items():
        names = {name.removeprefix("specserve.") for name in imports(path)}
        others = {"serving.openai" if name.startswith("serving.openai.") else name for name in names}
        graph.setdefault(unit, set()).update((others & set(units.values())) - {unit})
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("name", PURE)
def test_pure_module_imports_only_numpy_and_the_standard_library(name: str) -> None:
    pure = {f"specserve.{module.removesuffix('.py').replace('/', '.')}" for module in PURE}
    others = {module for module in imports(PACKAGE / name) if module not in pure}
    assert {module.split(".")[0] for module in others} <= sys.stdlib_module_names | {"numpy"}


@pytest.mark.parametrize("library", OWNERS)
def test_library_is_imported_only_by_its_owners(library: str) -> None:
    users = {name_of(path) for path in modules() if any(n.split(".")[0] == library for n in imports(path))}
    assert users <= OWNERS[library]
