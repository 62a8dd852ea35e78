"""`scripts/report`: summarise traces by prompt family, by draft length and by position, as tables."""

import json
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import add
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specserve.errors import ConfigError

_FIGURES = ("rounds", "tokens", "tokens a round", "drafted", "accepted", "ms a token")


def tables(traces: Iterable[Path]) -> list[Table]:
    # Rounds, tokens, drafts, accepted drafts and seconds by family, and by family and gamma.
    sums: dict[tuple[str | int, ...], list[float]] = defaultdict(lambda: [0] * 5)
    # By drafter and position, from 1: drafts whose predecessors were all accepted, and those accepted.
    positions: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    for entry in _rounds(traces):
        family, drafts, accepted = entry["family"] or "none named", entry["drafts"], entry["accepted"]
        numbers = (1, entry["tokens"], len(drafts), accepted, sum(entry["seconds"]))
        for key in ((family,), (family, len(drafts))):
            sums[key] = [*map(add, sums[key], numbers)]
        for i, drafter in enumerate(drafts[: accepted + 1]):
            tested = positions[drafter, i + 1]
            tested[0] += 1
            tested[1] += i < accepted
    if not sums:
        raise ConfigError("no round is recorded; set `trace` in the model's YAML and ask the server.")
    rows = [(*key, *_figures(*total)) for key, total in sorted(sums.items())]
    by_position = [(*key, tested, f"{kept / tested:.0%}") for key, (tested, kept) in sorted(positions.items())]
    return [
        _table("By prompt family", ("family", *_FIGURES), rows),
        _table("By draft length", ("family", "gamma", *_FIGURES), rows),
        _table("By position, after accepted drafts", ("drafter", "position", "drafted", "accepted"), by_position),
    ]


def _figures(rounds: float, tokens: float, drafted: float, accepted: float, seconds: float) -> tuple[object, ...]:
    """Return the cells of a table's row, as `_FIGURES` names them."""
    rate = f"{accepted / drafted:.0%}" if drafted else "-"
    per_token = f"{1000 * seconds / tokens:.1f}" if tokens else "-"
    return rounds, tokens, f"{tokens / rounds:.2f}", drafted, rate, per_token


def _rounds(traces: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield the rounds of all files, without a line that a full disk has truncated."""
    for path in traces:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue
                if entry["event"] == "round":
                    yield entry


def _table(title: str, columns: Iterable[str], rows: Iterable[tuple[object, ...]]) -> Table:
    """Make a table of the rows that have as many cells as it has columns."""
    table = Table(*columns, title=title, title_justify="left")
    for column in table.columns:
        column.justify = "left" if column.header in {"family", "drafter"} else "right"
    for row in rows:
        if len(row) == len(table.columns):
            table.add_row(*map(str, row))
    return table


def run(options: Namespace) -> int:
    console = Console(record=True)
    console.print(*tables(options.traces), sep="\n")
    if options.out:
        console.save_html(str(options.out))
    return 0
