"""What tables.py makes its page of: results by name, tables in Markdown, and where their figures come from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from common import Row

RESULTS = Path(__file__).parent / "results"
MACHINES = {"zen5": "Zen 5", "zen4": "Zen 4", "zen3": "Zen 3", "emerald": "Emerald Rapids"}
Results = Mapping[str, Row]
# Texts by the keys of their rows.
Column = dict[Any, str]


def read_results(directory: Path = RESULTS) -> dict[str, Row]:
    """All results by the names of their files."""
    files = sorted(directory.glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8").splitlines()[-1]) for path in files}


def on_machines(results: Results, *questions: str) -> dict[str, str]:
    """The results of some questions: the title of the machine by the name of the file."""
    names = [(f"{question}-{machine}", title) for question in questions for machine, title in MACHINES.items()]
    return {name: title for name, title in names if name in results}


def line(cells: Iterable[str]) -> str:
    """One line of a table."""
    return "| " + " | ".join(cells) + " |"


def table(corner: str, titles: Mapping[Any, str], columns: Mapping[str, Column]) -> list[str]:
    """The lines of a table: a row for each key of `titles` that a column has."""
    rows = [
        line([title, *(column.get(key, "") for column in columns.values())])
        for key, title in titles.items()
        if any(key in column for column in columns.values())
    ]
    return [line([corner, *columns]), "|---" * (1 + len(columns)) + "|", *rows]


def own_titles(columns: Mapping[str, Column]) -> dict[str, str]:
    """Titles of rows whose keys are texts already."""
    return {key: key for column in columns.values() for key in column}


def source(name: str) -> str:
    """On which machine a result was measured, with a link to its file, which has date and command."""
    model = "3B, " if "-3b-" in name else ""
    return f"[{model}{MACHINES.get(name.rpartition('-')[2], name.replace('_', ' '))}](results/{name}.json)"


def section(question: str, answer: str, lines: list[str], results: Results, names: Iterable[str]) -> list[str]:
    """A question, what its figures are, where they come from, and its table."""
    names = list(names)
    scripts = ", ".join(
        dict.fromkeys(f"`{Path(results[name]['command'].split()[0]).name.rstrip(';')}`" for name in names)
    )
    sources = ", ".join(map(source, names))
    return ["", f"## {question}", f"{answer} ({scripts}: {sources})", *(["", *lines] if lines else [])]
