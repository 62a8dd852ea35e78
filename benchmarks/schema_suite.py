"""Is what we accept promised? JSON Schema's own test suite through the compiler that requests meet.

Every schema of the suite is compiled with the vocabulary of the target. Of one that is taken, instances that the suite
calls invalid have to be refused in every spelling, and those that it calls valid accepted in one: keys may be written
in another order, and a whole number without its fraction, since those are the limits that llguidance documents. Masks
are made at every place, as for an answer.

    .venv/bin/python benchmarks/schema_suite.py DIRECTORY [--config FILE] [--quick] [--show]

DIRECTORY is `tests/` of github.com/json-schema-org/JSON-Schema-Test-Suite.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

import llguidance

from common import argument_parser, print_result, print_table
from specserve.cli.archive import prepared_handler
from specserve.engine.llama_model import LlamaModel
from specserve.errors import ConstraintError, RequestError
from specserve.grammar.compiler import GrammarCompiler
from specserve.grammar.constraint import Constraint

# Spellings of one instance that are tried.
MOST_SPELLINGS = 200


@dataclass
class Survey:
    """What became of the schemas and instances of one draft."""

    schemas: int = 0
    taken: int = 0
    # Titles of instances whose masks ran into a limit.
    costly: list[str] = field(default_factory=list)
    valid: int = 0
    not_accepted: list[str] = field(default_factory=list)
    invalid: int = 0
    broken: list[str] = field(default_factory=list)


def spellings(value: Any, *, whole: bool) -> Iterator[Any]:
    """The same JSON value with its keys in other orders, and where `whole` is set whole numbers in both forms."""
    if isinstance(value, dict):
        for keys in permutations(value):
            for values in product(*(list(islice(spellings(value[key], whole=whole), 6)) for key in keys)):
                yield dict(zip(keys, values, strict=True))
    elif isinstance(value, list):
        yield from (
            list(items) for items in product(*(list(islice(spellings(item, whole=whole), 6)) for item in value))
        )
    else:
        yield value
        if not whole:
            return
        if isinstance(value, float) and value.is_integer():
            yield int(value)
        elif isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
            yield float(value)


class Judge:
    """Follows texts by compiled schemas, token by token."""

    def __init__(self, model: LlamaModel) -> None:
        self._model = model
        self.compiler = GrammarCompiler(model)
        self._ends = list(model.end_tokens())

    def accepts(self, constraint: Constraint, value: Any) -> bool:
        """Whether an answer could be this value."""
        text = json.dumps(value, ensure_ascii=False)
        written: list[int] = []
        for token in self._model.encode(text, begin=False):
            mask = constraint.allowed(written)
            if mask is None or not mask[token]:
                return False
            written.append(token)
        mask = constraint.allowed(written)
        return mask is not None and bool(mask[self._ends].all())

    def survey(self, directory: Path) -> Survey:
        found = Survey()
        for file in sorted(directory.rglob("*.json")):
            for group in json.loads(file.read_text(encoding="utf-8")):
                self._group(f"{file.relative_to(directory)}: {group['description']}", group, found)
        return found

    def _group(self, name: str, group: dict[str, Any], found: Survey) -> None:
        if not isinstance(group["schema"], dict):
            # A request's schema is an object.
            return
        found.schemas += 1
        try:
            constraint = self.compiler.json_schema(group["schema"])
        except RequestError:
            # schemas.py lists reasons.
            return
        found.taken += 1
        for test in group["tests"]:
            title = f"{name}: {test['description']}"
            try:
                accepted = any(
                    self.accepts(constraint.fork(), spelled)
                    for spelled in islice(spellings(test["data"], whole=test["valid"]), MOST_SPELLINGS)
                )
            except ConstraintError as error:
                found.costly.append(f"{title}: {error}")
                continue
            found.valid += test["valid"]
            found.invalid += not test["valid"]
            if test["valid"] and not accepted:
                found.not_accepted.append(title)
            if accepted and not test["valid"]:
                found.broken.append(title)


def main() -> None:
    parser = argument_parser(__doc__, quick="only the last draft")
    parser.add_argument("directory", type=Path, help="`tests/` of the suite")
    parser.add_argument("--show", action="store_true", help="list the valid instances that are not accepted, too")
    options = parser.parse_args()
    config = prepared_handler(options.config)
    if config.target.path is None:
        raise SystemExit("The prepared configuration names no file of the target.")
    judge = Judge(LlamaModel(config.target.path))
    rows = []
    drafts = sorted(path for path in options.directory.iterdir() if path.is_dir() and not path.is_symlink())
    for directory in drafts[-1:] if options.quick else drafts:
        found = judge.survey(directory)
        print(directory.name, flush=True)
        for line in found.costly + found.broken + (found.not_accepted if options.show else []):
            print(f"    {line}")
        rows.append(
            {
                "draft": directory.name,
                "schemas": found.schemas,
                "taken": found.taken,
                "costly": len(found.costly),
                "valid": found.valid,
                "valid_accepted": found.valid - len(found.not_accepted),
                "invalid": found.invalid,
                "invalid_accepted": len(found.broken),
            }
        )
    print_table("JSON Schema's test suite", rows)
    print_result("schema_suite", {"target": config.model_id}, rows, [f"llguidance {llguidance.get_version()}"])


if __name__ == "__main__":
    main()
