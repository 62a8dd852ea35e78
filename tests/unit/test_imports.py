"""Imports point one way: from the server to the algorithms, without cycles."""

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "handler" / "specserve"

# What each package may import of specserve, besides its own modules.
ALLOWED = {
    "errors": "",
    "config": "errors machine",
    "machine": "errors",
    "shares": "",
    "private_file": "",
    "sequence": "errors",
    "engine": "errors sequence config machine private_file sampling.distribution",
    "sampling": "errors sequence",
    "grammar": "errors sequence engine.base",
    "speculation": "errors sequence shares config machine private_file sampling engine.base engine.kv_cache",
    "observability": "errors config private_file sequence speculation.step",
    "weights": "errors config engine",
    "core": (
        "errors sequence shares config machine observability.records engine grammar sampling speculation weights.find"
    ),
    "api": "errors sequence shares config observability engine grammar speculation core",
    "torchserve": "errors config observability speculation core api",
    "cli": "__version__ errors sequence config machine core.pool engine speculation weights",
}
# Algorithms that import NumPy and the standard library only.
PURE = (
    *("errors", "sequence", "shares", "engine.base", "sampling.distribution", "sampling.noise", "sampling.logits"),
    *("speculation.rejection", "speculation.costs", "speculation.acceptance", "speculation.alternatives"),
    *("speculation.ngram", "speculation.policy", "speculation.proposers", "speculation.step"),
)
# The modules that may import a library.
OWNERS = {
    "llama_cpp": {"engine/llama.py", "engine/llama_model.py", "engine/recurrent.py", "engine/thread_pool.py"},
    "llguidance": {"grammar/compiler.py", "grammar/constraint.py"},
    "ts": {"torchserve/types.py"},
}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # A module of a package, or what a module has.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_modules_import_only_allowed_packages() -> None:
    """In particular: core knows no protocol, and only torchserve knows TorchServe."""
    for path in MODULES:
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        allowed = tuple(f"specserve.{entry}." for entry in (package, *ALLOWED[package].split()))
        for name in imports(path):
            is_ours = name.startswith("specserve.")
            assert not is_ours or f"{name}.".startswith(allowed), f"{name_of(path)} imports {name}"


def test_imports_have_no_cycles() -> None:
    units = {name_of(path).removesuffix(".py").replace("/", "."): path for path in MODULES}
    graph = TopologicalSorter[str]()
    for unit, path in units.items():
        names = [name.removeprefix("specserve.") for name in imports(path)]
        graph.add(unit, *units.keys() & {*names, *(name.rpartition(".")[0] for name in names)})
    graph.prepare()


def test_pure_modules_import_only_numpy_and_the_standard_library() -> None:
    pure = tuple(f"specserve.{name}." for name in PURE)
    for name in PURE:
        others = [each for each in imports(PACKAGE / f"{name.replace('.', '/')}.py") if not each.startswith(pure)]
        assert {module.split(".")[0] for module in others} <= sys.stdlib_module_names | {"numpy"}, name


def test_libraries_are_imported_only_by_their_owners() -> None:
    for library, owners in OWNERS.items():
        assert {name_of(path) for path in MODULES if any(n.split(".")[0] == library for n in imports(path))} == owners
